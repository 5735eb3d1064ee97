"""Training files as they lie on disk, taken directly by compare, gate, which-layers and dump training --from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_parity.cli.main import main
from eagle_parity.dump import open_dump
from tests.synthetic import DumpSpec, codes, noisy

FIXTURES = Path(__file__).parent.parent / "fixtures"
FILES = FIXTURES / "training" / "specforge" / "hidden_states"
TARGET = FIXTURES / "training" / "target"
DRAFT = FIXTURES / "drafts" / "specforge_sglang"
HIDDEN = 64


def served(path: Path, order: tuple[int, ...] = (0, 1, 2)) -> Path:
    """A TP=2 server that was asked the same prompts: block order[j] of the stored states in slot j, with bf16 noise."""
    ids: list[int] = []
    positions: list[int] = []
    requests: list[dict[str, Any]] = []
    states = []
    for number, file in enumerate(sorted(FILES.rglob("*.ckpt"))):
        sample = torch.load(file, weights_only=True)
        tokens = sample["input_ids"].tolist()
        requests.append(
            {"id": f"p{number}", "rows": [len(ids), len(ids) + len(tokens)], "phase": "prefill", "batch": 1}
        )
        ids += tokens
        positions += range(len(tokens))
        states.append(sample["aux_hidden_state"][0])
    aux = torch.cat(states).float()
    blocks = [aux[:, j * HIDDEN : (j + 1) * HIDDEN] for j in range(3)]
    rank = {f"slot.{j}": noisy(blocks[k], seed=j).bfloat16() for j, k in enumerate(order)}
    model = {"architecture": "LlamaForCausalLM", "hidden_size": HIDDEN, "num_layers": 8, "dtype": "bfloat16"}
    engine = {"name": "sglang", "version": "0.5.23", "tp_size": 2}
    spec = DumpSpec("serving", ids, positions, requests, [rank, rank], {"model": model, "engine": engine})
    return spec.write(path)


def run_json(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main([*map(str, args), "--format", "json"])
    return code, json.loads(capsys.readouterr().out)


def test_compare_takes_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of layers that numbers the blocks comes from the serving dump."""
    code, report = run_json(capsys, "compare", FILES, served(tmp_path / "serving"))
    assert (code, codes(report)) == (0, set())
    assert [row["expected_boundary"] for row in report["rows"]] == [2, 4, 5]
    assert any("no file records them" in text for text in report["inputs"]["training"]["assumptions"])
    code, report = run_json(capsys, "compare", FILES, served(tmp_path / "permuted", (1, 0, 2)))
    assert (code, codes(report)) == (1, {"concat-order"})


def test_gate_and_which_layers_take_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serving = served(tmp_path / "serving")
    assert main(["gate", str(FILES), str(serving), "--draft", str(DRAFT)]) == 0
    code, report = run_json(capsys, "which-layers", FILES, serving, "--draft", DRAFT)
    assert (code, report["layers"]["served"], report["layers"]["declared"]) == (0, [2, 4, 5], [2, 4, 5])


def test_dump_training_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "dump"
    assert main(["dump", "training", "--from", str(FILES), "--model", str(TARGET), "-o", str(out)]) == 0
    assert "137 tokens" in capsys.readouterr().out
    dump = open_dump(out)
    assert dump.facts.slot_boundaries == (2, 4, 5)
    assert dump.facts.boundaries == (2, 4, 5)
    code, report = run_json(capsys, "compare", out, served(tmp_path / "serving"))
    assert (code, codes(report)) == (0, set())


def test_part_of_a_dump(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    main(["dump", "training", "--from", str(FILES), "--model", str(TARGET), "-o", str(whole)])
    assert main(["dump", "training", "--from", str(whole), "--limit", "1", "--boundaries", "4", "-o", str(part)]) == 0
    assert open_dump(part).facts.boundaries == (4,)
    assert len(open_dump(part).tokens.requests) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["dump", "training", "-o", "OUT"], "no source was given"),
        (["dump", "training", "-o", "OUT", "--from", FILES], "--model"),
        (["dump", "training", "-o", "OUT", "--from", FILES, "--prompts", "x"], "leave out --prompts"),
        (["dump", "training", "-o", "OUT", "--from", FILES, "--reader", "nope"], "nope"),
        (["dump", "training", "-o", "OUT", "--from", "EMPTY"], "EMPTY"),
        (["dump", "training", "-o", "OUT", "--from", FILES, "--slots", "2,x"], "--slots"),
        (["compare", "EMPTY", "SERVING"], "EMPTY"),
        (["compare", FILES, "SERVING", "--reader", "modelopt"], "aux_hidden_states"),
    ],
)
def test_mistakes(args: list[object], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "EMPTY"
    empty.mkdir()
    places = {"OUT": tmp_path / "out", "EMPTY": empty, "SERVING": tmp_path / "serving"}
    served(places["SERVING"])
    assert main([str(places.get(str(word), word)) for word in args]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "fix:" in err
    assert not (tmp_path / "out").exists()
