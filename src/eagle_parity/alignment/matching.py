"""Which training boundary does a serving tensor hold, row by row, and how far is it from it by every metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_parity.alignment.channels import channels_of, ordinary_rows
from eagle_parity.alignment.measuring import Measured, Side, measure
from eagle_parity.alignment.views import RankView, View, blocks, rank_view
from eagle_parity.metrics.channels import ChannelSums
from eagle_parity.metrics.distances import FloatArray, RowSums, angle, numpy64, row_sums
from eagle_parity.metrics.distribution import median, sign_test
from eagle_parity.metrics.paired import pairing
from eagle_parity.metrics.threads import one_thread
from eagle_parity.records import FINAL_NORM, Boundary, Capture, IntArray, boundary_name

RUN_ROWS = 8
SAMPLE_ROWS = 128  # rows that tell what a channel is like
NO_CHANNELS = torch.empty(0, dtype=torch.int64)
LUCK = 0.01  # p-value above which best and runner-up cannot be told apart


@dataclass(frozen=True)
class Comparison:
    """A serving tensor against one boundary, per aligned row: float64 [N] each."""

    cosine: FloatArray
    rel_l2: FloatArray
    norm_ratio: FloatArray
    cosine_no_massive: FloatArray
    cosine_centred: FloatArray


@dataclass(frozen=True)
class References:
    """The boundary that each tensor is compared with, and what the channels of all of them are like."""

    boundaries: Mapping[str, Boundary]
    ours: Mapping[str, ChannelSums]
    theirs: Mapping[Boundary, ChannelSums]


@dataclass(frozen=True)
class Match:
    """Relative L2 of each aligned row to every boundary that the training side stores: float64 [N] each.

    Which boundary is nearest is decided by distance itself where `norms` (of the boundaries' rows) are known: relative
    to each boundary's own norm, a noisy state seems nearer to a later boundary, since norms grow with depth.
    """

    rel_l2: Mapping[Boundary, FloatArray]
    norms: Mapping[Boundary, FloatArray] = field(default_factory=dict)
    comparison: Comparison | None = None
    """All metrics against the boundary that was asked for."""

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
    *,
    references: References | None = None,
    left_out: torch.Tensor = NO_CHANNELS,
    hidden: int | None = None,
    step: Callable[[int], None] | None = None,
) -> dict[str, Match]:
    """Distances of each serving tensor to each boundary of its own width, in one pass over the aligned rows.

    `references`: what to measure with all metrics besides. `left_out`: channels of `hidden`-wide tensors that distances
    leave out. `step` is called with the number of rows done, of each tensor.
    """
    asked = References({}, {}, {}) if references is None else references
    found: dict[str, Match] = {}
    for width in sorted({view.width for view in serving.values()}):
        ours = {name: view for name, view in serving.items() if view.width == width}
        theirs = {boundary: view for boundary, view in boundaries.items() if view.width == width}
        if not theirs or len(serving_rows) == 0:
            found.update(dict.fromkeys(ours, Match({})))
        else:
            massive = left_out if width == hidden else NO_CHANNELS
            found.update(_match(ours, theirs, serving_rows, training_rows, asked, massive, step))
    return found


def _match(
    serving: Mapping[str, View],
    boundaries: Mapping[Boundary, View],
    serving_rows: IntArray,
    training_rows: IntArray,
    asked: References,
    massive: torch.Tensor,
    step: Callable[[int], None] | None,
) -> dict[str, Match]:
    """The match of tensors that are all of one width."""
    # The tensors that are compared come last, and their boundaries first in the same order: pairs lie side by side.
    paired = [name for name in serving if asked.boundaries.get(name) in boundaries]
    wanted = [asked.boundaries[name] for name in paired]
    ours = [*(name for name in serving if name not in paired), *paired]
    theirs = [*wanted, *(boundary for boundary in boundaries if boundary not in wanted)]
    means = [*(asked.ours[name].mean() for name in paired), *(asked.theirs[k].mean() for k in wanted)]
    width = next(iter(boundaries.values())).width
    measured = measure(
        Side([serving[name] for name in ours], serving_rows),
        Side([boundaries[boundary] for boundary in theirs], training_rows),
        partial(
            pairing,
            torch.stack(means).view(2, len(paired), width) if means else torch.zeros(2, 0, width),
            [asked.theirs[boundary].massive() for boundary in wanted],
            massive,
        ),
        None if step is None else lambda rows: step(rows * len(ours)),
    )
    places = {boundary: theirs.index(boundary) for boundary in boundaries}
    norms = {boundary: measured.norms[j] for boundary, j in places.items()}
    comparisons = dict(zip(paired, _comparisons(measured), strict=True))
    return {
        name: Match({boundary: measured.rel_l2[i, j] for boundary, j in places.items()}, norms, comparisons.get(name))
        for i, name in enumerate(ours)
    }


def _comparisons(measured: Measured) -> list[Comparison]:
    """Of each pair."""
    plain, centred, no_massive = torch.from_numpy(measured.sums)
    sums = RowSums(serving_sq=plain[0], training_sq=plain[1], dot=plain[2], difference_sq=plain[3])
    each = zip(
        numpy64(sums.cosine()),
        numpy64(sums.rel_l2()),
        numpy64(sums.norm_ratio()),
        numpy64(angle(no_massive[2], no_massive[0], no_massive[1])),
        numpy64(angle(centred[2], centred[0], centred[1])),
        strict=True,
    )
    return [Comparison(*columns) for columns in each]


@one_thread()
def sums(
    serving: View,
    training: View,
    serving_rows: IntArray,
    training_rows: IntArray,
    channels: slice = slice(None),
    massive: torch.Tensor = NO_CHANNELS,
    hidden: int | None = None,
) -> RowSums:
    """Sums of one tensor with some of another's channels on paired rows.

    `massive`: channels of tensors of `hidden` channels that are left out.
    """
    found = RowSums(*torch.empty(4, len(serving_rows), dtype=torch.float64))
    for block in blocks(len(serving_rows), training.width):
        ours = ordinary_rows(serving, serving_rows[block], massive, hidden, "states")
        theirs = ordinary_rows(training, training_rows[block], massive, hidden, "theirs")
        part = row_sums(ours, theirs[:, channels])
        for name in ("dot", "serving_sq", "training_sq", "difference_sq"):
            getattr(found, name)[block] = getattr(part, name)
    return found


@one_thread()
def compare(serving: View, training: View, serving_rows: IntArray, training_rows: IntArray) -> Comparison:
    """All per-token metrics of one pair. What its channels are like is learnt from a sample of the rows."""
    index = sample(len(serving_rows), SAMPLE_ROWS)
    ours, theirs = channels_of(serving, serving_rows[index]), channels_of(training, training_rows[index])
    found = match(
        {"": serving},
        {0: training},
        serving_rows,
        training_rows,
        references=References({"": 0}, {"": ours}, {0: theirs}),
        left_out=theirs.massive(),
        hidden=training.width,
    )
    nothing = np.empty(0)
    return found[""].comparison or Comparison(nothing, nothing, nothing, nothing, nothing)


def sample(count: int, limit: int) -> IntArray:
    """Up to `limit` indexes spread over `count`, for tests that need all tensors in memory at once.

    In short runs, since rows that lie together are read together.
    """
    if count <= limit:
        return np.arange(count, dtype=np.int64)
    begins = np.linspace(0, count - RUN_ROWS, limit // RUN_ROWS).astype(np.int64)
    return (begins[:, None] + np.arange(RUN_ROWS, dtype=np.int64)).ravel()  # of more rows: no two overlap


def medians_of(columns: Sequence[FloatArray]) -> tuple[float, ...]:
    """The median of each column."""
    return tuple(median(column) for column in columns)
