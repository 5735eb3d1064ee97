"""The rows of a pass, one span a sequence: which request, which phase, and whether their context is known.

A pass records the tokens of all its sequences in a row, their positions, and one length a sequence. That tells the
phases apart: a prompt's rows end at its length, the rows of a draft tree begin there. It does not tell which rows of a
tree go on from which, nor, in a tensor dump, whose rows they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from eagle_parity.readers.passes import POSITIONS, SEQ_LENS, TOKEN_IDS, Pass
from eagle_parity.records import Phase

_HEALTH_CHECK = "HEALTH_CHECK"  # sglang's own requests: one token, now and then


@dataclass(frozen=True)
class Span:
    """Rows [begin, end) of pass `number`: consecutive tokens of one sequence."""

    number: int
    begin: int
    end: int
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    phase: Phase
    request: str
    batch: int
    forward_tokens: int


@dataclass(frozen=True)
class Found:
    """The spans that can be used, in the order of the passes, and how many rows were left out for which reason."""

    spans: tuple[Span, ...]
    left_out: Mapping[str, int]


NO_TREE = "rows of draft trees below the root: which row goes on from which was not recorded"
NO_CONTEXT = "rows that go on with something, of which nobody recorded what"
NO_LENGTHS = "rows in an order that no sequence has"
OWN = "rows of the server's own health checks"


def has_tokens(passes: Mapping[int, Pass]) -> bool:
    """Whether every pass recorded its token ids and positions."""
    return all(TOKEN_IDS in one.tensors and POSITIONS in one.tensors for one in passes.values())


def spans(passes: Mapping[int, Pass]) -> Found:
    """The spans of passes that recorded their tokens."""
    found: list[Span] = []
    left_out: dict[str, int] = {}
    open_: tuple[str, int] | None = None  # a lone sequence and its next position
    prompts = 0
    for number, one in sorted(passes.items()):
        ids, positions = one.integers(TOKEN_IDS) or [], one.integers(POSITIONS) or []
        rows = len(ids)
        parts = _parts(positions, one.integers(SEQ_LENS)) if len(positions) == rows else None
        if parts is None:
            left_out[NO_LENGTHS] = left_out.get(NO_LENGTHS, 0) + rows
            open_ = None
            continue
        rids = one.rids if one.rids is not None and len(one.rids) == len(parts) else None
        before, open_ = open_, None
        for i, (begin, end, phase, kept) in enumerate(parts):
            at = positions[begin]
            if rids is not None:
                label: str | None = None if rids[i].startswith(_HEALTH_CHECK) else rids[i]
            elif at == 0:
                prompts += 1
                label = f"sequence {prompts}"
            else:
                label = before[0] if before is not None and len(parts) == 1 and before[1] == at else None
            if label is None:
                why = NO_CONTEXT if rids is None else OWN
                left_out[why] = left_out.get(why, 0) + end - begin
                continue
            if kept < end:
                left_out[NO_TREE] = left_out.get(NO_TREE, 0) + end - kept
            if len(parts) == 1:
                open_ = (label, positions[kept - 1] + 1)
            found.append(
                Span(
                    number,
                    begin,
                    kept,
                    tuple(ids[begin:kept]),
                    tuple(positions[begin:kept]),
                    phase,
                    label,
                    batch=len(parts),
                    forward_tokens=rows,
                )
            )
    return Found(tuple(found), left_out)


def _parts(positions: Sequence[int], lengths: Sequence[int] | None) -> list[tuple[int, int, Phase, int]] | None:
    """(begin, end, phase, end of the rows to keep) a sequence; None where positions and lengths make no sense."""
    if lengths is None:
        breaks = [i + 1 for i, (a, b) in enumerate(pairwise(positions)) if b != a + 1]
        edges = [0, *breaks, len(positions)]
        begun = [(a, b) for a, b in pairwise(edges) if b > a]
        # Without lengths a chunk and a draft tree look alike; only a prompt from its first token on is certain.
        return [(a, b, "prefill", b) for a, b in begun] if all(positions[a] == 0 for a, _ in begun) else None
    begin, extended = 0, list[tuple[int, int, Phase, int]]()
    for length in lengths:
        end = begin
        while end < len(positions) and positions[end] < length and positions[end] == positions[begin] + end - begin:
            end += 1
        if end == begin or positions[end - 1] != length - 1:
            break
        extended.append((begin, end, "decode" if end == begin + 1 and length > 1 else "prefill", end))
        begin = end
    if begin == len(positions) and len(extended) == len(lengths):
        return extended
    size, rest = divmod(len(positions), max(len(lengths), 1))
    roots = [i * size for i in range(len(lengths))]
    if size == 0 or rest or any(positions[root] != length for root, length in zip(roots, lengths, strict=True)):
        return None
    return [(root, root + size, "verify", root + 1) for root in roots]


def given(passes: Mapping[int, Pass], rows: Mapping[int, int], sequences: Sequence[tuple[str, Sequence[int]]]) -> Found:
    """The spans of passes without tokens, of which the caller knows the `sequences` in order.

    Passes of one row are decode steps and health checks: left out. The others must be as many and as long as the
    sequences. Raises LengthsDiffer, for the caller knows what to say about either side.
    """
    prompts = {number: count for number, count in rows.items() if count > 1}
    if sorted(passes) != sorted(rows) or list(prompts.values()) != [len(ids) for _, ids in sequences]:
        raise LengthsDiffer(list(prompts.values()))
    made = [
        Span(number, 0, len(ids), tuple(ids), tuple(range(len(ids))), "prefill", label, 1, len(ids))
        for number, (label, ids) in zip(prompts, sequences, strict=True)
    ]
    single = sum(count for count in rows.values() if count == 1)
    return Found(tuple(made), {NO_CONTEXT: single} if single else {})


class LengthsDiffer(Exception):
    """The passes' row counts, which are not those of the sequences."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.lengths = lengths
