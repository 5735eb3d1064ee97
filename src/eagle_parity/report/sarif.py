"""A report as SARIF 2.1.0, which code scanning and editors read: one result a finding, at its line where it has one.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/sarif-v2.1.0-errata01-os-complete.html. Rules are the
catalogue of `explain`. A finding that belongs to no file has a logical location (slot 1) instead.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from eagle_parity import __version__
from eagle_parity.diagnosis.faults import Fault, find
from eagle_parity.records import Finding, Report
from eagle_parity.report.content import summary
from eagle_parity.report.document import plain
from eagle_parity.report.place import find_place

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVEL = {"error": "error", "warning": "warning", "info": "note"}
_ROOT = "SRCROOT"
_UNDECIDED = "inconclusive"


def to_sarif(report: Report) -> str:
    """The log file as text, with one run."""
    codes = list(dict.fromkeys(finding.code for finding in report.findings))
    results = [_result(finding, codes.index(finding.code)) for finding in report.findings]
    if report.verdict == "inconclusive" and not any(finding.severity == "error" for finding in report.findings):
        # A run that decided nothing must not look clean.
        codes.append(_UNDECIDED)
        results.append(_undecided(report, len(codes) - 1))
    driver = {"name": "eagle-parity", "version": __version__, "rules": [_rule(code) for code in codes]}
    run = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": True}],
        "results": results,
        "properties": {"command": report.command, "verdict": report.verdict},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, allow_nan=False) + "\n"


def _rule(code: str) -> dict[str, Any]:
    fault = find(code)
    if fault is None:
        text = "Nothing could be decided" if code == _UNDECIDED else code
        return {"id": code, "shortDescription": {"text": text}}
    return {
        "id": code,
        "shortDescription": {"text": f"{fault.title}."},
        "fullDescription": {"text": fault.cause},
        "help": {"text": _help(fault)},
    }


def _help(fault: Fault) -> str:
    sources = "; ".join(fault.sources)
    return f"How it looks: {fault.looks}\n\nHow to confirm: {fault.confirm}\n\nHow to fix: {fault.fix}\n\n{sources}"


def _result(finding: Finding, index: int) -> dict[str, Any]:
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": _LEVEL[finding.severity],
        "message": {"text": f"{finding.message}\nfix: {finding.fix}"},
        "locations": [_location(finding)],
        "partialFingerprints": {"eagleParity/v1": _fingerprint(finding)},
        "properties": plain(
            {
                "slot": finding.slot,
                "boundary": finding.boundary,
                "ranks": finding.ranks,
                "evidence": dict(finding.evidence),
                "fix": finding.fix,
            }
        ),
    }


def _location(finding: Finding) -> dict[str, Any]:
    place = find_place(finding)
    if place is None:
        where = "the deployment" if finding.slot is None else f"slot {finding.slot}"
        return {"logicalLocations": [{"name": where}]}
    artifact = (
        {"uri": quote(place.file), "uriBaseId": _ROOT}
        if place.inside
        else {"uri": Path(place.file).absolute().as_uri()}
    )
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": place.line}}}


def _fingerprint(finding: Finding) -> str:
    """What makes it the same finding in the next run: which fault, found how, in which key or slot; not the numbers."""
    parts = (finding.code, finding.slot, finding.evidence.get("check"), finding.evidence.get("key"))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _undecided(report: Report, index: int) -> dict[str, Any]:
    return {
        "ruleId": _UNDECIDED,
        "ruleIndex": index,
        "level": "warning",
        "message": {"text": f"inconclusive: {summary(report)}"},
        "locations": [{"logicalLocations": [{"name": report.command}]}],
    }
