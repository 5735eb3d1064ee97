"""What the server's own boundaries say of its slots, where the training side stores too little to say it."""

from __future__ import annotations

from functools import lru_cache

import torch

from eagle_parity.alignment.views import rank_view
from eagle_parity.diagnosis.case import Case, TensorCase
from eagle_parity.diagnosis.judgement import MIN_ROWS
from eagle_parity.records import Boundary, boundary_name


@lru_cache(maxsize=1)
def own_boundaries(case: Case) -> dict[str, Boundary]:
    """Slots that are bit by bit a boundary which the serving side stores and the training side does not, by name.

    Nothing is estimated: layers that hardly change the stream are told apart as well. A slot that equals its expected
    boundary too (a buffer of both) is left to the comparison with the training side.
    """
    found: dict[str, Boundary] = {}
    for slot in case.slots:
        if slot.view is None or not isinstance(slot.expected, int) or len(case.probe) < MIN_ROWS:
            continue
        held = [b for b in case.serving.facts.boundaries if b != slot.expected and b not in case.boundaries]
        equal = [b for b in held if _equal(case, slot, b)]
        if len(equal) == 1 and not _equal(case, slot, slot.expected):
            found[slot.name] = equal[0]
    return found


def _equal(case: Case, slot: TensorCase, boundary: Boundary) -> bool:
    rank, name = slot.ranks.ranks[0], boundary_name(boundary)
    if slot.view is None or name not in case.serving.names(rank):
        return False
    view, rows = rank_view(case.serving, rank, name), case.alignment.serving[case.probe]
    return bool(view.holds(rows).all()) and torch.equal(view.read(rows).float(), slot.view.read(rows).float())
