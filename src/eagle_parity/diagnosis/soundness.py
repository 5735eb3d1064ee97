"""Which tensor to judge where ranks differ: the sum of their parts, or the rank that a boundary vouches for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from eagle_parity.alignment.channels import ordinary_rows
from eagle_parity.alignment.matching import sample
from eagle_parity.alignment.partial import PartialSum, find_partial_sum
from eagle_parity.alignment.ranks import RankStudy
from eagle_parity.alignment.views import View
from eagle_parity.diagnosis.case import PROBE_ROWS, Case
from eagle_parity.metrics.distances import rel_l2
from eagle_parity.metrics.distribution import median
from eagle_parity.records import Boundary, IntArray

FAR_NEARER = 0.3  # a sound rank's distance to its boundary, over the distance between ranks: at most this


@dataclass(frozen=True)
class Sound:
    """What of a tensor is to be judged."""

    view: View | None
    """The whole tensor: rebuilt, or the first sound rank's."""
    partial: PartialSum | None = None
    odd_ranks: tuple[int, ...] = ()
    """The ranks that disagree with it."""


def sound_of(case: Case, ranks: RankStudy, limits: Mapping[Boundary, float]) -> Sound:
    """What to judge of a tensor. `limits`: up to which median relative L2 it counts as a boundary."""
    if ranks.shape != "differ":
        return Sound(ranks.whole)
    expected, probe = case.expected(ranks.name), _differing(case, ranks)
    partial = _partial(case, ranks, probe, limits)
    if partial is not None:
        return Sound(partial.whole or ranks.views[0], partial)
    groups = ranks.groups()
    if len(groups[0]) > len(ranks.views) / 2:
        return _among(ranks, groups[0])
    hits = _vouched_for(case, ranks, probe, limits)
    if not hits:
        return Sound(ranks.views[0])
    _, held = min(hits, key=lambda hit: (hit[1] != expected, hits[hit]))
    return _among(ranks, tuple(rank for rank, boundary in sorted(hits, key=lambda hit: hits[hit]) if boundary == held))


def _differing(case: Case, ranks: RankStudy) -> IntArray:
    """The rows for questions about ranks: those where they differ, if only some do."""
    apart = np.max([spread.rel_l2[case.alignment.serving] != 0 for spread in ranks.spreads], axis=0)
    rows = np.flatnonzero(apart)
    return rows[sample(len(rows), PROBE_ROWS)] if len(rows) else case.probe


def _partial(case: Case, ranks: RankStudy, probe: IntArray, limits: Mapping[Boundary, float]) -> PartialSum | None:
    """Whether ranks that all differ are parts of a sum. A rank that is some boundary by itself excludes it."""
    if len(probe) == 0 or len(ranks.groups()) < len(ranks.views):
        return None
    rows = case.alignment.serving[probe], case.alignment.training[probe]
    found = find_partial_sum(ranks.views, case.boundaries, *rows, limits, case.expected(ranks.name), case.massive)
    # A stored residual proves it whatever a single rank looks like: the largest part alone can be near a boundary.
    if found is None or found.how == "residual":
        return found
    return None if _vouched_for(case, ranks, probe, limits) else found


def _vouched_for(
    case: Case, ranks: RankStudy, probe: IntArray, limits: Mapping[Boundary, float]
) -> dict[tuple[int, Boundary], float]:
    """Which ranks hold which boundary all by themselves, with the median distance.

    A sound rank is far nearer to the boundary than to a broken rank; parts of a sum are as far from the truth as
    from each other, however small they are.
    """
    rows, theirs = case.alignment.serving[probe], case.alignment.training[probe]
    hidden = ranks.views[0].width
    tensors = {view.rank: ordinary_rows(view, rows, case.massive, hidden, "states").clone() for view in ranks.views}
    first, *others = tensors.values()
    apart = max(median(np.nan_to_num(rel_l2(other, first), nan=np.inf)) for other in others)
    hits: dict[tuple[int, Boundary], float] = {}
    for boundary, view in case.boundaries.items():
        reference = ordinary_rows(view, theirs, case.massive, hidden, "theirs")
        for rank, tensor in tensors.items():
            if tensor.shape[1] == reference.shape[1]:
                distance = median(rel_l2(tensor, reference))
                if distance <= min(limits[boundary], FAR_NEARER * apart):
                    hits[rank, boundary] = distance
    return hits


def _among(ranks: RankStudy, good: tuple[int, ...]) -> Sound:
    """The first of the good ranks, and those that are not among them."""
    view = next(view for view in ranks.views if view.rank == good[0])
    return Sound(view, None, tuple(view.rank for view in ranks.views if view.rank not in good))
