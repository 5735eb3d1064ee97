"""Per-token sums of two tensors, and the distances that follow from them.

Accuracy. Inputs become float32, which is exact for bf16, fp16 and fp8 (float64 inputs stay float64). Squares and
products are summed in float32 over at most RUN channels and from there on in float64. Whatever the order inside a run,
the relative error of a sum of squares is then below RUN + 4 roundings of 2^-24, that is 1.6e-5, and half of that for
what is a root of it: a norm or a relative L2 (differences are formed channel by channel, so closeness costs no
accuracy). A dot product, and with it the cosine, has that error relative to |a||b|. Typical errors are a hundred times
smaller.

Rows whose norm is below 1e-10 or whose squares leave float32's range are summed in float64. What remains: a difference
below 1e-19 in a channel counts as none, an absolute error below 1e-7 in relative L2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_parity.metrics.threads import scratch

FloatArray = NDArray[np.float64]

RUN = 256  # channels summed in float32: short enough for the bound above, long enough for the speed of float32
BLOCK = 2**18  # values worked on at once: what is made of them on the way stays in a core's cache
TINY = 1e-20  # a float32 sum of squares below this may have lost terms to underflow


@dataclass(frozen=True)
class RowSums:
    """Sums over the hidden dimension for each token row: all float64 [rows]."""

    dot: torch.Tensor
    serving_sq: torch.Tensor
    training_sq: torch.Tensor
    difference_sq: torch.Tensor

    def rel_l2(self) -> torch.Tensor:
        """|serving - training| / |training|; 0 for two zero rows, inf for a zero training row alone."""
        return root_ratio(self.difference_sq, self.training_sq)

    def norm_ratio(self) -> torch.Tensor:
        """|serving| / |training|; 1 for two zero rows."""
        both_zero = (self.serving_sq == 0) & (self.training_sq == 0)
        return torch.where(both_zero, 1.0, root_ratio(self.serving_sq, self.training_sq))

    def cosine(self) -> torch.Tensor:
        """Cosine of the angle, clipped to [-1, 1]; 1 for two zero rows, 0 when only one is zero."""
        return angle(self.dot, self.serving_sq, self.training_sq)


def root_ratio(a_sq: torch.Tensor, b_sq: torch.Tensor) -> torch.Tensor:
    """Root of a_sq / b_sq; 0 where both are zero, infinity where only b_sq is."""
    ratio = (a_sq / torch.where(b_sq == 0, 1.0, b_sq)).sqrt()
    return torch.where(b_sq == 0, torch.where(a_sq == 0, 0.0, torch.inf), ratio)


def angle(dot: torch.Tensor, a_sq: torch.Tensor, b_sq: torch.Tensor) -> torch.Tensor:
    """Cosine from a dot product and the squares, clipped to [-1, 1]; 1 for two zero rows, 0 when only one is zero."""
    norms = a_sq.sqrt() * b_sq.sqrt()
    value = torch.where(norms == 0, 0.0, dot / torch.where(norms == 0, 1.0, norms))
    return torch.where((a_sq == 0) & (b_sq == 0), 1.0, value.clamp(-1.0, 1.0))


def widened(rows: torch.Tensor) -> torch.Tensor:
    """Rows in the dtype that sums are formed in: float32, or float64 for float64."""
    return rows if rows.dtype == torch.float64 else rows.float()


def squares(rows: torch.Tensor) -> torch.Tensor:
    """Sum of squares over the last dimension of [..., W] (float32 or float64), in float64: [...].

    Not safe where squares leave float32's range, see `safely`.
    """
    return products(rows, rows)


def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Dot products over the last dimension of [..., W] (one dtype, float32 or float64), in float64: [...]."""

    width = a.shape[-1]
    whole = width // RUN * RUN
    found = torch.zeros(a.shape[:-1], dtype=torch.float64, device=a.device)
    for begin, end in ((0, whole), (whole, width)):  # whole runs, and the channels that are left over
        if end > begin:
            runs = a.new_empty(*a.shape[:-1], runs_of(end - begin)[0])
            run_products(a[..., begin:end], b[..., begin:end], runs)
            found += runs.sum(-1, dtype=torch.float64)
    return found


def matrix_products(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor) -> None:
    """Batched matrix products of [..., n, W] and [..., W, m] in their own dtype.

    The BLAS under numpy is two to eight times as fast as torch's on matrices of a few rows.
    """
    if not a.is_cpu:
        into.copy_(torch.matmul(a, b))
        return
    with np.errstate(all="ignore"):  # what float32 cannot hold is found by its value
        np.matmul(a.numpy(), b.numpy(), out=into.numpy())


def run_products(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor) -> None:
    """Dot products over each run of channels of two [..., W], W `padded`, in their own dtype: [..., runs]."""
    runs, run = runs_of(a.shape[-1])
    x, y = (rows.view(*rows.shape[:-1], runs, run) for rows in (a, b))
    if a.is_cpu:
        with np.errstate(all="ignore"):
            np.matmul(x.unsqueeze(-2).numpy(), y.unsqueeze(-1).numpy(), out=into.numpy()[..., None, None])
    else:
        torch.linalg.vecdot(x, y, out=into)


def runs_of(width: int) -> tuple[int, int]:
    """How many runs a `padded` width has, and how many channels each of them."""
    run = max(1, min(width, RUN))
    return width // run, run


def padded(width: int) -> int:
    """The width of rows that are whole runs, filled up with zeros."""
    return width if width <= RUN else -(-width // RUN) * RUN


def safely(measure: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
    """What `measure` makes of tensors [rows, W] of any float dtype: float64 [k, rows], in blocks of a few rows.

    Rows that float32 cannot hold (a sum is not finite, or one of the first two, which are squares, is next to nothing)
    are measured again in float64; those with NaN or infinite inputs stay what they are.
    """
    count, width = rows[0].shape
    wide = torch.float64 if any(r.dtype == torch.float64 for r in rows) else torch.float32
    step = max(1, BLOCK // max(width, 1))
    found = []
    for begin in range(0, max(count, 1), step):
        block = [r[begin : begin + step].to(wide) for r in rows]
        sums = measure(*block)
        held = sums.isfinite().all(0) & (sums[:2] >= TINY).all(0)
        if not held.all():
            sums[:, ~held] = measure(*(b[~held].double() for b in block))
        found.append(sums)
    return torch.cat(found, 1)


def row_sums(serving: torch.Tensor, training: torch.Tensor) -> RowSums:
    """Sums of two [rows, W] tensors of any float dtype."""

    def measure(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack([squares(a), squares(b), products(a, b), squares(difference(a, b))])

    serving_sq, training_sq, dot, difference_sq = safely(measure, serving, training)
    return RowSums(dot, serving_sq, training_sq, difference_sq)


def rel_l2(serving: torch.Tensor, training: torch.Tensor) -> FloatArray:
    """Relative L2 distance of each row of two [rows, W] tensors: float64 [rows]."""
    _, training_sq, difference_sq = difference_sums(serving, training)
    return numpy64(root_ratio(difference_sq, training_sq))


def difference_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a|^2, |b|^2 and |a - b|^2 of each row of two [rows, W] tensors of any float dtype: float64 [3, rows]."""
    return safely(lambda x, y: torch.stack([squares(x), squares(y), squares(difference(x, y))]), a, b)


def difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a - b, on the CPU in `scratch` memory that the next difference is written to."""
    if not a.is_cpu:
        return a - b
    return torch.sub(a, b, out=scratch("difference", a.shape, torch.promote_types(a.dtype, b.dtype)))


def cosine(a: torch.Tensor, b: torch.Tensor) -> FloatArray:
    """Cosine of each row of two [rows, W] tensors: float64 [rows]."""
    return numpy64(row_sums(a, b).cosine())


def numpy64(values: torch.Tensor) -> FloatArray:
    """A tensor as a float64 array."""
    return np.asarray(values.double().cpu().numpy(), dtype=np.float64)
