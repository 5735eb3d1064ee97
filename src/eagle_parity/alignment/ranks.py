"""What the ranks hold of one tensor together: found from widths, rows and equality, without any training data.

Whether ranks that differ are a partial sum needs the training side; see `partial`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch

from eagle_parity.alignment.views import Concatenated, Gathered, RankView, View, blocks, rank_view, spans
from eagle_parity.metrics.distances import FloatArray, rel_l2, widened
from eagle_parity.metrics.threads import one_thread, scratch, start
from eagle_parity.records import Capture, IntArray
from eagle_parity.tensorfile import bytes_of

BLOCK_BYTES = 2**20  # of one rank: two are about a core's second cache, and smaller ones take more calls

# Half a unit in the last place, relative: 2^-(significand bits).
ROUNDOFF = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24, "F64": 2.0**-53, "F8_E4M3": 2.0**-4, "F8_E5M2": 2.0**-3}


Shape: TypeAlias = Literal["one-rank", "equal", "rounding", "differ", "hidden-shard", "token-shard", "width"]


@dataclass(frozen=True)
class RankSpread:
    """How far a rank's rows are from the first rank's: relative L2 per row, float64 [rows]."""

    rank: int
    rel_l2: FloatArray
    rounding: float
    """How many times its own size a channel differs by, RMS over the channels of the worst row; NaN is infinite.

    Massive channels make up most of a row's norm; beside them a share of a sum looks like a rounding error.
    """
    digest: int
    """Of the rows that differ: two ranks with one digest are equal bit by bit."""

    @property
    def equal(self) -> bool:
        """Bitwise equal (a row that differs in any bit has a distance above 0, or NaN)."""
        return bool(np.all(self.rel_l2 == 0))


@dataclass(frozen=True)
class NonFinite:
    """The first NaN or infinity of a rank: token row and channel."""

    rank: int
    row: int
    channel: int


@dataclass(frozen=True)
class RankStudy:
    """One tensor over the ranks that hold it."""

    name: str
    views: tuple[RankView, ...]
    missing: tuple[int, ...]
    """Ranks that have a file in the dump but not this tensor."""
    shape: Shape
    spreads: tuple[RankSpread, ...]
    """Against the first rank, for the other ranks; empty for shards and one rank."""
    whole: View | None
    """The tensor rebuilt, where that needs no training data."""
    non_finite: tuple[NonFinite, ...] = ()
    """Ranks that hold NaN or infinite values."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold the tensor."""
        return tuple(view.rank for view in self.views)

    @property
    def equal(self) -> bool | None:
        """Bitwise equal over ranks; None with one rank."""
        if len(self.views) < 2:
            return None
        return self.shape == "equal"

    def groups(self) -> list[tuple[int, ...]]:
        """Ranks that are bitwise equal to each other on the studied rows, largest group first."""
        first = self.views[0].rank
        same = [first, *(s.rank for s in self.spreads if s.equal)]
        rest = [s for s in self.spreads if not s.equal]
        groups = [tuple(same)]
        while rest:
            head = rest[0]
            group = [s for s in rest if s.digest == head.digest]
            groups.append(tuple(s.rank for s in group))
            rest = [s for s in rest if s not in group]
        return sorted(groups, key=len, reverse=True)


@one_thread()
def study_ranks(capture: Capture, name: str, rows: IntArray, hidden_size: int | None) -> RankStudy:
    """Study a tensor on the given token rows (ascending). `hidden_size` is the config's."""
    return begin_ranks(capture, [name], rows, hidden_size)()[name]


def begin_ranks(
    capture: Capture,
    names: Sequence[str],
    rows: IntArray,
    hidden_size: int | None,
    step: Callable[[float], None] | None = None,
) -> Callable[[], dict[str, RankStudy]]:
    """The same of several tensors, begun at once (see `threads.start`).

    `step` is called with shares of the work done, which add up to 1.
    """
    tensors = {}
    for name in names:
        views = tuple(rank_view(capture, rank, name) for rank in capture.ranks if name in capture.names(rank))
        tensors[name] = _Tensor(views, _shape(views, rows, hidden_size, _tp_size(capture)), rows)
    parts = [(tensor, block) for tensor in tensors.values() for block in tensor.blocks]
    looks = start(lambda part: part[0].look(part[1]), parts)

    def found() -> dict[str, RankStudy]:
        for _ in looks():
            if step is not None:
                step(1 / len(parts))
        return {name: _study(capture, name, tensor, hidden_size) for name, tensor in tensors.items()}

    return found


def _study(capture: Capture, name: str, tensor: _Tensor, hidden_size: int | None) -> RankStudy:
    views, shape = tensor.views, tensor.shape
    missing = tuple(rank for rank in capture.ranks if rank not in {view.rank for view in views})
    bad = tuple(NonFinite(view.rank, *place) for i, view in enumerate(views) if (place := tensor.bad(i)) is not None)
    if shape != "differ":
        whole: View | None = None
        if shape == "token-shard":
            whole = Gathered(views)
        elif shape == "hidden-shard" and sum(view.width for view in views) == hidden_size:
            whole = Concatenated(views)
        elif shape == "one-rank":
            whole = views[0]
        return RankStudy(name, views, missing, shape, (), whole, bad)
    spreads = tensor.spreads()
    if all(spread.equal for spread in spreads):
        return RankStudy(name, views, missing, "equal", spreads, views[0], bad)
    rounding = 2 * ROUNDOFF.get(capture.spec(views[0].rank, name).dtype, 0.0)
    if all(spread.rounding <= rounding for spread in spreads):
        return RankStudy(name, views, missing, "rounding", spreads, views[0], bad)
    return RankStudy(name, views, missing, "differ", spreads, None, bad)


def _shape(views: tuple[RankView, ...], rows: IntArray, hidden_size: int | None, tp_size: int) -> Shape:
    """What widths and rows tell; `differ` where the values have to be looked at."""
    widths = {view.width for view in views}
    if any(view.index is not None for view in views) and not all(bool(v.holds(rows).all()) for v in views):
        return "token-shard"
    # A shard is only a shard against the config: 896 is also some models' full width.
    if hidden_size is not None and hidden_size not in widths:
        if sum(view.width for view in views) == hidden_size:
            return "hidden-shard"
        if widths == {hidden_size // tp_size} and tp_size > 1:
            return "hidden-shard"  # some ranks' shards are not in the dump
    if len(widths) > 1 or (hidden_size is not None and widths != {hidden_size}):
        return "width"
    return "one-rank" if len(views) == 1 else "differ"


class _Tensor:
    """One tensor over its ranks, looked at block by block. Blocks may be looked at in any order, by several threads."""

    def __init__(self, views: tuple[RankView, ...], shape: Shape, rows: IntArray) -> None:
        self.views, self.shape, self._rows = views, shape, rows
        width = max((view.row_bytes for view in views), default=0)
        self.blocks = [(block.start, block.stop) for block in blocks(len(rows), width, 4 * BLOCK_BYTES)]
        self._distances = np.zeros((len(views), len(rows)))
        self._roundings: dict[tuple[int, int], float] = {}
        self._digests: dict[tuple[int, int], int] = {}
        self._bad: dict[tuple[int, int], tuple[int, int]] = {}

    def look(self, block: tuple[int, int]) -> None:
        """Find what is not finite and, where ranks are to be compared, which of them differ and how far.

        Copies are compared as bytes; only what differs is computed.
        """
        begin, rows = block[0], self._rows[slice(*block)]
        first: torch.Tensor | None = None
        common = spans(rows)
        for i, view in enumerate(self.views):
            held = rows if self.shape == "differ" else rows[view.holds(rows)]
            values = scratch("first rank" if first is None else "rank", (len(held), view.width), view.dtype)
            view.fill(common if view.index is None else view.spans(held), bytes_of(values))
            if first is not None and _equal(first, values):
                if (begin, 0) in self._bad:
                    self._bad[begin, i] = self._bad[begin, 0]
                continue
            bad = _bad_value(values, held)
            if bad is not None:
                self._bad[begin, i] = bad
            if first is not None:
                distance, rounding, digest = _differing(first, values)
                self._distances[i, slice(*block)] = distance
                self._roundings[begin, i], self._digests[begin, i] = rounding, digest
            elif self.shape == "differ":
                first = values

    def bad(self, i: int) -> tuple[int, int] | None:
        """Token row and channel of the first value of a rank that is no number."""
        return next((self._bad[begin, i] for begin, _ in self.blocks if (begin, i) in self._bad), None)

    def spreads(self) -> tuple[RankSpread, ...]:
        """The ranks after the first against it."""
        return tuple(
            RankSpread(
                view.rank,
                self._distances[i],
                max((self._roundings.get((begin, i), 0.0) for begin, _ in self.blocks), default=0.0),
                hash(tuple(self._digests.get((begin, i), 0) for begin, _ in self.blocks)),
            )
            for i, view in enumerate(self.views)
            if i
        )


def _equal(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are equal. numpy compares at several times the speed of torch."""
    kind = np.uint64 if first.nbytes % 8 == other.nbytes % 8 == 0 else np.uint8
    ours, theirs = (np.frombuffer(bytes_of(rows), kind) for rows in (first, other))
    return np.array_equal(ours, theirs)


def _differing(first: torch.Tensor, other: torch.Tensor) -> tuple[FloatArray, float, int]:
    """Relative L2 of each row, exactly 0 only for rows that are equal bit by bit; `rounding` and `digest`."""
    same = (first.view(torch.uint8) == other.view(torch.uint8)).all(-1).numpy()
    distance = np.where(same, 0.0, np.maximum(rel_l2(other, first), np.finfo(np.float64).tiny))
    a, b = widened(first), widened(other)
    size = torch.maximum(a.abs(), a.abs().median(-1, keepdim=True).values).clamp_min(1e-30)
    rounded = float(((b - a) / size).square().mean(-1).sqrt().max())
    digest = zlib.crc32(bytes_of(other.contiguous()))
    return distance, rounded if math.isfinite(rounded) else math.inf, digest


def _bad_value(values: torch.Tensor, rows: IntArray) -> tuple[int, int] | None:
    """Token row and channel of the first value that is no number."""
    wide = widened(values)
    if math.isfinite(wide.sum()):  # a sum is quick, and no NaN or infinity gets lost in it
        return None
    places = (~wide.isfinite()).nonzero()
    if len(places) == 0:
        return None
    row, channel = places[0].tolist()
    return int(rows[row]), channel


def _tp_size(capture: Capture) -> int:
    engine = capture.facts.engine
    return engine.tp_size if engine is not None and engine.tp_size is not None else len(capture.ranks)
