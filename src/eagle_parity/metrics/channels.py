"""Statistics per channel over tokens: what centring and leaving out massive dimensions need."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from eagle_parity.metrics.threads import scratch

MASSIVE = 10.0  # a channel is massive when its reference RMS is over this many times the median channel's


@dataclass
class ChannelSums:
    """Running sums over token rows: float64 [W]."""

    width: int
    count: int = 0
    total: torch.Tensor = field(init=False)
    square: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.total = torch.zeros(self.width, dtype=torch.float64)
        self.square = torch.zeros(self.width, dtype=torch.float64)

    def add(self, rows: torch.Tensor) -> None:
        """Take in [rows, W], float32 or float64, so few that float32 is good enough; float64 where it overflows."""
        ones = rows.new_ones(rows.shape[0])
        squares = torch.mul(rows, rows, out=scratch("difference", rows.shape, rows.dtype))
        total, square = ones @ rows, ones @ squares  # a product is twice as fast as a sum over rows
        if rows.dtype != torch.float64 and not bool(square.isfinite().all()):
            self.add(rows.double())
            return
        self.count += rows.shape[0]
        self.total += total
        self.square += square

    def mean(self) -> torch.Tensor:
        """Mean over tokens, float64 [W]."""
        return self.total / max(self.count, 1)

    def massive(self) -> torch.Tensor:
        """Indexes of the massive channels; none, where that cannot be judged."""
        rms = np.sqrt(self.square.numpy() / max(self.count, 1))
        middle = np.partition(rms, (self.width - 1) // 2)[(self.width - 1) // 2] if self.width else 0.0
        found = torch.from_numpy(np.flatnonzero(rms > MASSIVE * middle))
        return found if len(found) < self.width else found[:0]
