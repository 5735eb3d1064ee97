"""Rows of a tensor that hold another boundary than most of them do, without a situation that separates them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from eagle_parity.alignment.matching import LUCK
from eagle_parity.diagnosis.case import Case, TensorCase, once
from eagle_parity.diagnosis.floor import FACTOR, MEASURED_FACTOR
from eagle_parity.diagnosis.judgement import MIN_ROWS
from eagle_parity.metrics.distances import FloatArray, numpy64, row_sums
from eagle_parity.metrics.distribution import median
from eagle_parity.records import FINAL_NORM, Boundary, Finding, IntArray

LEAST_SHARE = 0.01  # rows of another boundary are a fault from this share on
LEAST_ROWS = 2  # and from this number on
END = 0.25  # of the way between two boundaries: this near to one of them is at it
CENTRE = 0.1  # of the way, by which the middle of the rows that are at the other boundary may miss it
CLOSE = 4.0  # times the noise: boundaries further away than that are told by single rows
NOISIER = 1.5  # how much further from the way than the other rows these may lie


@dataclass(frozen=True)
class Strays:
    """The rows (indexes into the alignment) of a tensor that hold `boundary`, among those looked at."""

    boundary: Boundary
    rows: IntArray
    looked_at: int
    p_value: float | None
    """That noise does this, where single rows do not prove it."""

    @property
    def share(self) -> float:
        """Of the rows that were looked at."""
        return len(self.rows) / self.looked_at


@once
def strays(case: Case) -> dict[str, Strays]:
    """The strays of every tensor whose other rows are right, by the tensor's name.

    Borrowed boundaries do not count: a server's own map has its noise in common with the tensor.
    """
    found = {}
    for tensor in case.tensors:
        apart = any(part.status == "fail" for part in tensor.strata)  # then the situation is the finding
        if tensor.expected is None or tensor.holds != tensor.expected or tensor.view is None or apart:
            continue
        rows = _single(case, tensor, tensor.expected) or _together(case, tensor, tensor.expected)
        if rows is not None:
            found[tensor.name] = rows
    return found


def _single(case: Case, tensor: TensorCase, expected: Boundary) -> Strays | None:
    """Rows that prove it one by one: at another boundary's floor, and twice as near to it as to the expected one.

    The floor is what the other rows say (three times their median), not the limit of a median, which is far above it.
    The deviation from the expected state is then the way to the other boundary: its cosine to it is over 0.85. A row
    that took other experts deviates by what it lost (a part of the way) and by what it got instead (not on the way, and
    about as long), a cosine of 0.7 even where that expert made all of the step.
    """
    usual = MEASURED_FACTOR * tensor.match.medians()[expected]
    limits = {b: min(limit, max(usual, limit / FACTOR)) for b, limit in tensor.limits.items()}
    by_boundary = tensor.match.strays(expected, limits)
    by_boundary = {b: rows for b, rows in by_boundary.items() if b not in case.borrowed}
    if not by_boundary:
        return None
    boundary, mask = max(by_boundary.items(), key=lambda item: int(item[1].sum()))
    rows = np.flatnonzero(mask)
    if len(rows) < max(LEAST_ROWS, LEAST_SHARE * len(mask)):
        return None
    return Strays(boundary, rows, len(mask), None)


def _together(case: Case, tensor: TensorCase, expected: Boundary) -> Strays | None:
    """Rows that prove it by being many, where noise is as long as the way to the other boundary.

    A row's place on the way, 0 at the other boundary and 1 at the expected one, scatters by its noise over the way and
    the root of the hidden size, so that ends can be told apart where distances cannot. Whatever the noise: if it has
    one mode, at the expected state, then no more rows lie within 0.25 of the other boundary than in the middle half of
    the way, which is as long and nearer to the mode. The exact binomial tail of the two counts is the p-value, over the
    boundaries tried. Rows that took other experts may lie in one place too, but off the way, or not at its end.
    """
    if len(case.probe) < MIN_ROWS:
        return None
    medians = tensor.match.medians()
    others = [b for b in medians if b != expected and b not in case.borrowed]
    close = [b for b in others if medians[b] <= CLOSE * medians[expected]]
    if not close:
        return None
    serving = case.keep_ordinary(case.serving_rows(tensor))
    truth = case.keep_ordinary(case.training_rows(expected))
    tried = [(b, _at_end(serving, truth, case.keep_ordinary(case.training_rows(b)))) for b in close]
    proven = [(p, str(b), b, rows) for b, (p, rows) in tried if p < LUCK / len(others)]
    if not proven:
        return None
    p_value, _, boundary, rows = min(proven, key=lambda entry: entry[:2])
    return Strays(boundary, case.probe[rows], len(case.probe), p_value)


def _at_end(serving: torch.Tensor, truth: torch.Tensor, other: torch.Tensor) -> tuple[float, IntArray]:
    """The p-value that noise took rows to the other boundary, and which rows; 1 where they are not at it as a whole."""
    way = truth - other
    sums = row_sums(serving - other, way)
    place = numpy64(sums.dot / sums.training_sq.clamp_min(1e-30))
    across = _across(serving - other, way, place) / np.maximum(numpy64(truth.double().norm(dim=-1)), 1e-30)
    there, between, here = np.abs(place) <= END, (place > END) & (place < 1 - END), place >= 1 - END
    count, total = int(there.sum()), int(there.sum() + between.sum())
    rows = np.flatnonzero(there)
    if count < LEAST_ROWS or here.sum() <= count:
        return 1.0, rows
    off_centre = abs(median(place[place < 0.5])) > CENTRE
    if off_centre or median(across[there]) > NOISIER * median(across[here]):
        return 1.0, rows
    return sum(math.comb(total, k) for k in range(count, total + 1)) / 2**total, rows


def _across(rows: torch.Tensor, way: torch.Tensor, place: FloatArray) -> FloatArray:
    """Distance of each row from the way."""
    return numpy64((rows.double() - torch.from_numpy(place).unsqueeze(-1) * way.double()).norm(dim=-1))


def stray_rows(case: Case) -> Iterator[Finding]:
    """A tensor that is right on most rows and another boundary on some."""
    for tensor in case.tensors:
        found = strays(case).get(tensor.name)
        if found is None:
            continue
        kept, step = tensor.expected, None
        if isinstance(kept, int) and isinstance(found.boundary, int):
            step = found.boundary - kept
        if found.boundary == FINAL_NORM or kept == FINAL_NORM:
            code = "final-norm"
        else:
            code = "layer-shift" if step is not None and abs(step) == 1 else "layer-set"
        where = _requests(case, found.rows)
        few = ", ".join(f"{name} ({count})" for name, count in where.most_common(3))
        yield Finding(
            code,
            "error",
            f"{tensor.where}: {len(found.rows)} of {found.looked_at} rows ({found.share:.0%}) hold boundary "
            f"{found.boundary}, the others boundary {kept}; most in request {few}",
            "the capture differs between rows of one kind: look at what those rows have in common (chunk, slot of the "
            "batch, step), and for a buffer that is written by one layer while another reads it",
            slot=tensor.slot,
            boundary=found.boundary,
            evidence={
                "share": found.share,
                "rows": len(found.rows),
                "looked_at": found.looked_at,
                "p_value": found.p_value,
                "requests": dict(where.most_common(16)),
                "examples": _examples(case, tensor, found),
            },
        )


def _requests(case: Case, indexes: IntArray) -> Counter[str]:
    """How many of the rows are in each request."""
    rows = case.alignment.serving[indexes]
    counts: Counter[str] = Counter()
    for request in case.serving.tokens.requests:
        counts[request.id] += int(((rows >= request.begin) & (rows < request.end)).sum())
    return +counts


def _examples(case: Case, tensor: TensorCase, found: Strays) -> list[dict[str, object]]:
    tokens = case.serving.tokens
    examples: list[dict[str, object]] = []
    for index in found.rows[:5].tolist():
        row = int(case.alignment.serving[index])
        examples.append(
            {
                "row": row,
                "token_id": int(tokens.token_ids[row]),
                "position": int(tokens.positions[row]),
                "rel_l2": float(tensor.match.rel_l2[found.boundary][index]),
                "rel_l2_to_expected": float(tensor.match.rel_l2[tensor.expected][index]),  # type: ignore[index]
            }
        )
    return examples
