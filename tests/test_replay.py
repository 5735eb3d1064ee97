from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_parity.captures.replay import replay
from eagle_parity.records import Phase, Request, Tokens


@dataclass
class Table:
    """A token table in the making. A row: token id, position, parent (-1: none), accepted."""

    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def prefill(self, label: str, ids: Sequence[int], begin: int = 0, phase: Phase = "prefill") -> None:
        self.add(label, [(token, begin + i, -1, 0) for i, token in enumerate(ids)], phase)

    def verify(self, label: str, rows: Iterable[tuple[int, int, int, int]]) -> None:
        first = len(self.rows)
        self.add(label, [(t, p, first + parent if parent >= 0 else -1, a) for t, p, parent, a in rows], "verify")

    def add(self, label: str, rows: list[tuple[int, int, int, int]], phase: Phase) -> None:
        begin = len(self.rows)
        self.rows += rows
        self.requests.append(Request(label, begin, len(self.rows), phase))

    def tokens(self) -> Tokens:
        ids, positions, parents, accepted = np.array(self.rows, dtype=np.int64).reshape(-1, 4).T
        return Tokens(ids, positions, tuple(self.requests), None, parents, accepted)


def ids_of(tokens: Tokens) -> list[tuple[int, ...]]:
    return [sequence.token_ids for sequence in replay(tokens).sequences]


def test_chunks_a_draft_tree_and_a_decode_row() -> None:
    table = Table()
    table.prefill("a", [10, 11])
    table.prefill("b", [20])
    table.prefill("a", [12], begin=2)
    # root 13, children 90 (rejected) and 14 (accepted), grandchild 15 of 14 (accepted), 91 of 90
    table.verify("a", [(13, 3, -1, 1), (90, 4, 0, 0), (14, 4, 0, 1), (91, 5, 1, 0), (15, 5, 2, 1)])
    table.prefill("a", [16], begin=6, phase="decode")
    found = replay(table.tokens())
    assert [(s.id, s.token_ids) for s in found.sequences] == [("a", (10, 11, 12, 13, 14, 15, 16)), ("b", (20,))]
    assert found.skipped == ()


def test_a_prefix_from_the_cache_is_named() -> None:
    table = Table()
    table.prefill("warm", [5, 6], begin=3)
    table.verify("warm", [(7, 5, -1, 1)])
    table.prefill("cold", [1])
    table.requests[0] = replace(table.requests[0], cached_tokens=3)
    found = replay(table.tokens())
    assert [s.id for s in found.sequences] == ["cold"]
    assert found.skipped == (
        "request warm: its first row is at position 3, the tokens before it were not captured "
        "(3 came from the prefix cache)",
    )


def test_a_request_sent_twice_may_be_warm_the_second_time() -> None:
    table = Table()
    table.prefill("a", [1, 2, 3])
    table.prefill("a", [3], begin=2)
    table.verify("a", [(4, 3, -1, 1)])
    assert ids_of(table.tokens()) == [(1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("begin", "ids"), [(4, [9]), (2, [8]), (-1, [3])], ids=["a gap", "another token", "a negative position"]
)
def test_what_does_not_go_on_ends_a_sequence(begin: int, ids: list[int]) -> None:
    table = Table()
    table.prefill("a", [1, 2, 3])
    table.prefill("a", ids, begin=begin)
    table.prefill("a", [4], begin=3)  # its context is unknown by now
    found = replay(table.tokens())
    assert [s.token_ids for s in found.sequences] == [(1, 2, 3)]
    assert len(found.skipped) == 1
    assert f"positions {begin}..{begin} do not go on with the 3 tokens" in found.skipped[0]


@pytest.mark.parametrize(
    "rows",
    [
        [(4, 3, -1, 1), (5, 4, 0, 1), (6, 4, 0, 1)],  # two of one position
        [(4, 3, -1, 1), (5, 4, 0, 1), (6, 6, 1, 1)],  # a hole
        [(4, 3, -1, 1), (5, 4, 0, 1), (9, 4, 0, 0), (6, 5, 2, 1)],  # the child of a rejected row
    ],
)
def test_accepted_rows_that_form_no_path(rows: list[tuple[int, int, int, int]]) -> None:
    table = Table()
    table.prefill("a", [1, 2, 3])
    table.verify("a", rows)
    found = replay(table.tokens())
    assert [s.token_ids for s in found.sequences] == [(1, 2, 3, 4, 5)]
    assert "accepted verify rows form no single path" in found.skipped[0]


def test_accepted_rows_may_lie_in_any_order() -> None:
    table = Table()
    table.prefill("a", [1])
    table.verify("a", [(4, 3, 2, 1), (2, 1, -1, 1), (3, 2, 1, 1)])
    assert ids_of(table.tokens()) == [(1, 2, 3, 4)]


def test_a_first_accepted_row_that_hangs_on_a_rejected_one() -> None:
    table = Table()
    table.prefill("a", [1])
    table.verify("a", [(9, 0, -1, 0), (2, 1, 0, 1)])
    found = replay(table.tokens())
    assert [s.token_ids for s in found.sequences] == [(1,)]
    assert found.skipped == ("request a: its accepted verify rows form no single path at position 1",)


def test_verify_rows_without_accepted_are_left_out() -> None:
    table = Table()
    table.prefill("a", [1, 2])
    table.verify("a", [(3, 2, -1, 1)])
    found = replay(replace(table.tokens(), accepted=None, parents=None))
    assert [s.token_ids for s in found.sequences] == [(1, 2)]
    assert found.skipped == ("request a: its verify rows do not say which were accepted",)


def test_equal_sequences_and_beginnings_are_computed_once() -> None:
    table = Table()
    for label, ids in [("a", [1, 2]), ("b", [1, 2, 3]), ("c", [1, 2, 3]), ("d", [1, 3]), ("e", [1])]:
        table.prefill(label, ids)
    assert [(s.id, s.token_ids) for s in replay(table.tokens()).sequences] == [("b", (1, 2, 3)), ("d", (1, 3))]


def test_nothing_at_all() -> None:
    empty = np.zeros(0, dtype=np.int64)
    assert replay(Tokens(empty, empty, ())).sequences == ()
    assert replay(Tokens(empty, empty, (Request("a", 0, 0),))).skipped == ()


@dataclass(frozen=True)
class Served:
    """A request: its prompt in chunks, then steps, each accepted tokens and a set of rejected branches."""

    chunks: list[list[int]]
    steps: list[tuple[list[int], list[int]]]

    @property
    def ids(self) -> list[int]:
        return [t for chunk in self.chunks for t in chunk] + [t for accepted, _ in self.steps for t in accepted]


token = st.integers(0, 5)
served = st.builds(
    Served,
    st.lists(st.lists(token, min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.tuples(st.lists(token, min_size=1, max_size=3), st.lists(token, max_size=3)), max_size=3),
)


def forwards(label: str, request: Served, table: Table) -> Iterable[None]:
    """Write one forward a step, so that requests can be interleaved."""
    position = 0
    for chunk in request.chunks:
        table.prefill(label, chunk, begin=position)
        position += len(chunk)
        yield
    for accepted, rejected in request.steps:
        rows = [(t, position + i, i - 1, 1) for i, t in enumerate(accepted)]
        # Rejected rows hang on any row before them, the tree's own rejected ones included.
        for t in rejected:
            parent = len(rows) // 2
            rows.append((t, rows[parent][1] + 1, parent, 0))
        table.verify(label, rows)
        position += len(accepted)
        yield


@given(st.lists(served, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_every_sequence_that_was_served_comes_back(requests: list[Served], random: Random) -> None:
    table = Table()
    running = [iter(forwards(f"r{i}", request, table)) for i, request in enumerate(requests)]
    while running:
        one = random.choice(running)
        if next(one, running) is running:
            running.remove(one)
    found = replay(table.tokens())
    assert found.skipped == ()
    got = [s.token_ids for s in found.sequences]
    want = [tuple(request.ids) for request in requests]
    # Each is computed, by itself or as the beginning of another; nothing else is; nothing is computed twice.
    assert all(any(g[: len(w)] == w for g in got) for w in want)
    assert set(got) <= set(want)
    assert not any(a != b and b[: len(a)] == a for a in got for b in got)
    assert len(set(got)) == len(got)


@given(st.lists(st.tuples(token, st.integers(-1, 4), st.integers(-1, 4), st.integers(0, 1)), max_size=12), st.data())
def test_any_table_gives_only_paths_that_are_in_it(rows: list[tuple[int, int, int, int]], data: st.DataObject) -> None:
    table = Table(list(rows))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    for begin, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        phase: Phase = data.draw(st.sampled_from(["prefill", "verify", "decode"]))
        table.requests.append(Request(data.draw(st.sampled_from("ab")), begin, end, phase))
    known = {(t, p) for t, p, _, _ in rows}
    for sequence in replay(table.tokens()).sequences:
        assert {(t, i) for i, t in enumerate(sequence.token_ids)} <= known
