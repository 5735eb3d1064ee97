"""A report as Markdown, for a job summary or a comment on a pull request."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_parity.records import Finding, Report
from eagle_parity.report.columns import USUAL
from eagle_parity.report.content import notes, summary


def to_markdown(report: Report) -> str:
    """Verdict, rows, findings, what was not seen."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"**{report.verdict.upper()}**: {_escape(summary(report))}"
    if report.rows:
        yield ""
        yield "| " + " | ".join(column.name for column in USUAL) + " |"
        yield "| " + " | ".join("---:" if column.right else "---" for column in USUAL) + " |"
        for row in report.rows:
            yield "| " + " | ".join(column.cell(row) for column in USUAL) + " |"
    for finding in report.findings:
        yield ""
        yield from _finding(finding)
    for heading, items in notes(report):
        if heading != "controls":
            yield ""
            yield f"{heading.capitalize()}: {_escape('; '.join(items))}."


def _finding(finding: Finding) -> Iterator[str]:
    evidence = finding.evidence
    place = f" ({_escape(str(evidence['file']))}:{evidence['line']})" if "line" in evidence else ""
    yield f"- **{finding.severity} `{finding.code}`**{place}: {_escape(finding.message)}"
    yield f"  Fix: {_escape(finding.fix)}"


def _escape(text: str) -> str:
    for letter in "\\`*_[]<>|":
        text = text.replace(letter, "\\" + letter)
    return text.replace("\n", " ")
