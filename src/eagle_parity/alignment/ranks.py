"""What the ranks hold of one tensor together: found from widths, rows and equality, without any training data.

Whether ranks that differ are a partial sum needs the training side; see `partial`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch

from eagle_parity.alignment.views import Concatenated, Gathered, RankView, View, blocks, rank_view
from eagle_parity.metrics.distances import FloatArray, numpy64, row_sums
from eagle_parity.records import Capture, IntArray

# Half a unit in the last place, relative: 2^-(significand bits).
ROUNDOFF = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24, "F64": 2.0**-53, "F8_E4M3": 2.0**-4, "F8_E5M2": 2.0**-3}

Shape: TypeAlias = Literal["one-rank", "equal", "rounding", "differ", "hidden-shard", "token-shard", "width"]


@dataclass(frozen=True)
class RankSpread:
    """How far a rank's rows are from the first rank's: relative L2 per row, float64 [rows]."""

    rank: int
    rel_l2: FloatArray

    @property
    def equal(self) -> bool:
        """Bitwise equal (a row that differs in any bit has a distance above 0, or NaN)."""
        return bool(np.all(self.rel_l2 == 0))


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
            group = [s for s in rest if np.array_equal(s.rel_l2, head.rel_l2, equal_nan=True)]
            groups.append(tuple(s.rank for s in group))
            rest = [s for s in rest if s not in group]
        return sorted(groups, key=len, reverse=True)


def study_ranks(capture: Capture, name: str, rows: IntArray, hidden_size: int | None) -> RankStudy:
    """Study a tensor on the given token rows (ascending). `hidden_size` is the config's."""
    present = [rank for rank in capture.ranks if name in capture.names(rank)]
    missing = tuple(rank for rank in capture.ranks if rank not in present)
    views = tuple(rank_view(capture, rank, name) for rank in present)
    widths = {view.width for view in views}
    if any(view.index is not None for view in views) and not all(bool(v.holds(rows).all()) for v in views):
        return RankStudy(name, views, missing, "token-shard", (), Gathered(views))
    # A shard is only a shard against the config: 896 is also some models' full width.
    if hidden_size is not None and hidden_size not in widths and sum(view.width for view in views) == hidden_size:
        return RankStudy(name, views, missing, "hidden-shard", (), Concatenated(views))
    if hidden_size is not None and widths == {hidden_size // _tp_size(capture)} and _tp_size(capture) > 1:
        return RankStudy(name, views, missing, "hidden-shard", (), None)  # some ranks' shards are not in the dump
    if len(widths) > 1 or (hidden_size is not None and widths != {hidden_size}):
        return RankStudy(name, views, missing, "width", (), None)
    if len(views) == 1:
        return RankStudy(name, views, missing, "one-rank", (), views[0])
    spreads = tuple(RankSpread(v.rank, _spread(views[0], v, rows)) for v in views[1:])
    if all(spread.equal for spread in spreads):
        return RankStudy(name, views, missing, "equal", spreads, views[0])
    dtype = capture.spec(present[0], name).dtype
    if all(np.all(s.rel_l2 <= 2 * ROUNDOFF.get(dtype, 0.0)) for s in spreads):
        return RankStudy(name, views, missing, "rounding", spreads, views[0])
    return RankStudy(name, views, missing, "differ", spreads, None)


def _spread(first: RankView, other: RankView, rows: IntArray) -> FloatArray:
    """Relative L2 of each row against the first rank; exactly 0 only for rows that are equal bit by bit."""
    parts = []
    for block in blocks(len(rows), first.width):
        a, b = first.read(rows[block]), other.read(rows[block])
        if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            parts.append(np.zeros(len(a)))
            continue
        same = (a.view(torch.uint8) == b.view(torch.uint8)).all(-1).numpy()
        distance = numpy64(row_sums(b, a).rel_l2())
        parts.append(np.where(same, 0.0, np.maximum(distance, np.finfo(np.float64).tiny)))
    return np.concatenate(parts) if parts else np.empty(0)


def _tp_size(capture: Capture) -> int:
    engine = capture.facts.engine
    return engine.tp_size if engine is not None and engine.tp_size is not None else len(capture.ranks)
