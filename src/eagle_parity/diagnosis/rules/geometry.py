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

from eagle_parity.metrics.distances import numpy64
from eagle_parity.metrics.distribution import median, sign_test

SURE = 0.001  # p-value below which rows agree about a sign
OFF = 0.03  # share of the step by which a tensor must be away from either end to be between them
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

    @property
    def inside(self) -> bool:
        """Between the two ends, by more than noise can do.

        In healthy captures (recordings, bf16 and quantised, MoE) shares stay within 0.006 of 0 or 1, as noise has no
        part of the step; what is off must also point along the step more than chance allows in few channels.
        """
        if not 0.8 < self.stream < 1.2 or not self.forward or not self.short:
            return False
        return OFF < self.step < 1 - OFF and min(self.along(self.step), self.along(1 - self.step)) > ALONG

    @property
    def beyond(self) -> bool:
        """Past the far end, by more than noise can do: the last step counts more than once."""
        return 0.8 < self.stream < 1.2 and self.over and self.step > 1 + OFF and self.along(self.step - 1) > ALONG

    def along(self, share: float) -> float:
        """Cosine to the step of a deviation that has this share of it and the rest across."""
        return share / math.hypot(share, self.rest) if share else 0.0

    @property
    def evidence(self) -> Mapping[str, float]:
        """For a finding."""
        return {"stream_share": self.stream, "step_share": self.step, "rest_of_step": self.rest}


def place(rows: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> Place:
    """Fit each row [n, H] as a * before + b * (after - before)."""
    x, s, d = (tensor.double() for tensor in (rows, before, after - before))
    ss, sd, dd = (s * s).sum(-1), (s * d).sum(-1), (d * d).sum(-1)
    xs, xd = (x * s).sum(-1), (x * d).sum(-1)
    determinant = (ss * dd - sd * sd).clamp_min(1e-30)
    a, b = (xs * dd - xd * sd) / determinant, (xd * ss - xs * sd) / determinant
    rest = (x - a.unsqueeze(-1) * s - b.unsqueeze(-1) * d).norm(dim=-1) / dd.sqrt().clamp_min(1e-30)
    shares = numpy64(b)
    return Place(
        median(numpy64(a)),
        median(shares),
        median(numpy64(rest)),
        forward=sign_test(np.zeros_like(shares), shares) < SURE,
        short=sign_test(shares, np.ones_like(shares)) < SURE,
        over=sign_test(np.ones_like(shares), shares) < SURE,
    )


def nearest(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Relative L2 of each row of ours [n, H] to the nearest row of theirs [m, H]: [n].

    The search is by matrix product, which cannot tell small distances; the distance itself is exact.
    """
    found = theirs[torch.cdist(ours, theirs).argmin(dim=-1)]
    distance: torch.Tensor = (ours - found).norm(dim=-1) / found.norm(dim=-1).clamp_min(1e-30)
    return distance
