"""Faults in what a tensor holds that is no boundary at its floor: scale, norm, shift, residual, basis, precision.

Explanations, tried in order on each tensor that failed without being a partial sum or another boundary; the first
that its data supports names the fault.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from eagle_parity.alignment.partial import residual_like
from eagle_parity.diagnosis.case import Case, TensorCase, bad_rows
from eagle_parity.diagnosis.rules.order import is_another_boundary
from eagle_parity.diagnosis.rules.rows import split_rows, swapped_finding
from eagle_parity.metrics.distances import numpy64, rel_l2, row_sums
from eagle_parity.metrics.distribution import median
from eagle_parity.records import FINAL_NORM, Boundary, Finding


def _scale(case: Case, tensor: TensorCase) -> tuple[Boundary, float, float] | None:
    """A boundary that the tensor equals up to one factor for all tokens: (boundary, factor, distance then)."""
    serving = case.serving_rows(tensor)
    best: tuple[Boundary, float, float] | None = None
    for boundary in tensor.match.rel_l2:
        sums = row_sums(serving, case.training_rows(boundary))
        factor = median(numpy64(sums.dot / sums.training_sq.clamp_min(1e-30)))
        if not factor > 0:
            continue
        distance = median(rel_l2(serving / factor, case.training_rows(boundary)))
        if distance <= tensor.limits[boundary] and (best is None or distance < best[2]):
            best = (boundary, factor, distance)
    return best


def double_sum(case: Case, tensor: TensorCase) -> Finding | None:
    """The all-reduce ran twice: the tensor is tp times the truth, or the truth plus (tp-1) times the layer's output."""
    size = len(case.serving.ranks)
    if size < 2:
        return None
    scale = _scale(case, tensor)
    if scale is not None and abs(scale[1] / size - 1) < 0.01:
        boundary: Boundary = scale[0]
        evidence = {"factor": scale[1], "rel_l2_after": scale[2], "tp": size}
    else:
        found = _doubled_output(case, tensor, size)
        if found is None:
            return None
        boundary, evidence = found
    return Finding(
        "double-sum",
        "error",
        f"{tensor.where} was summed over the {size} ranks twice (boundary {boundary})",
        "remove one of the two all-reduces around the capture",
        slot=tensor.slot,
        boundary=boundary,
        evidence=evidence,
    )


def _doubled_output(case: Case, tensor: TensorCase, size: int) -> tuple[Boundary, dict[str, float]] | None:
    """R + tp * M instead of R + M: truth - (x - truth) / (tp - 1) is then the residual stream R, close to K-1."""
    serving = case.serving_rows(tensor)
    for boundary in [b for b in (tensor.expected, tensor.match.best) if isinstance(b, int) and b > 0]:
        if boundary - 1 not in case.boundaries or boundary not in case.boundaries:
            continue
        truth, before = case.training_rows(boundary), case.training_rows(boundary - 1)
        estimate = truth - (serving - truth) / (size - 1)
        evidence = residual_like(estimate, truth, before)
        if evidence is not None:
            return boundary, evidence
    return None


def scale_mismatch(case: Case, tensor: TensorCase) -> Finding | None:
    """Right direction, wrong length by one factor for all tokens."""
    scale = _scale(case, tensor)
    if scale is None:
        return None
    boundary, factor, distance = scale
    embedding = boundary == 0
    return Finding(
        "embedding-scale" if embedding else "scale-mismatch",
        "error",
        f"{tensor.where} is boundary {boundary} times {factor:.4g}",
        "apply the same embedding scale (sqrt(hidden) in Gemma-like models) on both sides"
        if embedding
        else "look for a scale on one side only: a residual multiplier, a quantisation scale, a mean over ranks",
        slot=tensor.slot,
        boundary=boundary,
        evidence={"factor": factor, "rel_l2_after": distance},
    )


def final_norm(case: Case, tensor: TensorCase) -> Finding | None:
    """An RMS norm applied on the serving side: per-token unit RMS times one weight per channel.

    With the target's final norm weight (recovered from boundary n and final.norm) it is `final-norm`, with any other
    weight a norm of the draft's own.
    """
    serving = case.serving_rows(tensor)
    half = len(serving) // 2
    if half < 4:
        return None
    scale = _scale(case, tensor)  # where token norms hardly vary, one factor explains a norm as well
    boundaries = sorted((b for b in tensor.match.rel_l2 if b != FINAL_NORM), key=lambda b: b != tensor.expected)
    for boundary in boundaries:
        normed = _unit_rms(case.training_rows(boundary))
        weight = _channel_weight(serving[:half], normed[:half])
        distance = median(rel_l2(serving[half:], normed[half:] * weight))
        if distance > tensor.limits[boundary] or (scale is not None and scale[2] <= 2 * distance):
            continue
        code = "final-norm" if _is_final_weight(case, weight) else "draft-norm"
        return Finding(
            code,
            "error",
            f"{tensor.where} is boundary {boundary} after "
            + ("the target's final norm" if code == "final-norm" else "an RMS norm that training did not apply here"),
            "hand the draft the state before any norm; check norm_before_fc / fc_norm in the draft's config and "
            "whether this engine version knows them",
            slot=tensor.slot,
            boundary=boundary,
            evidence={
                "rel_l2_after": distance,
                "weight_mean": float(weight.mean()),
                "weight_std": float(weight.std()),
            },
        )
    return None


def _unit_rms(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)


def _channel_weight(serving: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """Least-squares factor of each channel."""
    return (serving * normed).sum(0) / normed.square().sum(0).clamp_min(1e-30)


def _is_final_weight(case: Case, weight: torch.Tensor) -> bool:
    last = case.num_layers
    if FINAL_NORM not in case.boundaries or last is None or last not in case.boundaries:
        return True  # cannot be told apart; the target's own norm is the usual culprit
    final = _channel_weight(case.training_rows(FINAL_NORM), _unit_rms(case.training_rows(last)))
    return float((weight - final).norm() / final.norm().clamp_min(1e-30)) < 0.1


def token_shift(case: Case, tensor: TensorCase) -> Finding | None:
    """Right states, one to three rows away from their tokens."""
    view = tensor.view
    if view is None or tensor.expected not in case.boundaries or tensor.expected is None:
        return None
    rows, theirs = case.alignment.serving[case.probe], case.alignment.training[case.probe]
    total = len(case.training.tokens.token_ids)
    for shift in (1, -1, 2, -2, 3, -3):
        keep = (theirs + shift >= 0) & (theirs + shift < total)
        if keep.sum() < 8:
            continue
        shifted = case.training_rows(tensor.expected, theirs[keep] + shift)
        distance = median(rel_l2(view.read(rows[keep]).float(), shifted))
        if distance <= tensor.limits[tensor.expected]:
            return Finding(
                "token-shift",
                "error",
                f"{tensor.where} holds at each token the state of the token {abs(shift)} "
                f"{'later' if shift > 0 else 'earlier'}",
                "pair hidden state t with token t on both sides; look for a roll or a [1:] applied to states",
                slot=tensor.slot,
                boundary=tensor.expected,
                evidence={"shift": shift, "rel_l2_after": distance},
            )
    return None


def rows_swapped(case: Case, tensor: TensorCase) -> Finding | None:
    """Most rows hold the states of other rows."""
    distances = bad_rows(tensor)
    if distances is None or tensor.expected is None:
        return None
    swapped, unknown = split_rows(case, tensor, np.flatnonzero(distances > tensor.limits[tensor.expected]))
    return swapped_finding(case, tensor, swapped) if len(swapped) > len(unknown) else None


def residual_missing(case: Case, tensor: TensorCase) -> Finding | None:
    """The last block's output alone: truth minus the tensor is the residual stream, which is close to K-1."""
    boundary = tensor.expected
    if not isinstance(boundary, int) or boundary == 0:
        return None
    if boundary not in case.boundaries or boundary - 1 not in case.boundaries:
        return None
    serving, truth = case.serving_rows(tensor), case.training_rows(boundary)
    before = case.training_rows(boundary - 1)
    evidence = residual_like(truth - serving, truth, before)
    if evidence is None:
        return None
    return Finding(
        "residual-missing",
        "error",
        f"{tensor.where} holds the output of layer {boundary - 1} without the residual",
        "capture hidden_states + residual",
        slot=tensor.slot,
        boundary=boundary,
        evidence=evidence,
    )


def rotated_basis(case: Case, tensor: TensorCase) -> Finding | None:
    """Same angles between tokens, other vectors: the served target lives in a rotated basis."""
    boundary = tensor.expected
    if boundary is None or boundary not in case.boundaries:
        return None
    serving, truth = case.serving_rows(tensor), case.training_rows(boundary)
    direct = median(rel_l2(serving, truth))
    a, b = serving @ serving.T, truth @ truth.T
    distance = float((a - b).norm() / b.norm().clamp_min(1e-30))
    if direct > 0.5 and distance <= 2 * tensor.limits[boundary]:
        return Finding(
            "rotated-basis",
            "error",
            f"{tensor.where} is boundary {boundary} in a rotated basis (same Gram matrix of tokens)",
            "serve the target that the draft was trained on, or fold the same rotation into the draft's fc",
            slot=tensor.slot,
            boundary=boundary,
            evidence={"gram_rel_difference": distance, "rel_l2": direct},
        )
    return None


def precision(case: Case, tensor: TensorCase) -> Finding | None:
    """The expected boundary, told apart from every other, but further away than the floor allows."""
    del case
    distance = tensor.judgement.best_median
    if tensor.match.best != tensor.expected or distance is None or distance >= 0.5:
        return None
    return Finding(
        "precision",
        "error",
        f"{tensor.where} is boundary {tensor.expected}, but {distance:.3g} away from it; the limit is "
        f"{tensor.limit.limit:.3g} ({tensor.limit.floor.source})",
        "compare the dtypes and the quantisation of both sides; if this server is known to be good, record its "
        "floor: dump serving twice and pass one with --floor",
        slot=tensor.slot,
        boundary=tensor.expected,
        evidence={"rel_l2": distance, "limit": tensor.limit.limit},
    )


def undetermined(case: Case, tensor: TensorCase) -> Finding | None:
    """Not the expected state, and nothing above explains it: the nearest hypotheses, and what would decide."""
    medians = tensor.match.medians()
    nearest = [{"boundary": b, "rel_l2": medians[b]} for b in tensor.match.ranking()[:3]]
    one_rank = len(tensor.ranks.views) == 1 and tensor.layout != "replicated"
    return Finding(
        "undetermined",
        "error",
        f"{tensor.where} is not boundary {tensor.expected} and matches no training state at its floor"
        + ("; with one rank's data a partial sum cannot be excluded" if one_rank else ""),
        "capture every rank, and training with --boundaries all: then partial sums and layer shifts can be told apart"
        if one_rank or len(tensor.match.rel_l2) <= len(case.slots)
        else "inspect the capture point of this engine version; report it with both dumps if the draft is sound",
        slot=tensor.slot,
        boundary=tensor.match.best,
        evidence={"nearest": nearest},
    )


EXPLANATIONS = (
    double_sum,
    final_norm,
    scale_mismatch,
    token_shift,
    rows_swapped,
    residual_missing,
    rotated_basis,
    precision,
    undetermined,
)


def unexplained(case: Case, tensor: TensorCase) -> Iterator[Finding]:
    """The first explanation that fits a failed tensor which is no partial sum, no odd rank's and no other boundary."""
    if (
        tensor.judgement.status != "fail"
        or tensor.partial is not None
        or tensor.view is None
        or len(case.probe) == 0
        or is_another_boundary(tensor)
        or (tensor.ranks.shape == "differ" and not tensor.odd_ranks)
        or not bool(case.serving_rows(tensor).isfinite().all())
    ):
        return
    found = (explain(case, tensor) for explain in EXPLANATIONS)
    yield next(finding for finding in found if finding is not None)


def content(case: Case) -> Iterator[Finding]:
    """Explain every tensor that failed for what it holds."""
    for tensor in case.tensors:
        yield from unexplained(case, tensor)
