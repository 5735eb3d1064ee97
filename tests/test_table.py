"""The table in a terminal: it fits, wraps under itself, and its colours can be read on any background."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from rich.color import Color
from rich.console import Console

from eagle_parity.cli import compare
from eagle_parity.cli.training import Files
from eagle_parity.records import FINAL_NORM, Report
from eagle_parity.report import print_table, table
from tests.conftest import ROOT
from tests.test_formats import luminance

DEMO = ROOT / "src" / "eagle_parity" / "demo"


@pytest.fixture(scope="module")
def report() -> Report:
    return compare.measure(DEMO / "training", DEMO / "serving-wrong", None, (), Files())


def printed(report: Report, columns: int) -> list[str]:
    out = io.StringIO()
    print_table(report, Console(file=out, width=columns, highlight=False))
    return out.getvalue().splitlines()


def widest(report: Report) -> Report:
    """Every cell as wide as it can be."""
    row = replace(
        report.rows[0],
        slot=None,
        boundary=60,
        expected_boundary=FINAL_NORM,
        best_boundary=FINAL_NORM,
        width=896,
        expected_width=7168,
        layout="hidden-shard",
        ranks=tuple(range(8)),
        status="inconclusive",
    )
    return replace(report, rows=(row, *report.rows))


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_it_fits(columns: int, report: Report) -> None:
    for one in (report, widest(report)):
        lines = printed(one, columns)
        assert max(map(len, lines)) <= columns
        assert not any(line.endswith(" ") for line in lines)
        heads = next(line for line in lines if line.split()[:2] == ["want", "holds"])
        assert "rel L2" in heads
        assert heads.endswith("status")
        row = next(line for line in lines if line.startswith("slot 2"))
        assert row.split()[2:4] == ["6", "4"]
        assert row.endswith("fail")
    assert ("ranks" in heads) == (columns == 200)


def test_text_wraps_beside_its_label(report: Report) -> None:
    lines = printed(report, 60)
    at = next(i for i, line in enumerate(lines) if line.startswith("not seen  "))
    assert all(line.startswith(" " * 10) and line[10] != " " for line in lines[at + 1 :])
    fix = next(i for i, line in enumerate(lines) if line.startswith("  fix: "))
    assert lines[fix + 1].startswith("       {")


@pytest.mark.parametrize("name", [table.GOOD, table.BAD, table.DOUBT, table.NOTE])
def test_colours_are_legible_on_black_and_on_white(name: str) -> None:
    """WCAG asks for 3 where text is bold and large, 4.5 for body text; no colour gives 4.6 on both."""
    number = Color.parse(name).number
    assert number is not None
    assert number >= 16  # the first 16 are what the user's theme makes of them
    value = luminance(Color.parse(name).get_truecolor().hex.removeprefix("#"))
    assert min((1 + 0.05) / (value + 0.05), (value + 0.05) / 0.05) >= 3.8


def in_a_terminal(environment: dict[str, str]) -> str:
    """Run compare with a pseudo-terminal as stdout, and return what it wrote there."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "eagle_parity", "compare", str(DEMO / "training"), str(DEMO / "serving-wrong")]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "COLUMNS": "80"} | environment
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=env) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux says EIO when the other end is closed
                break
            if not piece:
                break
            written += piece
    os.close(ours)
    assert process.returncode == 1
    return written.decode().replace("\r\n", "\n")


COLOUR = re.compile(r"\x1b\[[\d;]*(?:3[0-7]|38;5)[\d;]*m")


@pytest.mark.parametrize(
    ("environment", "colour", "escapes"),
    [
        ({"TERM": "xterm-256color"}, True, True),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False, True),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_escape_codes(environment: dict[str, str], colour: bool, escapes: bool) -> None:
    out = in_a_terminal(environment)
    assert bool(COLOUR.search(out)) == colour
    assert ("\x1b" in out) == escapes
    assert "\x1b[2m" not in out  # dim
    plain = re.sub(r"\x1b\[[\d;]*m", "", out)
    assert plain.startswith("FAIL  layer-shift on slots 0, 1, 2\n")
    assert "\x1b" not in plain


def test_no_escape_codes_in_a_pipe() -> None:
    command = [sys.executable, "-m", "eagle_parity", "compare", str(DEMO / "training"), str(DEMO / "serving")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"TERM": "xterm-256color"}
    )
    assert "\x1b" not in done.stdout


def shown(picture: str) -> tuple[list[str], set[str]]:
    """The texts of an SVG, and its colours; not how the library lays it out, which may change."""
    texts = [unescape(text).replace("\xa0", " ") for text in re.findall(r"<text[^>]*>([^<]*)</text>", picture)]
    return texts, set(re.findall(r"fill: ?(#\w+)|fill=\"(#\w+)\"", picture))


def test_pictures_are_what_the_script_draws(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "make_pictures.py", tmp_path], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "docs").glob("compare-*.svg")}
    assert {name: shown(text) for name, text in drawn.items()} == {name: shown(text) for name, text in kept.items()}
    assert any("layer-shift" in text for text in shown(kept["compare-dark.svg"])[0])
    assert sum(map(len, kept.values())) < 40_000
