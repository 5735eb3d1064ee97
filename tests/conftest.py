"""Fixtures shared by the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_parity.cli.main import main
from tests.synthetic import DumpSpec, Net, make_net

# A shell starts background jobs with SIGINT ignored, and children inherit that: the tests of Ctrl-C need the usual.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it brings

ROOT = Path(__file__).parent.parent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI nothing may be missing: a skipped test is a failed one."""
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def net() -> Net:
    return make_net()


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Write two specs, compare them through the command line, return exit code and JSON report."""
    count = 0

    def run(training: DumpSpec, serving: DumpSpec, *options: str) -> tuple[int, dict[str, Any]]:
        nonlocal count
        count += 1
        base = tmp_path / f"pair{count}"
        sides = [str(training.write(base / "training")), str(serving.write(base / "serving"))]
        capsys.readouterr()
        code = main(["compare", *sides, "--format", "json", *options])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recordings of fixtures/recordings as dumps: <name>/training and <name>/serving*."""
    out = tmp_path_factory.mktemp("recordings")
    script = ROOT / "fixtures" / "recordings" / "convert.py"
    for recording in sorted(script.parent.glob("*.safetensors")):
        subprocess.run([sys.executable, script, recording, out / recording.stem], check=True)
    return out
