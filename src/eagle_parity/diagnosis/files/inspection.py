"""Run every check on a deployment and make the report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle_parity.diagnosis.files import CHECKS
from eagle_parity.diagnosis.files.check import GIVE, SGLANG_ALONE, Check, Problem
from eagle_parity.diagnosis.files.deployment import Deployment
from eagle_parity.diagnosis.files.lines import line_of
from eagle_parity.records import Finding, Layers, Report, Verdict

_WEIGHT = {"error": 0, "warning": 1, "info": 2}


def inspect_files(deployment: Deployment) -> Report:
    """The report of `check`: a finding a problem, and under `inputs.checks` what ran and what could not.

    fail: an error. inconclusive: target and engine are known, the meaning of the ids is not. Checks that could not
    run for want of a target or an engine are listed and change no verdict.
    """
    findings: list[Finding] = []
    checks: list[dict[str, Any]] = []
    for check in CHECKS:
        missing = check.missing(deployment)
        if "vllm" in missing and deployment.engine is not None:
            continue
        found = [] if missing else [_finding(check, problem, deployment) for problem in check.run(deployment)]
        findings += found
        worst = min((finding.severity for finding in found), key=_WEIGHT.__getitem__, default=None)
        checks.append(
            {
                "check": check.name,
                "code": check.code,
                "status": "skipped" if missing else "ok" if worst in (None, "info") else worst,
                "why": SGLANG_ALONE
                if check.of_other_engine(deployment)
                else " and ".join(GIVE[need] for need in missing) or None,
                "source": check.source,
            }
        )
    answer = deployment.served(deployment.ids)
    return Report(
        command="check",
        verdict=_verdict(findings),
        inputs={**_inputs(deployment), "checks": checks},
        thresholds={},
        coverage=None,
        controls=(),
        rows=(),
        findings=tuple(sorted(findings, key=lambda finding: _WEIGHT[finding.severity])),
        layers=None if answer is None else Layers(declared=answer.boundaries),
    )


def _verdict(findings: list[Finding]) -> Verdict:
    if any(finding.severity == "error" for finding in findings):
        return "fail"
    if any(finding.evidence["check"] == "ids-rule-known" and finding.severity == "warning" for finding in findings):
        return "inconclusive"
    return "pass"


def _finding(check: Check, problem: Problem, deployment: Deployment) -> Finding:
    return Finding(
        problem.code or check.code,
        problem.severity,
        problem.message,
        problem.fix,
        evidence={
            "check": check.name,
            **dict(_place(check.file(problem, deployment), problem.key)),
            "source": check.source,
            **problem.evidence,
        },
    )


def _place(file: Path | None, key: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if file is None:
        return
    yield "file", str(file)
    yield "line", line_of(file.read_text(encoding="utf-8"), key)
    if key:
        yield "key", ".".join(key)


def _inputs(deployment: Deployment) -> dict[str, Any]:
    draft, target, engine = deployment.draft, deployment.target, deployment.engine
    return {
        "draft": {
            "path": str(draft.path),
            "architecture": draft.architecture,
            "declared_ids": None if draft.declared_ids is None else list(draft.declared_ids),
            "declared_in": draft.declared_in,
            "num_slots": draft.num_slots,
        },
        "target": None
        if target is None
        else {"path": str(target.path.parent), "architecture": target.architecture, "num_layers": deployment.layers},
        "engine": None if engine is None else engine.name,
        "engine_version": None if engine is None else engine.version,
        "tp_size": None if engine is None else engine.tp_size,
    }
