"""A per-token quantity as a distribution: never one number a slot."""

from __future__ import annotations

import math

import numpy as np

from eagle_parity.metrics.distances import FloatArray
from eagle_parity.records import Distribution


def summarise(values: FloatArray) -> Distribution | None:
    """Median, mean, percentiles (linear) and extremes; None without values. NaN anywhere makes all of them NaN."""
    if len(values) == 0:
        return None
    with np.errstate(invalid="ignore"):
        p01, median, p99 = (float(p) for p in np.percentile(values, [1, 50, 99]))
    return Distribution(median, float(np.mean(values)), p01, p99, float(np.min(values)), float(np.max(values)))


def median(values: FloatArray) -> float:
    """Median of the values that are numbers, NaN without any."""
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return math.nan
    # numpy's median takes three times as long, and a comparison asks for hundreds.
    middle = (len(known) - 1) // 2, len(known) // 2
    low, high = np.partition(known, middle)[list(middle)].tolist()
    return float(low if low == high else (low + high) / 2)


def sign_test(first: FloatArray, second: FloatArray) -> float:
    """One-sided p-value that `first` is smaller than `second` on paired rows by luck (exact sign test, ties half).

    Small means: on nearly every row the first one is smaller. Rows with NaN do not count.
    """
    known = ~(np.isnan(first) | np.isnan(second))
    first, second = first[known], second[known]
    wins = float(np.sum(first < second)) + 0.5 * float(np.sum(first == second))
    count = len(first)
    if count == 0:
        return 1.0
    if count > 1000:  # normal approximation, exact sums get slow
        z = (wins - 0.5 - count / 2) / math.sqrt(count / 4)
        return 0.5 * math.erfc(z / math.sqrt(2))
    ways = tail = 1  # to win all of them; each next number of wins follows from the one above it
    for k in range(count, math.ceil(wins), -1):
        ways = ways * k // (count - k + 1)
        tail += ways
    return float(tail / 2**count)
