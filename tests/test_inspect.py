"""`eagle-parity inspect`: dumps, training files and drafts, as a table of 80 columns and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from eagle_parity.cli import inspect
from eagle_parity.dump import DumpWriter
from eagle_parity.errors import InputError
from eagle_parity.readers import open_training, stream_training

FIXTURES = Path(__file__).parents[1] / "fixtures"
TRAINING = FIXTURES / "training"
TARGET = str(TRAINING / "target")
app = typer.Typer()
app.command()(inspect.command)


def run(*arguments: str) -> str:
    result: Result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def as_json(*arguments: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run(*arguments, "--format", "json"))
    assert document["schema_version"] == 1
    assert document["command"] == "inspect"
    return document


def test_training_files_as_a_table() -> None:
    text = run(str(TRAINING / "specforge/hidden_states_padded"), "--model", TARGET)
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "SpecForge .ckpt (specforge)",
        "3 in 3 files",
        "137",
        "512 of hidden states",
        "slot 1    4             64       BF16     assumed: specforge default",
        "last      final.norm",
        "the slots are boundaries 2, 4, 5, the default for 8 layers",
        "right padding (id 0) is left out (2 of 3 samples)",
    ):
        assert part in text, part


def test_training_files_as_json() -> None:
    document = as_json(str(TRAINING / "speculators/hidden_states_fp8"))
    assert document["kind"] == "training"
    assert document["format"] == "speculators"
    assert (document["dtype"], document["stored_dtype"]) == ("BF16", "F8_E4M3")
    assert document["bytes_per_token"] == 4 * 64
    assert document["tokens"] == 137
    assert document["tokens_exact"] is True
    assert document["blocks"][0] == {"role": "slot 0", "boundary": None, "known": False, "basis": "unknown"}
    assert "the default needs the target's number of layers" in document["assumptions"][0]


def test_known_boundaries_are_told_from_assumed_ones() -> None:
    text = run(str(TRAINING / "nemo"))
    assert "known: manifest.json" in text
    assert "assumed" not in text


def test_a_sample_of_many_is_an_estimate(tmp_path: Path) -> None:
    for i in range(10):
        torch.save(
            {
                "input_ids": torch.arange(i, i + 20),
                "hidden_states": torch.zeros(20, 8).bfloat16(),
                "aux_hidden_states": torch.zeros(20, 24).bfloat16(),
            },
            tmp_path / f"c{i}.pt",
        )
    text = run(str(tmp_path), "--limit", "4")
    assert "10 in 10 files, 4 looked at" in text
    assert "about 200 (from 80 in 4)" in text
    document = as_json(str(tmp_path), "--limit", "4")
    assert (document["samples"], document["samples_read"], document["tokens_exact"]) == (10, 4, False)


def test_bad_files_are_listed(tmp_path: Path) -> None:
    good = TRAINING / "modelopt/hf_eagle_default/c0.pt"
    (tmp_path / "c0.pt").write_bytes(good.read_bytes())
    (tmp_path / "c1.pt").write_bytes(good.read_bytes()[:999])
    text = run(str(tmp_path))
    assert "1 unusable" in text
    assert "not used" in text
    assert as_json(str(tmp_path))["problems"][0]["sample"] == "c1.pt"
    with pytest.raises(InputError, match="1 of 2 samples cannot be used"):
        run(str(tmp_path), "--strict")
    with pytest.raises(InputError, match="does not exist"):
        run(str(tmp_path / "nowhere"))


def test_headers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("hidden states were read")

    monkeypatch.setattr("eagle_parity.readers.stored.Rows.read", never)
    monkeypatch.setattr("eagle_parity.tensorfile.TensorFile.read", never)
    for path in ("specforge/hidden_states", "speculators/vllm_connector_raw", "nemo", "speculators-v1"):
        run(str(TRAINING / path))
    run(str(FIXTURES / "drafts/torchspec_mla"))


def test_a_dump(tmp_path: Path) -> None:
    stream = stream_training(open_training(TRAINING / "speculators-v1"))
    with DumpWriter(tmp_path / "dump", stream.plan) as writer:
        for sample in stream.samples:
            writer.add(sample)
    text = run(str(tmp_path / "dump"))
    for part in ("eagle-parity dump, training side", "3 (prefill)", "135", "trained on 3, 5, 6", "boundary.8"):
        assert part in text, part
    document = as_json(str(tmp_path / "dump"))
    assert document["kind"] == "dump"
    assert document["tensors"][0] == {"name": "boundary.3", "rows": 135, "width": 64, "dtype": "BF16", "ranks": [0]}


def test_a_draft() -> None:
    text = run(str(FIXTURES / "drafts/speculators_fc_norm_out"))
    for part in ("draft checkpoint, llama, speculators config", "2, 4, 5 (at the top level)", "fc_norm, norm_output"):
        assert part in text, part
    document = as_json(str(FIXTURES / "drafts/specforge_sglang"))
    assert document["kind"] == "draft"
    assert document["missing"] == ["embed_tokens"]


def test_a_target_is_no_draft() -> None:
    with pytest.raises(InputError, match=r"is not an EAGLE-3 draft: it has no fc.weight, but 75 tensors in 8 layers"):
        run(TARGET)


def test_help_loads_no_torch() -> None:
    code = "import sys, eagle_parity.cli.inspect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
