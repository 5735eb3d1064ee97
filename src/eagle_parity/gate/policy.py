"""What a deploy script needs of reports: the worst verdict, one line a finding, one number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eagle_parity.records import Finding, Report, Verdict

_CODES: dict[Verdict, int] = {"pass": 0, "fail": 1, "inconclusive": 3}
_ORDER: tuple[Verdict, ...] = ("fail", "inconclusive", "pass")


def exit_code(verdict: Verdict) -> int:
    """0 pass, 1 parity failed, 3 inconclusive."""
    return _CODES[verdict]


def worst(reports: Sequence[Report]) -> Verdict:
    """The worst verdict; without any report nothing was shown, which is inconclusive."""
    verdicts = {report.verdict for report in reports}
    return next((verdict for verdict in _ORDER if verdict in verdicts), "inconclusive")


def distinct(reports: Sequence[Report]) -> tuple[Finding, ...]:
    """The findings of all reports; one that two commands made is there once."""
    found: dict[tuple[object, ...], Finding] = {}
    for report in reports:
        for finding in report.findings:
            found.setdefault((finding.code, finding.slot, finding.severity), finding)
    return tuple(found.values())


def lines(reports: Sequence[Report]) -> Iterator[str]:
    """One line a finding, `SEVERITY code: message -> fix`."""
    for finding in distinct(reports):
        yield f"{finding.severity.upper()} {finding.code}: {finding.message} -> {finding.fix}"
