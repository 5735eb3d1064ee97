"""All sums of tensors of one width with each other, in one pass over blocks of rows that fit a core's caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from eagle_parity.alignment.views import RankView, View
from eagle_parity.alignment.views import spans as spans_of
from eagle_parity.metrics.distances import FloatArray, numpy64, padded, root_ratio, runs_of
from eagle_parity.metrics.paired import Pairing, add_tile, paired_sums, run_sums
from eagle_parity.metrics.threads import scratch, spread
from eagle_parity.records import IntArray
from eagle_parity.tensorfile import bytes_of

STORED_BYTES = 8 * 2**20  # of a block as it is stored: the fewer calls read it, the less threads wait for each other
WIDE_BYTES = 4 * 2**20  # of the rows of all tensors that are widened at once: what a core's caches hold


@dataclass(frozen=True)
class Side:
    """Tensors of one side, all of one width, and the token rows of each that are looked at, in order."""

    views: Sequence[View]
    rows: IntArray


@dataclass(frozen=True)
class Measured:
    """Of N rows: distances of all n tensors to all m others, and the sums of the pairs."""

    rel_l2: FloatArray
    """[n, m, N], without massive channels."""
    norms: FloatArray
    """[m, N], of the others, without massive channels."""
    sums: FloatArray
    """[3, 4, pairs, N]: plainly, centred, without massive channels; |a|^2, |b|^2, ab, |a - b|^2 (the latter NaN where
    it is not plain)."""


def measure(
    ours: Side,
    theirs: Side,
    pairs: Callable[[torch.dtype], Pairing],
    step: Callable[[int], None] | None = None,
) -> Measured:
    """Measure every tensor of ours against every one of theirs, and the pairs: the last of ours, the first of theirs.

    `pairs` makes the pairing for the dtype that sums are formed in. `step` is called with the number of rows done.
    """
    work = _Work(ours, theirs, pairs)
    blocks = work.reader.blocks()
    for (first, last), _ in zip(blocks, spread(work.measure, blocks), strict=True):
        if step is not None:
            step(last - first)
    return Measured(work.rel_l2, work.norms, work.sums)


class _Work:
    """The pass: blocks of rows may be measured in any order, by several threads."""

    def __init__(self, ours: Side, theirs: Side, pairs: Callable[[torch.dtype], Pairing]) -> None:
        self.reader = Reader((ours, theirs))
        self._pairs = pairs(self.reader.dtype)
        n, m, count = len(ours.views), len(theirs.views), len(ours.rows)
        self.rel_l2 = np.empty((n, m, count))
        self.norms = np.empty((m, count))
        self.sums = np.empty((3, 4, self._pairs.count, count))

    def measure(self, block: tuple[int, int]) -> None:
        """Measure the rows [begin, end)."""
        rows, (n, m, _) = slice(*block), self.rel_l2.shape
        runs = run_sums(n, m, rows.stop - rows.start, self._pairs)
        stored = self.reader.read(*block)
        for part, states in self.reader.widen(stored):
            add_tile(states, n, self._pairs, runs, part)
        found, sums = paired_sums(runs, self._pairs, stored.tensor)
        theirs_sq = found.theirs_sq.unsqueeze(0).expand_as(found.difference_sq)
        self.rel_l2[..., rows] = numpy64(root_ratio(found.difference_sq, theirs_sq))
        self.norms[:, rows] = numpy64(found.theirs_sq.sqrt())
        self.sums[..., rows] = numpy64(sums)


@dataclass(frozen=True)
class Stored:
    """Rows of all tensors as they are stored."""

    groups: list[tuple[slice, torch.Tensor]]
    """Tensors of one dtype that follow each other: which these are, and [tensors, rows, W]."""

    def tensor(self, number: int) -> torch.Tensor:
        """The rows of one tensor, [rows, W]."""
        return next(block[number - some.start] for some, block in self.groups if number < some.stop)


class Reader:
    """Reads blocks of paired rows of two sides, whose tensors are all of one width; any number of threads may read."""

    def __init__(self, sides: tuple[Side, Side]) -> None:
        self._sides = sides
        self._width = sides[0].views[0].width
        self._dtypes = [_dtype(view, side) for side in sides for view in side.views]
        self.dtype = torch.float64 if torch.float64 in self._dtypes else torch.float32

    @property
    def runs(self) -> int:
        """How many runs of channels a widened row has."""
        return runs_of(padded(self._width))[0]

    @property
    def _step(self) -> int:
        """How many rows are widened at once."""
        return max(1, WIDE_BYTES // (self.dtype.itemsize * padded(self._width) * len(self._dtypes)))

    def blocks(self) -> list[tuple[int, int]]:
        """Blocks of rows, [begin, end) each: what a thread reads at once."""
        row = self._width * sum(dtype.itemsize for dtype in self._dtypes)
        count, step = len(self._sides[0].rows), self._step * max(1, STORED_BYTES // max(row, 1) // self._step)
        return [(begin, min(begin + step, count)) for begin in range(0, count, step)]

    def read(self, begin: int, end: int) -> Stored:
        """The rows [begin, end) of all tensors as they are stored.

        The memory is the thread's own and is written to again by its next call, like that of `widen`.
        """
        groups, first = [], 0
        for dtype, same in groupby(self._dtypes):
            last = first + len(list(same))
            shape = last - first, end - begin, self._width
            groups.append((slice(first, last), scratch(f"stored {first}", shape, dtype)))
            first = last
        places = (place for _, block in groups for place in block)
        for side in self._sides:
            rows = side.rows[begin:end]
            common = spans_of(rows)
            for view, place in zip(side.views, places, strict=False):
                if isinstance(view, RankView):
                    view.fill(common if view.index is None else view.spans(rows), bytes_of(place))
                else:
                    place.copy_(view.read(rows))
        return Stored(groups)

    def widen(self, stored: Stored) -> Iterator[tuple[slice, torch.Tensor]]:
        """A few rows at a time of what was read: which, and all tensors in `dtype`, [tensors, few, padded W]."""
        count = stored.groups[0][1].shape[1]
        for begin in range(0, count, self._step):
            rows = slice(begin, min(begin + self._step, count))
            shape = len(self._dtypes), rows.stop - begin, padded(self._width)
            states = scratch("states", shape, self.dtype)
            states[..., self._width :] = 0
            for some, block in stored.groups:
                states[some, :, : self._width].copy_(block[:, rows])
            yield rows, states


def _dtype(view: View, side: Side) -> torch.dtype:
    """What a tensor is stored in, or rebuilt in."""
    return view.dtype if isinstance(view, RankView) else view.read(side.rows[:1]).dtype
