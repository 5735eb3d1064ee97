"""Is this tensor the expected boundary? Decided by contrast and against the floor, on any subset of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_parity.alignment.matching import Match
from eagle_parity.records import Boundary, Request, Status

MIN_ROWS = 8
MUCH_NEARER = 3.0  # runner-up's distance over the best's, for what needs more than being told apart
LONG = 2048  # SGLang's fused all-reduce stops at this many tokens a forward


@dataclass(frozen=True)
class Judgement:
    """The status of some rows, with the two medians that it rests on."""

    rows: str
    count: int
    status: Status
    best: Boundary | None
    expected_median: float | None
    best_median: float | None


def judge(
    match: Match,
    expected: Boundary | None,
    limits: Mapping[Boundary, float],
    rows: str = "all",
    *,
    stored: bool = True,
) -> Judgement:
    """Judge one tensor: `limits` holds, per boundary, the median relative L2 up to which it counts as that state.

    `stored`: whether the training side itself stores the expected boundary; otherwise nothing can be called right.
    """
    count = len(next(iter(match.rel_l2.values()), ()))
    medians = match.medians()
    best, runner_up = match.best, match.runner_up
    expected_median = medians.get(expected) if expected is not None else None
    best_median = medians[best] if best is not None else None

    def verdict() -> Status:
        if best is None or best_median is None or count < MIN_ROWS:
            return "inconclusive"
        if expected is None:
            return "inconclusive"
        if expected_median is None:  # the training side does not store it: is the tensor provably something else?
            # Its own neighbours are near it too, so the best one must be much nearer than any other.
            alone = runner_up is None or medians[runner_up] >= MUCH_NEARER * best_median
            return "fail" if alone and best_median <= limits[best] else "inconclusive"
        if expected_median > limits[expected]:
            return "fail"
        rival = runner_up if best == expected else best
        if rival is None or match.told_apart(expected, rival):
            return "ok" if stored else "inconclusive"
        return "fail" if match.told_apart(rival, expected) else "inconclusive"

    return Judgement(rows, count, verdict(), best, expected_median, best_median)


def strata(requests: tuple[Request, ...], rows: NDArray[np.int64]) -> dict[str, NDArray[np.bool_]]:
    """The aligned serving rows by situation, as masks: phase, eager or graph replay, short or long forward, cache.

    Only situations that some rows are in and others not; one server can be right in one and wrong in the other.
    """
    kinds: dict[str, NDArray[np.bool_]] = {}
    for request in requests:
        inside = (rows >= request.begin) & (rows < request.end)
        names: list[str] = [request.phase]
        if request.graph is not None:
            names.append(f"{request.phase}, {'graph replay' if request.graph else 'eager'}")
        if request.forward_tokens is not None:
            names.append(f"forwards of {'more than' if request.forward_tokens > LONG else 'up to'} {LONG} tokens")
        if request.cached_tokens is not None:
            names.append("after a cached prefix" if request.cached_tokens else "without a cached prefix")
        names.append("batch 1" if request.batch == 1 else "batch above 1")
        for name in names:
            kinds[name] = kinds.get(name, np.zeros(len(rows), dtype=bool)) | inside
    return {name: mask for name, mask in kinds.items() if MIN_ROWS <= mask.sum() < len(rows)}
