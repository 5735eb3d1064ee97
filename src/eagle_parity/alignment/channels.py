"""Massive channels left out: a handful of them can make up most of a row's norm and hide all the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from eagle_parity.alignment.views import View, blocks, widened_rows
from eagle_parity.metrics.channels import ChannelSums
from eagle_parity.metrics.distances import difference_sums, numpy64
from eagle_parity.metrics.distribution import median
from eagle_parity.records import IntArray

SAMPLE_BYTES = 4 * 2**20  # of float32 rows summed at once: usually all that a channel is learnt from


def channels_of(view: View, rows: IntArray) -> ChannelSums:
    """What the channels of a tensor are like on some token rows."""
    sums = ChannelSums(view.width)
    for block in blocks(len(rows), view.width, SAMPLE_BYTES):
        sums.add(widened_rows(view, rows[block], "theirs"))
    return sums


@dataclass(frozen=True)
class Sample:
    """What some token rows say of a tensor."""

    channels: ChannelSums
    apart: float
    """Median relative L2 of two tokens' states, without the tensor's massive channels; NaN where they are the same."""


def sample_of(view: View, rows: IntArray) -> Sample:
    """Look at some token rows of a tensor, all of them at once."""
    states = widened_rows(view, rows, "theirs")
    channels = ChannelSums(view.width)
    channels.add(states)
    states.index_fill_(1, channels.massive(), 0)
    half = len(states) // 2
    *lengths, away = numpy64(difference_sums(states[:half], states[half : 2 * half]))
    with np.errstate(divide="ignore", invalid="ignore"):
        return Sample(channels, median(np.sqrt(away / np.stack(lengths)).ravel()))


def massive_channels(boundaries: Iterable[ChannelSums], hidden: int | None) -> torch.Tensor:
    """Indexes of the channels that are massive in any boundary of `hidden` channels, ascending.

    None where so many are that the word means nothing.
    """
    massive = {channel for sums in boundaries if sums.width == hidden for channel in sums.massive().tolist()}
    if hidden is None or len(massive) > hidden // 4:
        massive = set()
    return torch.tensor(sorted(massive), dtype=torch.int64)


def without(rows: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """[rows, W] but for some channels, ascending. They are few, so copying what lies between them is quick."""
    ends = [-1, *channels.tolist(), rows.shape[1]]
    return torch.cat([rows[:, begin + 1 : end] for begin, end in pairwise(ends)], 1)


def ordinary_rows(view: View, rows: IntArray, massive: torch.Tensor, hidden: int | None, name: str) -> torch.Tensor:
    """`widened_rows`, in whole states with massive channels zero."""
    states = widened_rows(view, rows, name)
    return states.index_fill_(1, massive, 0) if view.width == hidden else states
