"""Which candidate is best, how sure that is, and who may be dropped early: paired statistics over rows.

All candidates see the same rows, so what is common to them drops out of their differences. Rows of one prompt are no
independent draws; the standard error is the larger one of rows taken as independent and of blocks of BLOCK successive
rows of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_parity.draft.bench import Bench, Order

BLOCK = 16
DROP = 6.0  # standard errors behind the leader at which a candidate leaves the race
SURE = 4.0  # … at which a winner is called: 1 in 30,000, and a search tries hundreds
FIRST = 64  # rows of the first round; every later one has four times as many, until there are ENOUGH
ENOUGH = 2000  # rows after which a race ends as soon as its winner is sure

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Standing:
    """A candidate after the rows that it saw. `excess` is its mean loss above the leader's on the same rows.

    `z` is excess / standard error, 0 for the leader, inf where two differ by the same amount everywhere.
    """

    order: Order
    loss: float
    agreement: float
    excess: float
    z: float
    rows: int
    dropped: bool


@dataclass(frozen=True)
class Race:
    """Standings, best first: those that saw every row, then those that were dropped."""

    standings: tuple[Standing, ...]

    @property
    def leader(self) -> Standing:
        """The best."""
        return self.standings[0]

    @property
    def runner_up(self) -> Standing | None:
        """The one that is hardest to tell from the best: the smallest z."""
        others = self.standings[1:]
        return min(others, key=lambda standing: (standing.z, standing.excess), default=None)


def z_scores(losses: Floats, blocks: NDArray[np.int64], leader: int) -> tuple[Floats, Floats]:
    """Mean excess over the leader and z of each row of `losses` [candidates, rows]; `blocks` [rows] are 0, 1, …"""
    differences = losses - losses[leader]
    rows, count = differences.shape[1], int(blocks.max()) + 1
    excess = differences.mean(axis=1)
    centred = differences - excess[:, None]
    by_row = centred.std(axis=1, ddof=1) / np.sqrt(rows) if rows > 1 else np.full(len(losses), np.inf)
    sums = np.zeros((len(losses), count))
    for block in range(count):
        sums[:, block] = centred[:, blocks == block].sum(axis=1)
    by_block = np.sqrt((sums**2).sum(axis=1) * count / max(count - 1, 1)) / rows if count > 1 else by_row
    error = np.maximum(by_row, by_block)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(error > 0, excess / error, np.where(excess > 0, np.inf, 0.0))
    return excess, z


def run(
    bench: Bench,
    orders: Sequence[Order],
    lessons: Sequence[int],
    *,
    keep: int = 5,
    limit: float = math.inf,
    step: Callable[[int], None] | None = None,
) -> Race:
    """Let candidates race over lessons, in rounds; a round drops those that are DROP standard errors behind.

    It ends with the last lesson, when the winner is sure on ENOUGH rows, or after `limit` candidate rows (then it says
    by its rows that some are missing). The best `keep` stay whatever happens. `step` is called with the number of
    candidate rows done.
    """
    alive = list(dict.fromkeys(orders))
    losses: dict[Order, list[Floats]] = {order: [] for order in alive}
    hits: dict[Order, list[Floats]] = {order: [] for order in alive}
    blocks: list[NDArray[np.int64]] = []
    dropped: list[Standing] = []
    rows, goal, done, standings = 0, FIRST, 0, []
    for place, number in enumerate(lessons):
        outcome = bench.try_out(alive, number)
        for order, loss, hit in zip(alive, outcome.loss.double().numpy(), outcome.hit.double().numpy(), strict=True):
            losses[order].append(loss)
            hits[order].append(hit)
        count = outcome.loss.shape[1]
        start = int(blocks[-1].max()) + 1 if blocks else 0
        if count:
            blocks.append(start + np.arange(count) // BLOCK)
        rows += count
        if step is not None:
            step(count * len(alive))
        done += count * len(alive)
        last = place == len(lessons) - 1 or (done >= limit and rows >= FIRST)
        if rows == 0 or (rows < goal and not last):
            continue
        standings = _standings(alive, losses, hits, np.concatenate(blocks), rows)
        if last or (rows >= ENOUGH and all(standing.z >= SURE for standing in standings[1:])):
            break
        goal = min(4 * rows, ENOUGH) if rows < ENOUGH else rows + ENOUGH
        gone = [s for s in standings[keep:] if s.z >= DROP]
        dropped += [Standing(s.order, s.loss, s.agreement, s.excess, s.z, s.rows, True) for s in gone]
        away = {s.order for s in gone}
        alive = [order for order in alive if order not in away]
    return Race((*standings, *sorted(dropped, key=lambda standing: standing.excess)))


def _standings(
    alive: Sequence[Order],
    losses: dict[Order, list[Floats]],
    hits: dict[Order, list[Floats]],
    blocks: NDArray[np.int64],
    rows: int,
) -> list[Standing]:
    table = np.stack([np.concatenate(losses[order]) for order in alive])
    agreed = [float(np.concatenate(hits[order]).mean()) for order in alive]
    means = table.mean(axis=1)
    excess, z = z_scores(table, blocks, int(means.argmin()))
    standings = [
        Standing(order, float(means[i]), agreed[i], float(excess[i]), float(z[i]), rows, False)
        for i, order in enumerate(alive)
    ]
    return sorted(standings, key=lambda standing: standing.loss)


def paired(better: Sequence[torch.Tensor], worse: Sequence[torch.Tensor]) -> float:
    """z of two lists of losses, one tensor [rows] a lesson: positive when `better` is."""
    blocks, start = [], 0
    for rows in better:
        blocks.append(start + np.arange(len(rows)) // BLOCK)
        start = int(blocks[-1].max()) + 1 if len(rows) else start
    table = np.stack([torch.cat(list(side)).double().numpy() for side in (better, worse)])
    _, z = z_scores(table, np.concatenate(blocks), 0)
    return float(z[1])
