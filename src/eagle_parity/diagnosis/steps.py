"""Where each tensor lies between its expected boundary and the neighbours of that: all tensors in one pass.

A rule that asked tensor by tensor would read each boundary three times and spend its time on calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch

from eagle_parity.alignment.measuring import Reader, Side
from eagle_parity.diagnosis.case import Case, TensorCase, once
from eagle_parity.metrics.distances import TINY, FloatArray, run_products
from eagle_parity.metrics.pairs import run_dots
from eagle_parity.metrics.threads import one_thread, scratch, spread


def step_sums(case: Case) -> Mapping[tuple[str, int, int], FloatArray]:
    """By tensor and the two neighbouring boundaries that it is placed between, of which one is the expected one.

    Borrowed boundaries do not count (see `rules.path`).

    With s the first boundary, d the way to the second and e the way from the second to the tensor, of each probe row
    without massive channels: ss, dd, ee, sd, de, es, float64 [6, rows]. Left out are those where float32 did not hold
    a sum.
    """
    found = _measured(case)
    return {} if found is None else found.steps


def row_factors(case: Case) -> Mapping[str, FloatArray]:
    """By tensor, the factor of each probe row that brings its expected boundary nearest to it: float64 [rows]."""
    found = _measured(case)
    return {} if found is None else found.factors


@once
@one_thread()
def _measured(case: Case) -> _Pass | None:
    views = {b: view for b, view in case.boundaries.items() if isinstance(b, int) and b not in case.borrowed}
    stored = sorted(b for b, view in views.items() if view.width == case.hidden_size)
    tensors = [tensor for tensor in case.tensors if tensor.expected in stored and _whole(case, tensor)]
    at = [stored.index(tensor.expected) for tensor in tensors]  # type: ignore[arg-type]
    needed = sorted({k for place in at for k in (place - 1, place, place + 1) if 0 <= k < len(stored)})
    if not tensors or len(case.probe) == 0:
        return None
    index = [needed.index(k) for k in at]
    neighbours = [needed[k + 1] == needed[k] + 1 for k in range(len(needed) - 1)]
    return _Pass(case, tensors, [stored[k] for k in needed], index, neighbours)


def _whole(case: Case, tensor: TensorCase) -> bool:
    return tensor.view is not None and tensor.view.width == case.hidden_size


class _Pass:
    """Sums over blocks of the probe rows."""

    def __init__(
        self, case: Case, tensors: list[TensorCase], boundaries: list[int], index: list[int], neighbours: list[bool]
    ) -> None:
        self._names, self._numbers, self._neighbours = [tensor.name for tensor in tensors], boundaries, neighbours
        ours = [tensor.view for tensor in tensors if tensor.view is not None]
        theirs = [case.boundaries[b] for b in boundaries]
        rows = case.alignment.serving[case.probe], case.alignment.training[case.probe]
        self._reader = Reader((Side(ours, rows[0]), Side(theirs, rows[1])))
        self._index, self._massive = index, case.massive
        n, m, count = len(ours), len(theirs), len(case.probe)
        self._squares, self._errors = np.empty((2 * m - 1, count)), np.empty((n, count))
        self._steps, self._dots = np.empty((m - 1, count)), np.empty((n, 2 * m - 1, count))
        self._boundaries = m
        for _ in spread(self._work, self._reader.blocks()):
            pass

    def _work(self, block: tuple[int, int]) -> None:
        n, m = len(self._names), self._boundaries
        wide, count, runs = self._reader.dtype, block[1] - block[0], self._reader.runs
        errors, ends_sq, steps = (torch.empty(k, count, runs, dtype=wide) for k in (n, 2 * m - 1, m - 1))
        dots = torch.empty(count, runs, n, 2 * m - 1, dtype=wide)
        for part, states in self._reader.widen(self._reader.read(*block)):
            states.index_fill_(2, self._massive, 0)
            ours, theirs = states[:n], states[n:]
            ends = scratch("theirs", (2 * m - 1, *states.shape[1:]), wide)
            ends[:m] = theirs
            torch.sub(theirs[1:], theirs[:-1], out=ends[m:])
            for e, k in zip(ours, self._index, strict=True):
                e -= theirs[k]
            run_products(ours, ours, errors[:, part])
            run_products(ends, ends, ends_sq[:, part])
            run_products(theirs[:-1], ends[m:], steps[:, part])
            run_dots(ours, ends, dots[part])
        rows = slice(*block)
        for found, sums in ((self._errors, errors), (self._squares, ends_sq), (self._steps, steps)):
            found[:, rows] = sums.sum(-1, dtype=torch.float64)
        self._dots[..., rows] = dots.sum(1, dtype=torch.float64).permute(1, 2, 0)

    @cached_property
    def steps(self) -> dict[tuple[str, int, int], FloatArray]:
        """The sums of each tensor before and after its expected boundary, see `step_sums`."""
        return {
            (name, self._numbers[k], self._numbers[k + 1]): sums
            for i, (name, expected) in enumerate(zip(self._names, self._index, strict=True))
            for k in (expected - 1, expected)
            if 0 <= k < len(self._neighbours) and self._neighbours[k]
            if (sums := self._sums(i, k, ahead=k == expected)) is not None
        }

    @cached_property
    def factors(self) -> dict[str, FloatArray]:
        """The row factors of each tensor, see `row_factors`."""
        with np.errstate(all="ignore"):
            return {
                name: 1 + self._dots[i, k] / np.maximum(self._squares[k], TINY)
                for i, (name, k) in enumerate(zip(self._names, self._index, strict=True))
            }

    def _sums(self, tensor: int, k: int, *, ahead: bool) -> FloatArray | None:
        """Of a tensor between boundaries k and k + 1, of which the first is the expected one if it is `ahead`."""
        m = self._boundaries
        ss, dd, sd = self._squares[k], self._squares[m + k], self._steps[k]
        ee, de, es = self._errors[tensor], self._dots[tensor, m + k], self._dots[tensor, k]
        if ahead:  # measured from the first boundary: take the way away
            with np.errstate(invalid="ignore"):
                ee, de, es = ee - 2 * de + dd, de - dd, es - sd
        found = np.stack([ss, dd, ee, sd, de, es])
        return found if bool(np.isfinite(found).all()) and bool((found[:2] >= TINY).all()) else None
