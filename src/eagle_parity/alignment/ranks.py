"""What the ranks hold of one tensor together: found from widths, rows and equality, without any training data.

Whether ranks that differ are a partial sum needs the training side; see `partial`.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch

from eagle_parity.alignment.views import Concatenated, Gathered, RankView, View, blocks, rank_view
from eagle_parity.metrics.distances import FloatArray, rel_l2, widened
from eagle_parity.metrics.threads import one_thread
from eagle_parity.records import Capture, IntArray

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
    present = [rank for rank in capture.ranks if name in capture.names(rank)]
    missing = tuple(rank for rank in capture.ranks if rank not in present)
    views = tuple(rank_view(capture, rank, name) for rank in present)
    shape = _shape(views, rows, hidden_size, _tp_size(capture))
    if shape != "differ":
        whole: View | None = None
        if shape == "token-shard":
            whole = Gathered(views)
        elif shape == "hidden-shard" and sum(view.width for view in views) == hidden_size:
            whole = Concatenated(views)
        elif shape == "one-rank":
            whole = views[0]
        found = [bad for view in views if (bad := _first_bad(view, rows[view.holds(rows)])) is not None]
        return RankStudy(name, views, missing, shape, (), whole, tuple(found))
    spreads, non_finite = _spreads(views, rows)
    if all(spread.equal for spread in spreads):
        return RankStudy(name, views, missing, "equal", spreads, views[0], non_finite)
    rounding = 2 * ROUNDOFF.get(capture.spec(present[0], name).dtype, 0.0)
    if all(spread.rounding <= rounding for spread in spreads):
        return RankStudy(name, views, missing, "rounding", spreads, views[0], non_finite)
    return RankStudy(name, views, missing, "differ", spreads, None, non_finite)


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


def _spreads(views: tuple[RankView, ...], rows: IntArray) -> tuple[tuple[RankSpread, ...], tuple[NonFinite, ...]]:
    """Each rank against the first, block by block: copies are compared as bytes, only what differs is computed."""

    distances = np.zeros((len(views), len(rows)))
    roundings = [0.0] * len(views)
    digests: list[list[int]] = [[] for _ in views]
    bad: dict[int, NonFinite] = {}
    for block in blocks(len(rows), views[0].width):
        first = views[0].read(rows[block])
        odd = _bad_value(first, rows[block])
        for i, view in enumerate(views):
            other = first if i == 0 else view.read(rows[block])
            copy = i == 0 or _same_bits(first, other)
            digest = 0
            if not copy:
                distances[i, block], rounded, digest = _differing(first, other)
                roundings[i] = max(roundings[i], rounded)
            digests[i].append(digest)
            place = odd if copy else _bad_value(other, rows[block])
            if place is not None:
                bad.setdefault(view.rank, NonFinite(view.rank, *place))
    spreads = tuple(
        RankSpread(view.rank, distances[i], roundings[i], hash(tuple(digests[i]))) for i, view in enumerate(views)
    )
    return spreads[1:], tuple(bad.values())


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int64 if a.nbytes % 8 == 0 else torch.uint8
    return np.array_equal(a.view(-1).view(kind).numpy(), b.view(-1).view(kind).numpy())


def _differing(first: torch.Tensor, other: torch.Tensor) -> tuple[FloatArray, float, int]:
    """Relative L2 of each row, exactly 0 only for rows that are equal bit by bit; `rounding` and `digest`."""
    same = (first.view(torch.uint8) == other.view(torch.uint8)).all(-1).numpy()
    distance = np.where(same, 0.0, np.maximum(rel_l2(other, first), np.finfo(np.float64).tiny))
    a, b = widened(first), widened(other)
    size = torch.maximum(a.abs(), a.abs().median(-1, keepdim=True).values).clamp_min(1e-30)
    rounded = float(((b - a) / size).square().mean(-1).sqrt().max())
    digest = zlib.crc32(other.contiguous().view(torch.uint8).numpy().data)
    return distance, rounded if math.isfinite(rounded) else math.inf, digest


def _first_bad(view: RankView, rows: IntArray) -> NonFinite | None:
    for block in blocks(len(rows), view.width):
        place = _bad_value(view.read(rows[block]), rows[block])
        if place is not None:
            return NonFinite(view.rank, *place)
    return None


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
