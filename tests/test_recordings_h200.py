"""The recording of a live TP=2 server with CUDA graphs: see fixtures/recordings/h200/PROVENANCE.md."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_parity.cli.main import main
from tests.conftest import ROOT
from tests.synthetic import codes

RECORDING = ROOT / "fixtures" / "recordings" / "h200"
Verdict = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def verdict(capsys: pytest.CaptureFixture[str]) -> Verdict:
    def run(serving: Path, training: Path = RECORDING / "training") -> tuple[int, dict[str, Any]]:
        code = main(["compare", str(training), str(serving), "--format", "json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_the_healthy_server_passes(verdict: Verdict) -> None:
    code, report = verdict(RECORDING / "serving")
    assert (code, report["verdict"], codes(report)) == (0, "pass", set())
    assert [row["best_boundary"] for row in report["rows"]] == [2, 4, 6]
    for row in report["rows"]:
        assert (row["layout"], row["rank_equal"], row["status"]) == ("replicated", True, "ok")
        assert row["rel_l2"]["median"] < 0.014
        assert row["margin"] > 30
    assert all(control["failed_as_expected"] is True for control in report["controls"])


def test_graph_replay_verify_rows_and_a_long_forward_were_seen(verdict: Verdict) -> None:
    _, report = verdict(RECORDING / "serving")
    coverage = report["coverage"]
    assert set(coverage["phases"]) == {"prefill", "verify"}
    assert set(coverage["graph"]) == {False, True}
    assert coverage["max_forward_tokens"] == 2305
    assert coverage["ranks"] == [0, 1]
    assert not any("graph" in what or "verify rows" in what for what in coverage["not_seen"])


def test_wrong_ids_fail_with_the_line_to_write(verdict: Verdict) -> None:
    code, report = verdict(RECORDING / "serving-wrong")
    assert (code, report["verdict"], codes(report)) == (1, "fail", {"layer-shift"})
    assert [row["best_boundary"] for row in report["rows"]] == [0, 2, 4]
    assert any('"eagle_aux_hidden_state_layer_ids": [2, 4, 6]' in finding["fix"] for finding in report["findings"])


def test_sixty_one_layers(verdict: Verdict) -> None:
    """Deep in a model a layer changes little: the next boundary is 5 times as far as the noise, and that is enough."""
    code, report = verdict(RECORDING / "deep" / "serving", RECORDING / "deep" / "training")
    assert (code, report["verdict"], codes(report)) == (0, "pass", set())
    assert [row["best_boundary"] for row in report["rows"]] == [2, 30, 58]
    assert [row["width"] for row in report["rows"]] == [7168] * 3
    for row, margin in zip(report["rows"], (60, 8, 4.5), strict=True):
        assert (row["layout"], row["rank_equal"]) == ("replicated", True)
        assert row["margin"] > margin


@pytest.mark.parametrize("step", [-1, 1])
def test_a_shift_by_one_deep_in_the_model(step: int, verdict: Verdict, tmp_path: Path) -> None:
    """Slot 1 is given training's own boundary 29 or 31, without any noise that would help."""
    deep = RECORDING / "deep"
    shutil.copytree(deep / "serving", tmp_path / "serving")
    training, tokens = (load_file(deep / "training" / name) for name in ("rank-0000.safetensors", "tokens.safetensors"))
    theirs = dict(zip(tokens["positions"].tolist(), training[f"boundary.{30 + step}"], strict=True))
    positions = load_file(deep / "serving" / "tokens.safetensors")["positions"].tolist()
    for rank in range(2):
        path = tmp_path / "serving" / f"rank-{rank:04d}.safetensors"
        tensors = load_file(path)
        rows = [theirs.get(position, row) for position, row in zip(positions, tensors["slot.1"], strict=True)]
        path.unlink()
        save_file(tensors | {"slot.1": torch.stack(rows)}, path)
    code, report = verdict(tmp_path / "serving", deep / "training")
    assert (code, codes(report)) == (1, {"layer-shift"})
    assert report["rows"][1]["best_boundary"] == 30 + step


def test_states_of_another_row_in_graph_replay_alone_are_found(verdict: Verdict, tmp_path: Path) -> None:
    for name in ("rank-0000.safetensors", "rank-0001.safetensors", "tokens.safetensors", "manifest.json"):
        (tmp_path / name).write_bytes((RECORDING / "serving" / name).read_bytes())
    requests = json.loads((tmp_path / "manifest.json").read_text())["requests"]
    rows = [row for request in requests if request["graph"] for row in range(*request["rows"])]
    for rank in range(2):
        path = tmp_path / f"rank-{rank:04d}.safetensors"
        tensors = load_file(path)
        for tensor in tensors.values():
            tensor[rows] = tensor[rows].roll(1, dims=0)
        save_file(tensors, path)
    code, report = verdict(tmp_path)
    assert (code, report["verdict"]) == (1, "fail")


def test_accepted_rows_form_the_path() -> None:
    """A chain of four: the root is accepted always, and what is accepted comes first."""
    tokens = load_file(RECORDING / "serving" / "tokens.safetensors")
    manifest = json.loads((RECORDING / "serving" / "manifest.json").read_text())
    verifies = [request["rows"] for request in manifest["requests"] if request["phase"] == "verify"]
    assert len(verifies) == 3
    for begin, end in verifies:
        accepted = tokens["accepted"][begin:end].tolist()
        assert accepted[0] == 1
        assert accepted == sorted(accepted, reverse=True)
        assert tokens["parents"][begin:end].tolist() == [-1, *range(begin, end - 1)]
    assert 0 in tokens["accepted"].tolist()


def test_the_ranks_are_the_same_bytes() -> None:
    for dump in ("serving", "serving-wrong"):
        files = [(RECORDING / dump / f"rank-000{rank}.safetensors").read_bytes() for rank in range(2)]
        assert len({hashlib.sha256(file).hexdigest() for file in files}) == 1


def test_trimming_keeps_the_rows_it_says(tmp_path: Path) -> None:
    """The script, run on its own output, keeps rows as they are and renumbers the tree."""
    script = RECORDING / "trim.py"
    sides = [RECORDING / "training", RECORDING / "serving"]
    keep = ["--keep", "prompt-40:4:2", "--keep", "prompt-2305:4:1", "--boundaries", "2,3,4"]
    subprocess.run([sys.executable, script, *sides, tmp_path / "out", *keep], check=True)
    whole, part = (load_file(folder / "rank-0000.safetensors") for folder in (sides[1], tmp_path / "out" / "serving"))
    rows = [*range(4, 8), *range(8, 24)]
    assert torch.equal(part["slot.1"], whole["slot.1"][rows])
    parents = load_file(tmp_path / "out" / "serving" / "tokens.safetensors")["parents"].tolist()
    assert parents == [-1, 0, 1, 2, -1, 4, 5, 6, -1, 8, 9, 10, -1, 12, 13, 14, -1, 16, 17, 18]
    states = load_file(tmp_path / "out" / "training" / "rank-0000.safetensors")
    assert set(states) == {"boundary.2", "boundary.3", "boundary.4"}
