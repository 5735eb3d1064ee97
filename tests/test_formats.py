"""Reports for other programs and for a browser: SARIF and HTML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_parity.cli.main import main
from eagle_parity.diagnosis.faults import FAULTS
from tests.synthetic import Net, serving_spec, training_spec
from tests.test_check import IDS, Case, ids
from tests.test_cli import draft_with

CODES = {fault.code for fault in FAULTS}


@pytest.fixture
def sides(net: Net, tmp_path: Path) -> list[str]:
    return [
        str(training_spec(net).write(tmp_path / "training")),
        str(serving_spec(net, (0, 2, 4)).write(tmp_path / "serving")),
    ]


# -------------------------------------------------------------------------------------------------------- SARIF


def sarif_of(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main([args[0], "--format", "sarif", *args[1:]])
    return code, only_run(capsys.readouterr().out)


def only_run(text: str) -> dict[str, Any]:
    """What SARIF 2.1.0 requires of a log (sections 3.13, 3.14, 3.19, 3.27, 3.28, 3.49), by hand."""
    log = json.loads(text)
    assert set(log) == {"$schema", "version", "runs"}
    assert log["version"] == "2.1.0"
    [run] = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "eagle-parity"
    rules = [rule["id"] for rule in driver["rules"]]
    assert len(set(rules)) == len(rules)
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in {"error", "warning", "note"}
        assert result["message"]["text"]
        for location in result["locations"]:
            assert set(location) <= {"physicalLocation", "logicalLocations"}
            if "physicalLocation" in location:
                uri = location["physicalLocation"]["artifactLocation"]["uri"]
                assert uri.isascii()
                assert " " not in uri
                assert location["physicalLocation"]["region"]["startLine"] >= 1
    assert run["invocations"][0]["executionSuccessful"] is True
    return dict(run)


def test_sarif_points_at_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = Case(config=ids(2, 30, 30)).write(tmp_path / "my repo")
    config = tmp_path / "my repo" / "draft" / "config.json"
    number = next(i for i, line in enumerate(config.read_text().splitlines(), 1) if IDS in line)
    code, run = sarif_of(capsys, *words)
    assert code == 1
    assert {result["ruleId"] for result in run["results"]} <= CODES
    first = run["results"][0]
    assert (first["ruleId"], first["level"]) == ("layer-set", "error")
    place = first["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": config.as_uri()}, "region": {"startLine": number}}
    monkeypatch.chdir(tmp_path)
    _, again = sarif_of(capsys, *words)
    artifact = again["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert artifact == {"uri": "my%20repo/draft/config.json", "uriBaseId": "SRCROOT"}
    assert again["results"][0]["partialFingerprints"] == first["partialFingerprints"]


def test_sarif_of_a_comparison(sides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, run = sarif_of(capsys, "compare", *sides)
    assert code == 1
    named = [(r["ruleId"], r["locations"][0]["logicalLocations"][0]["name"]) for r in run["results"]]
    assert named[:3] == [("layer-set", f"slot {j}") for j in range(3)]
    assert len({r["partialFingerprints"]["eagleParity/v1"] for r in run["results"]}) == len(run["results"])
    # With the draft at hand the line to change is known: the training side says [2, 3, 5], the server feeds [0, 2, 4].
    draft = draft_with([0, 2, 4], tmp_path / "draft")
    for command in ("compare", "which-layers", "gate"):
        code, run = sarif_of(capsys, command, *sides, "--draft", str(draft))
        assert code == 1
        places = [r["locations"][0]["physicalLocation"] for r in run["results"] if r["ruleId"] == "layer-set"]
        assert [p["artifactLocation"]["uri"] for p in places] == [(draft / "config.json").as_uri()] * 3
        assert {p["region"]["startLine"] for p in places} == {1}  # json.dumps without indent


def test_sarif_of_a_run_that_decided_nothing_is_not_empty(
    net: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = training_spec(net, None).write(tmp_path / "t")
    code, run = sarif_of(capsys, "compare", str(training), str(serving_spec(net).write(tmp_path / "s")))
    assert code == 3
    assert run["results"][-1]["ruleId"] == "inconclusive"
    assert run["properties"]["verdict"] == "inconclusive"


def test_sarif_into_a_file(sides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *sides, "--report", f"sarif={tmp_path / 'r.sarif'}"]) == 1
    assert only_run((tmp_path / "r.sarif").read_text())["results"]
