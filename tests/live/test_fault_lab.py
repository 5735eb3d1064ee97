"""The fault lab in live servers: what docs/fault-lab.md claims in its live part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import live, live_page
from tests.lab.engine import engine_faults
from tests.lab.live_faults import ENGINE, FEW, HALF, named
from tests.lab.live_runs import SERVERS, Live, broken, healthy
from tests.lab.sources import ROOT
from tests.live.conftest import needs_sglang


def wrong(runs: list[Live]) -> list[Live]:
    return [run for run in runs if not run.right]


def test_every_fault_of_the_engine_has_its_right_name() -> None:
    assert {fault.name for fault in (*ENGINE, HALF)} == {*engine_faults.NAMES} - {engine_faults.HEALTHY}
    assert len(named(*FEW)) == len(FEW)


@pytest.mark.live
@needs_sglang
def test_a_fault_of_each_kind_in_one_server(tmp_path: Path) -> None:
    with live.bench(tmp_path) as bench:
        runs = [healthy(bench), *broken(bench, named(*FEW)), healthy(bench, "healthy again")]
    assert wrong(runs) == []
    assert len(runs) == len(FEW) + 2


@pytest.mark.slow
@pytest.mark.live
@needs_sglang
@pytest.mark.parametrize("name", SERVERS)
def test_the_document_tells_what_comes_out(name: str, tmp_path: Path) -> None:
    """Nothing passes silently, no healthy server is blamed, and each row of the document is what came out now."""
    runs = list(SERVERS[name][1](tmp_path))
    assert [run for run in runs if not run.healthy and not run.found] == []
    assert [run for run in runs if run.healthy and not run.right] == []
    _, said = live_page.split((ROOT / "docs" / "fault-lab.md").read_text())
    now = live_page.render(said, {name: runs})
    assert live_page.claims(now, name) == live_page.claims(said, name), f"python -m tests.lab --live {name}"
