"""A report as JUnit XML, which CI systems show as tests: one test a slot, boundary, control or check.

A finding that belongs to no row is a test of its own. Schema as Jenkins and GitLab read it
(https://docs.gitlab.com/ci/testing/unit_test_reports).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from eagle_parity.records import Finding, Report, Row

# XML 1.0 has no way to write these, not even escaped.
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class _Case:
    name: str
    kind: str
    failure: tuple[str, str] | None = None
    """Finding code, text."""
    skipped: str | None = None


def to_junit(report: Report) -> str:
    """The XML document. Errors fail, what is inconclusive or could not run is skipped, the rest passes."""
    cases = list(_cases(report))
    if report.verdict == "inconclusive" and not any(case.failure for case in cases):
        # JUnit knows no third outcome, and a run that decided nothing must not look green.
        cases.append(_Case("verdict", "verdict", ("inconclusive", "nothing could be decided; see the other formats")))
    suite = ElementTree.Element(
        "testsuite",
        name=f"eagle-parity {report.command}",
        tests=str(len(cases)),
        failures=str(sum(case.failure is not None for case in cases)),
        skipped=str(sum(case.skipped is not None for case in cases)),
        errors="0",
    )
    for case in cases:
        element = ElementTree.SubElement(
            suite, "testcase", name=case.name, classname=f"eagle-parity.{report.command}.{case.kind}"
        )
        if case.failure is not None:
            code, text = case.failure
            first = _clean(text.split("\n")[0])
            ElementTree.SubElement(element, "failure", type=code, message=first).text = _clean(text)
        elif case.skipped is not None:
            ElementTree.SubElement(element, "skipped", message=_clean(case.skipped))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _cases(report: Report) -> Iterator[_Case]:
    errors = [finding for finding in report.findings if finding.severity == "error"]
    told: list[Finding] = []
    for check in report.inputs.get("checks", ()):
        found = [f for f in errors if f.evidence.get("check") == check["check"]]
        told += found
        skipped = f"needs {check['why']}" if check["status"] == "skipped" else None
        yield _Case(f"{check['check']} ({check['code']})", "check", _failure(found), skipped)
    for row in report.rows:
        found = [f for f in errors if f.slot is not None and f.slot == row.slot]
        told += found
        yield _row(row, found)
    for control in report.controls:
        failure = ("control", "a negative control matched") if control.failed_as_expected is False else None
        skipped = "could not be run" if control.failed_as_expected is None else None
        yield _Case(control.name, "control", failure, skipped)
    for finding in errors:
        if not any(finding is other for other in told):
            yield _Case(finding.code, "finding", _failure([finding]))


def _row(row: Row, found: list[Finding]) -> _Case:
    name = f"slot {row.slot}" if row.slot is not None else f"boundary {row.boundary}"
    failure = _failure(found)
    if failure is None and row.status == "fail":
        failure = ("fail", f"{name} is not what it should be")
    return _Case(name, "row", failure, row.status if row.status in ("inconclusive", "skipped") else None)


def _failure(found: list[Finding]) -> tuple[str, str] | None:
    if not found:
        return None
    text = "\n".join(f"{finding.code}: {finding.message}\nfix: {finding.fix}" for finding in found)
    return found[0].code, text


def _clean(text: str) -> str:
    return _UNPRINTABLE.sub("\ufffd", text)
