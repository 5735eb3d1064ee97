"""What the rules see: one tensor's measurements, and all tensors of a comparison together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_parity.alignment.channels import without
from eagle_parity.alignment.matching import Comparison, Match
from eagle_parity.alignment.partial import PartialSum
from eagle_parity.alignment.ranks import RankStudy
from eagle_parity.alignment.tokens import TokenAlignment
from eagle_parity.alignment.views import RankView, View
from eagle_parity.diagnosis.expectation import Expectation
from eagle_parity.diagnosis.floor import Limit
from eagle_parity.diagnosis.judgement import Judgement
from eagle_parity.records import Boundary, Capture, IntArray, Layout, RankMetrics, boundary_of

T = TypeVar("T")

PROBE_ROWS = 128  # rows that tests take when they need several tensors in memory at once


@dataclass(frozen=True)
class TensorCase:
    """One serving tensor (a slot, or a boundary that both sides store) and all that was measured on it."""

    name: str
    slot: int | None
    expected: Boundary | None
    ranks: RankStudy
    layout: Layout
    partial: PartialSum | None
    odd_ranks: tuple[int, ...]
    """Ranks whose tensor is not what the others (or the training side) say it is, where that can be told."""
    view: View | None
    """The whole tensor: rebuilt, or the first sound rank's. None when its width fits no boundary."""
    match: Match
    limits: Mapping[Boundary, float]
    limit: Limit
    judgement: Judgement
    strata: tuple[Judgement, ...]
    reference: Boundary | None
    """The boundary that the row's metrics are measured against: the expected one, or the best."""
    comparison: Comparison | None
    per_rank: tuple[RankMetrics, ...]
    rolled_rows: float | None
    """Median relative L2 to the same boundary of another token: the level of `not this row at all`."""
    rolled_dims: float | None

    @property
    def where(self) -> str:
        """The tensor's name as messages say it."""
        return f"slot {self.slot}" if self.slot is not None else self.name

    @property
    def holds(self) -> Boundary | None:
        """The boundary that most rows hold at its floor; None where that cannot be said."""
        if self.expected is not None and self.expected not in self.match.rel_l2:
            # What was trained is not stored: another boundary must be proven, and being the nearest one is no proof.
            return self.match.best if self.judgement.status == "fail" and self.best_is_sound else None
        if self.judgement.status in ("ok", "inconclusive") and self.expected is not None:
            return self.expected
        return self.match.best if self.best_is_sound else None

    @property
    def best_is_sound(self) -> bool:
        """Whether the best boundary is matched at its floor and cannot be mistaken for the runner-up."""
        best = self.match.best
        if best is None or self.judgement.best_median is None or self.judgement.best_median > self.limits[best]:
            return False
        runner_up = self.match.runner_up
        return runner_up is None or self.match.told_apart(best, runner_up)


@dataclass(frozen=True, eq=False)
class Case:
    """A whole comparison. Compared and hashed by identity: its fields hold arrays."""

    training: Capture
    serving: Capture
    alignment: TokenAlignment
    expectation: Expectation
    boundaries: Mapping[Boundary, RankView]
    tensors: tuple[TensorCase, ...]
    """Empty as long as they are being measured."""
    hidden_size: int | None
    num_layers: int
    probe: IntArray
    """Indexes into the alignment of the rows that in-memory tests use."""
    massive: torch.Tensor
    """The channels that are massive in any boundary, ascending. Matches leave them out; the others are ordinary."""
    strata: Mapping[str, NDArray[np.bool_]]
    """The aligned rows by situation, as masks (see `judgement.strata`)."""
    borrowed: Mapping[Boundary, str] = field(default_factory=dict)
    """Those of `boundaries` that the training side does not store, and the capture that they come from."""
    remarks: tuple[str, ...] = ()
    """What could not be borrowed, and why."""

    @property
    def slots(self) -> tuple[TensorCase, ...]:
        """The slots, in order."""
        return tuple(tensor for tensor in self.tensors if tensor.slot is not None)

    @cached_property
    def served(self) -> tuple[Boundary | None, ...]:
        """The boundary that each slot holds by content; None where it matches none at its floor."""
        return tuple(slot.match.best if slot.best_is_sound else None for slot in self.slots)

    def expected(self, name: str) -> Boundary | None:
        """The boundary that a tensor should hold, by its name; None for a slot of which nobody says it."""
        kind, _, number = name.partition(".")
        if kind != "slot":
            return boundary_of(name)
        known = self.expectation.boundaries
        return known[int(number)] if known is not None and int(number) < len(known) else None

    def keep_ordinary(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, W] without the massive channels."""
        if len(self.massive) == 0 or rows.shape[1] != self.hidden_size:
            return rows
        probed = self._recent.holder(rows)
        if probed is None:
            return without(rows, self.massive)
        if probed.ordinary is None:
            probed.ordinary = without(rows, self.massive)
        return probed.ordinary

    def serving_rows(self, tensor: TensorCase) -> torch.Tensor:
        """The probe rows of a serving tensor, float32 [rows, W]; not to be written to."""
        view = tensor.view
        assert view is not None
        return self._recent.get(("serving", tensor.name), lambda: view.read(self.alignment.serving[self.probe]).float())

    def training_rows(self, boundary: Boundary, rows: IntArray | None = None) -> torch.Tensor:
        """The probe rows (or the given training rows) of a boundary, float32 [rows, W]; not to be written to."""
        view = self.boundaries[boundary]
        if rows is not None:
            return view.read(rows).float()
        return self._recent.get(("training", boundary), lambda: view.read(self.alignment.training[self.probe]).float())

    @cached_property
    def _made(self) -> dict[Callable[[Case], Any], Any]:
        return {}

    @cached_property
    def _recent(self) -> _Recent:
        return _Recent()


def once(make: Callable[[Case], T]) -> Callable[[Case], T]:
    """Decorator: what a function says of a case is made once, and kept as long as the case is."""

    @wraps(make)
    def made(case: Case) -> T:
        if make not in case._made:
            case._made[make] = make(case)
        found: T = case._made[make]
        return found

    return made


class _Probed:
    """Probe rows, and the same without massive channels once somebody wanted them."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.ordinary: torch.Tensor | None = None


class _Recent:
    """The probe rows that rules asked for last: neighbouring tensors are measured against the same boundaries.

    Few, so that memory stays flat however many boundaries there are.
    """

    KEPT = 4

    def __init__(self) -> None:
        self._held: dict[object, _Probed] = {}  # the last one last

    def get(self, key: object, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The rows of a tensor, read anew where they are not among the last."""
        probed = self._held.pop(key, None) or _Probed(read())
        self._held[key] = probed
        while len(self._held) > self.KEPT:
            del self._held[next(iter(self._held))]
        return probed.rows

    def holder(self, rows: torch.Tensor) -> _Probed | None:
        """What holds these very rows."""
        return next((probed for probed in self._held.values() if probed.rows is rows), None)
