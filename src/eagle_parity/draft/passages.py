"""Passages: the rows of a capture that follow one another from position 0 on, which a draft can read as one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from eagle_parity.records import IntArray, Request, Tokens


@dataclass(frozen=True)
class Passage:
    """`rows` of the capture, their token ids, and which of them the loss mask counts; int64 and bool [T]."""

    rows: IntArray
    ids: IntArray
    counted: np.ndarray[tuple[int], np.dtype[np.bool_]]

    def __len__(self) -> int:
        return len(self.rows)

    def cut(self, length: int) -> Passage:
        """Its first rows: a causal draft does the same with them."""
        return Passage(self.rows[:length], self.ids[:length], self.counted[:length])


def find_passages(tokens: Tokens, *, at_least: int = 3) -> tuple[Passage, ...]:
    """The passages of a capture, in row order; shorter ones than `at_least` cannot be judged and are left out.

    Prefill chunks of one request are joined by position, accepted verify and decode rows follow. A row whose
    beginning was not captured (a prefix cache) belongs to no passage: the draft's attention would lack it.
    """
    found: list[list[int]] = []
    open_at: dict[str, int] = {}
    for request in sorted(tokens.requests, key=lambda request: request.begin):
        for row in _accepted(tokens, request):
            position = int(tokens.positions[row])
            if position == 0:
                open_at[request.id] = len(found)
                found.append([row])
                continue
            number = open_at.get(request.id)
            if number is not None and position == len(found[number]):
                found[number].append(row)
    joined = [np.array(rows, dtype=np.int64) for rows in found if len(rows) >= at_least]
    mask = tokens.loss_mask
    everything = np.ones(len(tokens.token_ids), dtype=bool)
    counted = everything if mask is None else mask.astype(bool)
    return tuple(Passage(rows, tokens.token_ids[rows], counted[rows]) for rows in joined)


def _accepted(tokens: Tokens, request: Request) -> Sequence[int]:
    rows = range(request.begin, request.end)
    if request.phase != "verify":
        return rows
    if tokens.accepted is None:
        return ()
    kept = [row for row in rows if tokens.accepted[row]]
    return sorted(kept, key=lambda row: int(tokens.positions[row]))


def windows(passages: Sequence[Passage], length: int) -> tuple[Passage, ...]:
    """Passages cut into pieces of `length` rows: the first piece of every passage, then the second ones, and so on.

    A later piece lacks what the draft's attention would have seen before it; its states do not. Positions count from
    the piece's own beginning, which a rotary embedding cannot tell from the true ones.
    """
    pieces = [
        (at, Passage(p.rows[at : at + length], p.ids[at : at + length], p.counted[at : at + length]))
        for p in passages
        for at in range(0, len(p), length)
        if len(p) - at >= 3
    ]
    return tuple(piece for _, piece in sorted(pieces, key=lambda pair: pair[0]))


def limited(passages: Sequence[Passage], rows: int) -> tuple[Passage, ...]:
    """The first passages that together have about `rows` rows; the last one is cut."""
    kept: list[Passage] = []
    for passage in passages:
        left = rows - sum(map(len, kept))
        if left < 3:
            break
        kept.append(passage.cut(left))
    return tuple(kept)


def uncounted(passages: Sequence[Passage]) -> tuple[Passage, ...]:
    """The same with every row counting."""
    return tuple(replace(p, counted=np.ones(len(p), dtype=bool)) for p in passages)
