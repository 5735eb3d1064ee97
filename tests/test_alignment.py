"""Alignment of tokens: distortions are undone exactly or named, and no row is paired across different contexts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_parity.alignment.tokens import KEY, TokenAlignment, align
from eagle_parity.records import Phase, Request, Tokens


@dataclass(frozen=True)
class Piece:
    """One request entry: the tokens [begin, end) of a context, with positions moved by `shift`."""

    label: str
    context: tuple[int, ...]
    begin: int
    end: int
    shift: int = 0
    phase: Phase = "prefill"


def tokens(pieces: Sequence[Piece]) -> Tokens:
    ids: list[int] = []
    positions: list[int] = []
    requests = []
    for piece in pieces:
        requests.append(Request(piece.label, len(ids), len(ids) + piece.end - piece.begin, piece.phase))
        ids += piece.context[piece.begin : piece.end]
        positions += [i + piece.shift for i in range(piece.begin, piece.end)]
    return Tokens(np.array(ids, dtype=np.int64), np.array(positions, dtype=np.int64), tuple(requests))


def contexts(pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
    """Every row's whole context, itself included."""
    return [piece.context[: i + 1] for piece in pieces for i in range(piece.begin, piece.end)]


def whole(prompts: Sequence[Sequence[int]]) -> list[Piece]:
    return [Piece(f"t{n}", tuple(prompt), 0, len(prompt)) for n, prompt in enumerate(prompts)]


def check(found: TokenAlignment, training: Sequence[Piece], serving: Sequence[Piece]) -> None:
    """Paired rows have the same context; a serving row is paired at most once."""
    ours, theirs = contexts(training), contexts(serving)
    for left, right in zip(found.training.tolist(), found.serving.tolist(), strict=True):
        assert ours[left] == theirs[right]
    assert len(set(found.serving.tolist())) == len(found.serving)
    assert found.unaligned == len(theirs) - len(found.serving)


# Few different tokens, so that prompts share beginnings, repeat and run into each other.
prompt_lists = st.lists(st.lists(st.integers(0, 2), min_size=KEY, max_size=30), min_size=1, max_size=5)
long_prompts = st.lists(st.integers(0, 10_000), min_size=3 * KEY, max_size=60, unique=True)


@settings(max_examples=200, deadline=None)
@given(prompts=prompt_lists, data=st.data())
def test_order_duplicates_and_chunks_are_undone(prompts: list[list[int]], data: st.DataObject) -> None:
    training = whole(prompts)
    serving: list[Piece] = []
    for number in data.draw(st.lists(st.sampled_from(range(len(prompts))), min_size=1, max_size=6)):
        context = tuple(prompts[number])
        cuts = sorted(data.draw(st.sets(st.integers(1, len(context) - 1), max_size=3)))
        label = data.draw(st.sampled_from(["same", f"s{len(serving)}"]))
        serving += [
            Piece(label, context, begin, end) for begin, end in zip([0, *cuts], [*cuts, len(context)], strict=True)
        ]
    found = align(tokens(training), tokens(serving))
    check(found, training, serving)
    assert found.unaligned == 0


@settings(max_examples=200, deadline=None)
@given(prompts=prompt_lists, data=st.data())
def test_rows_of_other_contexts_are_never_paired(prompts: list[list[int]], data: st.DataObject) -> None:
    """Prompts that are cut, go on differently, or are not there at all."""
    training = whole(prompts)
    serving = []
    for number in range(data.draw(st.integers(1, 4))):
        base = list(data.draw(st.sampled_from(prompts)))
        keep = data.draw(st.integers(1, len(base)))
        more = data.draw(st.lists(st.integers(0, 2), max_size=12))
        context = tuple(base[:keep] + more)
        serving.append(Piece(f"s{number}", context, 0, len(context)))
    check(align(tokens(training), tokens(serving)), training, serving)


@settings(max_examples=100, deadline=None)
@given(prompt=long_prompts, shift=st.sampled_from([-3, -2, -1, 1, 2, 3]))
def test_shifted_positions_are_named(prompt: list[int], shift: int) -> None:
    training = whole([prompt])
    serving = [Piece("s", tuple(prompt), 0, len(prompt), shift)]
    found = align(tokens(training), tokens(serving))
    check(found, training, serving)
    assert found.unaligned == 0
    assert [note.code for note in found.notes] == ["token-shift"]
    assert f"differ by {shift} " in found.notes[0].message


@settings(max_examples=100, deadline=None)
@given(prompt=long_prompts, lost=st.sampled_from([1, 4, 8, 16]))
def test_a_lost_prefix_is_undone(prompt: list[int], lost: int) -> None:
    """A prefix-cache hit: rows begin in the middle, at their true positions."""
    training = whole([prompt])
    serving = [Piece("s", tuple(prompt), lost, len(prompt))]
    found = align(tokens(training), tokens(serving))
    check(found, training, serving)
    assert found.unaligned == 0
    assert found.notes == ()


@settings(max_examples=100, deadline=None)
@given(prompt=long_prompts, missing=st.sampled_from([1, 4]))
def test_a_prompt_without_its_first_tokens_is_another_context(prompt: list[int], missing: int) -> None:
    """No BOS on the serving side: the same tokens, other states."""
    serving = [Piece("s", tuple(prompt[missing:]), 0, len(prompt) - missing)]
    found = align(tokens(whole([prompt])), tokens(serving))
    assert len(found.serving) == 0
    assert [note.code for note in found.notes] == ["template-mismatch"]


@settings(max_examples=100, deadline=None)
@given(prompt=long_prompts, lost=st.sampled_from([1, 2, 4]))
def test_a_prefix_lost_on_the_training_side_is_undone(prompt: list[int], lost: int) -> None:
    """NeMo Automodel stores no first token: its rows begin at position 1."""
    training = [Piece("t", tuple(prompt), lost, len(prompt))]
    serving = [Piece("s", tuple(prompt), 0, len(prompt))]
    found = align(tokens(training), tokens(serving))
    check(found, training, serving)
    assert found.unaligned == lost
    assert [note.code for note in found.notes] == ["rows-lost"]


@settings(max_examples=100, deadline=None)
@given(prompt=long_prompts, extra=st.integers(1, 3))
def test_tokens_in_front_are_named_and_left_out(prompt: list[int], extra: int) -> None:
    context = (*range(20_000, 20_000 + extra), *prompt)
    found = align(tokens(whole([prompt])), tokens([Piece("s", context, 0, len(context))]))
    assert len(found.serving) == 0
    assert [note.code for note in found.notes] == ["template-mismatch"]


@settings(max_examples=100, deadline=None)
@given(prompt=long_prompts, cut=st.integers(KEY, 20), pad=st.integers(0, 9))
def test_truncation_and_padding(prompt: list[int], cut: int, pad: int) -> None:
    padded = (*prompt[:cut], *[0] * pad)
    training = [Piece("t", padded, 0, len(padded))]
    serving = [Piece("s", tuple(prompt), 0, len(prompt))]
    found = align(tokens(training), tokens(serving))
    check(found, training, serving)
    assert len(found.serving) >= cut


def test_a_prefix_that_fits_several_prompts_is_left_out() -> None:
    tail = list(range(100, 120))
    training = whole([[1, 2, 3, 4, *tail], [5, 6, 7, 8, *tail]])
    serving = [Piece("s", (1, 2, 3, 4, *tail), 4, 24)]
    found = align(tokens(training), tokens(serving))
    assert len(found.serving) == 0
    assert [note.code for note in found.notes] == ["undetermined"]


# ----------------------------------------------------------------------------------------------- verify and decode


def verify(prompt: list[int], tree: list[tuple[int, int, int]], accepted: list[int] | None, *, parents: bool) -> Tokens:
    """A prompt and one verify forward; `tree` rows are (token, position, parent within the tree)."""
    base = len(prompt)
    rows = [p + base if p >= 0 else -1 for _, _, p in tree]
    return Tokens(
        np.array([*prompt, *(t for t, _, _ in tree)], dtype=np.int64),
        np.array([*range(base), *(p for _, p, _ in tree)], dtype=np.int64),
        (Request("s", 0, base), Request("s", base, base + len(tree), "verify")),
        parents=np.array([*range(-1, base - 1), *rows], dtype=np.int64) if parents else None,
        accepted=None if accepted is None else np.array([1] * base + accepted, dtype=np.int64),
    )


PROMPT = list(range(50, 62))
#       root        two branches                a deeper row on each
TREE = [(7, 12, -1), (8, 13, 0), (9, 13, 0), (10, 14, 1), (10, 14, 2)]


@pytest.mark.parametrize(
    ("goes_on", "rows"),
    [
        ([7, 9, 10], [12, 14, 16]),  # the branch through 9, and not the same token below 8
        ([7, 8, 10], [12, 13, 15]),
        ([7], [12]),
        ([8, 9], []),  # another root: nothing below it counts
        ([], []),
    ],
)
def test_a_draft_tree_is_followed_along_what_training_has(goes_on: list[int], rows: list[int]) -> None:
    training = tokens(whole([[*PROMPT, *goes_on]]))
    found = align(training, verify(PROMPT, TREE, None, parents=True))
    assert found.serving.tolist() == [*range(12), *rows]
    assert found.training.tolist() == list(range(12 + len(rows)))


def test_without_parents_the_accepted_rows_are_the_path() -> None:
    training = tokens(whole([[*PROMPT, 7, 9, 10]]))
    found = align(training, verify(PROMPT, TREE, [1, 0, 1, 0, 1], parents=False))
    assert found.serving.tolist() == [*range(12), 12, 14, 16]
    assert found.unaligned == 0  # a rejected branch is nobody's to replay
    # and without either, the branches cannot be told apart
    found = align(training, verify(PROMPT, TREE, None, parents=False))
    assert found.serving.tolist() == list(range(12))


def test_a_gap_in_the_context_ends_the_path() -> None:
    """The second verify's root follows a token that training does not have: its context differs."""
    served = Tokens(
        np.array([*PROMPT, 7, 8, 9], dtype=np.int64),
        np.array([*range(12), 12, 13, 14], dtype=np.int64),
        (Request("s", 0, 12), Request("s", 12, 14, "verify"), Request("s", 14, 15, "verify")),
    )
    found = align(tokens(whole([[*PROMPT, 7, 1000, 9]])), served)
    assert found.serving.tolist() == [*range(12), 12]


# ----------------------------------------------------------------------------------------------- padding, packing


@settings(max_examples=100, deadline=None)
@given(prompt=long_prompts, pad=st.integers(1, 9), right=st.integers(0, 5))
def test_left_padding_whose_positions_do_not_count_is_undone(prompt: list[int], pad: int, right: int) -> None:
    """A padded batch of the training side: positions 0 for the padding, then 0, 1, 2, …"""
    size = pad + len(prompt) + right
    training = Tokens(
        np.array([0] * pad + prompt + [0] * right, dtype=np.int64),
        np.array([0] * pad + list(range(len(prompt) + right)), dtype=np.int64),
        (Request("t", 0, size),),
    )
    found = align(training, tokens(whole([prompt])))
    assert found.unaligned == 0
    assert found.training.tolist() == list(range(pad, pad + len(prompt)))


@settings(max_examples=100, deadline=None)
@given(prompt=long_prompts, pad=st.integers(1, 9))
def test_left_padding_that_counts_is_named(prompt: list[int], pad: int) -> None:
    padded = (*[0] * pad, *[token + 1 for token in prompt])
    found = align(tokens(whole([padded])), tokens(whole([[token + 1 for token in prompt]])))
    assert len(found.serving) == 0
    assert [note.code for note in found.notes] == ["template-mismatch"]


@settings(max_examples=100, deadline=None)
@given(prompts=st.lists(long_prompts, min_size=2, max_size=4))
def test_packed_prompts_are_found_by_their_positions(prompts: list[list[int]]) -> None:
    """Several prompts in one training sample, each counted from 0."""
    ids = [token for prompt in prompts for token in prompt]
    positions = [i for prompt in prompts for i in range(len(prompt))]
    training = Tokens(np.array(ids, dtype=np.int64), np.array(positions, dtype=np.int64), (Request("t", 0, len(ids)),))
    found = align(training, tokens(whole(prompts)[::-1]))
    assert found.unaligned == 0
    assert [ids[row] for row in found.training] == [t for prompt in prompts[::-1] for t in prompt]


# ------------------------------------------------------------------------------------------------- notes and speed


def test_notes_of_a_kind_are_one_note() -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 10_000, size).tolist() for size in range(20, 60)]
    served = [Piece(f"s{i}", (10_001, *prompt), 0, len(prompt) + 1) for i, prompt in enumerate(prompts)]
    (note,) = align(tokens(whole(prompts)), tokens(served)).notes
    assert note.code == "template-mismatch"
    assert note.message.startswith("training has from position 0 on tokens that serving has from position 1 on")
    assert len(note.requests) == len(prompts)
    parting = [
        Piece(f"s{i}", (*prompt[: 10 + i], 10_001, *prompt[11 + i :]), 0, len(prompt))
        for i, prompt in enumerate(prompts[:8])
    ]
    (note,) = align(tokens(whole(prompts)), tokens(parting)).notes
    assert note.message == "token ids part at position 10 to 17: rows from there on were left out"


@pytest.mark.parametrize("kind", ["shuffled", "shared beginning", "one token in front", "warm cache", "one token only"])
def test_a_thousand_prompts_align_quickly(kind: str) -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 150_000, (1000, 500))
    if kind != "shuffled":
        prompts[:, :250] = prompts[0, :250]
    if kind == "one token only":
        prompts[:] = 7
    training, serving = whole(prompts.tolist()), whole(prompts[::-1].tolist())
    if kind in ("one token in front", "one token only"):
        serving = [Piece(p.label, (150_001, *p.context), 0, 501) for p in serving]
    if kind == "warm cache":
        serving = [Piece(p.label, p.context, 64 * (n % 4), 500) for n, p in enumerate(serving)]
    sides = tokens(training), tokens(serving)
    begin = time.process_time()
    found = align(*sides)
    assert time.process_time() - begin < 5  # it takes half a second; every pair of prompts would take minutes
    assert found.unaligned == (501_000 if kind in ("one token in front", "one token only") else 0)
