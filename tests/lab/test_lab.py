"""The lab as a test: a fast set always, everything among the slow tests. And the table of public cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_parity.diagnosis.faults import FAULTS
from eagle_parity.diagnosis.files import CHECKS
from tests.lab import catalogue, sets
from tests.lab.injections import INJECTIONS
from tests.lab.matrix import Lab, run
from tests.lab.page import render
from tests.lab.sources import ROOT


def check(lab: Lab, least: float) -> None:
    named, runs = lab.named()
    detected, _ = lab.detected()
    both, pairs = lab.both()
    assert lab.false_errors() == []
    assert (detected, named >= least * runs) == (runs, True), render(lab, ())
    assert both >= 0.8 * pairs, render(lab, ())


def test_fast(tmp_path: Path) -> None:
    check(run(sets.fast(), tmp_path), 0.95)


@pytest.mark.slow
def test_everything(tmp_path: Path) -> None:
    lab = run(sets.everything(tmp_path), tmp_path / "pair")
    check(lab, 0.95)
    assert len(lab.healthy) >= 200
    assert {injection.name for injection, _, _ in lab.faults} == {injection.name for injection in INJECTIONS}


def test_every_public_case_is_accounted_for() -> None:
    listed = catalogue.entries()
    assert [entry.case for entry in listed] == [f"C{number:03}" for number in range(1, 132)]
    names = {fault.code for fault in FAULTS} | {entry.name for entry in CHECKS}
    lab = {injection.name for injection in INJECTIONS} | {"check"}
    for entry in listed:
        assert set(entry.by) <= names, entry
        assert set(entry.lab) <= lab, entry
        assert entry.by or entry.note, entry


def test_the_document_of_cases_is_up_to_date() -> None:
    assert (ROOT / "docs" / "catalogue.md").read_text() == catalogue.render(), "write it again: python -m tests.lab"
