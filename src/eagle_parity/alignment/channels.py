"""Massive channels left out: a handful of them can make up most of a row's norm and hide all the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from eagle_parity.alignment.views import View, blocks
from eagle_parity.metrics.channels import ChannelSums, channel_sums
from eagle_parity.metrics.distances import widened
from eagle_parity.metrics.threads import one_thread, spread
from eagle_parity.records import IntArray

K = TypeVar("K")


def channels_of(view: View, rows: IntArray) -> ChannelSums:
    """What the channels of a tensor are like on some token rows."""
    sums = ChannelSums(view.width)
    for block in blocks(len(rows), view.width):
        sums.add(channel_sums(widened(view.read(rows[block]))))
    return sums


@one_thread()
def channels_of_all(views: Mapping[K, View], rows: IntArray) -> dict[K, ChannelSums]:
    """The same of several tensors."""
    return dict(zip(views, spread(lambda view: channels_of(view, rows), views.values()), strict=True))


def massive_channels(boundaries: Iterable[ChannelSums], hidden: int | None) -> torch.Tensor:
    """Indexes of the channels that are massive in any boundary of `hidden` channels, ascending.

    None where so many are that the word means nothing.
    """
    massive = {channel for sums in boundaries if sums.width == hidden for channel in sums.massive().tolist()}
    if hidden is None or len(massive) > hidden // 4:
        massive = set()
    return torch.tensor(sorted(massive), dtype=torch.int64)


def ordinary_channels(massive: torch.Tensor, hidden: int | None) -> torch.Tensor | None:
    """Indexes of the other channels; None where all are ordinary."""
    return None if hidden is None or len(massive) == 0 else complement(massive, hidden)


def complement(channels: torch.Tensor | None, hidden: int | None) -> torch.Tensor:
    """Indexes of the channels that are not among these, ascending; none where these are all, said by None."""
    left = torch.ones(0 if channels is None or hidden is None else hidden, dtype=torch.bool)
    if channels is not None and hidden is not None:
        left[channels] = False
    return left.nonzero().flatten()


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
