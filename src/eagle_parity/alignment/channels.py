"""Massive channels left out: a handful of them can make up most of a row's norm and hide all the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from eagle_parity.alignment.views import View
from eagle_parity.metrics.channels import ChannelSums, channel_sums
from eagle_parity.records import Boundary, IntArray


def ordinary_channels(boundaries: Mapping[Boundary, View], rows: IntArray, hidden: int | None) -> torch.Tensor | None:
    """Indexes of the channels that are massive in no boundary, judged on some training rows; None where all are.

    Only boundaries of `hidden` channels count. None too where so many are massive that the word means nothing.
    """
    massive: set[int] = set()
    for view in boundaries.values():
        if view.width == hidden and len(rows):
            sums = ChannelSums(view.width)
            sums.add(channel_sums(view.read(rows).float()))
            massive |= set(sums.massive().tolist())
    if hidden is None or not massive or len(massive) > hidden // 4:
        return None
    return torch.tensor([channel for channel in range(hidden) if channel not in massive])


@dataclass(frozen=True)
class Selected:
    """A view of some channels of another."""

    view: View
    channels: torch.Tensor

    @property
    def width(self) -> int:
        """How many channels."""
        return len(self.channels)

    def read(self, rows: IntArray) -> torch.Tensor:
        """Token rows, [len(rows), width]."""
        return take(self.view.read(rows), self.channels)


def take(rows: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Some channels of [rows, W], ascending. Those left out are few, so copying what lies between them is quick."""
    cuts = (channels.diff() != 1).nonzero().flatten() + 1
    runs = [(int(run[0]), int(run[-1]) + 1) for run in channels.tensor_split(cuts) if len(run)]
    return torch.cat([rows[:, begin:end] for begin, end in runs], 1) if runs else rows[:, :0]


def select(view: View, channels: torch.Tensor | None, hidden: int | None) -> View:
    """The view without massive channels; itself where there are none, or where it is no whole state."""
    return view if channels is None or view.width != hidden else Selected(view, channels)
