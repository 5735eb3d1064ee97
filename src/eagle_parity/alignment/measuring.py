"""All sums of tensors of one width with each other, in one pass over blocks of rows that fit a core's caches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eagle_parity.alignment.views import RankView, View
from eagle_parity.alignment.views import spans as spans_of
from eagle_parity.metrics.distances import FloatArray, numpy64, root_ratio
from eagle_parity.metrics.paired import Pairing, exactly, lost, paired_sums
from eagle_parity.metrics.pairs import padded
from eagle_parity.metrics.threads import spread
from eagle_parity.records import IntArray


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
    size: int,
    step: Callable[[int], None] | None = None,
) -> Measured:
    """Measure every tensor of ours against every one of theirs, and the pairs that come first on both sides.

    `pairs` makes the pairing for the dtype that sums are formed in. `size`: bytes of a block in float32. `step` is
    called with the number of rows done.
    """
    blocks = _Blocks(ours, theirs, pairs)
    spans = blocks.reader.blocks(size)
    for (begin, end), _ in zip(spans, spread(blocks.work, spans), strict=True):
        if step is not None:
            step(end - begin)
    return Measured(blocks.rel_l2, blocks.norms, blocks.sums)


class _Blocks:
    """The pass: blocks of rows may be worked on in any order, by several threads."""

    def __init__(self, ours: Side, theirs: Side, pairs: Callable[[torch.dtype], Pairing]) -> None:
        self.reader = Reader((ours, theirs))
        self._pairs = pairs(self.reader.dtype)
        n, m, count = len(ours.views), len(theirs.views), len(ours.rows)
        self.rel_l2 = np.empty((n, m, count))
        self.norms = np.empty((m, count))
        self.sums = np.empty((3, 4, self._pairs.count, count))

    def work(self, block: tuple[int, int]) -> None:
        """Measure the rows [begin, end)."""
        n, rows = len(self.rel_l2), slice(*block)
        states = self.reader.read(*block)
        found, sums = paired_sums(states, n, self._pairs)
        theirs_sq = found.theirs_sq.unsqueeze(0).expand_as(found.difference_sq)
        self.rel_l2[..., rows] = numpy64(root_ratio(found.difference_sq, theirs_sq))
        self.norms[:, rows] = numpy64(found.theirs_sq.sqrt())
        again = lost(sums)
        for p in again.any(-1).nonzero().flatten().tolist():
            index = block[0] + again[p].nonzero().flatten().numpy()
            sums[:, :, p, again[p]] = exactly(*self.reader.stored(p, index), self._pairs, p)
        self.sums[..., rows] = numpy64(sums)


class Reader:
    """Reads blocks of paired rows of two sides, whose tensors are all of one width; any number of threads may read."""

    def __init__(self, sides: tuple[Side, Side]) -> None:
        self._sides = sides
        self._width = sides[0].views[0].width
        self._tensors = sum(len(side.views) for side in sides)
        self._scratch = _Scratch()
        self._dtypes = [_dtypes(side) for side in sides]
        self.dtype = torch.float64 if any(torch.float64 in some for some in self._dtypes) else torch.float32

    def blocks(self, size: int) -> list[tuple[int, int]]:
        """Blocks of rows, [begin, end) each, of at most `size` bytes in float32 or else of one row."""
        count, step = len(self._sides[0].rows), max(1, size // (4 * padded(self._width) * self._tensors))
        return [(begin, min(begin + step, count)) for begin in range(0, count, step)]

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Rows of all tensors in `dtype`, [tensors, rows, padded W].

        The memory is the thread's own and is read into again by its next call.
        """
        states = self._scratch.states(self._tensors, end - begin, padded(self._width), self.dtype)
        places = iter(states[..., : self._width])
        for side in self._sides:
            rows = side.rows[begin:end]
            common = spans_of(rows)
            for view, place in zip(side.views, places, strict=False):
                if not isinstance(view, RankView):
                    place.copy_(view.read(rows))
                    continue
                # Through a small block that stays in the core's own cache.
                stored, data = self._scratch.stored(len(rows), self._width, view.dtype)
                view.fill(common if view.index is None else view.spans(rows), data)
                place.copy_(stored)
        return states

    def stored(self, pair: int, index: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (indexes into those of the sides) of both sides' tensors of a number, as they are stored."""
        ours, theirs = (side.views[pair].read(side.rows[index]) for side in self._sides)
        return ours, theirs


def _dtypes(side: Side) -> set[torch.dtype]:
    """What the tensors of a side are stored in."""
    return {view.dtype if isinstance(view, RankView) else view.read(side.rows[:1]).dtype for view in side.views}


class _Scratch(threading.local):
    """A thread's memory for a block: fresh memory would cost as much as the sums."""

    def __init__(self) -> None:
        self._states = torch.empty(0)
        self._stored: dict[tuple[int, int, torch.dtype], tuple[torch.Tensor, memoryview]] = {}

    def states(self, tensors: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[tensors, rows, width], the padding zero."""
        if self._states.shape != (tensors, rows, width):
            self._states = torch.zeros(tensors, rows, width, dtype=dtype)
        return self._states

    def stored(self, rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, memoryview]:
        """Memory for the rows of a tensor as they are stored, [rows, width], and the same as bytes."""
        key = rows, width, dtype
        if key not in self._stored:
            memory = torch.empty(rows, width, dtype=dtype)
            self._stored[key] = memory, memory.view(-1).view(torch.uint8).numpy().data
        return self._stored[key]
