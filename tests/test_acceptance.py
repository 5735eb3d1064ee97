"""The forecast of the accept length: trees against a server's own code, walks against a hand-made one."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle_parity.draft import acceptance
from eagle_parity.draft.acceptance import Speculation, Trees, accepted, forecast, propose
from eagle_parity.draft.forward import Draft, open_reference
from eagle_parity.draft.passages import Passage, find_passages, limited
from eagle_parity.draft.teacher import Lesson, Teacher, teach
from eagle_parity.records import Request, Tokens

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture(scope="module", params=["speculators_fc_norm_out", "torchspec_mla", "specforge_sglang"])
def case(request: pytest.FixtureRequest) -> tuple[Draft, torch.Tensor, torch.Tensor]:
    """A draft, token ids [T] and what it is fed [T-1, K*H]."""
    folder = FIXTURES / "drafts" / request.param
    tensors = load_file(folder / "golden_step0.safetensors")
    draft = open_reference(folder, FIXTURES / "training" / "target", device="cpu")
    fed = tensors.get("fc_input", tensors.get("fc_input_raw"))
    assert fed is not None
    ids = torch.cat([torch.tensor([1]), tensors["input_ids_shifted"][0]])
    return draft, ids[:13], fed[0, :12].float()


def one_by_one(draft: Draft, ids: torch.Tensor, fed: torch.Tensor, anchor: int, settings: Speculation) -> list[list]:
    """[(score, token, parent)] of one anchor: SGLang's loop, a branch a time, no batch and no shared code."""
    k = settings.topk
    start = draft.begin(
        draft.fuse(fed).unsqueeze(0), draft.embedded(ids[None, 1:]), torch.arange(len(ids) - 1).unsqueeze(0)
    )
    chances = draft.logits(start.hidden[0, anchor]).softmax(-1)
    best = chances.topk(k)
    nodes = [[float(p) if k > 1 else 1.0, int(draft.target_ids[i]), -1] for p, i in zip(*best, strict=True)]
    branches = [
        (score, token, draft.recurrent(start.hidden[0, anchor]), i) for i, (score, token, _) in enumerate(nodes)
    ]
    own: list = [None] * k  # attention entries belong to a place among the branches, not to a path
    for step in range(1, settings.steps):
        grown = []
        for place, (score, token, hidden, column) in enumerate(branches):
            done = draft.advance(
                hidden.view(1, 1, -1),
                draft.embedded(torch.tensor([[token]])),
                torch.tensor([[anchor + step]]),
                start.entries,
                torch.tensor([anchor]),
                own[place],
            )
            own[place] = done.entries
            best = draft.logits(done.hidden[0, 0]).softmax(-1).topk(k)
            for p, i in zip(*best, strict=True):
                value = score * (float(p) if k > 1 else 1.0)
                nodes.append([value, int(draft.target_ids[i]), column])
                grown.append((value, nodes[-1][1], draft.recurrent(done.hidden[0, 0]), len(nodes) - 1))
        branches = sorted(grown, key=lambda branch: -branch[0])[:k]
    return nodes


@pytest.mark.parametrize("settings", [Speculation(3, 1, 4), Speculation(3, 2, 6), Speculation(4, 3, 8)])
def test_trees_of_all_anchors_at_once(
    case: tuple[Draft, torch.Tensor, torch.Tensor], settings: Speculation, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, ids, fed = case
    trees = propose(draft, ids, fed, settings)
    for anchor in (0, 4, 11):
        nodes = one_by_one(draft, ids, fed, anchor, settings)
        kept = sorted(sorted(range(len(nodes)), key=lambda i: -nodes[i][0])[: settings.tokens - 1])
        assert trees.tokens[anchor].tolist() == [nodes[i][1] for i in kept]
        parents = [-1 if nodes[i][2] < 0 else kept.index(nodes[i][2]) for i in kept]
        assert trees.parents[anchor].tolist() == parents
    monkeypatch.setattr(acceptance, "ELEMENTS", 3 * settings.topk * max(draft.head.length, 48))
    again = propose(draft, ids, fed, settings)
    assert torch.equal(again.tokens, trees.tokens)
    assert torch.equal(again.parents, trees.parents)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
@pytest.mark.filterwarnings("ignore")
def test_selection_is_sglangs(case: tuple[Draft, torch.Tensor, torch.Tensor]) -> None:
    """select_top_k_tokens and organize_draft_results, fed with this draft's chances, choose the same tokens."""
    from sglang.srt.speculative import eagle_utils, spec_utils

    draft, ids, fed = case
    settings, anchor = Speculation(3, 2, 6), 5
    k = settings.topk
    later = spec_utils._select_top_k_tokens_later
    later = getattr(later, "_torchdynamo_orig_callable", later)
    start = draft.begin(
        draft.fuse(fed).unsqueeze(0), draft.embedded(ids[None, 1:]), torch.arange(len(ids) - 1).unsqueeze(0)
    )
    chances, index = draft.logits(start.hidden[:, anchor]).softmax(-1).topk(k)
    index, hidden, scores, before = draft.target_ids[index], draft.recurrent(start.hidden[0, [anchor]]), None, None
    lists: tuple[list, list, list] = ([], [], [])
    for step in range(settings.steps):
        if step == 0:
            tokens, hidden, scores, info = spec_utils._select_top_k_tokens_first(chances, index, hidden, k)
        else:
            tokens, hidden, scores, info = later(step, chances, index, hidden, scores, k)
        for kept, value in zip(lists, info, strict=True):
            kept.append(value)
        if step == settings.steps - 1:
            break
        done = draft.advance(
            hidden.unsqueeze(0),
            draft.embedded(tokens.unsqueeze(0)),
            torch.full((1, k), anchor + step + 1),
            start.entries,
            torch.full((k,), anchor),
            before,
        )
        before, hidden = done.entries, draft.recurrent(done.hidden[0])
        chances, index = draft.logits(done.hidden[0]).softmax(-1).topk(k)
        index = draft.target_ids[index]
    parents, chosen, tokens = eagle_utils.organize_draft_results(*lists, settings.tokens)
    trees = propose(draft, ids, fed, settings)
    assert trees.tokens[anchor].tolist() == tokens[0].tolist()
    flat = [int(parents[0, i // k]) for i in chosen[0].tolist()]  # as build_tree_kernel_efficient reads them
    wanted = [-1 if parent < 0 else chosen[0].tolist().index(parent) for parent in flat]
    assert trees.parents[anchor].tolist() == wanted


def test_the_text_is_followed_through_a_tree() -> None:
    """Row 0 reads token 1 and predicts token 2. Its tree: 7 -> 8, 9 -> 4; the text goes on 9, 4, 5."""
    tokens = torch.tensor([[7, 9, 8, 4], [4, 1, 2, 3], [5, 5, 5, 5]])
    parents = torch.tensor([[-1, -1, 0, 1], [-1, -1, 0, 0], [-1, 0, 1, 2]])
    ids = torch.tensor([1, 2, 9, 4])
    assert accepted(Trees(tokens, parents), ids, 3).tolist() == [2, 1, 0]


def lessons(ids: list[int], counted: list[int] | None = None) -> Teacher:
    """Text that is its own right answer."""
    rows = np.arange(len(ids))
    mask = np.ones(len(ids), dtype=bool) if counted is None else np.array(counted, dtype=bool)
    wanted = torch.tensor([*ids[2:], -1])
    passage = Passage(rows, np.array(ids), mask)
    return Teacher((Lesson(passage, torch.zeros(0), torch.zeros(0), wanted, wanted >= 0),), "scripted", 1.0)


def scripted(monkeypatch: pytest.MonkeyPatch, chains: list[list[int]]) -> None:
    tokens = torch.tensor(chains)
    parents = torch.arange(-1, tokens.shape[1] - 1).expand_as(tokens)
    monkeypatch.setattr(acceptance, "propose", lambda *_: Trees(tokens, parents))


def test_a_walk_counts_as_the_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt of 2, then 10 11 12 13 14 15: the first with the prefill, [11 12 x] takes 2 and 13, [14 15] ends it."""
    ids = [1, 2, 10, 11, 12, 13, 14, 15]
    chains = [[0, 0, 0]] * 7
    chains[1] = [11, 12, 99]
    chains[4] = [14, 15, 77]
    scripted(monkeypatch, chains)
    draft = open_reference(FIXTURES / "drafts" / "torchspec_mla", device="cpu")
    found = forecast(draft, lessons(ids), lambda rows: torch.zeros(len(rows), 192), prompts=[2])
    assert (found.kind, found.verify_steps) == ("walk", 2)
    assert found.accept_length == 6 / 2
    masked = forecast(draft, lessons(ids, [0, 0, 1, 1, 1, 1, 1, 1]), lambda rows: torch.zeros(len(rows), 192))
    assert masked.accept_length == found.accept_length  # the loss mask says where the prompt ends


def test_without_a_prompt_every_row_counts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    chains = [[i + 3, i + 4, 0] for i in range(7)]  # two right, the third wrong, wherever there is text
    scripted(monkeypatch, chains)
    draft = open_reference(FIXTURES / "drafts" / "torchspec_mla", device="cpu")
    found = forecast(draft, lessons(ids), lambda rows: torch.zeros(len(rows), 192))
    assert found.kind == "survival"
    assert found.by_depth == (1.0, 1.0, 0.0)
    assert found.accept_length == 3.0
    assert found.agreement == 1.0


def test_other_text_is_not_walked() -> None:
    """A passage that the target would not have written says nothing of the server's path."""
    folder = FIXTURES / "drafts" / "torchspec_mla"
    draft = open_reference(folder, device="cpu")
    ids = np.arange(3, 40)
    passage = Passage(np.arange(len(ids)), ids, np.ones(len(ids), dtype=bool))
    lesson = teach(draft, [passage]).lessons[0]
    other = torch.where(torch.arange(len(lesson.wanted)) % 2 == 0, lesson.wanted, 5)
    teacher = Teacher((replace(lesson, wanted=other),), "half of it is the target's", 0.5)
    found = forecast(draft, teacher, lambda rows: torch.randn(len(rows), 192), prompts=[4])
    assert found.kind == "survival"
    assert 1.0 <= found.accept_length <= 4.0


# ---------------------------------------------------------------------------------------------------- passages


def tokens_of(*requests: Request, positions: list[int], **columns: np.ndarray) -> Tokens:
    count = len(positions)
    return Tokens(np.arange(100, 100 + count), np.array(positions), requests, **columns)


def test_chunks_and_accepted_rows_make_one_passage() -> None:
    tokens = tokens_of(
        Request("a", 0, 3),
        Request("a", 3, 5),
        Request("a", 5, 9, phase="verify"),
        Request("b", 9, 12),
        positions=[0, 1, 2, 3, 4, 5, 6, 6, 7, 0, 1, 2],
        accepted=np.array([0, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0]),
    )
    found = find_passages(tokens)
    assert [passage.rows.tolist() for passage in found] == [[0, 1, 2, 3, 4, 5, 7, 8], [9, 10, 11]]


def test_rows_after_a_cached_prefix_and_short_ones_are_left_out() -> None:
    tokens = tokens_of(Request("a", 0, 4), Request("b", 4, 6), positions=[5, 6, 7, 8, 0, 1])
    assert find_passages(tokens) == ()


def test_a_label_that_repeats_begins_anew() -> None:
    tokens = tokens_of(Request("a", 0, 3), Request("a", 3, 6), positions=[0, 1, 2, 0, 1, 2])
    assert [len(passage) for passage in find_passages(tokens)] == [3, 3]
    assert [len(passage) for passage in limited(find_passages(tokens), 5)] == [3]
