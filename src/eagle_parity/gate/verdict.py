"""What a deploy script needs of reports: the worst verdict, one line a finding, one number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle_parity.errors import InputError
from eagle_parity.gate.policy import Policy
from eagle_parity.records import Finding, Report, Verdict
from eagle_parity.report.columns import row_name

_CODES: dict[Verdict, int] = {"pass": 0, "fail": 1, "inconclusive": 3}
_NOTHING = "a measured slot: required, and no report holds one (compare measures slots)"
_ORDER: tuple[Verdict, ...] = ("fail", "inconclusive", "pass")


@dataclass(frozen=True)
class Judged:
    """A report, and the file that it was read from (None: it was just made)."""

    origin: str | None
    report: Report


def exit_code(verdict: Verdict) -> int:
    """0 pass, 1 parity failed, 3 inconclusive."""
    return _CODES[verdict]


def decide(judged: Sequence[Judged], policy: Policy) -> Report:
    """One report out of several: the worst verdict, the rows of the report that it comes from, all findings.

    A pass needs a slot that was measured: configs alone, or a map of the target without a draft, are inconclusive.
    What the policy requires and no report has seen makes a pass inconclusive; a warning that it names is an error.
    """
    reports = [policy.tighten(entry.report) for entry in judged]
    verdicts = [report.verdict for report in reports]
    worst: Verdict = next((verdict for verdict in _ORDER if verdict in verdicts), "inconclusive")
    unmet = [] if any(_measured(report) for report in reports) else [_NOTHING]
    unmet += policy.unmet(reports)
    verdict: Verdict = "inconclusive" if worst == "pass" and unmet else worst
    decisive = reports[verdicts.index(worst)] if worst in verdicts else reports[0]
    inputs: Mapping[str, Any] = {
        **decisive.inputs,
        "reports": [
            {"report": entry.origin, "command": report.command, "verdict": report.verdict}
            for entry, report in zip(judged, reports, strict=True)
        ],
        "policy": policy.path,
        "unmet": unmet,
    }
    return replace(decisive, command="gate", verdict=verdict, inputs=inputs, findings=distinct(reports))


def _measured(report: Report) -> bool:
    return any(row.slot is not None and row.status != "skipped" for row in report.rows)


def distinct(reports: Sequence[Report]) -> tuple[Finding, ...]:
    """The findings of all reports, errors first; one that two reports hold is there once."""
    found: dict[tuple[object, ...], Finding] = {}
    for report in reports:
        for finding in report.findings:
            found.setdefault((finding.code, finding.slot, finding.severity, finding.message), finding)
    return tuple(sorted(found.values(), key=lambda finding: ("error", "warning", "info").index(finding.severity)))


def lines(report: Report) -> Iterator[str]:
    """One line a file where there are several, one a finding, `SEVERITY code: message -> fix`, and what is unmet."""
    read = [entry for entry in report.inputs["reports"] if entry["report"] is not None]
    for entry in read if len(read) > 1 else ():
        yield f"{entry['verdict']} {entry['command']} {entry['report']}"
    for finding in report.findings:
        yield f"{finding.severity.upper()} {finding.code}: {finding.message} -> {finding.fix}"
    for sentence in report.inputs["unmet"]:
        yield f"UNMET {sentence}"


def refuse_contradictions(judged: Judged) -> None:
    """InputError for a report whose own content does not support its pass: it was edited, or cut, or made by a bug.

    This is no signature: whoever changes rows and findings as well can write any report.
    """
    why = _contradiction(judged.report)
    if judged.report.verdict == "pass" and why is not None:
        raise InputError(
            f"{judged.origin} says pass, but {why}", fix="write the report again, and do not edit it afterwards"
        )


def _contradiction(report: Report) -> str | None:
    error = next((finding for finding in report.findings if finding.severity == "error"), None)
    if error is not None:
        return f"it holds the error {error.code}: {error.message}"
    control = next((control for control in report.controls if control.failed_as_expected is False), None)
    if control is not None:
        return f"its negative control ({control.name}) did not fail"
    slots = [row for row in report.rows if row.slot is not None]
    bad = next((row for row in slots or report.rows if row.status != "ok"), None)
    if bad is not None:
        return f"{row_name(bad)} is {bad.status}"
    checks = report.inputs.get("checks")
    if report.command == "check":
        return None if any(c["status"] != "skipped" for c in checks or ()) else "no check ran"
    if report.command == "which-layers" and not report.rows:
        layers = report.layers
        agree = layers is not None and layers.trained is not None and layers.trained == layers.declared
        return None if agree else "trained and declared layers differ"
    if not report.rows:
        return "it holds no rows"
    aligned, least = report.inputs.get("aligned_rows"), report.thresholds.get("min_rows")
    if not isinstance(aligned, int) or not isinstance(least, int) or aligned < least:
        return f"{aligned} rows were aligned, {least} are needed"
    return None
