"""Which rows of two captures stand for the same token in the same context.

By token sequence and position, never by label or file order. A row counts as aligned only when every token before
it is the same on both sides, as far as the captures show them: a causal model's state depends on all of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from eagle_parity.records import IntArray, Request, Tokens

KEY = 8  # tokens that a match must have in common before it is believed
FARTHEST_SHIFT = 3  # positions counted from 1, or from after a BOS: not more


@dataclass(frozen=True)
class Strand:
    """Rows of one context in order: a prompt (chunks stitched), and what verify and decode rows add to it."""

    rows: IntArray
    ids: IntArray
    positions: IntArray

    @property
    def first(self) -> int:
        """Position of the first row; above 0 when a prefix was cached or lost."""
        return int(self.positions[0])


@dataclass(frozen=True)
class Note:
    """Something that alignment noticed: `code` is a finding code, `requests` the labels concerned."""

    code: str
    message: str
    requests: tuple[str, ...]


@dataclass(frozen=True)
class TokenAlignment:
    """Row i of both arrays is the same token in the same context; int64 [N], in serving order."""

    training: IntArray
    serving: IntArray
    notes: tuple[Note, ...]
    unaligned: int
    """Serving rows that have no counterpart, rejected branches of draft trees left out: nobody replays those."""


def align(training: Tokens, serving: Tokens) -> TokenAlignment:
    """Pair the rows of two captures."""
    index = _Index(training)
    pairs: list[tuple[IntArray, IntArray]] = []
    notes: list[Note] = []
    for label, requests in _by_label(serving.requests):
        for strand, extra in _strands(serving, requests):
            match = index.match(strand)
            if match.note:
                notes.append(Note(match.note[0], match.note[1], (label,)))
            if match.strand is None:
                continue
            count, at, begin = match.count, match.at, match.begin
            pairs.append((match.strand.rows[at : at + count], strand.rows[begin : begin + count]))
            if begin + count == len(strand.rows):
                end = int(strand.positions[-1])
                pairs.extend(_continuation(serving, extra, match.strand, match.offset, end))
    if pairs:
        left, right = (np.concatenate(side) for side in zip(*pairs, strict=True))
        order = np.argsort(right, kind="stable")
        left, right = left[order], right[order]
    else:
        left = right = np.empty(0, dtype=np.int64)
    wanted = np.ones(len(serving.token_ids), dtype=bool) if serving.accepted is None else serving.accepted != 0
    wanted[right] = False
    return TokenAlignment(left, right, _merged(notes), int(wanted.sum()))


def _merged(notes: list[Note]) -> tuple[Note, ...]:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for note in notes:
        groups[note.code, note.message].extend(note.requests)
    return tuple(Note(code, message, tuple(labels)) for (code, message), labels in groups.items())


def _by_label(requests: tuple[Request, ...]) -> list[tuple[str, list[Request]]]:
    groups: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        groups[request.id].append(request)
    return list(groups.items())


def _rows(tokens: Tokens, request: Request) -> Strand:
    span = slice(request.begin, request.end)
    rows = np.arange(request.begin, request.end, dtype=np.int64)
    return Strand(rows, tokens.token_ids[span], tokens.positions[span])


def _strands(tokens: Tokens, requests: list[Request]) -> list[tuple[Strand, list[Request]]]:
    """Prefill strands of one label, each with the verify and decode requests that came after it.

    Labels may repeat: a prefill that does not continue the position of the one before begins a new strand.
    """
    found: list[tuple[Strand, list[Request]]] = []
    for request in requests:
        if request.begin == request.end:
            continue
        if request.phase != "prefill" and found:
            found[-1][1].append(request)
            continue
        strand = _rows(tokens, request)
        if request.phase != "prefill":
            # No prompt rows to hang these on: their context is unknown, only a plain run can be matched.
            if np.all(np.diff(strand.positions) == 1):
                found.append((strand, []))
            continue
        if found and not found[-1][1] and strand.first == int(found[-1][0].positions[-1]) + 1:
            before = found.pop()[0]
            strand = Strand(
                np.concatenate([before.rows, strand.rows]),
                np.concatenate([before.ids, strand.ids]),
                np.concatenate([before.positions, strand.positions]),
            )
        found.append((strand, []))
    return found


@dataclass(frozen=True)
class _Match:
    strand: Strand | None
    at: int = 0
    """First aligned row of the training strand."""
    count: int = 0
    begin: int = 0
    """First aligned row of the serving strand."""
    offset: int = 0
    """Serving position minus training position of an aligned row."""
    note: tuple[str, str] | None = None


class _Index:
    """The training strands, found by their leading tokens or by any run of KEY tokens inside."""

    def __init__(self, tokens: Tokens) -> None:
        self.strands = [
            strand for _, requests in _by_label(tokens.requests) for strand, _ in _strands(tokens, requests)
        ]
        self._starts: dict[int, dict[int, list[tuple[int, int]]]] = {}
        self._runs: dict[tuple[int, ...], list[tuple[int, int]]] | None = None

    def _at(self, position: int, token: int) -> list[tuple[int, int]]:
        """The training rows (strand, row) with this token at this position."""
        if position not in self._starts:
            index: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for number, strand in enumerate(self.strands):
                for row in np.flatnonzero(strand.positions == position).tolist():
                    index[int(strand.ids[row])].append((number, row))
            self._starts[position] = index
        return self._starts[position].get(token, [])

    def match(self, strand: Strand) -> _Match:
        """The training strand that holds the longest leading part of a serving strand."""
        best = self._in_place(strand)
        if best.note is not None:
            return best
        if best.count >= min(KEY, len(strand.rows)):
            if best.count < len(strand.rows):
                return self._cut(strand, best)
            return best
        moved = self._moved(strand)
        return moved if moved.strand is not None or moved.note else best

    def _in_place(self, strand: Strand) -> _Match:
        found: list[tuple[int, int, Strand]] = []
        for number, at in self._at(strand.first, int(strand.ids[0])):
            other = self.strands[number]
            found.append((_common(strand, other, at), at, other))
        if not found:
            return _Match(None)
        count = max(item[0] for item in found)
        best = [item for item in found if item[0] == count]
        _, at, other = best[0]
        if strand.first > 0 and any(not np.array_equal(other.ids[:at], o.ids[:a]) for _, a, o in best[1:]):
            text = (
                "rows begin after a prefix that was not captured, and several training prompts with different "
                "beginnings fit them: left out"
            )
            return _Match(None, note=("undetermined", text))
        return _Match(other, at, count)

    def _cut(self, strand: Strand, match: _Match) -> _Match:
        assert match.strand is not None
        rest = len(match.strand.rows) - match.at - match.count
        if rest == 0:
            return match  # the training side is only shorter (truncated); nothing is wrong with what both hold
        where = int(strand.positions[match.count])
        note = ("template-mismatch", f"token ids part at position {where}: rows from there on were left out")
        return _Match(match.strand, match.at, match.count, note=note)

    def _moved(self, strand: Strand) -> _Match:
        """The longest common run anywhere: shifted positions, a beginning that training lost, or another template."""
        if self._runs is None:
            self._runs = defaultdict(list)
            for number, other in enumerate(self.strands):
                ids = other.ids.tolist()
                for at in range(len(ids) - KEY + 1):
                    self._runs[tuple(ids[at : at + KEY])].append((number, at))
        ids = strand.ids.tolist()
        best: tuple[int, int, int, Strand] | None = None  # run length, serving at, training at, strand
        for here in range(len(ids) - KEY + 1):
            if best and best[1] == 0 and best[0] >= len(ids) - here:
                break
            for number, at in self._runs.get(tuple(ids[here : here + KEY]), ()):
                other = self.strands[number]
                same = _equal_run(strand.ids[here:], other.ids[at:])
                if best is None or same > best[0]:
                    best = (same, here, at, other)
        if best is None:
            return _Match(None)
        same, here, at, other = best
        if at == 0 and other.first == int(strand.positions[here]):
            note = ("rows-lost", f"the first {here} tokens of the prompt have no rows on the training side")
            return _Match(other, at, same, begin=here, note=note)
        offset = int(strand.positions[here]) - int(other.positions[at])
        if here == at == 0 and abs(offset) <= FARTHEST_SHIFT:
            note = ("token-shift", f"positions differ by {offset} while the tokens are the same")
            return _Match(other, at, same, offset=offset, note=note)
        # A run that begins elsewhere than its prompt has other tokens before it: another context, other states.
        text = (
            f"training has from position {int(other.positions[at])} on the {same} tokens that serving has from "
            f"{int(strand.positions[here])} on, with other tokens before them: left out"
        )
        return _Match(None, note=("template-mismatch", text))


def _equal_run(a: IntArray, b: IntArray) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def _common(strand: Strand, other: Strand, at: int) -> int:
    return min(
        _equal_run(strand.ids, other.ids[at:]),
        _equal_run(strand.positions, other.positions[at:]),
    )


def _continuation(
    tokens: Tokens, requests: list[Request], other: Strand, offset: int, end: int
) -> list[tuple[IntArray, IntArray]]:
    """Verify and decode rows whose whole path from the prompt on is what training has.

    A tree's row needs its parent aligned; a root, or a row without known parents, needs its position to follow an
    aligned one. Rejected branches drop out by themselves: their tokens are not the training side's.
    """
    where = {int(p) + offset: i for i, p in enumerate(other.positions)}
    reached = {end}
    pairs: list[tuple[IntArray, IntArray]] = []
    for request in requests:
        rows = _rows(tokens, request)
        parents = _parents(tokens, rows)
        matched: dict[int, int] = {}
        for row, token, position in zip(rows.rows.tolist(), rows.ids.tolist(), rows.positions.tolist(), strict=True):
            parent = parents.get(row)
            # A parent outside this request is the context before it.
            inside = parent is not None and request.begin <= parent < request.end
            known = parent in matched if inside else parent is not None and position - 1 in reached
            at = where.get(position)
            if known and at is not None and int(other.ids[at]) == token:
                matched[row] = int(other.rows[at])
                reached.add(position)
        pairs.append((np.array(list(matched.values()), dtype=np.int64), np.array(list(matched), dtype=np.int64)))
    return pairs


def _parents(tokens: Tokens, rows: Strand) -> dict[int, int]:
    """The row before each row in its context; rows of a tree whose branches cannot be told apart are left out."""
    if tokens.parents is not None:
        return {int(row): int(tokens.parents[row]) for row in rows.rows}
    chain = rows.rows
    if len(np.unique(rows.positions)) < len(rows.positions):
        chain = chain[tokens.accepted[chain] != 0] if tokens.accepted is not None else chain[:0]
    return dict(zip(chain.tolist(), [-1, *chain[:-1].tolist()], strict=False))
