"""A report as GitHub workflow commands: one annotation a finding, at its line where it has one.

https://docs.github.com/actions/reference/workflow-commands-for-github-actions, "Setting an error message".
"""

from __future__ import annotations

from eagle_parity.records import Finding, Report
from eagle_parity.report.content import summary
from eagle_parity.report.place import find_place

_LEVEL = {"error": "error", "warning": "warning", "info": "notice"}


def to_github(report: Report) -> str:
    """Annotations, then the verdict as a line of the log. Paths below the working directory are made relative to it."""
    lines = [_annotation(finding) for finding in report.findings]
    return "\n".join([*lines, f"{report.verdict.upper()}  {summary(report)}"]) + "\n"


def _annotation(finding: Finding) -> str:
    properties = {"title": f"eagle-parity {finding.code}"}
    place = find_place(finding)
    if place is not None:
        properties = {"file": place.file, "line": str(place.line)} | properties
    listed = ",".join(f"{name}={_escape(value, ':,')}" for name, value in properties.items())
    text = f"{finding.message}\nfix: {finding.fix}"
    return f"::{_LEVEL[finding.severity]} {listed}::{_escape(text)}"


def _escape(text: str, more: str = "") -> str:
    for letter in "%\r\n" + more:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text
