"""A capture's states as the replay reads them: by boundary, or as a server fed them, by token row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from eagle_parity.alignment.tokens import TokenAlignment
from eagle_parity.alignment.views import View, rank_view
from eagle_parity.draft.acceptance import Fed
from eagle_parity.draft.passages import Passage
from eagle_parity.draft.teacher import Read
from eagle_parity.records import FINAL_NORM, Boundary, Capture, IntArray, Tokens, boundary_name


def stored_states(capture: Capture, width: int) -> tuple[Boundary, ...]:
    """The boundaries that the first rank holds whole, `width` wide and for every token; `final.norm` last."""
    rank = capture.ranks[0]
    names = set(capture.names(rank))
    found: list[Boundary] = [*capture.facts.boundaries, FINAL_NORM]
    return tuple(
        boundary
        for boundary in found
        if boundary_name(boundary) in names
        and capture.spec(rank, boundary_name(boundary)).width == width
        and capture.rows(rank, boundary_name(boundary)) is None
    )


def reader(capture: Capture) -> Read:
    """Rows of a boundary from the first rank."""

    def read(boundary: Boundary, rows: IntArray) -> torch.Tensor:
        return rank_view(capture, capture.ranks[0], boundary_name(boundary)).read(rows)

    return read


def ordered(capture: Capture, order: Sequence[Boundary]) -> Fed:
    """What the draft would be fed with these boundaries in its slots, in this order."""
    read = reader(capture)

    def fed(rows: IntArray) -> torch.Tensor:
        return torch.cat([read(boundary, rows).float() for boundary in order], dim=-1)

    return fed


def served(slots: Sequence[View], alignment: TokenAlignment) -> Fed:
    """What a server fed to the draft, asked by training row. Rows must be aligned (see `aligned`)."""
    where = dict(zip(alignment.training.tolist(), alignment.serving.tolist(), strict=True))

    def fed(rows: IntArray) -> torch.Tensor:
        theirs = np.array([where[row] for row in rows.tolist()], dtype=np.int64)
        return torch.cat([slot.read(theirs).float() for slot in slots], dim=-1)

    return fed


def aligned(passages: Sequence[Passage], alignment: TokenAlignment) -> tuple[Passage, ...]:
    """Training passages as far as the server's rows go, from their beginning; the last token needs no state."""
    known = set(alignment.training.tolist())
    kept = []
    for passage in passages:
        count = next((i for i, row in enumerate(passage.rows.tolist()) if row not in known), len(passage))
        cut = passage.cut(min(count + 1, len(passage)))
        if len(cut) >= 3:
            kept.append(cut)
    return tuple(kept)


def prompt_lengths(passages: Sequence[Passage], alignment: TokenAlignment, serving: Tokens) -> list[int]:
    """How many leading tokens of each training passage the server was given; the rest it generated and verified.

    0 where none of a passage's rows was a verify row, so that nothing says where its prompt ends.
    """
    phase = np.zeros(len(serving.token_ids), dtype=bool)
    for request in serving.requests:
        phase[request.begin : request.end] = request.phase != "prefill"
    generated = set(alignment.training[phase[alignment.serving]].tolist())
    return [next((i for i, row in enumerate(p.rows.tolist()) if row in generated), 0) for p in passages]
