"""One tensor of one side, read by token row whatever way the ranks hold it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from eagle_parity.metrics.distances import widened
from eagle_parity.metrics.threads import scratch
from eagle_parity.records import Capture, IntArray
from eagle_parity.tensorfile import DTYPES, Filler, bytes_of

BLOCK_BYTES = 2**20  # of float32 rows: the blocks that belong to one sum fit in a core's cache


def blocks(count: int, width: int, size: int = BLOCK_BYTES) -> Iterator[slice]:
    """Consecutive slices of `count` rows, each of about `size` bytes in float32."""
    step = max(1, size // (4 * max(width, 1)))
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def spans(stored: IntArray) -> list[tuple[int, int]]:
    """Runs of neighbouring indexes, [begin, end) each: what is read in one go."""
    if len(stored) == 0:
        return []
    if len(stored) == stored[-1] - stored[0] + 1 and (np.diff(stored) == 1).all():
        return [(int(stored[0]), int(stored[-1]) + 1)]
    cuts = np.flatnonzero(np.diff(stored) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(stored, cuts)]


@dataclass(frozen=True)
class RankView:
    """A tensor on one rank. `index` maps a token row to its stored row, -1 where the rank does not hold it."""

    capture: Capture
    rank: int
    name: str
    width: int
    index: IntArray | None

    def read(self, rows: IntArray) -> torch.Tensor:
        """Token rows, [len(rows), W]. The rank must hold them (see `holds`)."""
        out = torch.empty((len(rows), self.width), dtype=self.dtype)
        self.fill(self.spans(rows), bytes_of(out))
        return out

    def fill(self, stored: Iterable[tuple[int, int]], into: memoryview) -> None:
        """Fill bytes with spans of stored rows, one after the other."""
        size, at = self.row_bytes, 0
        for begin, end in stored:
            self._filler(begin, into[at : at + (end - begin) * size])
            at += (end - begin) * size

    @cached_property
    def _filler(self) -> Filler:
        """Straight from the file where the capture can (a dump can), else by way of a tensor."""
        if hasattr(self.capture, "filler"):
            filler: Filler = self.capture.filler(self.rank, self.name)
            return filler

        def fill(begin: int, into: memoryview) -> None:
            size = self.row_bytes
            rows = self.capture.read(self.rank, self.name, begin, begin + (len(into) // size if size else 0))
            into[:] = bytes_of(rows.contiguous())

        return fill

    def spans(self, rows: IntArray) -> list[tuple[int, int]]:
        """Where token rows are stored; the rank must hold them."""
        return spans(rows if self.index is None else self.index[rows])

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype that it is stored in."""
        return DTYPES[self.capture.spec(self.rank, self.name).dtype]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a stored row."""
        return self.width * self.dtype.itemsize

    def holds(self, rows: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of the token rows the rank holds."""
        if self.index is None:
            return np.ones(len(rows), dtype=bool)
        return self.index[rows] >= 0


def rank_view(capture: Capture, rank: int, name: str) -> RankView:
    """The view of a tensor on one rank."""
    rows = capture.rows(rank, name)
    index = None
    if rows is not None:
        index = np.full(len(capture.tokens.token_ids), -1, dtype=np.int64)
        index[rows] = np.arange(len(rows))
    return RankView(capture, rank, name, capture.spec(rank, name).width, index)


def widened_rows(view: View, rows: IntArray, name: str) -> torch.Tensor:
    """Token rows in float32 (float64 if stored so), [len(rows), W], in the thread's `scratch` memory of this name."""
    if not isinstance(view, RankView):
        return widened(view.read(rows))
    shape = len(rows), view.width
    stored = scratch("stored 0", shape, view.dtype)
    view.fill(view.spans(rows), bytes_of(stored))
    return scratch(name, shape, torch.float64 if view.dtype == torch.float64 else torch.float32).copy_(stored)


class View(Protocol):
    """A whole tensor, [rows, width] for any token rows that it covers."""

    @property
    def width(self) -> int:
        """Width of a row."""

    def read(self, rows: IntArray) -> torch.Tensor:
        """Token rows, [len(rows), width]."""


@dataclass(frozen=True)
class Concatenated:
    """Hidden shards side by side, in rank order."""

    views: tuple[RankView, ...]

    @property
    def width(self) -> int:
        """Sum of the shards' widths."""
        return sum(view.width for view in self.views)

    def read(self, rows: IntArray) -> torch.Tensor:
        """Token rows of all shards, joined along the hidden dimension."""
        return torch.cat([view.read(rows) for view in self.views], dim=-1)


@dataclass(frozen=True)
class Gathered:
    """Token shards: each row from the first rank that holds it."""

    views: tuple[RankView, ...]

    @property
    def width(self) -> int:
        """Width of every shard."""
        return self.views[0].width

    def read(self, rows: IntArray) -> torch.Tensor:
        """Token rows, each from a rank that holds it; zeros for rows that none holds."""
        first = self.views[0]
        out = torch.zeros((len(rows), self.width), dtype=first.dtype)
        missing = np.ones(len(rows), dtype=bool)
        for view in self.views:
            mine = missing & view.holds(rows)
            if mine.any():
                out[torch.from_numpy(mine)] = view.read(rows[mine])
                missing &= ~mine
        return out


@dataclass(frozen=True)
class Summed:
    """Partial sums added over the ranks, minus `excess` times the part that every rank holds (`residual`)."""

    views: tuple[RankView, ...]
    residual: RankView | None = None
    excess: int = 0

    @property
    def width(self) -> int:
        """Width of every rank's tensor."""
        return self.views[0].width

    def read(self, rows: IntArray) -> torch.Tensor:
        """Token rows of the sum, float32."""
        total = sum((view.read(rows).float() for view in self.views[1:]), self.views[0].read(rows).float())
        if self.residual is not None:
            total = total - self.excess * self.residual.read(rows).float()
        return total
