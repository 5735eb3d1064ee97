"""demo: what comes with the package is what the script makes, is packaged, is small, and shows what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eagle_parity.cli.main import main
from tests.conftest import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = ROOT / "src" / "eagle_parity"
DEMO = PACKAGE / "demo"


def test_it_shows_a_fault_and_a_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("FAIL", "PASS"))] == ["FAIL", "PASS"]
    assert "FAIL  layer-shift on slots 0, 1, 2" in out
    assert '"eagle_aux_hidden_state_layer_ids": [2, 4, 6]' in " ".join(out.split())


def test_the_script_makes_what_is_packaged(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "make_demo.py", tmp_path], check=True)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    kept = {path.relative_to(DEMO): path.read_bytes() for path in DEMO.glob("*/*")}
    assert made == kept
    assert sum(map(len, kept.values())) < 60_000


def test_every_file_is_package_data() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = settings["tool"]["setuptools"]["package-data"]["eagle_parity"]
    packaged = {path for glob in globs for path in PACKAGE.glob(glob)}
    assert {path for path in DEMO.rglob("*") if path.is_file()} <= packaged
