"""which-layers and compare with a trained draft: the proven order, four answers, the fix, and the forecast."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_parity.cli.main import main
from eagle_parity.conventions.sglang import upgrade_for
from eagle_parity.diagnosis.declarations import declarations
from eagle_parity.diagnosis.replay import speculation
from eagle_parity.draft.acceptance import Speculation
from eagle_parity.draft.checkpoint import open_draft
from eagle_parity.dump import open_dump
from eagle_parity.records import Engine

pytest.importorskip("transformers")

TRAINED = Path(__file__).parent.parent / "fixtures" / "trained"
TARGET = TRAINED / "deepseek-target"
Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All boundaries of the DeepSeek target on 20 held-out prompts; nobody says what a draft was trained on."""
    out = tmp_path_factory.mktemp("which") / "training"
    words = ["--model", str(TARGET), "--prompts", str(TRAINED / "prompts.jsonl"), "--dtype", "float32", "--limit", "20"]
    assert main(["dump", "training", "-o", str(out), *words]) == 0
    return out


@pytest.fixture
def declaring(training: Path, tmp_path: Path) -> Callable[[list[int | str]], Path]:
    """The same with slot_boundaries."""

    def made(slots: list[int | str]) -> Path:
        path = tmp_path / ("declares-" + "-".join(map(str, slots)))
        shutil.copytree(training, path)
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(manifest | {"slot_boundaries": slots}))
        return path

    return made


@pytest.fixture
def serving(training: Path, tmp_path: Path) -> Callable[..., Path]:
    """A healthy SGLang at TP=2 that feeds these boundaries."""

    def made(*fed: int, version: str = "0.5.23") -> Path:
        path = tmp_path / ("serving-" + "-".join(map(str, fed)))
        path.mkdir()
        ours = open_dump(training)
        shutil.copy(training / "tokens.safetensors", path)
        rows = len(ours.tokens.token_ids)
        slots = {f"slot.{j}": ours.read(0, f"boundary.{k}", 0, rows) for j, k in enumerate(fed)}
        for rank in range(2):
            save_file({k: v.clone() for k, v in slots.items()}, path / f"rank-{rank:04d}.safetensors")
        manifest = json.loads((training / "manifest.json").read_text())
        manifest |= {
            "side": "serving",
            "source": {"pipeline": "sglang", "version": version, "detail": None},
            "engine": {
                "name": "sglang",
                "version": version,
                "tp_size": 2,
                "dp_size": 1,
                "pp_size": 1,
                "ep_size": 1,
                "flags": {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
            },
            "draft": {"name": "draft", "declared_ids": None, "num_slots": len(fed), "spec_accept_length": 1.5},
            "boundaries": [],
            "slots": len(fed),
            "slot_boundaries": None,
        }
        (path / "manifest.json").write_text(json.dumps(manifest))
        return path

    return made


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: object) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = main([*map(str, words), "--format", "json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def codes(report: dict[str, Any], *severities: str) -> list[str]:
    return [f["code"] for f in report["findings"] if f["severity"] in (severities or ("error",))]


def test_a_draft_served_right(training: Path, serving: Callable[..., Path], run: Run) -> None:
    """Nobody declares the order: the weights prove it, the server feeds it, the config means it."""
    code, report = run("which-layers", "--draft", TRAINED / "usual", "--target", TARGET, training, serving(2, 4, 6))
    assert (code, report["verdict"], codes(report)) == (0, "pass", [])
    layers = report["layers"]
    assert layers["trained"] == layers["served"] == layers["declared"] == [2, 4, 6]
    assert layers["stored"] == [*range(9), "final.norm"]
    assert layers["trained_from"].startswith("replaying the draft on ")
    assert layers["ranking"][0]["order"] == [2, 4, 6]
    assert set(layers["ranking"][0]) == {"order", "kl", "excess", "z", "agreement", "rows", "dropped"}
    assert layers["ambiguous"] is False
    assert layers["replay"]["z"] >= 4
    assert layers["replay"]["tried"] == 720
    chances = layers["acceptance"]
    assert chances["training"]["accept_length"] == pytest.approx(chances["serving"]["accept_length"])
    assert chances["measured"] == 1.5


def test_a_draft_served_wrong_names_the_ids_to_write(training: Path, serving: Callable[..., Path], run: Run) -> None:
    code, report = run("which-layers", "--draft", TRAINED / "usual", "--target", TARGET, training, serving(0, 2, 4))
    assert (code, set(codes(report))) == (1, {"layer-shift"})
    assert report["layers"]["trained"] == [2, 4, 6]
    assert report["layers"]["served"] == [0, 2, 4]
    fix = next(f["fix"] for f in report["findings"] if f["code"] == "layer-shift")
    assert '{"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}' in fix
    chances = report["layers"]["acceptance"]
    assert chances["training"]["accept_length"] - chances["serving"]["accept_length"] > 0.2


@pytest.mark.slow
def test_the_story(training: Path, serving: Callable[..., Path], run: Run) -> None:
    """[embed, 2, 4] or [2, 4, 6]? One server, two drafts: each says what it was trained on."""
    for draft, order in (("embedding-first", [0, 2, 4]), ("usual", [2, 4, 6])):
        _, report = run("which-layers", "--draft", TRAINED / draft, "--target", TARGET, training)
        assert report["layers"]["trained"] == order


def test_an_order_that_no_id_list_gives(training: Path, serving: Callable[..., Path], run: Run) -> None:
    code, report = run("which-layers", "--draft", TRAINED / "permuted", "--target", TARGET, training, serving(2, 4, 6))
    assert (code, set(codes(report))) == (1, {"concat-order"})
    assert report["layers"]["trained"] == [6, 2, 4]
    fix = next(f["fix"] for f in report["findings"] if f["code"] == "concat-order")
    assert "no id list gives [6, 2, 4]" in fix
    assert "retrain" in fix


@pytest.mark.slow
def test_an_older_server_gets_the_version_to_upgrade_to(training: Path, serving: Callable[..., Path], run: Run) -> None:
    wrong = serving(2, 4, 6, version="0.5.12")
    draft = TRAINED / "embedding-first"
    code, report = run("which-layers", "--draft", draft, "--target", TARGET, training, wrong)
    assert code == 1
    fixes = {f["fix"] for f in report["findings"] if f["slot"] is not None and f["severity"] == "error"}
    assert any("upgrade to 0.5.14" in fix and "[0, 2, 4]" in fix for fix in fixes), fixes
    assert upgrade_for((0, 2, 4), architecture="LlamaForCausalLM", version="0.5.12", num_layers=8) is None
    assert upgrade_for((0, 2, 4), architecture=None, version="0.5.12", num_layers=8) is None


@pytest.mark.slow
def test_the_weights_overrule_the_dump(declaring: Callable[..., Path], serving: Callable[..., Path], run: Run) -> None:
    """A dump that says [3, 5, 7] of a draft trained on [2, 4, 6]: a warning, and the server is right."""
    code, report = run(
        "which-layers", "--draft", TRAINED / "usual", "--target", TARGET, declaring([3, 5, 7]), serving(2, 4, 6)
    )
    assert (code, codes(report, "error", "warning")) == (0, ["layer-set"])
    (warning,) = [f for f in report["findings"] if f["severity"] == "warning"]
    assert warning["evidence"]["declared"] == [3, 5, 7]
    assert warning["evidence"]["proven"] == [2, 4, 6]
    assert "--slots 2,4,6" in warning["fix"]


@pytest.mark.slow
def test_compare_asks_the_draft_only_where_nobody_declares(
    training: Path, declaring: Callable[..., Path], serving: Callable[..., Path], run: Run
) -> None:
    served = serving(2, 4, 6)
    words = ["compare", "--draft", TRAINED / "usual", "--target", TARGET]
    code, report = run(*words, training, served)
    assert (code, report["layers"]["trained"]) == (0, [2, 4, 6])
    assert report["inputs"]["expected_from"].startswith("replaying the draft")
    code, report = run(*words, declaring([3, 5, 7]), served)
    assert (code, report["layers"]["trained"]) == (1, [3, 5, 7])
    assert report["inputs"]["expected_from"] == "the training dump's slot_boundaries"


def test_what_the_draft_was_not_trained_on_is_known_before_the_rest(
    tmp_path: Path, serving: Callable[..., Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows: [2, 4, 6] and a neighbour cannot be told apart, and yet [0, 2, 4] cannot be right."""
    monkeypatch.setattr("eagle_parity.draft.proof.ROWS", {False: 500, True: 500})
    few = tmp_path / "few"
    words = ["--model", str(TARGET), "--prompts", str(TRAINED / "prompts.jsonl"), "--dtype", "float32", "--limit", "20"]
    assert main(["dump", "training", "-o", str(few), *words]) == 0
    draft = tmp_path / "draft"
    shutil.copytree(TRAINED / "usual", draft)
    config = json.loads((draft / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 2, 4]
    (draft / "config.json").write_text(json.dumps(config))
    fed = serving(0, 2, 4)
    code, report = run("which-layers", "--draft", draft, "--target", TARGET, few, fed)
    assert report["layers"]["ambiguous"] is True
    assert (code, codes(report)) == (1, ["layer-set"])
    evidence = report["findings"][0]["evidence"]
    assert [2, 4, 6] in evidence["candidates"]
    assert [0, 2, 4] not in evidence["candidates"]
    assert not [f for f in report["findings"] if f["code"] == "features-match-check-draft"]
    code, report = run("compare", "--draft", draft, "--target", TARGET, few, fed)
    assert (code, codes(report)) == (1, ["layer-set"])
    code, report = run("which-layers", "--draft", draft, "--target", TARGET, few, "--engine", "sglang==0.5.23")
    assert (code, codes(report)) == (1, ["engine-version-rule"])


def test_what_cannot_be_replayed_leaves_the_other_answers(
    training: Path, serving: Callable[..., Path], run: Run
) -> None:
    """Without --target the draft has no embedding."""
    code, report = run("which-layers", "--draft", TRAINED / "usual", training, serving(2, 4, 6))
    assert (code, codes(report)) == (0, [])
    (note,) = [f for f in report["findings"] if f["message"].startswith("the trained order was not proven")]
    assert "--target" in note["fix"]
    assert report["layers"]["trained"] == report["layers"]["declared"] == [2, 4, 6]
    assert report["layers"]["ranking"] == []


def test_the_table_shows_four_answers(
    training: Path, serving: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    fed = serving(0, 2, 4)
    capsys.readouterr()
    assert (
        main(["which-layers", "--draft", str(TRAINED / "usual"), "--target", str(TARGET), str(training), str(fed)]) == 1
    )
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        "trained on [2, 4, 6] replaying the draft on",
        "stored 0..8, final.norm on the training side",
        "served [0, 2, 4] by content",
        "declared [2, 4, 6]",
        "as vLLM 0.33.0: the id itself",
        "replayed in this order KL worse by z agreement",
        "accept length",
        "on what the server feeds; 1.50 measured",
    ):
        assert text in out, out


def test_declarations_of_one_config() -> None:
    """[1, 3, 5] of 8 layers: SGLang by version, vLLM, and the trainers in groups."""
    entries = declarations(open_draft(TRAINED / "usual"), "DeepseekV3ForCausalLM", 8, (2, 4, 6))
    found = [(entry["by"], entry["boundaries"], entry["as_trained"]) for entry in entries]
    assert ("SGLang", (2, 4, 6), True) in found
    assert ("vLLM", (1, 3, 5), False) in found
    assert [entry["versions"] for entry in entries if entry["by"] == "SGLang"] == ["before 0.5.13", "0.5.13 to 0.5.23"]
    trainers = [entry for entry in entries if entry["by"] not in ("SGLang", "vLLM")]
    assert [entry["boundaries"] for entry in trainers] == [(1, 3, 5), (2, 4, 6)]
    assert "SpecForge" in trainers[1]["by"]
    assert all(entry["source"] for entry in entries)
    assert declarations(open_draft(TRAINED / "usual"), "DeepseekV3ForCausalLM", None, None) == ()


def test_the_servers_own_settings() -> None:
    assert speculation(None) == Speculation(3, 1, 4)
    flags = {"speculative_num_steps": 5, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8}
    assert speculation(Engine("sglang", flags=flags)) == Speculation(5, 2, 8)
    assert speculation(Engine("sglang", flags={"speculative_num_steps": 4})) == Speculation(4, 1, 5)


@pytest.mark.slow
def test_a_random_draft_is_said_to_prove_nothing(training: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "random"
    shutil.copytree(TRAINED / "usual", path)
    g = torch.Generator().manual_seed(0)
    tensors = load_file(path / "model.safetensors")
    noise = {k: (torch.randn(v.shape, generator=g) * 0.05).bfloat16() for k, v in tensors.items() if v.dim() == 2}
    save_file(tensors | noise, path / "model.safetensors")
    _, report = run("which-layers", "--draft", path, "--target", TARGET, training)
    assert report["layers"]["ambiguous"] is True
    assert any("does not decide the order" in f["message"] for f in report["findings"])
