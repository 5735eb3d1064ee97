"""The ordering search: sums of parts are the draft's own fc, a planted order is found, and doubt is said aloud."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_parity.draft import bench as benches
from eagle_parity.draft import ordering, race
from eagle_parity.draft.bench import Bench, Order
from eagle_parity.draft.forward import Draft, open_reference
from eagle_parity.draft.ordering import rank_orderings, row_cost, seeds
from eagle_parity.draft.passages import Passage
from eagle_parity.draft.race import paired, z_scores
from eagle_parity.draft.target import open_target
from eagle_parity.draft.teacher import Lesson, Read, Teacher, teach
from eagle_parity.records import FINAL_NORM, Boundary, IntArray

FIXTURES = Path(__file__).parent.parent / "fixtures"
DRAFTS = FIXTURES / "drafts"
TARGET = FIXTURES / "training" / "target"
KINDS = [
    "specforge_sglang",
    "speculators_fc_norm_out",
    "speculators_norm_before_fc",
    "speculators_nbr",
    "torchspec_mla",
]
STATES: tuple[Boundary, ...] = (0, 1, 2, 3, 4, 5, FINAL_NORM)


def states_of(rows: int, seed: int = 0) -> dict[Boundary, torch.Tensor]:
    """A random walk over layers whose norm grows, neighbours close; the final norm shrinks the last one."""
    g = torch.Generator().manual_seed(seed)
    stream, found = torch.randn(rows, 64, generator=g), {}
    for state in STATES[:-1]:
        found[state] = stream
        stream = 1.1 * (stream + 0.5 * stream.std() * torch.randn(rows, 64, generator=g))
    found[FINAL_NORM] = stream / stream.square().mean(-1, keepdim=True).sqrt()
    return found


def reader(states: dict[Boundary, torch.Tensor]) -> Read:
    def read(boundary: Boundary, rows: IntArray) -> torch.Tensor:
        return states[boundary][torch.from_numpy(rows)].bfloat16()

    return read


def passages(rows: int, length: int, vocabulary: int = 512) -> list[Passage]:
    g = np.random.default_rng(1)
    return [
        Passage(
            np.arange(at, min(at + length, rows)),
            g.integers(3, vocabulary, min(length, rows - at)),
            np.ones(min(length, rows - at), dtype=bool),
        )
        for at in range(0, rows, length)
    ]


def planted(draft: Draft, order: Order, read: Read, rows: int = 400, length: int = 50, sharp: float = 4.0) -> Teacher:
    """Lessons whose right answers are the draft's own under an order, made sharper, with noise."""
    g, lessons = torch.Generator().manual_seed(5), []
    for passage in passages(rows, length):
        fed = torch.cat([read(state, passage.rows).float() for state in order], -1)[:-1]
        count = len(passage) - 1
        tokens = draft.embedded(torch.from_numpy(passage.ids[1:]).unsqueeze(0))
        made = draft.begin(draft.fuse(fed).unsqueeze(0), tokens, torch.arange(count).unsqueeze(0))
        logits = sharp * draft.logits(made.hidden[0])
        logits = logits + 0.5 * torch.randn(logits.shape, generator=g)
        shares = logits.softmax(-1)
        assert draft.head.memory is not None
        entropy = -(shares * shares.log()).sum(-1)
        lessons.append(
            Lesson(
                passage,
                shares @ draft.head.memory.float(),
                entropy,
                draft.target_ids[logits.argmax(-1)],
                torch.ones(count, dtype=torch.bool),
            )
        )
    return Teacher(tuple(lessons), "planted", None)


@pytest.fixture(scope="module", params=KINDS)
def draft(request: pytest.FixtureRequest) -> Draft:
    return open_reference(DRAFTS / request.param, TARGET, device="cpu")


@pytest.fixture(scope="module")
def plain() -> Draft:
    return open_reference(DRAFTS / "torchspec_mla", device="cpu")


def test_the_sum_of_parts_is_what_fc_makes_of_the_whole(draft: Draft) -> None:
    read = reader(states_of(30))
    lessons = planted(draft, (1, 3, 5), read, rows=30, length=30).lessons
    bench = Bench(draft, lessons, read)
    for order in ((1, 3, 5), (5, 0, FINAL_NORM), (FINAL_NORM, 4, 2)):
        whole = draft.fuse(torch.cat([read(state, lessons[0].passage.rows[:-1]) for state in order], -1))
        torch.testing.assert_close(bench._hidden(order, 0), whole, rtol=1e-4, atol=1e-4)


def test_the_bias_of_fc_is_added_once(tmp_path: Path) -> None:
    path = tmp_path / "draft"
    shutil.copytree(DRAFTS / "torchspec_mla", path)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(3))
    save_file(load_file(path / "model.safetensors") | {"fc.bias": bias}, path / "model.safetensors")
    draft, read = open_reference(path, device="cpu"), reader(states_of(30))
    lessons = planted(draft, (1, 3, 5), read, rows=30, length=30).lessons
    whole = draft.fuse(torch.cat([read(state, lessons[0].passage.rows[:-1]) for state in (0, 2, 4)], -1))
    torch.testing.assert_close(Bench(draft, lessons, read)._hidden((0, 2, 4), 0), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("truth", [(1, 3, 5), (0, 2, 4), (4, 1, 2), (2, 3, FINAL_NORM)])
def test_a_planted_order_is_found(draft: Draft, truth: Order) -> None:
    read = reader(states_of(400))
    found = rank_orderings(draft, planted(draft, truth, read), STATES, read)
    assert found.best == truth, found.ranking[:3]
    assert (found.tried, found.total) == (210, 210)
    assert found.z >= race.SURE
    assert found.control_z >= race.SURE
    assert found.why is None
    assert found.ranking[0].excess == found.ranking[0].z == 0
    assert all(a.loss <= b.loss for a, b in itertools.pairwise(s for s in found.ranking if not s.dropped))
    assert found.how.startswith("all 210 orderings were tried")


@pytest.mark.parametrize("truth", [(1, 3, 5), (0, 2, 4), (4, 1, 2), (2, 3, FINAL_NORM)])
def test_the_staged_search_finds_the_same(draft: Draft, truth: Order) -> None:
    read = reader(states_of(400))
    found = rank_orderings(draft, planted(draft, truth, read), STATES, read, num_layers=6, staged=True)
    assert found.best == truth
    assert found.tried < 210
    assert "each slot was varied over all 7 states on 1" in found.how


def test_parts_that_do_not_fit_are_made_again(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    read = reader(states_of(100))
    teacher = planted(draft, (1, 3, 5), read, rows=100)
    orders = list(itertools.permutations((1, 3, 5, 0), 3))
    whole = [Bench(draft, teacher.lessons, read).try_out(orders, n) for n in (0, 1)]
    monkeypatch.setattr(benches, "PARTS", 1)
    monkeypatch.setattr(benches, "STATES", 1)
    monkeypatch.setattr(benches, "LOGITS", 600)
    small = Bench(draft, teacher.lessons, read)
    for number in (0, 1):
        again = small.try_out(orders, number)
        torch.testing.assert_close(again.loss, whole[number].loss, rtol=1e-4, atol=1e-4)
        assert torch.equal(again.hit, whole[number].hit)
    assert len(small._parts) <= 3


def test_two_stored_states_that_are_the_same_are_ambiguous(plain: Draft) -> None:
    states = states_of(400)
    states[4] = states[3]
    read = reader(states)
    found = rank_orderings(plain, planted(plain, (1, 3, 5), read), STATES, read)
    assert found.best is None
    assert found.ambiguous
    assert found.rows_needed is None  # no number of rows tells equal things apart
    assert found.why == "[1, 3, 5] and [1, 4, 5] cannot be told apart (0.0 standard errors)"


def test_few_rows_say_how_many_would_do(plain: Draft) -> None:
    states = states_of(400)
    states[4] = states[3] + 0.1 * states[3].std() * torch.randn(400, 64, generator=torch.Generator().manual_seed(9))
    read = reader(states)
    few = rank_orderings(plain, planted(plain, (1, 3, 5), read, rows=40, sharp=1.5), STATES, read)
    assert few.ambiguous
    assert few.rows_needed is not None
    assert few.rows < few.rows_needed < 4000
    many = rank_orderings(plain, planted(plain, (1, 3, 5), read, rows=400, sharp=1.5), STATES, read)
    assert many.best == (1, 3, 5)


def test_a_draft_that_does_not_heed_its_states_proves_nothing(plain: Draft) -> None:
    read = reader(states_of(300))
    g, lessons = torch.Generator().manual_seed(6), []
    for lesson in planted(plain, (1, 3, 5), read, rows=300).lessons:
        assert plain.head.memory is not None
        noise = torch.randn(lesson.mean_head.shape[0], len(plain.head.memory), generator=g).softmax(-1)
        lessons.append(
            Lesson(lesson.passage, noise @ plain.head.memory.float(), lesson.entropy, lesson.wanted, lesson.counted)
        )
    found = rank_orderings(plain, Teacher(tuple(lessons), "noise", None), STATES, read)
    assert found.best is None
    assert found.why is not None
    assert found.control_z < race.SURE


def test_rows_of_which_nothing_can_be_said(plain: Draft) -> None:
    read = reader(states_of(8))
    teacher = planted(plain, (1, 3, 5), read, rows=8, length=4)
    found = rank_orderings(plain, teacher, STATES, read)
    assert (found.why, found.ranking) == ("6 rows can be judged, 8 are needed", ())
    found = rank_orderings(plain, planted(plain, (1, 3, 5), reader(states_of(60)), rows=60), (1, 2), read)
    assert found.why == "2 states are stored, the draft has 3 slots"


def test_seeds_hold_the_usual_layers_and_the_storys_two_answers() -> None:
    usual = seeds(3, (*range(62), FINAL_NORM), 61)
    for order in ((2, 30, 58), (3, 31, 59), (1, 29, 57), (0, 3, 31), (0, 2, 30), (58, 2, 30), (2, 30, FINAL_NORM)):
        assert order in usual, order
    assert len(set(usual)) == len(usual)
    assert seeds(3, (0, 4, 9), 61) == list(itertools.permutations((0, 4, 9)))
    assert seeds(4, range(6), 5)[0] == (0, 2, 3, 5)
    assert seeds(1, (7,), 61) == [(7,)]


def test_the_work_is_estimated_from_the_weights(plain: Draft) -> None:
    weights = plain.weights
    fc, doubled = 64 * 192, (24 + 24) * 64
    numbers = sum(w.numel() for n, w in weights.items() if n.startswith("layers.")) + 512 * 64
    assert row_cost(plain) == 2 * (numbers - doubled)
    assert fc not in (row_cost(plain),)
    assert ordering.FULL_BUDGET["cpu"] > 720 * 256 * row_cost(plain)


def test_a_race_that_nobody_wins_ends_all_the_same(plain: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve states that are the same: nothing is ever dropped."""
    states = states_of(400)
    same: dict[Boundary, torch.Tensor] = dict.fromkeys(range(12), states[1])
    read = reader(same)
    monkeypatch.setattr(ordering, "LIMIT", {False: 1320 * 100 * row_cost(plain), True: 0.0})
    found = rank_orderings(plain, planted(plain, (1, 2, 3), read), tuple(same), read, staged=False)
    assert found.ambiguous
    assert 100 <= found.rows < 250


# ------------------------------------------------------------------------------------------------- statistics


def test_z_is_the_paired_one() -> None:
    g = np.random.default_rng(0)
    shared, noise = 10 * g.standard_normal(400), g.standard_normal(400)
    table = np.stack([shared, shared + 0.2 + noise])
    excess, z = z_scores(table, np.arange(400) // 16, 0)
    by_row = (0.2 + noise).mean() / (noise.std(ddof=1) / 20)
    assert excess.tolist() == pytest.approx([0, 0.2 + noise.mean()])
    assert z[0] == 0
    assert 0.7 * by_row < z[1] <= by_row + 1e-9


def test_rows_that_go_together_count_less() -> None:
    """A difference that is the same within a block is as good as one draw a block."""
    g = np.random.default_rng(0)
    noise = np.repeat(g.standard_normal(25), 16)
    table = np.stack([np.zeros(400), 0.5 + noise])
    _, z = z_scores(table, np.arange(400) // 16, 0)
    blocks = (0.5 + noise)[::16]
    assert z[1] == pytest.approx(blocks.mean() / (blocks.std(ddof=1) / 5), rel=1e-6)


def test_false_calls_are_rare() -> None:
    """Two candidates that are equally good: 1,000 trials, none of them beyond SURE, about 5 % beyond 2."""
    g = np.random.default_rng(3)
    found = []
    for _ in range(1000):
        _, z = z_scores(np.stack([np.zeros(320), g.standard_normal(320)]), np.arange(320) // 16, 0)
        found.append(abs(z[1]))
    assert max(found) < race.SURE
    assert 0.02 < np.mean(np.array(found) > 2) < 0.07


def test_paired_takes_lessons_apart() -> None:
    g = torch.Generator().manual_seed(0)
    better = [torch.randn(40, generator=g), torch.randn(0), torch.randn(30, generator=g)]
    worse = [loss + 1 + 0.1 * torch.randn(loss.shape, generator=g) for loss in better]
    assert paired(better, worse) > 20
    assert paired(worse, better) < -20


# ----------------------------------------------------------------------------------------------------- teacher


def test_the_loss_is_the_divergence_of_two_distributions(draft: Draft) -> None:
    """Against the formula written out over the vocabulary."""
    target = open_target(TARGET)
    states = states_of(40)
    read = reader(states)
    (passage,) = passages(40, 40)
    teacher = teach(draft, [passage], target=target, boundaries=STATES, read=read)
    (lesson,) = teacher.lessons
    assert teacher.measure == "KL of the draft from the target"
    assert target.head.memory is not None
    logits = states[FINAL_NORM].bfloat16().float() @ target.head.memory.float().T
    best = logits.argmax(-1)[1:]
    assert torch.equal(lesson.wanted, best)
    assert torch.equal(lesson.counted, torch.isin(best, draft.target_ids))
    shares = logits[1:, draft.target_ids].softmax(-1)
    outcome = Bench(draft, [lesson], read).try_out([(1, 3, 5)], 0)
    fed = torch.cat([read(state, passage.rows) for state in (1, 3, 5)], -1)[:-1]
    tokens = draft.embedded(torch.from_numpy(passage.ids[1:]).unsqueeze(0))
    made = draft.begin(draft.fuse(fed).unsqueeze(0), tokens, torch.arange(39).unsqueeze(0))
    ours = draft.logits(made.hidden[0]).log_softmax(-1)
    wanted = (shares * (shares.log() - ours)).sum(-1)[lesson.counted]
    torch.testing.assert_close(outcome.loss[0], wanted, rtol=1e-3, atol=1e-4)
    assert torch.equal(outcome.hit[0], (draft.target_ids[ours.argmax(-1)] == best)[lesson.counted])


def test_without_the_targets_head_the_next_token_is_the_answer(draft: Draft) -> None:
    (passage,) = passages(40, 40)
    read = reader(states_of(40))
    teacher = teach(draft, [passage], boundaries=STATES, read=read)
    (lesson,) = teacher.lessons
    assert teacher.measure == "cross-entropy of the next token"
    following = torch.from_numpy(passage.ids[2:])
    inside = torch.isin(following, draft.target_ids)
    assert torch.equal(lesson.counted, torch.cat([inside, torch.tensor([False])]))
    outcome = Bench(draft, [lesson], read).try_out([(1, 3, 5)], 0)
    fed = torch.cat([read(state, passage.rows) for state in (1, 3, 5)], -1)[:-1]
    tokens = draft.embedded(torch.from_numpy(passage.ids[1:]).unsqueeze(0))
    logits = draft.logits(draft.begin(draft.fuse(fed).unsqueeze(0), tokens, torch.arange(39).unsqueeze(0)).hidden[0])
    own = torch.tensor([draft.target_ids.tolist().index(t) for t in following[inside].tolist()], dtype=torch.int64)
    wanted = torch.nn.functional.cross_entropy(logits[:-1][inside], own, reduction="none")
    torch.testing.assert_close(outcome.loss[0], wanted, rtol=1e-3, atol=1e-3)


def test_the_state_before_the_final_norm_will_do(plain: Draft) -> None:
    target = open_target(TARGET)
    states = states_of(40)
    states[8] = 3 * states[5]
    states[FINAL_NORM] = target.normed(states[8].bfloat16().float())
    (passage,) = passages(40, 40)
    by_norm = teach(plain, [passage], target=target, boundaries=(FINAL_NORM,), read=reader(states)).lessons[0]
    by_last = teach(plain, [passage], target=target, boundaries=(3, 8), num_layers=8, read=reader(states)).lessons[0]
    torch.testing.assert_close(by_norm.mean_head, by_last.mean_head, rtol=0.02, atol=0.02)
    none = teach(plain, [passage], target=target, boundaries=(3, 5), num_layers=8, read=reader(states))
    assert none.measure == "cross-entropy of the next token"


def test_the_loss_mask_counts_where_it_leaves_enough(plain: Draft) -> None:
    rows = passages(200, 100)
    for passage in rows:
        passage.counted[:40] = False
    teacher = teach(plain, rows)
    assert teacher.rows == 2 * (98 - 40)
    for passage in rows:
        passage.counted[:95] = False
    assert teach(plain, rows).rows == 2 * 98
