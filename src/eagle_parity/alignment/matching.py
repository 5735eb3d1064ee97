"""Which training boundary does a serving tensor hold, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_parity.alignment.views import RankView, View, blocks, rank_view
from eagle_parity.metrics.channels import ChannelSums, channel_sums
from eagle_parity.metrics.distances import (
    FloatArray,
    RowSums,
    angle,
    numpy64,
    products,
    row_sums,
    safely,
    squares,
    widened,
)
from eagle_parity.metrics.distribution import median, sign_test
from eagle_parity.metrics.pairs import padded, pair_rel_l2
from eagle_parity.metrics.threads import one_thread
from eagle_parity.records import FINAL_NORM, Boundary, Capture, IntArray, boundary_name

PAIRS_BYTES = 16 * 2**20  # of float32 rows of all tensors together: few enough for a cache, enough to read in one go
RUN_ROWS = 8
LUCK = 0.01  # p-value above which best and runner-up cannot be told apart


@dataclass(frozen=True)
class Match:
    """Relative L2 of each aligned row to every boundary that the training side stores: float64 [N] each.

    Which boundary is nearest is decided by distance itself where `norms` (of the boundaries' rows) are known: relative
    to each boundary's own norm, a noisy state seems nearer to a later boundary, since norms grow with depth.
    """

    rel_l2: Mapping[Boundary, FloatArray]
    norms: Mapping[Boundary, FloatArray] = field(default_factory=dict)

    def where(self, rows: NDArray[np.bool_]) -> Match:
        """The match of some rows."""
        return Match({b: v[rows] for b, v in self.rel_l2.items()}, {b: v[rows] for b, v in self.norms.items()})

    @cached_property
    def _distance(self) -> Mapping[Boundary, FloatArray]:
        """Distances of each row on one scale."""
        if self.norms.keys() != self.rel_l2.keys() or not self.norms:
            return self.rel_l2
        scale = np.maximum(np.mean(list(self.norms.values()), axis=0), np.finfo(np.float64).tiny)
        return {b: np.where(v == 0, 0.0, v * (self.norms[b] / scale)) for b, v in self.rel_l2.items()}

    @cached_property
    def _medians(self) -> dict[Boundary, float]:
        return {boundary: median(values) for boundary, values in self.rel_l2.items()}

    def medians(self) -> dict[Boundary, float]:
        """Median relative L2 to each boundary."""
        return dict(self._medians)

    @cached_property
    def _ranking(self) -> list[Boundary]:
        medians = {boundary: median(values) for boundary, values in self._distance.items()}
        return sorted(medians, key=lambda b: (np.isnan(medians[b]), medians[b]))

    def ranking(self) -> list[Boundary]:
        """Boundaries by median distance, nearest first; NaN last."""
        return list(self._ranking)

    @property
    def best(self) -> Boundary | None:
        """The nearest boundary; None when no row or no boundary was there to compare."""
        ranking = self.ranking()
        return ranking[0] if ranking and not np.isnan(self._medians[ranking[0]]) else None

    @property
    def runner_up(self) -> Boundary | None:
        """The second nearest."""
        ranking = self.ranking()
        return ranking[1] if self.best is not None and len(ranking) > 1 else None

    @property
    def margin(self) -> float | None:
        """Runner-up's median distance over the best's; infinite for an exact match, None without a runner-up."""
        if self.best is None or self.runner_up is None:
            return None
        first, second = self._medians[self.best], self._medians[self.runner_up]
        if first == 0:
            return 1.0 if second == 0 else float("inf")
        return second / first

    def told_apart(self, first: Boundary, second: Boundary) -> bool:
        """Whether `first` is nearer than `second` on so many rows that it cannot be luck (sign test)."""
        return sign_test(self._distance[first], self._distance[second]) < LUCK

    def strays(self, expected: Boundary, limits: Mapping[Boundary, float]) -> dict[Boundary, NDArray[np.bool_]]:
        """Rows that hold another boundary: at its floor, and less than half as far away as the expected one.

        A row whose routing flipped is at no boundary's floor. `limits`: the largest distance that counts as the floor.
        """
        if not self._distance or expected not in self._distance:
            return {}
        boundaries = list(self._distance)
        nearest = np.argmin(np.nan_to_num(np.stack(list(self._distance.values())), nan=np.inf), axis=0)
        found = {}
        for i, boundary in enumerate(boundaries):
            clear = self._distance[boundary] < 0.5 * self._distance[expected]
            rows = (nearest == i) & clear & (self.rel_l2[boundary] <= limits[boundary])
            if boundary != expected and rows.any():
                found[boundary] = rows
        return found


def training_views(training: Capture) -> dict[Boundary, RankView]:
    """Every boundary that the training side stores on its first rank, by number, `final.norm` last."""
    rank = training.ranks[0]
    found: dict[Boundary, RankView] = {
        b: rank_view(training, rank, boundary_name(b)) for b in training.facts.boundaries
    }
    if FINAL_NORM in training.names(rank):
        found[FINAL_NORM] = rank_view(training, rank, FINAL_NORM)
    return found


@one_thread()
def match(
    serving: Mapping[str, View],
    boundaries: Mapping[Boundary, View],
    serving_rows: IntArray,
    training_rows: IntArray,
    step: Callable[[int], None] | None = None,
) -> dict[str, Match]:
    """Distances of each serving tensor to each boundary of its own width, in one pass over the aligned rows.

    `step` is called with the number of rows done, for a progress bar.
    """
    found: dict[str, Match] = {}
    for width in sorted({view.width for view in serving.values()}):
        ours = {name: view for name, view in serving.items() if view.width == width}
        theirs = {boundary: view for boundary, view in boundaries.items() if view.width == width}
        sides = [(view, serving_rows) for view in ours.values()] + [(view, training_rows) for view in theirs.values()]
        distances = np.empty((len(ours), len(theirs), len(serving_rows)))
        norms = np.empty((len(theirs), len(serving_rows)))
        for block, states in _side_by_side(sides, width) if theirs else ():
            distances[..., block], norms[:, block] = pair_rel_l2(states[: len(ours)], states[len(ours) :])
            if step is not None:
                step(block.stop - block.start)
        by_boundary = dict(zip(theirs, norms, strict=True)) if len(serving_rows) else {}
        for name, values in zip(ours, distances, strict=True):
            found[name] = Match(dict(zip(by_boundary, values, strict=False)), by_boundary)
    return found


def _side_by_side(sides: list[tuple[View, IntArray]], width: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Blocks of rows of all tensors of a width: [tensors, rows of the block, padded width]."""
    slices = list(blocks(len(sides[0][1]), padded(width) * len(sides), PAIRS_BYTES))
    if not slices:
        return
    wide = torch.float64 if any(view.read(rows[:1]).dtype == torch.float64 for view, rows in sides) else torch.float32
    # One buffer for all blocks: fresh memory would cost as much as the sums.
    buffer = torch.zeros(len(sides), slices[0].stop, padded(width), dtype=wide)
    for block in slices:
        part = buffer[:, : block.stop - block.start]
        for place, (view, rows) in zip(part, sides, strict=True):
            place[:, :width] = view.read(rows[block])
        yield block, part.contiguous()


@one_thread()
def sums(
    serving: View, training: View, serving_rows: IntArray, training_rows: IntArray, channels: slice = slice(None)
) -> RowSums:
    """Sums of one tensor with some of another's channels on paired rows."""
    found = RowSums(*torch.empty(4, len(serving_rows), dtype=torch.float64))
    for block in blocks(len(serving_rows), training.width):
        part = row_sums(serving.read(serving_rows[block]), training.read(training_rows[block])[:, channels])
        for name in ("dot", "serving_sq", "training_sq", "difference_sq"):
            getattr(found, name)[block] = getattr(part, name)
    return found


@dataclass(frozen=True)
class Comparison:
    """A serving tensor against one boundary, per aligned row: float64 [N] each."""

    cosine: FloatArray
    rel_l2: FloatArray
    norm_ratio: FloatArray
    cosine_no_massive: FloatArray
    cosine_centred: FloatArray


@one_thread()
def compare(serving: View, training: View, serving_rows: IntArray, training_rows: IntArray) -> Comparison:
    """All per-token metrics of one pair, in two passes (the first finds means and massive channels)."""
    slices = list(blocks(len(serving_rows), training.width))

    def read(block: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return widened(serving.read(serving_rows[block])), widened(training.read(training_rows[block]))

    ours, theirs = ChannelSums(serving.width), ChannelSums(training.width)
    for block in slices:
        s, t = read(block)
        ours.add(channel_sums(s))
        theirs.add(channel_sums(t))
    our_mean, their_mean, massive = ours.mean(), theirs.mean(), theirs.massive()

    def measure(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        sums = [squares(s), squares(t), products(s, t), squares(s - t)]
        a, b = s - our_mean, t - their_mean
        sums += [squares(a), squares(b), products(a, b)]
        if len(massive):
            a, b = s.index_fill(1, massive, 0.0), t.index_fill(1, massive, 0.0)
            sums += [squares(a), squares(b), products(a, b)]
        return torch.stack(sums)

    sums = torch.empty(10 if len(massive) else 7, len(serving_rows), dtype=torch.float64)
    for block in slices:  # small results kept between large blocks would keep the allocator from using these again
        sums[:, block] = safely(measure, *read(block))
    plain = RowSums(serving_sq=sums[0], training_sq=sums[1], dot=sums[2], difference_sq=sums[3])
    return Comparison(
        cosine=numpy64(plain.cosine()),
        rel_l2=numpy64(plain.rel_l2()),
        norm_ratio=numpy64(plain.norm_ratio()),
        cosine_no_massive=numpy64(angle(sums[9], sums[7], sums[8]) if len(massive) else plain.cosine()),
        cosine_centred=numpy64(angle(sums[6], sums[4], sums[5])),
    )


def sample(count: int, limit: int) -> IntArray:
    """Up to `limit` indexes spread over `count`, for tests that need all tensors in memory at once.

    In short runs, since rows that lie together are read together.
    """
    if count <= limit:
        return np.arange(count, dtype=np.int64)
    begins = np.linspace(0, count - RUN_ROWS, limit // RUN_ROWS).astype(np.int64)
    return np.unique((begins[:, None] + np.arange(RUN_ROWS, dtype=np.int64)).ravel())


def medians_of(columns: Sequence[FloatArray]) -> tuple[float, ...]:
    """The median of each column."""
    return tuple(median(column) for column in columns)
