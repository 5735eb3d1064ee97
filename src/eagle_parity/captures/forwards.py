"""What the ranks recorded of one probe, put together: its forwards in order, their tokens, their accepted rows.

Everything that could be missing is looked for here, so that a dump is complete or is not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_parity.captures.prompts import Prompt
from eagle_parity.captures.spool import Header, Record
from eagle_parity.errors import EnvironmentFailure
from eagle_parity.records import Phase


@dataclass(frozen=True)
class Answer:
    """What the server said about a probe."""

    output_ids: tuple[int, ...] | None
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class Forward:
    """One forward of one probe: what each rank's target gave, and what each rank's draft was given."""

    given: Mapping[int, Record]
    received: Mapping[int, Record]
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def header(self) -> Header:
        """What the forward was, as the first rank saw it."""
        return next(iter(self.given.values())).header

    @property
    def phase(self) -> Phase:
        """Prefill, verify or decode."""
        assert self.header.phase is not None
        return self.header.phase

    @property
    def path(self) -> list[int]:
        """The accepted rows from the root on: those that the draft is given, in its order."""
        return sorted((row for row, flag in enumerate(self.accepted) if flag), key=lambda row: self.positions[row])


@dataclass(frozen=True)
class Probe:
    """A prompt, the server's answer, and its forwards in order."""

    prompt: Prompt
    answer: Answer
    forwards: tuple[Forward, ...]
    cached: int

    @classmethod
    def make(
        cls, prompt: Prompt, answer: Answer, records: Mapping[int, Sequence[Record]], *, complete: bool = True
    ) -> Probe:
        """Match the ranks' records forward by forward, and see that nothing is missing.

        Without `complete` there are more ranks elsewhere, and rows that none of these holds may be theirs.
        """
        by_rank = {rank: _pair(own) for rank, own in records.items()}
        counts = {rank: len(pairs) for rank, pairs in by_rank.items()}
        if len(set(counts.values())) != 1 or not min(counts.values()):
            raise EnvironmentFailure(
                f"prompt {prompt.id}: the ranks recorded different forwards: "
                + ", ".join(f"rank {rank} {count}" for rank, count in counts.items()),
                fix="capture again; if it stays, report it with the server's log",
            )
        count = next(iter(counts.values()))
        sequence = [*(prompt.token_ids or ()), *(answer.output_ids or ())] if prompt.token_ids else None
        forwards = tuple(
            _forward(prompt, {rank: pairs[i] for rank, pairs in by_rank.items()}, sequence) for i in range(count)
        )
        if complete:
            for forward in forwards:
                _check_covered(prompt, forward.given, len(forward.token_ids))
        return cls(prompt, answer, forwards, _check_prompt(prompt, answer, forwards))


_Pair = tuple[Record, "Record | None"]


def _pair(records: Sequence[Record]) -> list[_Pair]:
    """Each record of the target with the one of the draft that follows it before the target's next."""
    pairs: list[_Pair] = []
    for record in records:
        if record.header.kind == "target":
            pairs.append((record, None))
        elif pairs and pairs[-1][1] is None and pairs[-1][0].header.phase == record.header.phase:
            pairs[-1] = (pairs[-1][0], record)
    return pairs


def _forward(prompt: Prompt, pairs: Mapping[int, _Pair], sequence: Sequence[int] | None) -> Forward:
    given = {rank: pair[0] for rank, pair in pairs.items()}
    received = {rank: pair[1] for rank, pair in pairs.items() if pair[1] is not None}
    first_rank, first = next(iter(given.items()))
    ids, positions = first.integers("token_ids"), first.integers("positions")
    for rank, record in given.items():
        same_tokens = record.integers("token_ids") == ids and record.integers("positions") == positions
        if record.header.phase != first.header.phase or not record.fits or not same_tokens:
            raise EnvironmentFailure(
                f"prompt {prompt.id}: rank {rank} recorded {_label(record)} where rank {first_rank} recorded "
                f"{_label(first)}"
                + ("" if same_tokens else ", with other tokens or positions")
                + ("" if record.fits else f", with states that are not its {len(record.rows)} rows"),
                fix="the ranks must run the same forwards: capture again; if it stays, report it with the server's log",
            )
    if first.header.phase != "verify":
        return Forward(given, received, tuple(ids), tuple(positions), tuple(range(-1, len(ids) - 1)), (1,) * len(ids))
    parents = _parents(first, positions)
    path = _known_path(next(iter(received.values()), None), positions[0], sequence)
    return Forward(given, received, tuple(ids), tuple(positions), parents, accepted_rows(ids, parents, path))


def _check_covered(prompt: Prompt, given: Mapping[int, Record], tokens: int) -> None:
    """See that every row lies on some rank; ranks may hold parts."""
    held = {row for record in given.values() for row in record.rows}
    if len(held) < tokens:
        lacking = sorted(set(range(tokens)) - held)
        raise EnvironmentFailure(
            f"prompt {prompt.id}: no rank recorded rows {lacking[0]}..{lacking[-1]} of a forward of {tokens} tokens",
            fix="capture again; if it stays, report it with the server's arguments",
        )


def _label(record: Record) -> str:
    return f"a {record.header.phase} forward of {record.tokens} tokens"


def _parents(record: Record, positions: Sequence[int]) -> tuple[int, ...]:
    """The row before each row of a draft tree; -1 for its root, and for all where the tree is not known."""
    if record.has("child"):
        return tree_parents(record.integers("child"), record.integers("sibling"))
    chain = list(positions) == list(range(positions[0], positions[0] + len(positions)))
    return tuple(range(-1, len(positions) - 1)) if chain else (-1,) * len(positions)


def tree_parents(child: Sequence[int], sibling: Sequence[int]) -> tuple[int, ...]:
    """Parents [N] from first-child and next-sibling links [N]; -1 for rows without one."""
    parents = [-1] * len(child)
    for row, first in enumerate(child):
        other, steps = first, 0
        while 0 <= other < len(child) and steps < len(child):
            parents[other] = row
            other, steps = sibling[other], steps + 1
    return tuple(parents)


def _known_path(received: Record | None, root: int, sequence: Sequence[int] | None) -> Sequence[int]:
    """The tokens that the server accepted after the root, the bonus token left out where it is known to be one."""
    if received is not None and received.has("accepted"):
        # accepted counts the bonus token, which has no row of its own.
        return received.integers("token_ids")[: received.integers("accepted")[0] - 1]
    return [] if sequence is None else sequence[root + 1 :]


def accepted_rows(token_ids: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> tuple[int, ...]:
    """Which rows [N] of a draft tree lie on the accepted path: its root, row 0, and below it the tokens of `path`."""
    accepted = [0] * len(token_ids)
    row = 0
    accepted[0] = 1
    for token in path:
        below = [i for i, parent in enumerate(parents) if parent == row and token_ids[i] == token]
        if not below:
            break
        row = below[0]
        accepted[row] = 1
    return tuple(accepted)


def _check_prompt(prompt: Prompt, answer: Answer, forwards: Sequence[Forward]) -> int:
    """See that the prefill rows cover the prompt without a gap; how many tokens before them came from a cache."""
    chunks = [forward for forward in forwards if forward.phase == "prefill"]
    start = chunks[0].positions[0] if chunks else None
    if start is None:
        raise EnvironmentFailure(
            f"prompt {prompt.id}: no prefill forward was recorded", fix="capture again; if it stays, report it"
        )
    end = start
    for chunk in chunks:
        begin = chunk.positions[0]
        if begin > end:
            raise EnvironmentFailure(
                f"prompt {prompt.id}: the prefill rows at positions {end}..{begin - 1} were not recorded",
                fix="capture again; if it stays, report it with the server's log",
            )
        end = max(end, begin + len(chunk.positions))
        for position, token in zip(chunk.positions, chunk.token_ids, strict=True):
            sent = prompt.token_ids
            if sent is not None and position < len(sent) and sent[position] != token:
                raise EnvironmentFailure(
                    f"prompt {prompt.id}: the server computed token {token} at position {position}, sent was "
                    f"{sent[position]}",
                    fix="something between here and the model changes the tokens: see the server's arguments",
                )
    said = answer.meta.get("cached_tokens")
    length = answer.meta.get("prompt_tokens") or (len(prompt.token_ids) if prompt.token_ids else end)
    if end < length or (type(said) is int and start > said):
        raise EnvironmentFailure(
            f"prompt {prompt.id}: of {length} tokens, those at positions {start}..{end - 1} were recorded, and the "
            f"server took {said} from its cache",
            fix="capture again; if it stays, report it with the server's log",
        )
    return start
