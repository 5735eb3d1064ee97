"""Is a tensor a boundary after a norm? A norm multiplies each row by one number and each channel by another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from eagle_parity.alignment.matching import LUCK
from eagle_parity.diagnosis.case import Case, TensorCase, once
from eagle_parity.metrics.distances import FloatArray, numpy64, rel_l2
from eagle_parity.metrics.distribution import median, sign_test
from eagle_parity.records import FINAL_NORM, Boundary

ROUNDS, TRIMS = 12, 3
OFF, MANY = 0.02, 0.1  # a channel's weight that counts as none, and the share of such channels that no norm has
SAME = 0.1  # relative difference up to which two weights are one


class Fit(Protocol):
    """A boundary that a tensor can be brought to, and how near each row comes."""

    @property
    def boundary(self) -> Boundary:
        """The boundary."""

    @property
    def rows(self) -> FloatArray:
        """Relative L2 of each row afterwards; NaN where a row does not count."""


F = TypeVar("F", bound=Fit)


def nearest_of(fits: Sequence[F], expected: Boundary | None) -> F | None:
    """The nearest fit; the expected boundary's, unless the other one is nearer on too many rows for luck."""
    best = min(fits, key=lambda fit: median(fit.rows), default=None)
    wanted = min((fit for fit in fits if fit.boundary == expected), key=lambda fit: median(fit.rows), default=None)
    return wanted if best is None or (wanted is not None and sign_test(best.rows, wanted.rows) >= LUCK) else best


@dataclass(frozen=True)
class Scaling:
    """serving = a factor a row x boundary x weight. `rows`: relative L2 then, of rows that the weight did not see."""

    boundary: Boundary
    rows: FloatArray
    weight: torch.Tensor
    """Per channel, scaled to a root mean square of 1."""
    own: bool
    """Whether the row factors are one over the rows' own RMS: a norm of this tensor alone."""
    spread: float
    """Of the row factors: standard deviation over mean."""

    @property
    def distance(self) -> float:
        """Median of the rows."""
        return median(self.rows)

    @property
    def plain(self) -> bool:
        """Hardly more than one factor for everything."""
        return self.spread < 0.01 and float(self.weight.std()) < 0.01

    @property
    def is_norm(self) -> bool:
        """Whether the weight can be a norm's: no norm switches many channels off."""
        return float((self.weight.abs() < OFF).float().mean()) < MANY


def fit(case: Case, serving: torch.Tensor, boundary: Boundary, truth: torch.Tensor) -> Scaling | None:
    """Fit on every other row, judge on the rest, both without massive channels.

    Rows [n, H]; None with fewer than 8, or without a positive factor.
    """
    rms = truth[1::2].square().mean(-1).sqrt()  # of all channels: that is what a norm divides by
    serving, truth = case.keep_ordinary(serving), case.keep_ordinary(truth)
    if len(serving) < 8:
        return None
    x, y = serving[0::2], truth[0::2]
    weight = _weight(x, y)
    for _ in range(TRIMS):  # rows that took other experts are no norm's fault: fit the better half again
        off = rel_l2(x, _factors(x, y * weight).unsqueeze(-1) * y * weight)
        better = torch.from_numpy(off <= median(off))
        weight = _weight(x[better], y[better])
    x, y = serving[1::2], truth[1::2]
    factor = _factors(x, y * weight)
    if not bool((factor > 0).float().mean() > 0.9):
        return None
    rows = rel_l2(x, factor.unsqueeze(-1) * y * weight)
    own = factor * rms
    return Scaling(boundary, rows, weight, robust_spread(own) < 0.05, robust_spread(factor))


def _weight(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The weight of each channel, RMS 1, by alternating least squares with the rows' factors."""
    weight = torch.ones(x.shape[1])
    for _ in range(ROUNDS):
        scaled = _factors(x, y * weight).unsqueeze(-1) * y
        weight = (scaled * x).sum(0) / scaled.square().sum(0).clamp_min(1e-30)
        weight = weight / weight.square().mean().sqrt().clamp_min(1e-30)
    return weight


def _factors(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sum(-1) / y.square().sum(-1).clamp_min(1e-30)


def robust_spread(values: torch.Tensor) -> float:
    """Standard deviation over mean, as the median absolute deviation estimates it."""
    array = numpy64(values.double())
    middle = median(array)
    return median(abs(array - middle)) * 1.5 / max(abs(middle), 1e-30)


def find(case: Case, tensor: TensorCase) -> Scaling | None:
    """The boundary that the tensor is after a norm: the expected one, unless another fits better on nearly all rows."""
    serving = case.serving_rows(tensor)
    fits: list[Scaling] = []
    for boundary in tensor.match.rel_l2:
        if boundary == FINAL_NORM:
            continue
        found = fit(case, serving, boundary, case.training_rows(boundary))
        if found is not None and found.is_norm and found.distance <= tensor.limits[boundary]:
            fits.append(found)
    return nearest_of(fits, tensor.expected)


@once
def final_weight(case: Case) -> torch.Tensor | None:
    """The target's final norm weight (ordinary channels, RMS 1), where boundary n and final.norm are stored."""
    last = case.num_layers
    if last is None or last not in case.boundaries or FINAL_NORM not in case.boundaries:
        return None
    found = fit(case, case.training_rows(FINAL_NORM), last, case.training_rows(last))
    return None if found is None else found.weight


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two weights are one, up to a factor."""
    return float((first - second).norm() / second.norm().clamp_min(1e-30)) < SAME
