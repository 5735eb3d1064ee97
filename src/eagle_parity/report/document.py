"""A report as the JSON document of schema 1. Stable: keys may be added, none changed. Non-finite numbers are null."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from eagle_parity import __version__
from eagle_parity.records import Distribution, Finding, Floor, Report, Row

SCHEMA_VERSION = 1


def to_json(report: Report) -> str:
    """The document as text."""
    return json.dumps(to_document(report), indent=1)


def to_document(report: Report) -> dict[str, Any]:
    """The document as plain dicts and lists."""
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "tool": f"eagle-parity {__version__}",
        "command": report.command,
        "verdict": report.verdict,
        "inputs": report.inputs,
        "thresholds": report.thresholds,
        "coverage": None if report.coverage is None else asdict(report.coverage),
        "controls": [asdict(control) for control in report.controls],
        "rows": [_row(row) for row in report.rows],
        "findings": [_finding(finding) for finding in report.findings],
        "layers": None if report.layers is None else asdict(report.layers),
    }
    made = plain(document)
    assert isinstance(made, dict)
    return made


def _row(row: Row) -> dict[str, Any]:
    return {
        "slot": row.slot,
        "boundary": row.boundary,
        "expected_boundary": row.expected_boundary,
        "width": row.width,
        "expected_width": row.expected_width,
        "layout": row.layout,
        "ranks": row.ranks,
        "rank_equal": row.rank_equal,
        "tokens": row.tokens,
        "cosine": _distribution(row.cosine, "median", "mean", "p01", "min"),
        "rel_l2": _distribution(row.rel_l2, "median", "mean", "p99", "max"),
        "norm_ratio": _distribution(row.norm_ratio, "median", "p01", "p99"),
        "cosine_no_massive": _distribution(row.cosine_no_massive, "median", "mean", "p01", "min"),
        "cosine_centred": _distribution(row.cosine_centred, "median", "mean", "p01", "min"),
        "per_rank": [asdict(rank) for rank in row.per_rank],
        "floor": _floor(row.floor),
        "best_boundary": row.best_boundary,
        "runner_up": row.runner_up,
        "margin": row.margin,
        "status": row.status,
    }


def _distribution(values: Distribution | None, *keys: str) -> dict[str, float] | None:
    return None if values is None else {key: getattr(values, key) for key in keys}


def _floor(floor: Floor | None) -> dict[str, Any] | None:
    return None if floor is None else {"source": floor.source, "rel_l2": {"median": floor.median, "p99": floor.p99}}


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity,
        "slot": finding.slot,
        "boundary": finding.boundary,
        "ranks": finding.ranks,
        "message": finding.message,
        "evidence": dict(finding.evidence),
        "fix": finding.fix,
    }


def plain(value: Any) -> Any:
    """Tuples to lists, mappings to dicts, NaN and infinity to None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
