"""Which training boundary does a serving tensor hold, row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eagle_parity.alignment.views import RankView, View, blocks, rank_view
from eagle_parity.metrics.channels import ChannelSums
from eagle_parity.metrics.distances import FloatArray, numpy64, row_sums
from eagle_parity.metrics.distribution import median, sign_test
from eagle_parity.records import FINAL_NORM, Boundary, Capture, IntArray, boundary_name

LUCK = 0.01  # p-value above which best and runner-up cannot be told apart


@dataclass(frozen=True)
class Match:
    """Relative L2 of each aligned row to every boundary that the training side stores: float64 [N] each."""

    rel_l2: Mapping[Boundary, FloatArray]

    def medians(self, rows: np.ndarray[tuple[int], np.dtype[np.bool_]] | slice = slice(None)) -> dict[Boundary, float]:
        """Median distance to each boundary over some of the rows."""
        return {boundary: median(values[rows]) for boundary, values in self.rel_l2.items()}

    def ranking(self) -> list[Boundary]:
        """Boundaries by median distance, nearest first; NaN last."""
        medians = self.medians()
        return sorted(medians, key=lambda b: (np.isnan(medians[b]), medians[b]))

    @property
    def best(self) -> Boundary | None:
        """The nearest boundary; None when no row or no boundary was there to compare."""
        ranking = self.ranking()
        return ranking[0] if ranking and not np.isnan(self.medians()[ranking[0]]) else None

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
        medians = self.medians()
        first, second = medians[self.best], medians[self.runner_up]
        if first == 0:
            return 1.0 if second == 0 else float("inf")
        return second / first

    def told_apart(self, first: Boundary, second: Boundary) -> bool:
        """Whether `first` is nearer than `second` on so many rows that it cannot be luck (sign test)."""
        return sign_test(self.rel_l2[first], self.rel_l2[second]) < LUCK


def training_views(training: Capture) -> dict[Boundary, RankView]:
    """Every boundary that the training side stores on its first rank, by number, `final.norm` last."""
    rank = training.ranks[0]
    found: dict[Boundary, RankView] = {
        b: rank_view(training, rank, boundary_name(b)) for b in training.facts.boundaries
    }
    if FINAL_NORM in training.names(rank):
        found[FINAL_NORM] = rank_view(training, rank, FINAL_NORM)
    return found


def match(
    serving: Mapping[str, View],
    boundaries: Mapping[Boundary, RankView],
    serving_rows: IntArray,
    training_rows: IntArray,
    step: Callable[[int], None] | None = None,
) -> dict[str, Match]:
    """Distances of each serving tensor to each boundary of its own width, in one pass over the aligned rows.

    `step` is called with the number of rows done, for a progress bar.
    """
    found: dict[str, dict[Boundary, list[FloatArray]]] = {
        name: {b: [] for b, other in boundaries.items() if other.width == view.width} for name, view in serving.items()
    }
    width = max((view.width for view in serving.values()), default=1)
    for block in blocks(len(serving_rows), width):
        tensors = {name: view.read(serving_rows[block]).float() for name, view in serving.items()}
        for boundary, view in boundaries.items():
            reference = view.read(training_rows[block]).float()
            for name, tensor in tensors.items():
                if boundary in found[name]:
                    found[name][boundary].append(numpy64(row_sums(tensor, reference).rel_l2()))
        if step is not None:
            step(block.stop - block.start)
    return {name: Match({b: np.concatenate(parts) for b, parts in by.items() if parts}) for name, by in found.items()}


def distances(serving: View, training: View, serving_rows: IntArray, training_rows: IntArray) -> FloatArray:
    """Relative L2 of one tensor to another on paired rows: float64 [N]."""
    parts = [
        numpy64(row_sums(serving.read(serving_rows[block]), training.read(training_rows[block])).rel_l2())
        for block in blocks(len(serving_rows), training.width)
    ]
    return np.concatenate(parts) if parts else np.empty(0)


@dataclass(frozen=True)
class Comparison:
    """A serving tensor against one boundary, per aligned row: float64 [N] each."""

    cosine: FloatArray
    rel_l2: FloatArray
    norm_ratio: FloatArray
    cosine_no_massive: FloatArray
    cosine_centred: FloatArray


def compare(serving: View, training: View, serving_rows: IntArray, training_rows: IntArray) -> Comparison:
    """All per-token metrics of one pair, in two passes (the first finds means and massive channels)."""
    ours, theirs = ChannelSums(serving.width), ChannelSums(training.width)
    for block in blocks(len(serving_rows), training.width):
        ours.add(serving.read(serving_rows[block]))
        theirs.add(training.read(training_rows[block]))
    keep = theirs.ordinary()
    parts: list[tuple[FloatArray, ...]] = []
    for block in blocks(len(serving_rows), training.width):
        s = serving.read(serving_rows[block]).float()
        t = training.read(training_rows[block]).float()
        sums = row_sums(s, t)
        parts.append(
            (
                numpy64(sums.cosine()),
                numpy64(sums.rel_l2()),
                numpy64(sums.norm_ratio()),
                numpy64(row_sums(s[:, keep], t[:, keep]).cosine()),
                numpy64(row_sums(s - ours.mean(), t - theirs.mean()).cosine()),
            )
        )
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.empty(0)] * 5
    return Comparison(*columns)


def sample(count: int, limit: int) -> IntArray:
    """Up to `limit` indexes spread evenly over `count`, for tests that need all tensors in memory at once."""
    if count <= limit:
        return np.arange(count, dtype=np.int64)
    return np.unique(np.linspace(0, count - 1, limit).astype(np.int64))


def medians_of(columns: Sequence[FloatArray]) -> tuple[float, ...]:
    """The median of each column."""
    return tuple(median(column) for column in columns)
