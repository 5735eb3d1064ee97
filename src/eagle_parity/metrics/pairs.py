"""Relative L2 of several tensors to several others at once: which of 61 boundaries does a slot hold?

Most pairs are far apart, and |a - b|^2 = |a|^2 + |b|^2 - 2ab from one batched matrix product tells their distance at a
third of the cost of forming differences. Near pairs would lose their distance to cancellation: theirs is computed
from the differences.

Accuracy: as `distances` says for pairs nearer than NEAR times sqrt(|a|^2 + |b|^2); the others are within 0.2 % of their
value (the product's error is at most 1.6e-5 of (|a| + |b|)^2 in the square).
"""

from __future__ import annotations

import torch

from eagle_parity.metrics.distances import RUN, TINY, FloatArray, numpy64, root_ratio, squares

NEAR = 0.1


def padded(width: int) -> int:
    """The width of the rows that `pair_rel_l2` takes: whole runs, filled up with zeros."""
    return width if width <= RUN else -(-width // RUN) * RUN


def pair_rel_l2(serving: torch.Tensor, training: torch.Tensor) -> tuple[FloatArray, FloatArray]:
    """Relative L2 of each row of [n, R, W] to the same row of [m, R, W], [n, m, R], and the latter's norms, [m, R].

    W is a `padded` width, both are of one dtype, float32 or float64; the results are float64.
    """
    (n, rows, width), m = serving.shape, len(training)
    run = min(width, RUN)
    ours, theirs = _squares(serving).unsqueeze(1), _squares(training).unsqueeze(0)
    products = torch.bmm(serving.view(n, -1, run).transpose(0, 1), training.view(m, -1, run).permute(1, 2, 0))
    total = ours + theirs
    found = total - 2 * products.view(rows, -1, n, m).sum(1, dtype=torch.float64).permute(1, 2, 0)
    # NaN, infinity and rows that float32 cannot hold are not far either.
    far = (found >= NEAR**2 * total) & (ours >= TINY) & (theirs >= TINY) & total.isfinite()
    difference = torch.empty_like(serving[0])
    for i, j in (~far).any(-1).nonzero().tolist():
        torch.sub(serving[i], training[j], out=difference)
        found[i, j] = squares(difference)
    for i, j, row in (~(found + theirs >= TINY) | ~found.isfinite()).nonzero().tolist():
        found[i, j, row] = (serving[i, row].double() - training[j, row].double()).square().sum()
    return numpy64(root_ratio(found, theirs.expand_as(found))), numpy64(theirs[0].sqrt())


def _squares(rows: torch.Tensor) -> torch.Tensor:
    """Sum of squares of each row of [n, R, W], also where float32 cannot hold it: float64 [n, R]."""
    total = squares(rows)
    unsafe = ~((total >= TINY) & total.isfinite())
    if unsafe.any():
        total[unsafe] = rows[unsafe].double().square().sum(-1)
    return total
