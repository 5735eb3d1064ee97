"""Faults in what a tensor holds that is no boundary at its floor: scale, norm, shift, residual, basis, precision.

Explanations, tried in order on each tensor that failed without being a partial sum or another boundary; the first
that its data supports names the fault, and says which boundary it is a fault of. First come those that bring the
tensor to its floor (a factor, a norm, moved rows, a rotation), then those that only fit where the tensor lies, and last
the two that explain nothing. Distances leave massive channels out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from eagle_parity.alignment.matching import sample
from eagle_parity.diagnosis.case import PROBE_ROWS, Case, TensorCase, once
from eagle_parity.diagnosis.rules import norm, scale
from eagle_parity.diagnosis.rules.channels import Broken, broken
from eagle_parity.diagnosis.rules.explanation import Explained, error
from eagle_parity.diagnosis.rules.norm import nearest_of
from eagle_parity.diagnosis.rules.path import between, double_output, midway, residual_missing
from eagle_parity.diagnosis.rules.rows import graph_part, missing_images, split_rows, swapped_finding
from eagle_parity.metrics.distances import FloatArray, numpy64, rel_l2, row_sums
from eagle_parity.metrics.distribution import median
from eagle_parity.records import FINAL_NORM, Boundary, Finding

SHIFTS = (1, -1, 2, -2, 3, -3)


# ------------------------------------------------------------------------------------------ exact: at the floor then


def scaled_or_normed(case: Case, tensor: TensorCase) -> Explained | None:
    """Right direction, wrong length: one factor for all tokens, or a norm (a factor a token, a weight a channel).

    Where token norms hardly vary one factor explains a norm as well, so a norm must fit twice as well to be named.
    """
    factor, normed = scale.find(case, tensor), norm.find(case, tensor)
    if factor is not None and (normed is None or factor.distance <= 2 * normed.distance or normed.plain):
        return _scaled(case, tensor, factor)
    return None if normed is None or normed.plain else _normed(case, tensor, normed)


def _scaled(case: Case, tensor: TensorCase, found: scale.Scale) -> Explained:
    size = len(case.serving.ranks)
    evidence = {"factor": found.factor, "spread_of_row_factors": found.spread, "rel_l2_after": found.distance}
    embedded = found.boundary == 0 and abs(found.factor / (case.hidden_size or 1) ** 0.5 - 1) < 0.01
    if size > 1 and abs(found.factor / size - 1) < 0.01 and not embedded:
        finding = error(
            tensor,
            "double-sum",
            f"was summed over the {size} ranks twice (boundary {found.boundary})",
            "remove one of the two all-reduces around the capture",
            found.boundary,
            tp=size,
            **evidence,
        )
    elif found.boundary == 0:
        finding = error(
            tensor,
            "embedding-scale",
            f"is boundary 0 times {found.factor:.4g}",
            "apply the same embedding scale (sqrt(hidden) in Gemma-like models) on both sides",
            0,
            **evidence,
        )
    else:
        finding = error(
            tensor,
            "scale-mismatch",
            f"is boundary {found.boundary} times {found.factor:.4g}",
            "look for a scale on one side only: a residual multiplier, a quantisation scale, a mean over ranks",
            found.boundary,
            **evidence,
        )
    return Explained(finding, found.boundary)


def _normed(case: Case, tensor: TensorCase, found: norm.Scaling) -> Explained:
    final = _is_final(case, tensor, found)
    what = (
        "the target's final norm"
        if final
        else "an RMS norm that training did not apply here"
        if found.own
        else "an RMS norm over more than this slot (norm_before_fc)"
    )
    finding = error(
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
    finding = error(
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
    finding = error(
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


# -------------------------------------------------------------------------------------------------- no explanation


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
    finding = error(
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
    finding = error(
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


def _quiet(case: Case, tensor: TensorCase) -> Explained | None:
    """Faults that the median distance to the expected boundary may be too coarse for, whatever the status."""
    if tensor.partial is not None or (tensor.ranks.shape == "differ" and not tensor.odd_ranks):
        return None
    channels = broken(case, tensor)
    if channels is not None:
        return _broken(tensor, channels)
    between_two = midway(case, tensor)
    if between_two is not None:
        return between_two
    factor = scale.slight(case, tensor)
    return None if factor is None else _scaled(case, tensor, factor)


def _broken(tensor: TensorCase, found: Broken) -> Explained:
    """Channels that never change were not written; others hold something."""
    few = ", ".join(map(str, found.channels[:8])) + (", …" if len(found.channels) > 8 else "")
    stuck = len(found.stuck) == len(found.channels)
    finding = error(
        tensor,
        "capture-lost" if stuck else "undetermined",
        f"is boundary {found.boundary} but for {len(found.channels)} channels ({few}), which "
        + ("hold one value on all rows" if stuck else "hold something else"),
        "look for what writes single channels: a slice that is one short, a buffer that is not filled, a scale or a "
        "weight row that is broken on the serving side",
        found.boundary,
        channels=list(found.channels[:64]),
        error_over_sound_channels=found.off,
        rel_l2_of_the_others=found.distance,
        **({} if stuck else {"hypotheses": ["a broken quantisation scale", "exchanged channels", "corrupt memory"]}),
    )
    return Explained(finding, found.boundary)


@once
def explained(case: Case) -> dict[str, Explained]:
    """The first explanation of every tensor that failed for what it holds, by the tensor's name."""
    found: dict[str, Explained] = {}
    for tensor in case.tensors:
        quiet = _quiet(case, tensor)
        if quiet is not None:
            found[tensor.name] = quiet
        elif _needs_one(case, tensor):
            tried = (explain(case, tensor) for explain in EXPLANATIONS)
            found[tensor.name] = next(e for e in tried if e is not None)
    return found


def content(case: Case) -> Iterator[Finding]:
    """Explain every tensor that failed for what it holds."""
    for entry in explained(case).values():
        yield entry.finding


def situations(case: Case) -> Iterator[Finding]:
    """Broken channels or a slight factor in the rows of one situation only, in a tensor that is right altogether."""
    sound = [
        tensor
        for tensor in case.tensors
        if tensor.judgement.status == "ok" and tensor.partial is None and tensor.name not in explained(case)
    ]
    found: dict[str, Finding] = {}
    for name, mask in case.strata.items():
        rows = np.flatnonzero(mask)
        part = replace(case, probe=rows[sample(len(rows), PROBE_ROWS)])
        for tensor in sound:
            if tensor.name in found or not bool(part.serving_rows(tensor).isfinite().all()):
                continue
            channels, factor = broken(part, tensor), scale.slight(part, tensor)
            if channels is None and factor is None:
                continue
            what = _broken(tensor, channels) if channels else _scaled(part, tensor, factor)  # type: ignore[arg-type]
            evidence = {**what.finding.evidence, "rows": name, "count": len(rows)}
            message = f"{what.finding.message}, in the {len(rows)} rows of {name}"
            found[tensor.name] = replace(what.finding, message=message, evidence=evidence)
    yield from (found[tensor.name] for tensor in sound if tensor.name in found)
