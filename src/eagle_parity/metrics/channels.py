"""Statistics per channel over tokens: what centring and leaving out massive dimensions need."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MASSIVE = 10.0  # a channel is massive when its reference RMS is over this many times the median channel's


@dataclass
class ChannelSums:
    """Running sums over token rows: float64 [W]."""

    width: int
    count: int = 0

    def __post_init__(self) -> None:
        self.total = torch.zeros(self.width, dtype=torch.float64)
        self.square = torch.zeros(self.width, dtype=torch.float64)

    def add(self, rows: torch.Tensor) -> None:
        """Take in [rows, W]."""
        values = rows.float()
        self.total += values.sum(0, dtype=torch.float64)
        self.square += (values * values).sum(0, dtype=torch.float64)
        self.count += rows.shape[0]

    def mean(self) -> torch.Tensor:
        """Mean over tokens, float32 [W]."""
        return (self.total / max(self.count, 1)).float()

    def ordinary(self) -> torch.Tensor:
        """Which channels are not massive: bool [W]. All, where massiveness cannot be judged."""
        rms = (self.square / max(self.count, 1)).sqrt()
        keep = rms <= MASSIVE * rms.median()
        return keep if bool(keep.any()) else torch.ones_like(keep)
