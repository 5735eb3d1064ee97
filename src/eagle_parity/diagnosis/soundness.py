"""Which tensor to judge where ranks differ: the sum of their parts, or the rank that a boundary vouches for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from eagle_parity.alignment.channels import ordinary_rows
from eagle_parity.alignment.matching import sample
from eagle_parity.alignment.partial import PartialSum, find_partial_sum
from eagle_parity.alignment.ranks import RankStudy
from eagle_parity.alignment.tokens import TokenAlignment
from eagle_parity.alignment.views import RankView, View
from eagle_parity.diagnosis.case import PROBE_ROWS
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


@dataclass(frozen=True)
class Boundaries:
    """What the ranks of a tensor are held against."""

    views: Mapping[Boundary, RankView]
    alignment: TokenAlignment
    massive: torch.Tensor
    """Channels that distances leave out."""
    probe: IntArray
    """Aligned rows to look at, where ranks do not differ in some rows only."""

    def sound(self, ranks: RankStudy, limits: Mapping[Boundary, float], expected: Boundary | None) -> Sound:
        """What to judge of a tensor. `limits`: up to which median relative L2 it counts as a boundary."""
        if ranks.shape != "differ":
            return Sound(ranks.whole)
        probe = self._differing(ranks)
        partial = self._partial(ranks, probe, limits, expected)
        if partial is not None:
            return Sound(partial.whole or ranks.views[0], partial)
        groups = ranks.groups()
        if len(groups[0]) > len(ranks.views) / 2:
            return _among(ranks, groups[0])
        hits = self._vouched_for(ranks, probe, limits)
        if not hits:
            return Sound(ranks.views[0])
        _, held = min(hits, key=lambda hit: (hit[1] != expected, hits[hit]))
        return _among(
            ranks, tuple(rank for rank, boundary in sorted(hits, key=lambda hit: hits[hit]) if boundary == held)
        )

    def _differing(self, ranks: RankStudy) -> IntArray:
        """The rows for questions about ranks: those where they differ, if only some do."""
        apart = np.max([spread.rel_l2[self.alignment.serving] != 0 for spread in ranks.spreads], axis=0)
        rows = np.flatnonzero(apart)
        return rows[sample(len(rows), PROBE_ROWS)] if len(rows) else self.probe

    def _partial(
        self, ranks: RankStudy, probe: IntArray, limits: Mapping[Boundary, float], expected: Boundary | None
    ) -> PartialSum | None:
        """Whether ranks that all differ are parts of a sum. A rank that is some boundary by itself excludes it."""
        if len(probe) == 0 or len(ranks.groups()) < len(ranks.views):
            return None
        rows = self.alignment.serving[probe], self.alignment.training[probe]
        found = find_partial_sum(ranks.views, self.views, *rows, limits, expected, self.massive)
        # A stored residual proves it whatever a single rank looks like: the largest part alone can be near a boundary.
        if found is None or found.how == "residual":
            return found
        return None if self._vouched_for(ranks, probe, limits) else found

    def _vouched_for(
        self, ranks: RankStudy, probe: IntArray, limits: Mapping[Boundary, float]
    ) -> dict[tuple[int, Boundary], float]:
        """Which ranks hold which boundary all by themselves, with the median distance.

        A sound rank is far nearer to the boundary than to a broken rank; parts of a sum are as far from the truth as
        from each other, however small they are.
        """
        rows, theirs = self.alignment.serving[probe], self.alignment.training[probe]
        apart = max(median(spread.rel_l2[rows]) for spread in ranks.spreads)
        hidden = ranks.views[0].width
        tensors = {view.rank: ordinary_rows(view, rows, self.massive, hidden, "states").clone() for view in ranks.views}
        hits: dict[tuple[int, Boundary], float] = {}
        for boundary, view in self.views.items():
            reference = ordinary_rows(view, theirs, self.massive, hidden, "theirs")
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
