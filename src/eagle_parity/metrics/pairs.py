"""Relative L2 of several tensors to several others at once: which of 61 boundaries does a slot hold?

Most pairs are far apart, and |a - b|^2 = |a|^2 + |b|^2 - 2ab from one batched matrix product tells their distance at a
fraction of the cost of forming differences. Near pairs would lose their distance to cancellation: theirs is computed
from the differences.

Accuracy: as `distances` says for pairs nearer than NEAR times sqrt(|a|^2 + |b|^2); the others are within 0.2 % of their
value (the product's error is at most 1.6e-5 of (|a| + |b|)^2 in the square). Dot products have the error that
`distances` states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from eagle_parity.metrics.distances import TINY, matrix_products, runs_of, squares

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


def pair_sums(
    total: torch.Tensor, dots: torch.Tensor, known: torch.Tensor, wide: Callable[[int], torch.Tensor]
) -> PairSums:
    """Sums of pairs from sums of squares [n + m, R] and dot products [n, m, R], all float64.

    `known`: |a - b|^2 of the last tensors of ours and the first of theirs, [pairs, R]. `wide` gives the rows of a
    tensor, [R, W] in float32 or float64: those of near pairs are subtracted, and what float32 did not hold is made
    again in float64.
    """
    n, count = len(dots), len(known)
    safe = bool(((total >= TINY) & total.isfinite()).all())
    if not safe:
        total = _exact(total, wide)
    ours, theirs = total[:n], total[n:]
    both = ours.unsqueeze(1) + theirs.unsqueeze(0)
    found = torch.sub(both, dots, alpha=2)
    far = found >= NEAR**2 * both
    if not safe:  # NaN, infinity and rows that float32 cannot hold are not far either
        far &= (ours >= TINY).unsqueeze(1) & (theirs >= TINY).unsqueeze(0) & both.isfinite()
    found[n - count :, :count].diagonal().copy_(known.T)
    far[n - count :, :count].diagonal().fill_(True)
    for i, j in (~far.all(-1)).nonzero().tolist():
        found[i, j] = squares(wide(i) - wide(n + j))
    if not safe or not bool(found.isfinite().all()):
        lost = ~(found + theirs >= TINY) | ~found.isfinite()
        for i, j in lost.any(-1).nonzero().tolist():
            rows = lost[i, j]
            found[i, j, rows] = (wide(i)[rows].double() - wide(n + j)[rows].double()).square().sum(-1)
    return PairSums(ours, theirs, dots, found)


def run_dots(serving: torch.Tensor, training: torch.Tensor, into: torch.Tensor) -> None:
    """Dot products of each row of [n, R, W] with the same row of [m, R, W], W `padded`, over each run of channels.

    [R, runs, n, m] in their own dtype; `into` is contiguous.
    """
    n, m = into.shape[2:]
    run = runs_of(serving.shape[-1])[1]
    ours = serving.view(n, -1, run).transpose(0, 1)
    theirs = training.view(m, -1, run).permute(1, 2, 0)
    into = into.view(-1, n, m)
    tile = max(1, TILE // max(n, 1))
    for begin in range(0, m, tile):
        some = slice(begin, begin + tile)
        matrix_products(ours, theirs[..., some], into[..., some])


def _exact(total: torch.Tensor, wide: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Sums of squares [tensors, R], those that float32 cannot hold made again in float64."""
    unsafe = ~((total >= TINY) & total.isfinite())
    for i in unsafe.any(-1).nonzero().flatten().tolist():
        total[i, unsafe[i]] = wide(i)[unsafe[i]].double().square().sum(-1)
    return total
