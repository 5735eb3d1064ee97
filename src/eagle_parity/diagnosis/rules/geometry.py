"""Where a tensor lies between two boundaries.

A layer takes boundary K-1 to K by a step d = A + M: its attention's output and its MLP's. Faults of summing and of
capturing at the wrong moment leave tensors on this path: K-1 + A (captured before the MLP), K + A' (the next layer's
attention was added already), M alone (no residual), K-1 + A + tp M (summed twice). A point x is told by how much of
the stream and how much of the step it holds, x = a K-1 + b d + rest; a state of another token, noise or a corrupt row
has no share of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from eagle_parity.alignment.matching import LUCK
from eagle_parity.metrics.distances import FloatArray, numpy64, products, safely, squares
from eagle_parity.metrics.distribution import median, sign_test
from eagle_parity.records import IntArray

SURE = 0.001  # p-value below which rows agree about a sign
OFF = 0.03  # share of the step by which a tensor must be away from either end to be between them
FAR_OFF = 0.01  # the same where the ends are several layers apart: one layer is a small share of that way
STREAM = (0.8, 1.2)  # shares of the stream that count as all of it
ALONG = 0.12  # cosine to the step of that deviation, at least


@dataclass(frozen=True)
class Place:
    """Medians over rows: shares of the stream and of the step, and what is left over in units of the step."""

    stream: float
    step: float
    rest: float
    forward: bool
    """Whether nearly all rows have a positive share of the step."""
    short: bool
    """Whether nearly all rows have less than the whole step."""
    over: bool
    """Whether nearly all rows have more."""
    between: bool
    """Whether nearly all rows are nearer to both ends than these are to each other."""

    @property
    def inside(self) -> bool:
        """Between the two ends of a layer, by more than noise can do."""
        return self.within(OFF)

    def within(self, off: float) -> bool:
        """Between the two ends and away from both by a share of the step.

        In healthy captures (recordings, bf16 and quantised, MoE) shares stay within 0.006 of 0 or 1, as noise has no
        part of the step; what is off must also point along the step more than chance allows in few channels.
        """
        if not STREAM[0] < self.stream < STREAM[1] or not self.forward or not self.short:
            return False
        return off < self.step < 1 - off and min(self.along(self.step), self.along(1 - self.step)) > ALONG

    @property
    def beyond(self) -> bool:
        """Past the far end, by more than noise can do: the last step counts more than once."""
        return (
            STREAM[0] < self.stream < STREAM[1]
            and self.over
            and self.step > 1 + OFF
            and self.along(self.step - 1) > ALONG
        )

    def along(self, share: float) -> float:
        """Cosine to the step of a deviation that has this share of it and the rest across."""
        return share / math.hypot(share, self.rest) if share else 0.0

    @property
    def evidence(self) -> Mapping[str, float]:
        """For a finding."""
        return {"stream_share": self.stream, "step_share": self.step, "rest_of_step": self.rest}


def place(rows: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> Place:
    """Fit each row [n, H] as a * before + b * (after - before).

    Shares of the step are taken over the share of the stream where that is nearly 1: a factor moves no tensor.
    """
    return fitted(numpy64(safely(_products, rows, before, after)))


def fitted(sums: FloatArray) -> Place:
    """The place from the sums of each row, [6, rows]: see `_products`."""
    ss, dd, ee, sd, ed, es = sums
    with np.errstate(all="ignore"):  # rows with infinities have no place
        determinant = np.maximum(ss * dd - sd * sd, 1e-30)
        # With e = x - after: its shares are what x has more of either than `after` has.
        more, further = (es * dd - ed * sd) / determinant, (ed * ss - es * sd) / determinant
        to = dd + 2 * ed + ee
        rest = np.sqrt(np.maximum(ee - more * es - further * ed, 0)) / np.maximum(np.sqrt(dd), 1e-30)
    stream = median(1 + more)
    shares = (1 + further) / (stream if STREAM[0] < stream < STREAM[1] else 1.0)
    return Place(
        stream,
        median(shares),
        median(rest),
        forward=sign_test(np.zeros_like(shares), shares) < SURE,
        short=sign_test(shares, np.ones_like(shares)) < SURE,
        over=sign_test(np.ones_like(shares), shares) < SURE,
        between=max(sign_test(end, dd) for end in (ee, to)) < LUCK,
    )


def _products(x: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Of s = before, d = after - before and e = x - after: ss, dd, ee, sd, de, es, [6, rows]."""
    sde = torch.empty((3, *x.shape), dtype=x.dtype)
    sde[0] = before
    torch.sub(after, before, out=sde[1])
    torch.sub(x, after, out=sde[2])
    return torch.cat([squares(sde), products(sde[:2], sde[1:]), products(sde[2:], sde[:1])])


def nearest(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Relative L2 of each row of ours [n, H] to the nearest row of theirs [m, H]: [n]."""
    return torch.from_numpy(nearest_row(ours, theirs)[1]).float()


def nearest_row(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[IntArray, FloatArray]:
    """Index and relative L2 of the nearest row of theirs [m, H] to each row of ours [n, H]: [n] each.

    The search is by matrix product, which cannot tell small distances; the distance itself is exact.
    """
    index = torch.cdist(ours, theirs).argmin(dim=-1)
    found = theirs[index]
    distance = (ours - found).norm(dim=-1) / found.norm(dim=-1).clamp_min(1e-30)
    return np.asarray(index.numpy(), dtype=np.int64), numpy64(distance)
