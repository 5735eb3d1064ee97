"""Reports for other programs and for a browser: SARIF and HTML."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
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


# --------------------------------------------------------------------------------------------------------- HTML


class Page(HTMLParser):
    """Checks that tags nest, and collects tags, attributes and the text of the body."""

    VOID = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.body: list[str] = []
        self.style = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            self.style += data
        elif "body" in self.open and data.strip():
            self.body.append(data.strip())


def html_of(capsys: pytest.CaptureFixture[str], *args: str) -> Page:
    capsys.readouterr()
    main([args[0], "--format", "html", *args[1:]])
    text = capsys.readouterr().out
    assert text.startswith("<!DOCTYPE html>")
    page = Page(text)
    # Nothing from elsewhere, nothing that runs, nothing that a report's content could add.
    allowed = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "span", "p", "div", "table", "tr"}
    allowed |= {"th", "td", "article", "strong", "code", "details", "summary", "pre", "ul", "li"}
    assert {tag for tag, _ in page.tags} <= allowed
    assert {name for _, attributes in page.tags for name in attributes} <= {
        "lang",
        "charset",
        "name",
        "content",
        "http-equiv",
        "class",
    }
    assert "url(" not in page.style
    assert "@import" not in page.style
    assert "prefers-color-scheme: dark" in page.style
    return page


def test_html_has_verdict_rows_findings_evidence_and_what_was_not_seen(
    sides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = html_of(capsys, "compare", *sides)
    assert page.body[:2] == ["FAIL", "layer-set on slots 0, 1, 2"]
    at = [page.body.index(text) for text in ("Slots and boundaries", "Findings", "Evidence", "Not seen", "verify rows")]
    assert at == sorted(at)
    assert "slot 0 holds boundary 0, the draft was trained on 2" in page.body
    row = page.body[page.body.index("slot 0") :][:4]
    assert row == ["slot 0", "fail", "2", "0"]
    page = html_of(capsys, "which-layers", "--draft", str(draft_with([0, 2, 4], tmp_path / "draft")), *sides)
    assert {"Which layers", "trained on", "[2, 3, 5]", "[0, 2, 4]"} <= set(page.body)


def test_html_escapes_what_it_shows(net: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = tmp_path / "<script>alert(1)<" / "x&y"
    training = training_spec(net).write(evil / "t")
    page = html_of(capsys, "compare", str(training), str(serving_spec(net, (0, 2, 4)).write(evil / "s")))
    assert any("<script>alert(1)</x&y/t" in text for text in page.body)
    words = Case(config=ids(2, 30, 30)).write(tmp_path / "<b>")
    assert any("<b>/draft/config.json" in text for text in html_of(capsys, *words).body)


def luminance(colour: str) -> float:
    digits = colour if len(colour) == 6 else "".join(c * 2 for c in colour)
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_html_colours_are_legible_in_both_schemes(sides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """WCAG 2.2 contrast, level AA: 4.5 between text and background."""
    light, dark = re.findall(r":root \{(.*?)\}", html_of(capsys, "compare", *sides).style, flags=re.S)
    for scheme in (light, dark):
        colours = dict(re.findall(r"--(\w+): #(\w+);", scheme))
        back = luminance(colours["back"])
        for name in ("text", "quiet", "good", "bad", "doubt", "note"):
            high, low = sorted((luminance(colours[name]), back), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, name
