"""A report as Markdown, for a job summary or a comment on a pull request."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_parity.records import Finding, Report, Row
from eagle_parity.report.table import show, summary


def to_markdown(report: Report) -> str:
    """Verdict, rows, findings, what was not seen."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"**{report.verdict.upper()}**: {_escape(summary(report))}"
    if report.rows:
        yield ""
        yield "| | want | holds | cos | rel L2 | norm | width | layout | status |"
        yield "| --- | --- | --- | ---: | ---: | ---: | ---: | --- | --- |"
        yield from map(_row, report.rows)
    for finding in report.findings:
        yield ""
        yield from _finding(finding)
    skipped = [check for check in report.inputs.get("checks", ()) if check["status"] == "skipped"]
    if skipped:
        yield ""
        yield f"{len(skipped)} checks were not run: they need " + ", ".join(sorted({c["why"] for c in skipped})) + "."
    if report.coverage is not None and report.coverage.not_seen:
        yield ""
        yield "Not seen: " + _escape("; ".join(report.coverage.not_seen)) + "."


def _row(row: Row) -> str:
    name = f"slot {row.slot}" if row.slot is not None else f"boundary {row.boundary}"
    cells = [
        name,
        show(row.expected_boundary),
        show(row.best_boundary),
        "–" if row.cosine is None else f"{row.cosine.median:.5f}",
        "–" if row.rel_l2 is None else f"{row.rel_l2.median:.2g}",
        "–" if row.norm_ratio is None else f"{row.norm_ratio.median:.3f}",
        str(row.width),
        row.layout,
        row.status,
    ]
    return "| " + " | ".join(cells) + " |"


def _finding(finding: Finding) -> Iterator[str]:
    evidence = finding.evidence
    place = f" ({_escape(str(evidence['file']))}:{evidence['line']})" if "line" in evidence else ""
    yield f"- **{finding.severity} `{finding.code}`**{place}: {_escape(finding.message)}"
    yield f"  Fix: {_escape(finding.fix)}"


def _escape(text: str) -> str:
    for letter in "\\`*_[]<>|":
        text = text.replace(letter, "\\" + letter)
    return text.replace("\n", " ")
