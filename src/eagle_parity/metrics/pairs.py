"""Relative L2 of several tensors to several others at once: which of 61 boundaries does a slot hold?

Most pairs are far apart, and |a - b|^2 = |a|^2 + |b|^2 - 2ab from one batched matrix product tells their distance at a
fraction of the cost of forming differences. Near pairs would lose their distance to cancellation: theirs is computed
from the differences.

Accuracy: as `distances` says for pairs nearer than NEAR times sqrt(|a|^2 + |b|^2); the others are within 0.2 % of their
value (the product's error is at most 1.6e-5 of (|a| + |b|)^2 in the square). Dot products have the error that
`distances` states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagle_parity.metrics.distances import RUN, TINY, FloatArray, matrix_products, numpy64, root_ratio, squares

NEAR = 0.1
TILE = 1024  # products of a row and run at once: above that the BLAS under numpy starts threads, which wait for ours


@dataclass(frozen=True)
class PairSums:
    """Sums of each row of n tensors with the same row of m others: float64."""

    ours_sq: torch.Tensor
    """[n, R]"""
    theirs_sq: torch.Tensor
    """[m, R]"""
    dots: torch.Tensor
    """[n, m, R]; infinite or NaN where float32 cannot hold them."""
    difference_sq: torch.Tensor
    """[n, m, R]"""


def padded(width: int) -> int:
    """The width of the rows that `pair_sums` takes: whole runs, filled up with zeros."""
    return width if width <= RUN else -(-width // RUN) * RUN


def pair_sums(serving: torch.Tensor, training: torch.Tensor) -> PairSums:
    """Sums of each row of [n, R, W] with the same row of [m, R, W].

    W is a `padded` width, both are of one dtype, float32 or float64.
    """
    ours, theirs = _squares(serving), _squares(training)
    total = ours.unsqueeze(1) + theirs.unsqueeze(0)
    dots = dot_products(serving, training)
    found = total - 2 * dots
    # NaN, infinity and rows that float32 cannot hold are not far either.
    held = (ours >= TINY).unsqueeze(1) & (theirs >= TINY).unsqueeze(0) & total.isfinite()
    pairs = (~((found >= NEAR**2 * total) & held)).any(-1).nonzero().tolist()
    room = torch.empty_like(serving[: max(1, min(len(serving), len(pairs)))])
    for begin in range(0, len(pairs), len(room)):
        some = pairs[begin : begin + len(room)]
        for place, (i, j) in zip(room, some, strict=False):
            torch.sub(serving[i], training[j], out=place)
        for (i, j), value in zip(some, squares(room[: len(some)]), strict=True):
            found[i, j] = value
    lost = ~(found + theirs >= TINY) | ~found.isfinite()
    for i, j in lost.any(-1).nonzero().tolist():
        rows = lost[i, j]
        found[i, j, rows] = (serving[i, rows].double() - training[j, rows].double()).square().sum(-1)
    return PairSums(ours, theirs, dots, found)


def pair_rel_l2(serving: torch.Tensor, training: torch.Tensor) -> tuple[FloatArray, FloatArray]:
    """Relative L2 of each row of [n, R, W] to the same row of [m, R, W], [n, m, R], and the latter's norms, [m, R].

    Takes what `pair_sums` takes; the results are float64.
    """
    sums = pair_sums(serving, training)
    theirs = sums.theirs_sq.unsqueeze(0).expand_as(sums.difference_sq)
    return numpy64(root_ratio(sums.difference_sq, theirs)), numpy64(sums.theirs_sq.sqrt())


def dot_products(serving: torch.Tensor, training: torch.Tensor) -> torch.Tensor:
    """Dot products of each row of [n, R, W] with the same row of [m, R, W]: float64 [n, m, R]."""
    (n, rows, width), m = serving.shape, len(training)
    run = max(1, min(width, RUN))
    ours = serving.view(n, -1, run).transpose(0, 1)
    theirs = training.view(m, -1, run).permute(1, 2, 0)
    found = torch.empty((rows, n, m), dtype=torch.float64, device=serving.device)
    tile = max(1, TILE // max(n, 1))
    for begin in range(0, m, tile):
        some = slice(begin, min(begin + tile, m))
        products = matrix_products(ours, theirs[..., some]).view(rows, -1, n, some.stop - begin)
        torch.sum(products, 1, dtype=torch.float64, out=found[..., some])
    return found.permute(1, 2, 0)


def _squares(rows: torch.Tensor) -> torch.Tensor:
    """Sum of squares of each row of [n, R, W], also where float32 cannot hold it: float64 [n, R]."""
    total = squares(rows)
    unsafe = ~((total >= TINY) & total.isfinite())
    if unsafe.any():
        total[unsafe] = rows[unsafe].double().square().sum(-1)
    return total
