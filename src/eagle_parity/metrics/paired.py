"""All metrics of pairs of tensors from one block of rows, beside the distances of everything to everything.

Massive channels are left out of every sum in float32 and added, where they count, in float64: a sum that holds them
could not be made one that does not without losing what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eagle_parity.metrics.distances import TINY, difference, padded, run_products, runs_of, widened
from eagle_parity.metrics.pairs import PairSums, pair_sums, run_dots

PLAIN, CENTRED, NO_MASSIVE = range(3)


@dataclass(frozen=True)
class Pairing:
    """The last tensors of ours and the first of theirs are pairs: what their metrics need to know of their channels."""

    left_out: torch.Tensor
    """Indexes of the channels that distances leave out; every pair's massive channels are among them."""
    centres: torch.Tensor
    """[2 pairs, 1, padded W]: what to centre ours and theirs on, zero for channels left out."""
    massive_centres: torch.Tensor
    """[2, pairs, 1, left out], float64: the same for the channels left out."""
    ordinary: torch.Tensor
    """[pairs, 1, left out], float64: 0 for a pair's massive channels, 1 for those that only others leave out."""

    @property
    def count(self) -> int:
        """How many pairs."""
        return len(self.ordinary)


def pairing(means: torch.Tensor, massive: Sequence[torch.Tensor], left_out: torch.Tensor, wide: torch.dtype) -> Pairing:
    """Prepare a pairing from means [2, pairs, W] and the massive channels of each pair, for sums in dtype `wide`."""
    centres = means.new_zeros((2 * means.shape[1], 1, padded(means.shape[2])), dtype=wide)
    centres[:, 0, : means.shape[2]] = means.flatten(0, 1)
    centres[..., left_out] = 0
    ordinary = means.new_ones((means.shape[1], 1, len(left_out)), dtype=torch.float64)
    for mask, channels in zip(ordinary, massive, strict=True):
        mask[0, torch.isin(left_out, channels)] = 0
    return Pairing(left_out, centres, means[..., left_out].double().unsqueeze(2), ordinary)


@dataclass(frozen=True)
class RunSums:
    """What is summed over runs of channels while rows lie in a core's caches, in the dtype that sums are formed in.

    Without the channels left out.
    """

    total: torch.Tensor
    """Squares, [tensors, rows, runs]."""
    dots: torch.Tensor
    """[rows, runs, n, m]"""
    difference_sq: torch.Tensor
    """|a - b|^2 of the pairs, [pairs, rows, runs]."""
    centred_sq: torch.Tensor
    """|a|^2 of the pairs and |b|^2 of the pairs when centred, [2 pairs, rows, runs]."""
    centred_dots: torch.Tensor
    """ab of the pairs when centred, [pairs, rows, runs]."""
    left_out: torch.Tensor
    """The channels left out, [tensors, rows, channels]."""


def run_sums(n: int, m: int, rows: int, pairs: Pairing) -> RunSums:
    """Room for the sums of so many rows of n tensors and m others."""
    room, count = pairs.centres.new_empty, pairs.count
    runs = runs_of(pairs.centres.shape[-1])[0]
    return RunSums(
        room(n + m, rows, runs),
        room(rows, runs, n, m),
        room(count, rows, runs),
        room(2 * count, rows, runs),
        room(count, rows, runs),
        room(n + m, rows, len(pairs.left_out)),
    )


def add_tile(states: torch.Tensor, n: int, pairs: Pairing, sums: RunSums, rows: slice) -> None:
    """Fill in some rows: n tensors and the others, [tensors, rows, padded W] of float32 or float64; these are changed.

    Pairs are the last of ours and the first of theirs, side by side.
    """
    sums.left_out[:, rows] = states[..., pairs.left_out]
    states.index_fill_(2, pairs.left_out, 0)
    run_products(states, states, sums.total[:, rows])
    run_dots(states[:n], states[n:], sums.dots[rows])
    both = states[n - pairs.count : n + pairs.count]
    a, b = both[: pairs.count], both[pairs.count :]
    away = difference(a, b)
    run_products(away, away, sums.difference_sq[:, rows])
    both -= pairs.centres
    run_products(both, both, sums.centred_sq[:, rows])
    run_products(a, b, sums.centred_dots[:, rows])


def paired_sums(runs: RunSums, pairs: Pairing, stored: Callable[[int], torch.Tensor]) -> tuple[PairSums, torch.Tensor]:
    """Sums of all with all, without the channels left out, and of the pairs: [3, 4, pairs, rows], float64.

    The latter plain, centred, without massive channels, and of each |a|^2, |b|^2, ab, |a - b|^2 (the last NaN where not
    plain). `stored` gives the rows of a tensor, [rows, W] of any float dtype: for near pairs, and where float32 did not
    hold a sum.
    """
    count, n = pairs.count, runs.dots.shape[2]
    total, difference_sq, centred_sq, centred_dots = (
        part.sum(-1, dtype=torch.float64)
        for part in (runs.total, runs.difference_sq, runs.centred_sq, runs.centred_dots)
    )
    dots = runs.dots.sum(1, dtype=torch.float64).permute(1, 2, 0)
    left_out = runs.left_out.double()

    def wide(tensor: int) -> torch.Tensor:
        return widened(stored(tensor)).index_fill(1, pairs.left_out, 0)

    found = pair_sums(total, dots, difference_sq, wide)
    sums = torch.full((3, 4, *difference_sq.shape), torch.nan, dtype=torch.float64, device=dots.device)
    plain, centred, no_massive = sums
    plain[0], plain[1] = found.ours_sq[n - count :], found.theirs_sq[:count]
    plain[2], plain[3] = (each[n - count :, :count].diagonal().T for each in (dots, found.difference_sq))
    centred[:2], centred[2], no_massive[:3] = centred_sq.view(2, count, total.shape[1]), centred_dots, plain[:3]
    ours, theirs = left_out[n - count : n], left_out[n : n + count]
    plain += exact_sums(ours, theirs)
    centred += exact_sums(ours - pairs.massive_centres[0], theirs - pairs.massive_centres[1])
    no_massive += exact_sums(ours * pairs.ordinary, theirs * pairs.ordinary)
    lost = ~(sums[:, :3].isfinite().all(1).all(0) & (sums[[PLAIN, NO_MASSIVE], :2] >= TINY).all(1).all(0))
    for p in lost.any(-1).nonzero().flatten().tolist():
        a, b = (stored(tensor)[lost[p]] for tensor in (n - count + p, n + p))
        sums[:, :, p, lost[p]] = exactly(a, b, pairs, p)
    return found, sums


def exact_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a|^2, |b|^2, ab and |a - b|^2 over the last dimension of float64 [..., W]: [4, ...]."""
    away = a - b
    return torch.stack([a * a, b * b, a * b, away * away]).sum(-1)


def exactly(a: torch.Tensor, b: torch.Tensor, pairs: Pairing, pair: int) -> torch.Tensor:
    """The sums of some rows of one pair, [rows, W] of any float dtype, in float64: [3, 4, rows]."""
    a, b = a.double(), b.double()
    means = pairs.centres[pair :: pairs.count, 0, : a.shape[1]].double().clone()
    means[:, pairs.left_out] = pairs.massive_centres[:, pair, 0]
    keep = torch.ones(a.shape[1], dtype=torch.float64, device=a.device)
    keep[pairs.left_out] = pairs.ordinary[pair, 0]
    return torch.stack([exact_sums(*part) for part in ((a, b), (a - means[0], b - means[1]), (a * keep, b * keep))])
