"""All metrics of pairs of tensors from one block of rows, beside the distances of everything to everything.

Massive channels are left out of every sum in float32 and added, where they count, in float64: a sum that holds them
could not be made one that does not without losing what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle_parity.metrics.distances import TINY, products, squares
from eagle_parity.metrics.pairs import PairSums, padded, pair_sums

PLAIN, CENTRED, NO_MASSIVE = range(3)


@dataclass(frozen=True)
class Pairing:
    """The first tensors of both sides are pairs: what the metrics of each pair need to know of its channels."""

    left_out: torch.Tensor
    """Indexes of the channels that distances leave out; every pair's massive channels are among them."""
    centres: torch.Tensor
    """[2, pairs, 1, padded W]: what to centre ours and theirs on, zero for channels left out."""
    massive_centres: torch.Tensor
    """[2, pairs, 1, left out], float64: the same for the channels left out."""
    ordinary: torch.Tensor
    """[pairs, 1, left out], float64: 0 for a pair's massive channels, 1 for those that only others leave out."""

    @property
    def count(self) -> int:
        """How many pairs."""
        return self.centres.shape[1]


def pairing(means: torch.Tensor, massive: Sequence[torch.Tensor], left_out: torch.Tensor, wide: torch.dtype) -> Pairing:
    """Prepare a pairing from means [2, pairs, W] and the massive channels of each pair, for sums in dtype `wide`."""
    centres = means.new_zeros((*means.shape[:2], 1, padded(means.shape[2])), dtype=wide)
    centres[..., 0, : means.shape[2]] = means
    centres[..., left_out] = 0
    ordinary = means.new_ones((means.shape[1], 1, len(left_out)), dtype=torch.float64)
    for mask, channels in zip(ordinary, massive, strict=True):
        mask[0, torch.isin(left_out, channels)] = 0
    return Pairing(left_out, centres, means[..., left_out].double().unsqueeze(2), ordinary)


def paired_sums(states: torch.Tensor, n: int, pairs: Pairing) -> tuple[PairSums, torch.Tensor]:
    """Sums of n tensors with the others, [tensors, rows, padded W] of float32 or float64; `states` is overwritten.

    Returns those of all with all, without the channels left out, and of the pairs [3, 4, pairs, rows]: plain, centred,
    without massive channels, and of each |a|^2, |b|^2, ab, |a - b|^2 (the last NaN where not plain). float64.
    """
    count = pairs.count
    massive = states[..., pairs.left_out].double()
    states.index_fill_(2, pairs.left_out, 0)
    found = pair_sums(states[:n], states[n:])
    each = torch.arange(count, device=states.device)
    ordinary = torch.stack(
        [found.ours_sq[:count], found.theirs_sq[:count], found.dots[each, each], found.difference_sq[each, each]]
    )
    a, b = states[:count], states[n : n + count]
    a -= pairs.centres[0]
    b -= pairs.centres[1]
    centred = torch.stack([squares(a), squares(b), products(a, b)])
    ours, theirs = massive[:count], massive[n : n + count]
    sums = ordinary.new_full((3, *ordinary.shape), torch.nan)
    sums[PLAIN] = ordinary + exact_sums(ours, theirs)
    sums[CENTRED, :3] = centred + exact_sums(ours - pairs.massive_centres[0], theirs - pairs.massive_centres[1])[:3]
    sums[NO_MASSIVE, :3] = ordinary[:3] + exact_sums(ours * pairs.ordinary, theirs * pairs.ordinary)[:3]
    return found, sums


def exact_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a|^2, |b|^2, ab and |a - b|^2 over the last dimension of float64 [..., W]: [4, ...]."""
    return torch.stack([a.square().sum(-1), b.square().sum(-1), (a * b).sum(-1), (a - b).square().sum(-1)])


def lost(sums: torch.Tensor) -> torch.Tensor:
    """Which rows of which pairs float32 could not hold, of [3, 4, pairs, rows]: [pairs, rows]."""
    held: torch.Tensor = sums[:, :3].isfinite().all(1).all(0) & (sums[PLAIN, :2] >= TINY).all(0)
    return ~held


def exactly(a: torch.Tensor, b: torch.Tensor, pairs: Pairing, pair: int) -> torch.Tensor:
    """The sums of some rows of one pair, [rows, W] of any float dtype, in float64: [3, 4, rows]."""
    a, b = a.double(), b.double()
    means = pairs.centres[:, pair, 0, : a.shape[1]].double().clone()
    means[:, pairs.left_out] = pairs.massive_centres[:, pair, 0]
    keep = torch.ones(a.shape[1], dtype=torch.float64)
    keep[pairs.left_out] = pairs.ordinary[pair, 0]
    return torch.stack([exact_sums(*part) for part in ((a, b), (a - means[0], b - means[1]), (a * keep, b * keep))])
