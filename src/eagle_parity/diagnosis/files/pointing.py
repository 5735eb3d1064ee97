"""Findings of a comparison whose mend is a line of the draft's config.json point at that line."""

from __future__ import annotations

from dataclasses import replace

from eagle_parity.diagnosis.files.deployment import Deployment
from eagle_parity.diagnosis.files.lines import line_of
from eagle_parity.draft.checkpoint import DraftCheckpoint
from eagle_parity.draft.config import IDS
from eagle_parity.records import Report


def point(report: Report, draft: DraftCheckpoint | None) -> Report:
    """Add `file`, `line` and `key` to the evidence of every finding whose fix says what ids to write."""
    file = None if draft is None else Deployment(draft).config_path
    if draft is None or file is None:
        return report
    key = (IDS,) if draft.declared_in == "top-level" else ("eagle_config", IDS)
    place = {"file": str(file), "line": line_of(file.read_text(encoding="utf-8"), key), "key": ".".join(key)}
    findings = tuple(
        replace(finding, evidence={**place, **finding.evidence}) if IDS in finding.fix else finding
        for finding in report.findings
    )
    return replace(report, findings=findings)
