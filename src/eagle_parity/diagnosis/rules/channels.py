"""Single channels that do not hold the state: never written, stuck, exchanged, or scaled by themselves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from eagle_parity.alignment.views import widened_rows
from eagle_parity.diagnosis.case import Case, TensorCase, once
from eagle_parity.diagnosis.judgement import MIN_ROWS
from eagle_parity.metrics.channels import MASSIVE
from eagle_parity.metrics.distances import difference, rel_l2
from eagle_parity.metrics.distribution import median
from eagle_parity.metrics.threads import scratch, spread
from eagle_parity.records import Boundary

WRONG = 0.5  # of a channel's own size, by which it must be off on most rows
OUTSTANDING = 2.0  # times as far off as any channel of its size that is right
FEW = 0.05  # share of the channels; more is no fault of single channels


@dataclass(frozen=True)
class Broken:
    """Channels of a tensor that is its boundary but for them."""

    boundary: Boundary
    channels: tuple[int, ...]
    stuck: tuple[int, ...]
    """Those among them that hold one value on all rows."""
    off: float
    """Least error among them, over the largest among channels of their size that are right."""
    distance: float
    """Median relative L2 of the other channels."""


def broken(case: Case, tensor: TensorCase) -> Broken | None:
    """Channels that are wrong on most rows, in a tensor that is the expected boundary without them.

    The error of a channel is the median over rows of |serving - training|: rows that took other experts, or are wrong
    altogether, do not move it. Noise is spread over channels, in part alike and in part in proportion to their size: a
    channel whose noise is half of its signal is a small one, and there its noise is no larger than that of many others.
    So a broken channel is off by more than half of its own size (or holds one value on all rows, which may be near the
    mean of a channel that varies little) and by twice as much as any sound channel up to twice
    its size (or the usual size, if that is larger); the largest of hundreds is not beaten twofold by one more of them.
    """
    boundary = tensor.expected
    if boundary is None or tensor.name not in suspects(case):
        return None
    serving, truth = case.serving_rows(tensor), case.training_rows(boundary)
    error, size = ((rows.abs().median(0).values) for rows in (serving - truth, truth))
    stuck = (serving == serving[0]).all(0)
    wrong = ((error >= WRONG * size) | stuck) & (error > 0)
    if not bool(wrong.any()):
        return None
    rms = truth.square().mean(0).sqrt()
    sound = ~wrong & (rms <= MASSIVE * rms.median())
    if not bool(sound.any()):
        return None
    usual = size.median()
    found = []
    for channel in wrong.nonzero().flatten().tolist():
        alike = sound & (size <= torch.maximum(2 * size[channel], usual))
        level = error[alike].max() if bool(alike.any()) else error[sound].max()
        found.append((channel, float(error[channel] / level.clamp_min(1e-30))))
    found = [(channel, off) for channel, off in found if off >= OUTSTANDING]
    if not found or len(found) > max(1.0, FEW * len(size)):
        return None
    channels = tuple(channel for channel, _ in found)
    rest = torch.ones(len(size), dtype=torch.bool)
    rest[list(channels)] = False
    if len(size) == case.hidden_size:
        rest[case.massive] = False
    distance = median(rel_l2(serving[:, rest], truth[:, rest]))
    if distance > tensor.limits[boundary] or _nearer(case, tensor, serving, rest, distance):
        return None
    constant = tuple(c for c in channels if bool(stuck[c]))
    return Broken(boundary, channels, constant, min(off for _, off in found), distance)


@once
def suspects(case: Case) -> frozenset[str]:
    """The tensors of which some channel may turn out wrong, by name."""
    rows = case.alignment.serving[case.probe], case.alignment.training[case.probe]

    def suspect(tensor: TensorCase) -> bool:
        boundary = tensor.expected
        if boundary is None or boundary not in tensor.match.rel_l2 or tensor.view is None or len(case.probe) < MIN_ROWS:
            return False
        if tensor.ranks.non_finite:  # has a name of its own
            return False
        truth = widened_rows(case.boundaries[boundary], rows[1], "theirs")
        return some_may_be(widened_rows(tensor.view, rows[0], "states"), truth)

    found = spread(suspect, case.tensors)
    return frozenset(tensor.name for tensor, doubtful in zip(case.tensors, found, strict=True) if doubtful)


def some_may_be(serving: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether any channel could turn out wrong, without the medians, which take twenty times as long.

    Half of the rows are off by the median error or more, so that its square is at most twice the mean square; and half
    of the channel's values must then be below that over WRONG.
    """
    count = len(truth)
    off = difference(serving, truth).square_()
    top = (off.new_ones(count) @ off).mul_(2 / count).sqrt_() / WRONG
    size = torch.abs(truth, out=scratch("sizes", truth.shape, truth.dtype))
    low = (size.numpy() <= top.numpy()).view(np.uint8)  # numpy compares at several times the speed of torch
    if bool((low.sum(0, dtype=np.min_scalar_type(count)) >= (count + 1) // 2).any()):
        return True
    few = (serving[1] == serving[0]).nonzero().flatten()
    return bool((serving[:, few] == serving[0, few]).all(0).any())


def _nearer(case: Case, tensor: TensorCase, serving: torch.Tensor, rest: torch.Tensor, distance: float) -> bool:
    """Whether another boundary is nearer to the other channels: where noise may be as long as a layer's step, being
    within the limit of one boundary alone does not make a tensor that boundary."""
    best = tensor.match.best
    if best is None or best == tensor.expected:
        return False
    other = case.training_rows(best)
    return other.shape == serving.shape and median(rel_l2(serving[:, rest], other[:, rest])) < distance
