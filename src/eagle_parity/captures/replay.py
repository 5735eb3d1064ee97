"""Replay: the token sequences that a server saw, put together again from the rows of its dump.

A server computes one sequence over many forwards: the prompt in one or more prefill chunks, then a decode row or a
draft tree a step, of which some rows are accepted. The training side computes it in one forward, so it needs the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from eagle_parity.captures.prompts import TokenSequence
from eagle_parity.records import Request, Tokens


@dataclass(frozen=True)
class Replay:
    """The sequences that can be computed again, and one sentence for each thing that cannot."""

    sequences: tuple[TokenSequence, ...]
    skipped: tuple[str, ...]


@dataclass
class _Open:
    """A sequence that later forwards may go on with."""

    id: str
    token_ids: list[int] = field(default_factory=list)

    def extend(self, begin: int, token_ids: Sequence[int]) -> bool:
        """Go on with tokens at positions begin, begin + 1, …

        Positions already known may come again with the same tokens (the request was sent twice, and the second time
        its beginning came from the cache). False when there is a gap or another token, and then nothing is taken.
        """
        known = self.token_ids[begin : begin + len(token_ids)]
        if not 0 <= begin <= len(self.token_ids) or known != list(token_ids[: len(known)]):
            return False
        self.token_ids.extend(token_ids[len(known) :])
        return True


def replay(tokens: Tokens) -> Replay:
    """The sequences behind the rows of a capture, in the order in which they begin.

    Rows are taken request by request, in row order. Prefill (and decode) rows of one id are stitched by position;
    position 0 begins a new sequence, since ids are labels and may repeat. Of verify rows the accepted ones
    follow, in position order, if they form one path (`parents`, where given) that goes on with the sequence.
    Identical sequences, and those that are the beginning of another, are computed once. What cannot be replayed is
    named in `skipped`: rows behind a prefix that came from the server's cache, gaps, contradictions, verify rows
    without `accepted`.
    """
    sequences: list[_Open] = []
    latest: dict[str, _Open | None] = {}
    skipped: dict[str, None] = {}  # an ordered set: a request complains once about a thing
    for request in sorted(tokens.requests, key=lambda request: request.begin):
        if request.begin == request.end:
            continue
        rows, why = _path(tokens, request)
        if why:
            skipped[f"request {request.id}: {why}"] = None
        if not rows:
            continue
        begin, ids = int(tokens.positions[rows[0]]), [int(tokens.token_ids[row]) for row in rows]
        current = latest.get(request.id)
        if begin == 0:
            current = latest[request.id] = _Open(request.id, ids)
            sequences.append(current)
        elif current is not None:
            if not current.extend(begin, ids):
                skipped[
                    f"request {request.id}: {request.phase} rows at positions {begin}..{begin + len(ids) - 1} do not "
                    f"go on with the {len(current.token_ids)} tokens before them"
                ] = None
                latest[request.id] = None  # whatever comes later belongs to a context that is not known
        elif request.id not in latest:
            latest[request.id] = None
            cached = "" if request.cached_tokens is None else f" ({request.cached_tokens} came from the prefix cache)"
            skipped[
                f"request {request.id}: its first row is at position {begin}, the tokens before it were not "
                f"captured{cached}"
            ] = None
    return Replay(_distinct(sequences), tuple(skipped))


def _path(tokens: Tokens, request: Request) -> tuple[list[int], str | None]:
    """The rows of a request that follow one another, and why it is not all of them."""
    rows = list(range(request.begin, request.end))
    if request.phase == "verify":
        if tokens.accepted is None:
            return [], "its verify rows do not say which were accepted"
        rows = sorted((row for row in rows if tokens.accepted[row]), key=lambda row: int(tokens.positions[row]))
    for i, row in enumerate(rows):
        if not _follows(tokens, request, rows[i - 1] if i else None, row):
            kind = "accepted verify" if request.phase == "verify" else request.phase
            return rows[:i], f"its {kind} rows form no single path at position {int(tokens.positions[row])}"
    return rows, None


def _follows(tokens: Tokens, request: Request, previous: int | None, row: int) -> bool:
    parent = int(tokens.parents[row]) if request.phase == "verify" and tokens.parents is not None else None
    if previous is None:  # the root of a draft tree: what it goes on with lies in an earlier forward
        return parent is None or not request.begin <= parent < request.end
    step = int(tokens.positions[row]) - int(tokens.positions[previous])
    return step == 1 and parent in (None, previous)


def _distinct(sequences: Sequence[_Open]) -> tuple[TokenSequence, ...]:
    # In a sorted list a sequence comes right before the ones that it begins.
    order = sorted(range(len(sequences)), key=lambda i: (sequences[i].token_ids, -i))
    kept = set(order)
    for i, following in pairwise(order):
        ids = sequences[i].token_ids
        if sequences[following].token_ids[: len(ids)] == ids:
            kept.discard(i)
    return tuple(TokenSequence(sequences[i].id, tuple(sequences[i].token_ids)) for i in sorted(kept))
