"""Negative controls: data that must not match, or the instrument is broken."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from eagle_parity.alignment.channels import ordinary_rows
from eagle_parity.alignment.matching import sample
from eagle_parity.alignment.views import RankView, View
from eagle_parity.diagnosis.case import Case, once
from eagle_parity.diagnosis.judgement import MIN_ROWS
from eagle_parity.metrics.distances import rel_l2
from eagle_parity.metrics.distribution import median
from eagle_parity.records import IntArray

ROWS = 32  # that a control takes: what must fail by far needs no more


@dataclass(frozen=True)
class Rolled:
    """Rows that stand for other tokens: of some aligned rows (`index`), `other` is another token than `own`."""

    index: IntArray
    own: IntArray
    other: IntArray


@once
def roll_rows(case: Case) -> Rolled:
    """Roll by the amount that gives most rows a different token (repeated tokens have equal embeddings), and among
    these by the one nearest to half of the rows: neighbours have most of their context in common.
    """
    aligned = case.alignment.serving
    index = sample(len(aligned), ROWS)
    ids = case.serving.tokens.token_ids[aligned[index]]
    rows = np.arange(len(ids))
    best = max(
        range(1, len(ids)),
        key=lambda shift: (int((ids[rows - shift] != ids).sum()), -abs(shift - len(ids) / 2)),
        default=0,
    )
    own = np.flatnonzero(ids[rows - best] != ids)
    return Rolled(index, own, rows[own - best])


def controls(case: Case, view: View | None, reference: RankView) -> tuple[float | None, float | None]:
    """Median distances of data that must not match: each row against another token's, and channels rolled by one."""
    rolled, alignment, massive = roll_rows(case), case.alignment, case.massive
    if len(rolled.index) < MIN_ROWS:
        return None, None
    truth = ordinary_rows(reference, alignment.training[rolled.index], massive, reference.width, "theirs")
    ours = truth
    if view is not None:
        ours = ordinary_rows(view, alignment.serving[rolled.index], massive, reference.width, "states")
    dims = median(rel_l2(ours.roll(1, dims=-1), truth))
    if len(rolled.own) < MIN_ROWS:
        return None, dims
    own, other = (torch.from_numpy(rows) for rows in (rolled.own, rolled.other))
    return median(rel_l2(ours.index_select(0, other), truth.index_select(0, own))), dims
