"""Per-token sums of two tensors, and the distances that follow from them.

Accuracy: products and differences are formed in float32 and summed in float64. For bf16, fp16 and fp8 inputs the
products are exact (two 11-bit significands fit in 24 bits); for fp32 inputs each carries one rounding, 2^-24. Rows
whose squares leave float32's range are computed again in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_TINY = 1e-30  # below this a float32 sum of squares may have lost underflowed terms


@dataclass(frozen=True)
class RowSums:
    """Sums over the hidden dimension for each token row: all float64 [rows]."""

    dot: torch.Tensor
    serving_sq: torch.Tensor
    training_sq: torch.Tensor
    difference_sq: torch.Tensor

    def rel_l2(self) -> torch.Tensor:
        """|serving - training| / |training|; 0 for two zero rows, inf for a zero training row alone."""
        return _ratio(self.difference_sq.sqrt(), self.training_sq.sqrt())

    def norm_ratio(self) -> torch.Tensor:
        """|serving| / |training|; 1 for two zero rows."""
        ratio = _ratio(self.serving_sq.sqrt(), self.training_sq.sqrt())
        both_zero = (self.serving_sq == 0) & (self.training_sq == 0)
        return torch.where(both_zero, 1.0, ratio)

    def cosine(self) -> torch.Tensor:
        """Cosine of the angle, clipped to [-1, 1]; 1 for two zero rows, 0 when only one is zero."""
        both_zero = (self.serving_sq == 0) & (self.training_sq == 0)
        norms = self.serving_sq.sqrt() * self.training_sq.sqrt()
        value = torch.where(norms == 0, 0.0, self.dot / torch.where(norms == 0, 1.0, norms))
        return torch.where(both_zero, 1.0, value.clamp(-1.0, 1.0))


def _ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    ratio = a / torch.where(b == 0, 1.0, b)
    return torch.where(b == 0, torch.where(a == 0, 0.0, torch.inf), ratio)


def row_sums(serving: torch.Tensor, training: torch.Tensor) -> RowSums:
    """Sums of two [rows, W] tensors of any float dtype."""
    sums = _row_sums(serving.float(), training.float())
    norms = torch.stack([sums.serving_sq, sums.training_sq])
    if bool(((norms < _TINY) | ~norms.isfinite()).any()):
        return _row_sums(serving.double(), training.double())
    return sums


def _row_sums(serving: torch.Tensor, training: torch.Tensor) -> RowSums:
    difference = serving - training

    def total(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum(-1, dtype=torch.float64)

    return RowSums(
        total(serving, training),
        total(serving, serving),
        total(training, training),
        total(difference, difference),
    )


def rel_l2(serving: torch.Tensor, training: torch.Tensor) -> FloatArray:
    """Relative L2 distance of each row of two [rows, W] tensors: float64 [rows]."""
    return numpy64(row_sums(serving, training).rel_l2())


def cosine(a: torch.Tensor, b: torch.Tensor) -> FloatArray:
    """Cosine of each row of two [rows, W] tensors: float64 [rows]."""
    return numpy64(row_sums(a, b).cosine())


def numpy64(values: torch.Tensor) -> FloatArray:
    """A tensor as a float64 array."""
    return np.asarray(values.double().numpy(), dtype=np.float64)
