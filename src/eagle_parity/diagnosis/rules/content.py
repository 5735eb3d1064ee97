"""Faults in what a tensor holds that is no boundary at its floor: scale, norm, shift, residual, basis, precision.

Explanations, tried in order on each tensor that failed without being a partial sum or another boundary; the first
that its data supports names the fault, and says which boundary it is a fault of. First come those that bring the
tensor to its floor (a factor, a norm, moved rows, a rotation), then those that only fit where the tensor lies, and last
the two that explain nothing. Distances leave massive channels out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from eagle_parity.alignment.partial import residual_like
from eagle_parity.diagnosis.case import Case, TensorCase
from eagle_parity.diagnosis.judgement import MIN_ROWS
from eagle_parity.diagnosis.rules import norm
from eagle_parity.diagnosis.rules.geometry import Place, place
from eagle_parity.diagnosis.rules.norm import nearest_of
from eagle_parity.diagnosis.rules.rows import graph_part, missing_images, split_rows, swapped_finding
from eagle_parity.metrics.distances import FloatArray, numpy64, rel_l2, row_sums
from eagle_parity.metrics.distribution import median, sign_test
from eagle_parity.records import FINAL_NORM, Boundary, Finding

SHIFTS = (1, -1, 2, -2, 3, -3)


@dataclass(frozen=True)
class Explained:
    """A tensor's fault, and the boundary that the tensor would be without it (None: cannot be said)."""

    finding: Finding
    boundary: Boundary | None


def _error(
    tensor: TensorCase, code: str, message: str, fix: str, boundary: Boundary | None, **evidence: object
) -> Finding:
    return Finding(code, "error", f"{tensor.where} {message}", fix, tensor.slot, boundary, None, evidence)


# ------------------------------------------------------------------------------------------ exact: at the floor then


@dataclass(frozen=True)
class _Scale:
    boundary: Boundary
    factor: float
    rows: FloatArray

    @property
    def distance(self) -> float:
        return median(self.rows)


def _scale(case: Case, tensor: TensorCase) -> _Scale | None:
    """A boundary that the tensor equals up to one factor for all tokens; the expected one if it fits as well."""
    serving = case.keep_ordinary(case.serving_rows(tensor))
    found: list[_Scale] = []
    for boundary in tensor.match.rel_l2:
        truth = case.keep_ordinary(case.training_rows(boundary))
        sums = row_sums(serving, truth)
        factor = median(numpy64(sums.dot / sums.training_sq.clamp_min(1e-30)))
        if not factor > 0:
            continue
        scale = _Scale(boundary, factor, rel_l2(serving / factor, truth))
        if scale.distance <= tensor.limits[boundary]:
            found.append(scale)
    return nearest_of(found, tensor.expected)


def scaled_or_normed(case: Case, tensor: TensorCase) -> Explained | None:
    """Right direction, wrong length: one factor for all tokens, or a norm (a factor a token, a weight a channel).

    Where token norms hardly vary one factor explains a norm as well, so a norm must fit twice as well to be named.
    """
    scale, normed = _scale(case, tensor), norm.find(case, tensor)
    if scale is None and normed is None:
        return None
    if normed is None or (scale is not None and (scale.distance <= 2 * normed.distance or normed.plain)):
        assert scale is not None
        return _scaled(case, tensor, scale)
    return _normed(case, tensor, normed)


def _scaled(case: Case, tensor: TensorCase, scale: _Scale) -> Explained:
    size = len(case.serving.ranks)
    evidence = {"factor": scale.factor, "rel_l2_after": scale.distance}
    embedded = scale.boundary == 0 and abs(scale.factor / (case.hidden_size or 1) ** 0.5 - 1) < 0.01
    if size > 1 and abs(scale.factor / size - 1) < 0.01 and not embedded:
        finding = _error(
            tensor,
            "double-sum",
            f"was summed over the {size} ranks twice (boundary {scale.boundary})",
            "remove one of the two all-reduces around the capture",
            scale.boundary,
            tp=size,
            **evidence,
        )
    elif scale.boundary == 0:
        finding = _error(
            tensor,
            "embedding-scale",
            f"is boundary 0 times {scale.factor:.4g}",
            "apply the same embedding scale (sqrt(hidden) in Gemma-like models) on both sides",
            0,
            **evidence,
        )
    else:
        finding = _error(
            tensor,
            "scale-mismatch",
            f"is boundary {scale.boundary} times {scale.factor:.4g}",
            "look for a scale on one side only: a residual multiplier, a quantisation scale, a mean over ranks",
            scale.boundary,
            **evidence,
        )
    return Explained(finding, scale.boundary)


def _normed(case: Case, tensor: TensorCase, found: norm.Scaling) -> Explained:
    final = _is_final(case, tensor, found)
    what = (
        "the target's final norm"
        if final
        else "an RMS norm that training did not apply here"
        if found.own
        else "an RMS norm over more than this slot (norm_before_fc)"
    )
    finding = _error(
        tensor,
        "final-norm" if final else "draft-norm",
        f"is boundary {found.boundary} after {what}",
        "hand the draft the state before any norm; check norm_before_fc / fc_norm in the draft's config and whether "
        "this engine version knows them",
        found.boundary,
        rel_l2_after=found.distance,
        weight_std=float(found.weight.std()),
        row_factor_spread=found.spread,
    )
    return Explained(finding, found.boundary)


def _is_final(case: Case, tensor: TensorCase, found: norm.Scaling) -> bool:
    """Whether a norm is the target's final one: by its weight, where that is known; else by where it was found."""
    if not found.own:
        return False
    final = norm.final_weight(case)
    last = case.num_layers
    if final is None:
        return found.boundary == last or tensor.expected == FINAL_NORM
    if not norm.same(found.weight, final):
        return False
    plain = norm.same(final, torch.ones_like(final))
    return found.boundary == last or not plain  # a weight of ones is every norm's


@dataclass(frozen=True)
class _Shifted:
    boundary: Boundary
    shift: int
    rows: FloatArray

    @property
    def distance(self) -> float:
        return median(self.rows)


def token_shift(case: Case, tensor: TensorCase) -> Explained | None:
    """Right states, one to three rows away from their tokens."""
    view = tensor.view
    if view is None:
        return None
    rows, theirs = case.alignment.serving[case.probe], case.alignment.training[case.probe]
    total = len(case.training.tokens.token_ids)
    serving = case.keep_ordinary(view.read(rows).float())
    found: list[_Shifted] = []
    for boundary in tensor.match.rel_l2:
        for shift in SHIFTS:
            keep = (theirs + shift >= 0) & (theirs + shift < total)
            if keep.sum() < 8:
                continue
            shifted = case.keep_ordinary(case.training_rows(boundary, theirs[keep] + shift))
            distances = np.full(len(keep), np.nan)
            distances[keep] = rel_l2(serving[torch.from_numpy(keep)], shifted)
            if median(distances) <= tensor.limits[boundary]:
                found.append(_Shifted(boundary, shift, distances))
    best = nearest_of(found, tensor.expected)
    if best is None:
        return None
    distance, shift, held = best.distance, best.shift, best.boundary
    finding = _error(
        tensor,
        "token-shift",
        f"holds at each token the state of the token {abs(shift)} {'later' if shift > 0 else 'earlier'}",
        "pair hidden state t with token t on both sides; look for a roll or a [1:] applied to states",
        held,
        shift=shift,
        rel_l2_after=distance,
    )
    return Explained(finding, held)


def rows_swapped(case: Case, tensor: TensorCase) -> Explained | None:
    """Most rows hold the states of other rows."""
    if tensor.expected is None or tensor.expected not in tensor.match.rel_l2:
        return None
    distances = tensor.match.rel_l2[tensor.expected]
    swapped, unknown = split_rows(
        case, tensor, tensor.expected, np.flatnonzero(distances > tensor.limits[tensor.expected])
    )
    if len(swapped) <= len(unknown):
        return None
    return Explained(swapped_finding(case, tensor, tensor.expected, swapped), tensor.expected)


def rotated_basis(case: Case, tensor: TensorCase) -> Explained | None:
    """Same angles between tokens, same lengths, other vectors: the served target lives in a rotated basis."""
    boundary = tensor.expected
    if boundary is None or boundary not in tensor.match.rel_l2:
        return None
    serving, truth = case.serving_rows(tensor), case.training_rows(boundary)
    sums = row_sums(serving, truth)
    direct, length = median(numpy64(sums.rel_l2())), median(numpy64(sums.norm_ratio()))
    if direct < 0.5 or abs(length - 1) > 0.1:
        return None
    ours, theirs = _angles(serving), _angles(truth)
    spread = median(np.abs(theirs - median(theirs)))
    distance = median(np.abs(ours - theirs))
    if spread == 0 or distance > 0.25 * spread:
        return None
    finding = _error(
        tensor,
        "rotated-basis",
        f"is boundary {boundary} in a rotated basis (the tokens' angles to each other are the same)",
        "serve the target that the draft was trained on, or fold the same rotation into the draft's fc",
        boundary,
        angle_difference=distance,
        angle_spread=spread,
        rel_l2=direct,
    )
    return Explained(finding, boundary)


def _angles(rows: torch.Tensor) -> FloatArray:
    """Cosines of all pairs of rows, flat."""
    unit = torch.nn.functional.normalize(rows.double(), dim=-1)
    return numpy64((unit @ unit.T)[tuple(torch.triu_indices(len(rows), len(rows), 1))])


# --------------------------------------------------------------------------------- geometry: where the tensor lies


def _step(case: Case, tensor: TensorCase, boundary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The tensor, boundary K-1 and boundary K on ordinary channels; None where the training side lacks one."""
    if boundary - 1 not in tensor.match.rel_l2 or boundary not in tensor.match.rel_l2:
        return None
    rows = [case.serving_rows(tensor), case.training_rows(boundary - 1), case.training_rows(boundary)]
    x, before, after = (case.keep_ordinary(r) for r in rows)
    return x, before, after


def double_output(case: Case, tensor: TensorCase) -> Explained | None:
    """R + tp M instead of R + M: truth - (x - truth) / (tp - 1) is then the residual stream R."""
    boundary = tensor.expected
    if not isinstance(boundary, int):
        return None
    rows = _step(case, tensor, boundary)
    if rows is None:
        return None
    x, before, after = rows
    engine = case.serving.facts.engine
    sizes = dict.fromkeys([len(case.serving.ranks), (engine.tp_size if engine else None) or 0, 2, 4, 8])
    for size in [size for size in sizes if size > 1]:
        evidence = residual_like(after - (x - after) / (size - 1), after, before)
        if evidence is None:
            continue
        finding = _error(
            tensor,
            "double-sum",
            f"holds boundary {boundary} with the output of layer {boundary - 1} counted about {size} times",
            "remove one of the two all-reduces (or reduce-scatters) after that layer",
            boundary,
            times=size,
            **evidence,
        )
        return Explained(finding, boundary)
    return None


def residual_missing(case: Case, tensor: TensorCase) -> Explained | None:
    """A layer's output alone: a share of the step and none of the stream."""
    boundary = tensor.expected
    if not isinstance(boundary, int):
        return None
    rows = _step(case, tensor, boundary)
    if rows is None:
        return None
    x, before, after = rows
    found = place(x, before, after)
    size = median(numpy64(x.double().norm(dim=-1) / (after - before).double().norm(dim=-1).clamp_min(1e-30)))
    if abs(found.stream) > 0.1 or not found.forward or found.along(found.step) < 0.15 or size > 1.2:
        return None
    finding = _error(
        tensor,
        "residual-missing",
        f"holds the output of layer {boundary - 1} without the residual",
        "capture hidden_states + residual",
        boundary,
        **found.evidence,
    )
    return Explained(finding, boundary)


def between(case: Case, tensor: TensorCase) -> Explained | None:
    """On the way to the next boundary, or short of the expected one."""
    boundary = tensor.expected
    if not isinstance(boundary, int):
        return None
    ahead = _on_the_way(case, tensor, boundary + 1)
    behind = _on_the_way(case, tensor, boundary)
    if ahead is not None and (behind is None or ahead.rest <= behind.rest):
        finding = _error(
            tensor,
            "aliased-buffer",
            f"holds boundary {boundary} and {ahead.step:.0%} of the step to {boundary + 1}: a part of layer {boundary} "
            "was added after the capture",
            "clone the state when it is captured: the buffer is written again by the next layer",
            boundary,
            **ahead.evidence,
        )
        return Explained(finding, boundary)
    if behind is None:
        return None
    one_rank = tensor.ranks.shape == "one-rank" and tensor.layout != "replicated"
    finding = _error(
        tensor,
        "undetermined" if one_rank else "partial-sum",
        f"holds boundary {boundary - 1} and {behind.step:.0%} of the step to {boundary}: a part of its layer's "
        "output is not in it"
        + ("; with one rank's data a partial sum can neither be shown nor excluded" if one_rank else ""),
        "capture every rank: if they differ it is a partial sum"
        if one_rank
        else "capture after the layer's output is complete: every rank here lacks the same part",
        boundary,
        hypotheses=["partial-sum", "captured before the MLP's output was added"],
        **behind.evidence,
    )
    return Explained(finding, boundary)


def _on_the_way(case: Case, tensor: TensorCase, boundary: int) -> Place | None:
    """The tensor's place between boundary K-1 and K, if it lies there: nearer to both than they are to each other.

    This judges layers that hardly change the stream too, where every distance is below its floor.
    """
    rows = _step(case, tensor, boundary)
    if rows is None:
        return None
    x, before, after = rows
    found = place(x, before, after)
    step = numpy64((after - before).double().norm(dim=-1))
    to, on = (numpy64((x - end).double().norm(dim=-1)) for end in (before, after))
    return found if found.inside and sign_test(to, step) < 0.01 and sign_test(on, step) < 0.01 else None


# ------------------------------------------------------------------------------------------------------ no explanation


def images(case: Case, tensor: TensorCase) -> Explained | None:
    """Rows from a run of placeholder tokens on."""
    finding = missing_images(case, tensor)
    return None if finding is None else Explained(finding, tensor.expected)


def precision(case: Case, tensor: TensorCase) -> Explained | None:
    """The expected boundary, told apart from every other, but further away than the floor allows."""
    distance, expected = tensor.judgement.best_median, tensor.expected
    if tensor.match.best != expected or distance is None or distance >= 0.5:
        return None
    if isinstance(expected, int):  # without its neighbours at hand it may as well be one of them
        neighbours = [k for k in (expected - 1, expected + 1) if 0 <= k <= (case.num_layers or k)]
        if any(k not in tensor.match.rel_l2 for k in neighbours):
            return None
    finding = _error(
        tensor,
        "precision",
        f"is boundary {tensor.expected}, but {distance:.3g} away from it; the limit is {tensor.limit.limit:.3g} "
        f"({tensor.limit.floor.source})",
        "compare the dtypes and the quantisation of both sides; if this server is known to be good, record its floor: "
        "dump serving twice and pass one with --floor",
        tensor.expected,
        rel_l2=distance,
        limit=tensor.limit.limit,
    )
    return Explained(finding, tensor.expected)


def undetermined(case: Case, tensor: TensorCase) -> Explained | None:
    """Not the expected state, and nothing above explains it: the nearest hypotheses, and what would decide."""
    medians = tensor.match.medians()
    nearest = [{"boundary": b, "rel_l2": medians[b]} for b in tensor.match.ranking()[:3]]
    one_rank = len(tensor.ranks.views) == 1 and tensor.layout != "replicated"
    finding = _error(
        tensor,
        "undetermined",
        f"is not boundary {tensor.expected} and matches no training state at its floor"
        + ("; with one rank's data a partial sum cannot be excluded" if one_rank else ""),
        "capture every rank, and training with --boundaries all: then partial sums and layer shifts can be told apart"
        if one_rank or len(tensor.match.rel_l2) <= len(case.slots)
        else "inspect the capture point of this engine version; report it with both dumps if the draft is sound",
        tensor.match.best,
        nearest=nearest,
    )
    return Explained(finding, None)


EXPLANATIONS = (
    scaled_or_normed,
    token_shift,
    rows_swapped,
    rotated_basis,
    images,
    double_output,
    residual_missing,
    between,
    precision,
    undetermined,
)


def _midway(case: Case, tensor: TensorCase) -> Explained | None:
    """The finding for a tensor that looks right, or like a neighbouring layer, and lies between the two."""
    expected, best = tensor.expected, tensor.match.best
    if not isinstance(expected, int) or not isinstance(best, int) or abs(best - expected) > 1:
        return None
    if tensor.view is None or len(case.probe) < MIN_ROWS:
        return None
    if tensor.partial is not None or (tensor.ranks.shape == "differ" and not tensor.odd_ranks):
        return None
    found = between(case, tensor)
    if found is not None or tensor.judgement.status == "fail":
        return found
    rows = _step(case, tensor, expected)
    found_at = None if rows is None else place(*rows)
    if found_at is None or not found_at.beyond:
        return None
    return double_output(case, tensor) or _beyond(tensor, expected, found_at)


def _beyond(tensor: TensorCase, boundary: int, at: Place) -> Explained:
    """More than once the last step, by how often cannot be said."""
    finding = _error(
        tensor,
        "double-sum",
        f"holds {at.step:.2f} times the step to boundary {boundary}: a part of layer {boundary - 1}'s output counts "
        "more than once",
        "remove one of the two reductions after that layer",
        boundary,
        **at.evidence,
    )
    return Explained(finding, boundary)


def _needs_one(case: Case, tensor: TensorCase) -> bool:
    return not (
        tensor.judgement.status != "fail"
        or tensor.partial is not None
        or tensor.view is None
        or len(case.probe) == 0
        or (tensor.expected is not None and tensor.best_is_sound and tensor.match.best != tensor.expected)
        or (tensor.ranks.shape == "differ" and not tensor.odd_ranks)
        or graph_part(tensor) is not None
        or not bool(case.serving_rows(tensor).isfinite().all())
    )


@lru_cache(maxsize=1)
def explained(case: Case) -> dict[str, Explained]:
    """The first explanation of every tensor that failed for what it holds, by the tensor's name."""
    found: dict[str, Explained] = {}
    for tensor in case.tensors:
        midway = _midway(case, tensor)
        if midway is not None:
            found[tensor.name] = midway
        elif _needs_one(case, tensor):
            tried = (explain(case, tensor) for explain in EXPLANATIONS)
            found[tensor.name] = next(e for e in tried if e is not None)
    return found


def content(case: Case) -> Iterator[Finding]:
    """Explain every tensor that failed for what it holds."""
    for entry in explained(case).values():
        yield entry.finding
