"""Trained drafts of ten wirings: the replay names each, whatever its norms; and what a wrong order costs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eagle_parity.cli.main import main
from eagle_parity.draft.acceptance import Speculation, forecast
from eagle_parity.draft.forward import Draft, open_reference
from eagle_parity.draft.ordering import Ordering, rank_orderings
from eagle_parity.draft.passages import find_passages, limited, windows
from eagle_parity.draft.proof import ROWS, WINDOW, prove_order
from eagle_parity.draft.race import SURE
from eagle_parity.draft.states import ordered, reader, stored_states
from eagle_parity.draft.target import open_target
from eagle_parity.draft.teacher import teach
from eagle_parity.dump import Dump, open_dump
from eagle_parity.records import Boundary

pytest.importorskip("transformers")

TRAINED = Path(__file__).parent.parent / "fixtures" / "trained"
WIRINGS: dict[str, tuple[Boundary, ...]] = {
    "usual": (2, 4, 6),
    "embedding-first": (0, 2, 4),
    "late": (3, 5, 7),
    "permuted": (6, 2, 4),
    "fc-norm": (2, 4, 6),
    "norm-before-fc": (2, 3, 6),
    "mla": (1, 4, 7),
    "llama-usual": (1, 3, 5),
    "llama-residual": (2, 3, 4),
    "llama-final-norm": (1, 3, "final.norm"),
}
QUICK = ("usual", "embedding-first", "permuted", "llama-usual")

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def target_of(name: str) -> Path:
    return TRAINED / ("llama-target" if name.startswith("llama") else "deepseek-target")


@pytest.fixture(scope="module")
def dump_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Dump]:
    """The states of a draft's target on the held-out prompts, all boundaries, made once a target."""
    made: dict[Path, Dump] = {}

    def dump(name: str) -> Dump:
        target = target_of(name)
        if target not in made:
            out = tmp_path_factory.mktemp("dumps") / target.name
            words = ["--model", str(target), "--prompts", str(TRAINED / "prompts.jsonl"), "--dtype", "float32"]
            assert main(["dump", "training", "-o", str(out), *words, "--limit", "20"]) == 0
            made[target] = open_dump(out)
        return made[target]

    return dump


@pytest.fixture(scope="module")
def draft_of() -> Callable[[str], Draft]:
    return lambda name: open_reference(TRAINED / name, target_of(name), device="cpu")


def search(
    draft: Draft, dump: Dump, target: Path | None, *, staged: bool | None = None, rows: int = ROWS[False]
) -> Ordering:
    head = None if target is None else open_target(target)
    passages = limited(windows(find_passages(dump.tokens), WINDOW), rows)
    states, layers = stored_states(dump, draft.checkpoint.target_hidden_size), dump.facts.model.num_layers
    teacher = teach(draft, passages, target=head, boundaries=states, num_layers=layers, read=reader(dump))
    return rank_orderings(draft, teacher, states, reader(dump), num_layers=layers, staged=staged)


def names(every: bool) -> list[object]:
    slow = [] if every else [pytest.mark.slow]
    return [pytest.param(name, marks=[] if name in QUICK and not every else slow) for name in WIRINGS]


@pytest.mark.parametrize("name", names(every=False))
def test_the_wiring_is_found_among_all(
    name: str, dump_of: Callable[[str], Dump], draft_of: Callable[[str], Draft]
) -> None:
    dump, draft = dump_of(name), draft_of(name)
    found = prove_order(draft, dump, open_target(target_of(name))).ordering
    assert found.best == WIRINGS[name], (found.why, found.ranking[:3])
    assert found.tried == found.total == (720 if dump.facts.model.num_layers == 8 else 336)
    assert found.z >= SURE
    assert found.measure == "KL of the draft from the target"
    assert found.ranking[0].agreement > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", list(WIRINGS))
def test_the_staged_search_names_no_other(
    name: str, dump_of: Callable[[str], Dump], draft_of: Callable[[str], Draft]
) -> None:
    found = search(draft_of(name), dump_of(name), target_of(name), staged=True)
    assert found.best == WIRINGS[name]
    assert found.tried < found.total


@pytest.mark.slow
@pytest.mark.parametrize("name", list(WIRINGS))
def test_next_tokens_alone_name_the_wiring_or_none(
    name: str, dump_of: Callable[[str], Dump], draft_of: Callable[[str], Draft]
) -> None:
    found = search(draft_of(name), dump_of(name), None)
    assert found.measure == "cross-entropy of the next token"
    assert found.best in (WIRINGS[name], None)
    assert WIRINGS[name] in [standing.order for standing in found.ranking if standing.z < SURE]


def test_wrong_states_cost_accept_length(dump_of: Callable[[str], Dump], draft_of: Callable[[str], Draft]) -> None:
    dump, draft = dump_of("usual"), draft_of("usual")
    passages = limited(find_passages(dump.tokens), 800)
    states = stored_states(dump, draft.checkpoint.target_hidden_size)
    teacher = teach(draft, passages, target=open_target(target_of("usual")), boundaries=states, read=reader(dump))
    lengths = {
        order: forecast(draft, teacher, ordered(dump, order), Speculation()).accept_length
        for order in ((2, 4, 6), (3, 5, 7), (0, 2, 4), (6, 2, 4))
    }
    assert lengths[2, 4, 6] == max(lengths.values())
    assert lengths[2, 4, 6] - lengths[6, 2, 4] > 0.2
    tree = forecast(draft, teacher, ordered(dump, (2, 4, 6)), Speculation(3, 2, 6))
    assert tree.accept_length > lengths[2, 4, 6]


def test_a_draft_of_another_target_proves_nothing(
    tmp_path: Path, dump_of: Callable[[str], Dump], draft_of: Callable[[str], Draft]
) -> None:
    """Weights that fit and were trained on something else: here, on the same target with its dimensions turned."""
    path = tmp_path / "draft"
    shutil.copytree(TRAINED / "usual", path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].roll(17, dims=1)
    save_file(tensors, path / "model.safetensors")
    draft = open_reference(path, target_of("usual"), device="cpu")
    found = search(draft, dump_of("usual"), target_of("usual"), rows=300)
    assert found.best is None or found.ranking[0].agreement < 0.3


def test_provenance_names_every_model() -> None:
    text = (TRAINED / "PROVENANCE.md").read_text()
    for folder in TRAINED.iterdir():
        if folder.is_dir():
            assert folder.name in text
            assert (folder / "model.safetensors").is_file()
            json.loads((folder / "config.json").read_text())
    size = sum(file.stat().st_size for file in TRAINED.rglob("*") if file.is_file())
    assert size < 12e6


def test_an_order_that_was_left_out_can_be_held_against_the_best(
    dump_of: Callable[[str], Dump], draft_of: Callable[[str], Draft]
) -> None:
    proof = prove_order(draft_of("usual"), dump_of("usual"), open_target(target_of("usual")), rows=400)
    best = proof.ordering.ranking[0].order
    assert proof.refutes(best) is None
    assert proof.refutes((0, 2, 4)) == proof.ordering.standing((0, 2, 4))
    assert proof.standing((2, 4, 99)) is None
    cut = replace(proof, ordering=replace(proof.ordering, ranking=proof.ordering.ranking[:3]))
    again = cut.refutes((0, 2, 4))
    assert again is not None
    assert again.z >= SURE
    heedless = replace(proof, ordering=replace(proof.ordering, control_z=1.0))
    assert heedless.refutes((0, 2, 4)) is None
