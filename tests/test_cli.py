"""The command line: bad input, exit codes, where output goes, which-layers and gate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_parity.cli.main import main
from tests.synthetic import Net, codes, make_net, serving_spec, training_spec

ROOT = Path(__file__).parent.parent
DRAFT = ROOT / "fixtures" / "drafts" / "specforge_sglang"


def draft_with(ids: list[int] | None, path: Path, *, top_level: bool = False) -> Path:
    """A copy of a real draft that declares other ids."""
    path.mkdir()
    (path / "model.safetensors").symlink_to(DRAFT / "model.safetensors")
    config = json.loads((DRAFT / "config.json").read_text())
    config.pop("eagle_config", None)
    if ids is not None and top_level:
        config["eagle_aux_hidden_state_layer_ids"] = ids
    elif ids is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def sides(net: Net, tmp_path: Path) -> tuple[str, str]:
    return (
        str(training_spec(net).write(tmp_path / "training")),
        str(serving_spec(net, (0, 2, 4)).write(tmp_path / "serving")),
    )


@pytest.fixture
def healthy(net: Net, tmp_path: Path) -> tuple[str, str]:
    return (
        str(training_spec(net).write(tmp_path / "training")),
        str(serving_spec(net).write(tmp_path / "healthy")),
    )


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main([*args, "--format", "json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nonsense"],
        ["compare"],
        ["compare", "only-one"],
        ["compare", "a", "b", "--nope"],
        ["compare", "a", "b", "--format", "yaml"],
        ["compare", "a", "b", "--report", "json"],
        ["compare", "a", "b", "--report", "pdf=x"],
        ["compare", "a", "b", "--report", "json=/does/not/exist/report.json"],
        ["compare", "/does/not/exist", "b"],
        ["which-layers", "a", "b"],
        ["which-layers", "--draft", "/does/not/exist", "a", "b"],
        ["which-layers", "--draft", "d", "a", "--engine", "vllm==1"],
        ["gate", "a"],
        ["dump", "training", "-o", "x"],
        ["dump", "serving"],
    ],
)
def test_usage_errors_exit_2_without_a_traceback(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert err or out


def test_errors_as_json(capsys: pytest.CaptureFixture[str], sides: tuple[str, str]) -> None:
    for args in (["compare", "/does/not/exist", sides[1]], ["compare", "--nope"]):
        code, document = run_json(capsys, *args)
        assert code == 2
        assert document["schema_version"] == 1
        assert set(document["error"]) == {"code", "message", "fix"}
        assert document["error"]["message"]


def test_environment_errors_exit_4(capsys: pytest.CaptureFixture[str], sides: tuple[str, str], tmp_path: Path) -> None:
    args = ["dump", "serving", "-o", str(tmp_path / "x"), "--tokens-from", sides[0], "--server", "http://127.0.0.1:9"]
    assert main([*args, "--capture-dir", str(tmp_path / "spool")]) == 4
    assert "fix:" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_bug_exits_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sides: tuple[str, str]
) -> None:
    def broken(*args: object, **more: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("eagle_parity.cli.compare.measure", broken)
    code, document = run_json(capsys, "compare", *sides)
    assert (code, document["error"]["code"]) == (70, "bug")


def test_interrupt_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sides: tuple[str, str]
) -> None:
    def interrupted(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle_parity.cli.compare.measure", interrupted)
    assert main(["compare", *sides]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_swapped_sides_are_refused(healthy: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *healthy[::-1]]) == 2
    assert "the sides are swapped" in capsys.readouterr().err


def test_dumps_of_different_models_are_refused(
    healthy: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = serving_spec(make_net(hidden=64)).write(tmp_path / "other")
    assert main(["compare", healthy[0], str(other)]) == 2
    assert "hidden_size is 96" in capsys.readouterr().err


def test_results_on_stdout_and_into_files(
    sides: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = [f"json={tmp_path / 'r.json'}", f"table={tmp_path / 'r.txt'}"]
    assert main(["compare", *sides, "--report", reports[0], "--report", reports[1]]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("FAIL  layer-set on slots 0, 1, 2\n")
    assert err == ""
    assert json.loads((tmp_path / "r.json").read_text())["verdict"] == "fail"
    assert (tmp_path / "r.txt").read_text().startswith("FAIL  layer-set")


@pytest.mark.parametrize("columns", [80, 200])
def test_the_table_fits(columns: int, sides: tuple[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eagle_parity", "compare", *sides],
        capture_output=True,
        text=True,
        env={"COLUMNS": str(columns), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    row = next(line for line in lines if line.startswith("slot 0"))
    assert "…" not in row
    assert row.split()[2:4] == ["2", "0"]
    assert row.rstrip().endswith("fail")


# ------------------------------------------------------------------------------------------------ which-layers


def test_which_layers_names_what_is_fed(
    sides: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = draft_with([0, 2, 4], tmp_path / "draft")
    code, report = run_json(capsys, "which-layers", "--draft", str(draft), *sides)
    assert (code, report["command"]) == (1, "which-layers")
    assert report["layers"]["trained"] == [2, 3, 5]
    assert report["layers"]["served"] == report["layers"]["declared"] == [0, 2, 4]
    assert all("[2, 3, 5]" in f["fix"] for f in report["findings"] if f["severity"] == "error")
    main(["which-layers", "--draft", str(draft), *sides])
    out = " ".join(capsys.readouterr().out.split())
    assert "trained on [2, 3, 5]" in out
    assert "not proven by replaying the draft" in out
    assert "served [0, 2, 4] by content" in out


def test_which_layers_passes_where_all_agree(
    healthy: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = draft_with([1, 2, 4], tmp_path / "draft")
    code, report = run_json(capsys, "which-layers", "--draft", str(draft), *healthy)
    assert (code, codes(report), codes(report, "warning")) == (0, set(), set())
    assert report["layers"]["declared"] == [2, 3, 5]


def test_which_layers_warns_where_the_config_is_not_what_runs(
    healthy: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = draft_with([0, 2, 4], tmp_path / "draft")
    code, report = run_json(capsys, "which-layers", "--draft", str(draft), *healthy)
    assert (code, codes(report, "warning")) == (0, {"engine-version-rule"})


def test_which_layers_tells_of_ids_that_sglang_ignores(
    healthy: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = draft_with([1, 2, 4], tmp_path / "draft", top_level=True)
    code, report = run_json(capsys, "which-layers", "--draft", str(draft), *healthy)
    assert report["layers"]["declared"] == [2, 3]  # n = 6: the default [2, n // 2, n - 3] repeats a layer
    assert any("at the top level, which SGLang ignores" in f["message"] for f in report["findings"])
    assert code == 1  # whatever this server does, that default cannot fill three slots


@pytest.mark.parametrize(
    ("ids", "engine", "code"),
    [
        ([1, 2, 4], "sglang==0.5.23", 0),
        ([2, 3, 5], "sglang==0.5.23", 0),
        ([2, 3, 5], "sglang==0.5.12", 1),
        ([0, 2, 4], "sglang==0.5.23", 1),
        ([1, 2, 4], None, 3),
    ],
)
def test_which_layers_from_files_alone(
    ids: list[int],
    engine: str | None,
    code: int,
    healthy: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draft = draft_with(ids, tmp_path / "draft")
    more = [] if engine is None else ["--engine", engine]
    got, report = run_json(capsys, "which-layers", "--draft", str(draft), healthy[0], *more)
    assert got == code
    if code == 1:
        assert codes(report) == {"engine-version-rule"}


# --------------------------------------------------------------------------------------------------------- gate


def test_gate_passes(healthy: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = draft_with([1, 2, 4], tmp_path / "draft")
    assert main(["gate", *healthy, "--draft", str(draft)]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("PASS ")


def test_gate_fails_with_one_line_a_finding(
    sides: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = draft_with([0, 2, 4], tmp_path / "draft")
    assert main(["gate", *sides, "--draft", str(draft), "--report", f"json={tmp_path / 'g.json'}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FAIL layer-set on slots 0, 1, 2"
    assert [line.split(":")[0] for line in lines[1:]] == ["ERROR layer-set"] * 3
    document = json.loads((tmp_path / "g.json").read_text())
    assert (document["command"], document["verdict"]) == ("gate", "fail")


def test_gate_is_inconclusive_without_an_expected_order(
    net: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = training_spec(net, None).write(tmp_path / "training")
    serving = serving_spec(net).write(tmp_path / "serving")
    assert main(["gate", str(training), str(serving)]) == 3
    assert capsys.readouterr().out.startswith("INCONCLUSIVE nothing says which boundaries")


def test_gate_script_explains_itself() -> None:
    done = subprocess.run(["bash", str(ROOT / "scripts" / "gate.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Pre-deploy gate" in done.stderr
