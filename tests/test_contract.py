"""Promises that an outsider broke once: no wrong pass, nothing of the user's deleted, no bug where the input is odd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_parity.cli.main import main
from eagle_parity.dump import DumpWriter
from eagle_parity.errors import UsageError
from tests.synthetic import Net, codes, make_net, serving_spec, slots_from, training_spec
from tests.test_dump import plan

Compare = Callable[..., tuple[int, dict[str, Any]]]


def test_a_dump_without_slots_does_not_pass(net: Net, compare: Compare) -> None:
    spec = serving_spec(net, ())
    for rank in spec.ranks:
        rank["boundary.0"] = net.streams[0].bfloat16()
    code, report = compare(training_spec(net), spec)
    assert (code, report["verdict"]) == (3, "inconclusive")


def test_a_training_dump_as_serving_is_refused(net: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(training_spec(net).write(tmp_path / "t"))
    assert main(["compare", path, path]) == 2
    assert "nothing was served" in capsys.readouterr().err


def test_overwrite_replaces_dumps_only(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("keep")
    file = tmp_path / "prompts.jsonl"
    file.write_text("keep")
    for path, says in ((precious, "no dump"), (file, "not a directory"), (file / "x", "is a file")):
        with pytest.raises(UsageError, match=says):
            DumpWriter(path, plan(), overwrite=True)
    assert (precious / "thesis.txt").read_text() == file.read_text() == "keep"


def test_a_report_goes_into_a_pipe(net: Net, tmp_path: Path) -> None:
    sides = [str(training_spec(net).write(tmp_path / "t")), str(serving_spec(net).write(tmp_path / "s"))]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "eagle_parity", "compare", *sides, "--report", f"json={pipe}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        assert json.loads(pipe.read_text())["verdict"] == "pass"
        assert process.wait() == 0
    assert pipe.is_fifo()


def test_a_full_disk_is_no_bug(net: Net, tmp_path: Path) -> None:
    sides = [str(training_spec(net).write(tmp_path / "t")), str(serving_spec(net).write(tmp_path / "s"))]
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "eagle_parity", "compare", *sides, "--format", "json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 4
    assert "this is a bug" not in done.stderr


@pytest.mark.parametrize("tp", [2, 8])
def test_a_token_shard_may_be_empty(tp: int, compare: Compare) -> None:
    net = make_net(tp=tp)
    spec = serving_spec(net, tp=tp)
    count = len(net.ids)
    for r, rank in enumerate(spec.ranks):
        index = torch.arange(count if r == 0 else 0)
        for name in list(rank):
            rank[name] = rank[name][index]
        rank["rows"] = index
    code, report = compare(training_spec(net), spec)
    assert code == 1
    assert codes(report) <= {"token-shard", "rows-lost", "capture-lost"}


def test_rows_that_no_rank_holds(net: Net, compare: Compare) -> None:
    spec = serving_spec(net)
    for r, rank in enumerate(spec.ranks):
        index = torch.arange(0 if r else 20)
        for name in list(rank):
            rank[name] = rank[name][index]
        rank["rows"] = index
    code, report = compare(training_spec(net), spec)
    assert code == 1
    assert report["verdict"] == "fail"


@pytest.mark.parametrize("seed", range(4))
def test_a_stored_residual_proves_uneven_partial_sums(seed: int, compare: Compare) -> None:
    """One rank's share is most of the sum, so that it alone is near the truth."""
    net = make_net(tp=8, seed=seed, hidden=128)
    usual = (2, 3, 5)

    def part(j: int, r: int) -> torch.Tensor:
        shares = net.parts[usual[j]]
        small = [0.05 * share for share in shares[:-1]]
        own = small[r] if r < 7 else sum(shares, torch.zeros(())) - sum(small, torch.zeros(()))
        return (net.residuals[usual[j]] + own).bfloat16()

    spec = slots_from(serving_spec(net, tp=8), part)
    for rank in spec.ranks:
        rank |= {f"residual.{k}": net.residuals[k].bfloat16() for k in usual}
    code, report = compare(training_spec(net), spec)
    assert (code, codes(report)) == (1, {"partial-sum"})


def test_failures_are_not_followed_by_all_is_well(net: Net, compare: Compare) -> None:
    spec = serving_spec(net)
    spec.ranks[1]["slot.1"] = torch.zeros_like(spec.ranks[1]["slot.1"])
    code, report = compare(training_spec(net), spec)
    assert code == 1
    assert "features-match-check-draft" not in codes(report, "info")


def test_slots_beyond_the_model_are_a_usage_error(net: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [str(training_spec(net).write(tmp_path / "t")), str(serving_spec(net).write(tmp_path / "s"))]
    assert main(["compare", *sides, "--slots", "2,3,99"]) == 2
    assert "boundaries 0 to 6" in capsys.readouterr().err


@pytest.mark.parametrize("parent", [-5, 30, 200])
def test_broken_trees_are_refused(parent: int, net: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = serving_spec(net)
    parents = torch.arange(-1, len(net.ids) - 1)
    parents[0], parents[20], parents[37] = -1, -1, -1
    parents[25] = parent
    spec.columns["parents"] = parents
    training = training_spec(net).write(tmp_path / "t")
    assert main(["compare", str(training), str(spec.write(tmp_path / "s"))]) == 2
    assert "the parent of row 25" in capsys.readouterr().err


def test_half_of_the_channels_is_no_norm(net: Net, compare: Compare) -> None:
    mask = torch.arange(net.hidden) % 2 == 0
    spec = slots_from(serving_spec(net), lambda j, r: (net.streams[3] * mask).bfloat16() if j == 1 else None)
    code, report = compare(training_spec(net), spec)
    assert code == 1
    assert "draft-norm" not in codes(report)


def test_missing_neighbours_are_said(net: Net, compare: Compare) -> None:
    """With three boundaries stored, a one-layer shift in a slow model could pass: the report says so."""
    code, report = compare(training_spec(net, boundaries=[2, 3, 5]), serving_spec(net))
    assert code == 0
    assert any("boundaries next to those of slot 0, 1, 2" in text for text in report["coverage"]["not_seen"])
    code, report = compare(training_spec(net), serving_spec(net))
    assert not any("boundaries next to" in text for text in report["coverage"]["not_seen"])
