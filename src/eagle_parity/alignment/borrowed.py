"""Boundaries that the training side does not store, taken from other captures of the same target.

Training files hold what the draft is fed, three states mostly. A slot that holds none of these can only be named
against the rest: a map of the target made by a server (`dump serving --boundaries all`) or by a forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_parity.alignment.matching import sample, training_views
from eagle_parity.alignment.ranks import study_ranks
from eagle_parity.alignment.tokens import align
from eagle_parity.alignment.views import RankView, rank_view
from eagle_parity.records import Boundary, Capture, IntArray

PROBE_ROWS = 64  # on which a capture's ranks are asked whether they agree


def borrow(
    training: Capture, others: Sequence[Capture], rows: IntArray
) -> tuple[dict[Boundary, RankView], tuple[str, ...]]:
    """The boundaries that some capture holds on all of the training rows and `training` lacks; the first one's counts.

    They are read by the training side's row numbers. With one sentence for each capture that could not be used.
    """
    stored = training_views(training)
    width = next((view.width for view in stored.values()), None)
    found: dict[Boundary, RankView] = {}
    remarks = []
    for other in others:
        lent = {b: view for b, view in training_views(other).items() if b not in stored and view.width == width}
        if not lent:
            continue
        common = align(training.tokens, other.tokens)
        index = np.full(len(training.tokens.token_ids), -1, dtype=np.int64)
        index[common.training] = common.serving
        held = int((index[rows] >= 0).sum())
        if held < len(rows):
            remarks.append(
                f"{len(rows) - held} of {len(rows)} rows in the reference {other.path}, so its boundaries were not used"
            )
            continue
        probe = common.serving[sample(len(common.serving), PROBE_ROWS)]
        for boundary, view in lent.items():
            if boundary in found:
                continue
            if study_ranks(other, view.name, probe, width).shape not in ("equal", "rounding", "one-rank"):
                remarks.append(f"{view.name} of the reference {other.path}, whose ranks differ")
                continue
            found[boundary] = _by_training_row(other, view, index)
    return found, tuple(remarks)


def _by_training_row(other: Capture, view: RankView, index: IntArray) -> RankView:
    """The same tensor, read by the training side's row numbers."""
    own = rank_view(other, view.rank, view.name).index
    mapped = index if own is None else np.where(index >= 0, own[index], -1)
    return RankView(other, view.rank, view.name, view.width, mapped)
