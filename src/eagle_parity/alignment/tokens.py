"""Which rows of two captures stand for the same token in the same context.

By token sequence and position, never by label or file order. A row counts as aligned only when every token before
it is the same on both sides, as far as the captures show them: a causal model's state depends on all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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
    remarks: list[tuple[str, _Remark]] = []
    served = [(label, *it) for label, requests in _by_label(serving.requests) for it in _strands(serving, requests)]
    for label, strand, extra in sorted(
        served, key=lambda item: item[1].first
    ):  # the index holds one position at a time
        match = index.match(strand)
        if match.remark:
            remarks.append((label, match.remark))
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
    return TokenAlignment(left, right, _merged(remarks), int(wanted.sum()))


@dataclass(frozen=True)
class _Remark:
    """A note before it is merged with others of its kind: `text` has a place for each of the positions."""

    code: str
    text: str
    positions: tuple[int, ...] = ()


def _merged(remarks: list[tuple[str, _Remark]]) -> tuple[Note, ...]:
    """One note for all remarks of a kind, however many requests there are."""
    groups: dict[tuple[str, str], list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for label, remark in remarks:
        groups[remark.code, remark.text].append((label, remark.positions))
    notes = []
    for (code, text), found in groups.items():
        columns = zip(*(positions for _, positions in found), strict=True)
        spans = [str(min(c)) if min(c) == max(c) else f"{min(c)} to {max(c)}" for c in columns]
        notes.append(Note(code, text.format(*spans), tuple(label for label, _ in found)))
    return tuple(notes)


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
    remark: _Remark | None = None


class _Index:
    """The training strands, found by what they hold at a position, by how they begin, or by any run of KEY tokens.

    Sorted, the strands with the longest beginning in common with another stand beside its place.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.strands = [
            strand for _, requests in _by_label(tokens.requests) for strand, _ in _strands(tokens, requests)
        ]
        self._firsts = sorted({strand.first for strand in self.strands})
        self._position: int | None = None
        self._there: list[_Place] = []

    def match(self, strand: Strand) -> _Match:
        """The training strand that holds the longest leading part of a serving strand."""
        best = self._in_place(strand)
        if best.remark is not None or best.count >= min(KEY, len(strand.rows)):
            return best
        for find in (self._cut_by_training, self._shifted, self._elsewhere):
            found = find(strand)
            if found is not None:
                return found
        return best

    def _in_place(self, strand: Strand) -> _Match:
        """The longest beginning at the position where the strand begins."""
        if self._position != strand.first:
            self._position = strand.first
            self._there = sorted(
                _Place(_bytes(other, at), number, at)
                for number, other in enumerate(self.strands)
                for at in np.flatnonzero(other.positions == strand.first).tolist()
            )
        count, places = _longest(self._there, _bytes(strand))
        if count == 0:
            return _Match(None)
        place = next(places)
        other = self.strands[place.strand]
        before = other.ids[: place.at]
        if (
            count >= min(KEY, len(strand.rows))
            and strand.first > 0
            and any(not np.array_equal(before, self.strands[p.strand].ids[: p.at]) for p in places)
        ):
            text = (
                "rows begin after a prefix that was not captured, and several training prompts with different "
                "beginnings fit them: left out"
            )
            return _Match(None, remark=_Remark("undetermined", text))
        remark = None
        # Where the training side is only shorter (truncated) nothing is wrong with what both hold.
        if count < len(strand.rows) and place.at + count < len(other.rows) and count >= KEY:
            text = "token ids part at position {}: rows from there on were left out"
            remark = _Remark("template-mismatch", text, (int(strand.positions[count]),))
        return _Match(other, place.at, count, remark=remark)

    def _cut_by_training(self, strand: Strand) -> _Match | None:
        """A training strand that begins inside this one: its first tokens have no rows."""
        best = _Match(None)
        for first in self._firsts:
            for here in np.flatnonzero(strand.positions == first).tolist():
                count, places = _longest(self._begins[first], _bytes(strand, here))
                if here > 0 and count >= KEY and count > best.count:
                    text = "the first {} tokens of the prompt have no rows on the training side"
                    remark = _Remark("rows-lost", text, (here,))
                    best = _Match(self.strands[next(places).strand], 0, count, begin=here, remark=remark)
        return best if best.strand is not None else None

    def _shifted(self, strand: Strand) -> _Match | None:
        """The same tokens, counted from another position."""
        count, places = _longest(self._by_ids, strand.ids.tobytes(), 8)
        if count < min(KEY, len(strand.rows)):
            return None
        for place in places:
            other = self.strands[place.strand]
            offset = strand.first - other.first
            if 0 < abs(offset) <= FARTHEST_SHIFT:
                text = f"positions differ by {offset} while the tokens are the same"
                return _Match(other, 0, count, offset=offset, remark=_Remark("token-shift", text))
        return None

    def _elsewhere(self, strand: Strand) -> _Match | None:
        """A run that begins elsewhere than its prompt has other tokens before it: another context, other states."""
        known, rows = self._runs
        mine = _run_hashes(strand.ids)
        at = np.minimum(np.searchsorted(known, mine), max(len(known) - 1, 0))
        hits = np.flatnonzero(known[at] == mine) if len(known) else at[:0]
        if len(hits) == 0:
            return None
        here = int(hits[0])
        position = int(self._positions[rows[at[here]]])
        text = (
            "training has from position {} on tokens that serving has from position {} on, with other tokens before "
            "them: left out"
        )
        return _Match(None, remark=_Remark("template-mismatch", text, (position, int(strand.positions[here]))))

    @cached_property
    def _begins(self) -> dict[int, list[_Place]]:
        """The strands' beginnings by their first position."""
        found: dict[int, list[_Place]] = defaultdict(list)
        for number, strand in enumerate(self.strands):
            found[strand.first].append(_Place(_bytes(strand), number, 0))
        return {first: sorted(places) for first, places in found.items()}

    @cached_property
    def _by_ids(self) -> list[_Place]:
        """The strands' beginnings by their tokens alone."""
        return sorted(_Place(strand.ids.tobytes(), number, 0) for number, strand in enumerate(self.strands))

    @cached_property
    def _positions(self) -> IntArray:
        """Positions of all strands in a row."""
        return np.concatenate([np.empty(0, dtype=np.int64), *(strand.positions for strand in self.strands)])

    @cached_property
    def _runs(self) -> tuple[IntArray, IntArray]:
        """Hashes of all runs of KEY tokens, sorted, and where they begin in `_positions`."""
        hashes, rows, begin = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)], 0
        for strand in self.strands:
            found = _run_hashes(strand.ids)
            hashes.append(found)
            rows.append(begin + np.arange(len(found), dtype=np.int64))
            begin += len(strand.rows)
        known = np.concatenate(hashes)
        order = np.argsort(known, kind="stable")
        return known[order], np.concatenate(rows)[order]


class _Place(NamedTuple):
    """A training row, sorted by what follows from there on."""

    rest: bytes
    strand: int
    at: int


def _bytes(strand: Strand, at: int = 0) -> bytes:
    """Positions and tokens from a row on."""
    return np.stack([strand.positions[at:], strand.ids[at:]], 1).tobytes()


def _longest(places: list[_Place], rest: bytes, size: int = 16) -> tuple[int, Iterator[_Place]]:
    """Items of `size` bytes that the best of the sorted places has in common with `rest`, and all that are as good."""
    where = bisect_left(places, (rest,))
    near = [_common(place.rest, rest) // size for place in places[max(where - 1, 0) : where + 1]]
    count = max(near, default=0)
    if count == 0:
        return 0, iter(())

    def best() -> Iterator[_Place]:
        for side in (range(where, len(places)), range(where - 1, -1, -1)):
            for i in side:
                if places[i].rest[: count * size] != rest[: count * size]:
                    break
                yield places[i]

    return count, best()


def _common(a: bytes, b: bytes) -> int:
    """Bytes that two strings begin with alike."""
    size = min(len(a), len(b))
    different = np.flatnonzero(np.frombuffer(a, np.uint8, size) != np.frombuffer(b, np.uint8, size))
    return int(different[0]) if len(different) else size


def _run_hashes(ids: IntArray) -> IntArray:
    """A number for each run of KEY tokens; equal runs have equal numbers."""
    count = max(len(ids) - KEY + 1, 0)
    found = np.zeros(count, dtype=np.int64)
    with np.errstate(over="ignore"):
        for k in range(KEY):
            found = found * np.int64(1_000_000_007) + ids[k : k + count]
    return found


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
