"""Do ranks that differ add up to the truth? The evidence that separates a partial sum from a broken rank.

Every rank of a row-parallel layer holds part of a sum. Captured before the all-reduce, rank r holds R + p_r: the
replicated residual R and its own part of the layer's output, with R + sum(p_r) = F, the true boundary. Then
sum(x) - (tp - 1) R = F, and without R at hand (sum(x) - F) / (tp - 1) = R must look like the residual stream, that
is like boundary K-1, much more than F itself does, while what the ranks do not share must not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch

from eagle_parity.alignment.views import RankView, Summed, View, rank_view
from eagle_parity.metrics.distances import cosine, rel_l2
from eagle_parity.metrics.distribution import median, sign_test
from eagle_parity.records import FINAL_NORM, Boundary, IntArray, residual_name

How: TypeAlias = Literal["residual", "plain-sum", "residual-estimate", "without-residual"]

NEARER = 0.97  # distance of a residual estimate to boundary K-1 over the truth's: at most this, see `residual_like`
LEAST, MOST = 0.1, 1.1  # the MLP's output over the step: less and the estimate is as good as the truth itself
DETOUR = -0.4  # cosine of the two parts: below this they undo each other
SHARED = 0.5  # what ranks do not share may have at most this cosine to the residual stream


@dataclass(frozen=True)
class PartialSum:
    """Ranks that add up. `how` says by which evidence, `whole` rebuilds the tensor where that is possible."""

    boundary: Boundary
    how: How
    whole: View | None
    evidence: Mapping[str, float]


def find_partial_sum(
    views: tuple[RankView, ...],
    boundaries: Mapping[Boundary, RankView],
    serving_rows: IntArray,
    training_rows: IntArray,
    limits: Mapping[Boundary, float],
    expected: Boundary | None,
    massive: torch.Tensor,
) -> PartialSum | None:
    """Look for a boundary that the ranks' tensors are parts of, the expected one first.

    `limits` holds, per boundary, the relative L2 up to which two tensors count as the same. Rows: the same number on
    both sides. `massive`: indexes of channels to leave out. A sum that is the truth is proof; without one the residual
    estimate decides.
    """

    def seen(rows: torch.Tensor) -> torch.Tensor:
        return rows.float().index_fill(1, massive, 0)

    candidates = sorted((b for b in boundaries if boundaries[b].width == views[0].width), key=lambda b: b != expected)
    parts = torch.stack([seen(view.read(serving_rows)) for view in views])
    total = parts.sum(0)
    truth = {b: seen(boundaries[b].read(training_rows)) for b in candidates}
    proven = []
    for boundary, reference in truth.items():
        for how, whole in _sums(boundary, views):
            distance = median(rel_l2(seen(whole.read(serving_rows)), reference))
            if distance <= limits[boundary]:
                proven.append(PartialSum(boundary, how, whole, {"reconstruction_rel_l2": distance}))
    if proven:
        return min(proven, key=lambda p: p.evidence["reconstruction_rel_l2"])
    estimates = [
        estimate
        for boundary, reference in truth.items()
        for estimate in _estimates(boundary, reference, truth, parts, total)
    ]
    return min(estimates, key=lambda e: (e.boundary != expected, e.evidence["nearer"]), default=None)


def _sums(boundary: Boundary, views: tuple[RankView, ...]) -> Iterator[tuple[How, Summed]]:
    """The ways to rebuild a boundary from its parts: less the surplus residuals where one is stored, and plainly."""
    first = views[0]
    if boundary != FINAL_NORM and residual_name(boundary) in first.capture.names(first.rank):
        yield "residual", Summed(views, rank_view(first.capture, first.rank, residual_name(boundary)), len(views) - 1)
    yield "plain-sum", Summed(views)


def residual_like(estimate: torch.Tensor, truth: torch.Tensor, before: torch.Tensor) -> dict[str, float] | None:
    """Whether an estimate of boundary K's residual is one. Rows [n, H] each; returns the evidence, or None.

    The residual has the attention's output A and not yet the MLP's M, so it lies between K-1 and K: nearer to K-1 than
    K is, and no detour, since A and M do not undo each other. Anything unrelated that was added to the truth (noise,
    another token's state) takes the estimate away from K-1 and comes back in M with the opposite sign.
    """
    attention, mlp, step = estimate - before, truth - estimate, truth - before
    first, second, whole = (t.double().norm(dim=-1).numpy() for t in (attention, mlp, step))
    nearer, share = (median(part / np.maximum(whole, 1e-30)) for part in (first, second))
    detour = median(cosine(attention, mlp))
    if nearer > NEARER or not LEAST < share < MOST or detour < DETOUR or sign_test(first, whole) >= 0.01:
        return None
    return {
        "nearer": nearer,
        "attention_mlp_cosine": detour,
        "estimate_cosine_to_previous_boundary": median(cosine(estimate, before)),
        "truth_cosine_to_previous_boundary": median(cosine(truth, before)),
    }


def _estimates(
    boundary: Boundary,
    reference: torch.Tensor,
    truth: Mapping[Boundary, torch.Tensor],
    parts: torch.Tensor,
    total: torch.Tensor,
) -> list[PartialSum]:
    """Evidence of rule 6 without the residual: needs boundary K-1 on the training side."""
    if boundary == FINAL_NORM or boundary == 0 or boundary - 1 not in truth:
        return []
    before = truth[boundary - 1]
    # x_r - mean(x) is what rank r does not share with the others: the residual is not in it.
    unshared = parts - parts.mean(0)
    shared = float(np.max([abs(median(cosine(u, before))) for u in unshared]))
    if shared > SHARED:
        return []
    found: list[PartialSum] = []
    kinds: tuple[tuple[How, torch.Tensor], ...] = (
        ("residual-estimate", (total - reference) / (len(parts) - 1)),
        ("without-residual", reference - total),
    )
    for how, estimate in kinds:
        evidence = residual_like(estimate, reference, before)
        if evidence is not None:
            found.append(PartialSum(boundary, how, None, evidence | {"unshared_cosine_to_previous_boundary": shared}))
    return found
