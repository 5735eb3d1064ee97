"""A case -> a report: rows, controls, coverage, findings and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle_parity.diagnosis import floor
from eagle_parity.diagnosis.case import Case, TensorCase
from eagle_parity.diagnosis.judgement import LONG, MIN_ROWS
from eagle_parity.diagnosis.rules import RULES
from eagle_parity.metrics.distribution import summarise
from eagle_parity.metrics.threads import one_thread
from eagle_parity.records import (
    Boundary,
    Capture,
    Control,
    Coverage,
    Finding,
    Layers,
    Report,
    Row,
    Status,
    Verdict,
)


@one_thread()
def diagnose(case: Case, declared: tuple[Boundary, ...] | None = None) -> Report:
    """Apply every rule to a case. `declared`: what the draft's ids mean for this engine version, if known."""
    findings = _findings(case)
    rows = tuple(_row(tensor, findings, case) for tensor in case.tensors)
    controls = _controls(case)
    return Report(
        command="compare",
        verdict=verdict_of(case, rows, controls, findings),
        inputs={
            "training": _input(case.training),
            "serving": _input(case.serving),
            "aligned_rows": len(case.alignment.serving),
            "unaligned_rows": case.alignment.unaligned,
            "expected_from": case.expectation.source,
        },
        thresholds={
            "min_rows": MIN_ROWS,
            "estimated_floor_factor": floor.FACTOR,
            "measured_floor_factor": floor.MEASURED_FACTOR,
            "ceiling": floor.CEILING,
            "limits": {tensor.name: tensor.limit.limit for tensor in case.tensors},
        },
        coverage=_coverage(case),
        controls=controls,
        rows=rows,
        findings=findings,
        layers=Layers(
            trained=case.expectation.boundaries,
            stored=tuple(b for b in case.boundaries if b not in case.borrowed),
            served=case.served,
            declared=declared,
            trained_from=case.expectation.source,
            ambiguous=any(slot.judgement.status == "inconclusive" for slot in case.slots),
        ),
    )


_WEIGHT = {"error": 0, "warning": 1, "info": 2}


def _findings(case: Case) -> tuple[Finding, ...]:
    """All findings, one a fault, slot and ranks, errors first and otherwise in order of cause."""
    found: dict[tuple[object, ...], Finding] = {}
    for rule in RULES:
        for finding in rule(case):
            key = (finding.code, finding.slot, finding.ranks, finding.message if finding.slot is None else None)
            found.setdefault(key, finding)
    if any(finding.severity == "error" for finding in found.values()):
        found = {key: f for key, f in found.items() if f.code != "features-match-check-draft"}
    return tuple(sorted(found.values(), key=lambda finding: _WEIGHT[finding.severity]))


def _row(tensor: TensorCase, findings: Sequence[Finding], case: Case) -> Row:
    pair = tensor.comparison
    ranks = tensor.ranks
    faults = [f for f in findings if f.severity == "error" and f.slot == tensor.slot and tensor.slot is not None]
    status: Status = "fail" if faults else tensor.judgement.status
    return Row(
        slot=tensor.slot,
        boundary=tensor.reference,
        expected_boundary=tensor.expected,
        width=ranks.views[0].width if ranks.views else 0,
        expected_width=case.hidden_size,
        layout=tensor.layout,
        ranks=ranks.ranks,
        rank_equal=ranks.equal,
        tokens=len(case.alignment.serving),
        cosine=None if pair is None else summarise(pair.cosine),
        rel_l2=None if pair is None else summarise(pair.rel_l2),
        norm_ratio=None if pair is None else summarise(pair.norm_ratio),
        cosine_no_massive=None if pair is None else summarise(pair.cosine_no_massive),
        cosine_centred=None if pair is None else summarise(pair.cosine_centred),
        per_rank=tensor.per_rank,
        floor=tensor.limit.floor,
        best_boundary=tensor.match.best,
        runner_up=tensor.match.runner_up,
        margin=tensor.match.margin,
        status=status,
    )


def _controls(case: Case) -> tuple[Control, ...]:
    """Negative controls over all tensors: data that must not pass."""

    def outcome(values: list[tuple[TensorCase, float | None]]) -> bool | None:
        known = [(tensor, value) for tensor, value in values if value is not None]
        if not known:
            return None
        return all(value > tensor.limits[tensor.match.best] for tensor, value in known if tensor.match.best is not None)

    return (
        Control("rows rolled", outcome([(tensor, tensor.rolled_rows) for tensor in case.tensors])),
        Control("dimensions rolled", outcome([(tensor, tensor.rolled_dims) for tensor in case.tensors])),
    )


def verdict_of(case: Case, rows: Sequence[Row], controls: Sequence[Control], findings: Sequence[Finding]) -> Verdict:
    """Inconclusive before fail before pass: what cannot be measured is not judged."""
    if len(case.alignment.serving) < MIN_ROWS:
        return "inconclusive"
    if any(control.failed_as_expected is False for control in controls):
        return "inconclusive"
    if any(finding.severity == "error" for finding in findings) or any(row.status == "fail" for row in rows):
        return "fail"
    slots = [row for row in rows if row.slot is not None]
    # Boundaries alone (a map of the target) answer for no slot where somebody asked for slots.
    judged = slots if case.expectation.boundaries is not None else slots or list(rows)
    if not judged or any(row.status != "ok" for row in judged):
        return "inconclusive"
    return "pass"


def _coverage(case: Case) -> Coverage:
    requests = case.serving.tokens.requests
    phases = tuple(sorted({request.phase for request in requests}))
    graph = tuple(dict.fromkeys(request.graph for request in requests))
    forwards = [request.forward_tokens for request in requests if request.forward_tokens is not None]
    cached = {request.cached_tokens for request in requests}
    batch = max((request.batch for request in requests), default=0)
    engine = case.serving.facts.engine
    missing = []
    if len(case.serving.ranks) == 1 and (engine is None or engine.tp_size != 1):
        missing.append("other ranks: rank equality was not judged")
    elif engine is not None and engine.tp_size is not None and len(case.serving.ranks) < engine.tp_size:
        missing.append(f"{engine.tp_size - len(case.serving.ranks)} of {engine.tp_size} ranks")
    if "verify" not in phases:
        missing.append("verify rows")
    if True not in graph:
        missing.append("graph replay")
    if not forwards or max(forwards) <= LONG:
        missing.append(f"forwards of more than {LONG} tokens")
    if forwards and min(forwards) > LONG:
        missing.append(f"forwards of up to {LONG} tokens")
    if batch <= 1:
        missing.append("batch above 1")
    warm = None if cached == {None} or not cached else any(cached - {None, 0})
    if not warm:
        missing.append("warm prefix cache")
    lonely = [
        slot.slot for slot in case.slots if isinstance(slot.expected, int) and not _neighbours(case, slot.expected)
    ]
    if lonely:
        missing.append(
            f"the boundaries next to those of slot {', '.join(map(str, lonely))}: where layers change little, a "
            "shift by one could look right (dump training --boundaries all)"
        )
    missing.extend(case.remarks)
    if case.alignment.unaligned:
        missing.append(
            f"{case.alignment.unaligned} serving rows that training does not hold (dump training --tokens-from SERVING "
            "replays them)"
        )
    return Coverage(
        phases=phases,
        graph=graph,
        max_forward_tokens=max(forwards, default=None),
        batch=batch,
        warm_cache=warm,
        ranks=case.serving.ranks,
        not_seen=tuple(missing),
    )


def _neighbours(case: Case, boundary: int) -> bool:
    """Whether the training side stores the boundaries before and after one."""
    return all(k in case.boundaries for k in (boundary - 1, boundary + 1) if 0 <= k <= case.num_layers)


def _input(capture: Capture) -> Mapping[str, Any]:
    facts = capture.facts
    engine = facts.engine
    return {
        "path": capture.path,
        "side": facts.side,
        "source": facts.source.pipeline,
        "version": facts.source.version,
        "model": facts.model.name,
        "architecture": facts.model.architecture,
        "hidden_size": facts.model.hidden_size,
        "num_layers": facts.model.num_layers,
        "tokens": len(capture.tokens.token_ids),
        "ranks": list(capture.ranks),
        "engine": None if engine is None else engine.name,
        "engine_version": None if engine is None else engine.version,
        "tp_size": None if engine is None else engine.tp_size,
        "assumptions": list(getattr(capture, "assumptions", ())),
    }
