"""How far a tensor may be from each boundary: the estimate, what floor dumps say, and what no floor can excuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from eagle_parity.alignment import matching
from eagle_parity.alignment.tokens import align
from eagle_parity.alignment.views import rank_view
from eagle_parity.diagnosis import floor
from eagle_parity.diagnosis.case import Case
from eagle_parity.diagnosis.floor import Limit
from eagle_parity.errors import UsageError
from eagle_parity.metrics.distances import numpy64
from eagle_parity.records import Boundary, Capture, Floor, boundary_name

ALIKE = 0.5  # of the distance between two tokens' states, up to which two tensors may count as the same


@dataclass(frozen=True)
class Limits:
    """What the tensors of a case are held to."""

    case: Case
    dumps: tuple[Capture, ...]
    """Serving captures that are known to be healthy."""
    apart: Mapping[Boundary, float]
    """The distance between the states of two tokens, of each boundary; NaN or 0 where it is not known."""

    def estimated(self, name: str) -> dict[Boundary, float]:
        """Up to which median relative L2 a tensor counts as each boundary, from dtypes and depth."""
        rounding, layers = self._rounding(name), self.case.num_layers
        return {b: min(floor.estimated(b, layers, rounding).limit, self._top(b)) for b in self.case.boundaries}

    def of(self, name: str, held: Boundary | None) -> tuple[Limit, dict[Boundary, float]]:
        """The limit of a tensor that is compared with `held`, and up to which distance it counts as each boundary.

        Raises UsageError for floor dumps that share no row with the case.
        """
        limit, bounds = self._limit(name, held), self.estimated(name)
        if held is not None and held in self.apart:
            limit = replace(limit, limit=min(limit.limit, self._top(held)))
        if self.dumps:  # this server's noise is on whatever it feeds: another boundary is told by contrast, as always
            bounds = {b: min(max(bound, limit.limit), self._top(b)) for b, bound in bounds.items()}
        if (expected := self.case.expected(name)) in bounds:
            bounds[expected] = limit.limit
        return limit, bounds

    def _top(self, boundary: Boundary) -> float:
        """No limit may exceed half the distance between the states of two tokens, whatever the floor is said to be.

        Otherwise rows of other tokens would pass where tokens are alike (deep layers, a large common part).
        """
        return ALIKE * self.apart[boundary] if self.apart[boundary] > 0 else np.inf

    def _rounding(self, name: str) -> float:
        training, serving = self.case.training, self.case.serving
        places = [(serving, rank, name) for rank in serving.ranks if name in serving.names(rank)][:1]
        places += [(training, training.ranks[0], first) for first in training.names(training.ranks[0])[:1]]
        return floor.roundoff(*places)

    def _limit(self, name: str, held: Boundary | None) -> Limit:
        """The floor and the limit that follows from it."""
        rounding = self._rounding(name)
        guess = floor.estimated(held, self.case.num_layers, rounding)
        if not self.dumps:
            return guess
        training, serving = self.case.training, self.case.serving
        to_training = None if held is None else self._largest("training", training, boundary_name(held), name)
        to_serving = self._largest("serving", serving, name, name)
        if to_training is None and to_serving is None:
            paths = ", ".join(dump.path for dump in self.dumps)
            raise UsageError(
                f"--floor: {paths}: no row and {name} in common with the dumps compared",
                fix="make the floor dump from the same prompts: dump serving --tokens-from TRAINING",
            )
        return floor.measured(guess, to_training, to_serving, rounding)

    def _largest(self, side: str, reference: Capture, reference_name: str, name: str) -> Floor | None:
        """The distance to one side of the dump that is farthest from it."""
        found = [
            Floor(f"{dump.path} against {side}", *distance)
            for dump in self.dumps
            if (distance := self._distance(reference, dump, reference_name, name)) is not None
        ]
        return max(found, key=lambda farthest: farthest.median, default=None)

    def _distance(
        self, reference: Capture, other: Capture, reference_name: str, name: str
    ) -> tuple[float, float] | None:
        """Median and 99th percentile of the relative L2 between the first ranks of two captures, on common rows."""
        if reference_name not in reference.names(reference.ranks[0]) or name not in other.names(other.ranks[0]):
            return None
        ours, theirs = rank_view(other, other.ranks[0], name), rank_view(reference, reference.ranks[0], reference_name)
        common = align(reference.tokens, other.tokens)
        keep = ours.holds(common.serving) & theirs.holds(common.training)
        if ours.width != theirs.width or not keep.any():
            return None
        rows = common.serving[keep], common.training[keep]
        sums = matching.sums(ours, theirs, *rows, massive=self.case.massive, hidden=self.case.hidden_size)
        values = numpy64(sums.rel_l2())
        values = values[~np.isnan(values)]  # rows that hold NaN say nothing of the floor
        return (float(np.median(values)), float(np.percentile(values, 99))) if len(values) else None
