"""The answer to "which layers?": trained, served and declared side by side, and what to write where they disagree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from eagle_parity.conventions import Served, served
from eagle_parity.diagnosis.case import Case
from eagle_parity.diagnosis.diagnose import diagnose, verdict_of
from eagle_parity.diagnosis.rules.order import fix_ids
from eagle_parity.draft.checkpoint import DraftCheckpoint
from eagle_parity.records import Boundary, Capture, Engine, Finding, Layers, Report, Verdict


def declared(
    draft: DraftCheckpoint, engine: Engine | None, training: Capture, serving: Capture | None
) -> Served | None:
    """What this engine version captures for the draft's config; None when its rule is not known."""
    if engine is None or engine.name != "sglang":
        return None
    models = [training.facts.model] + ([serving.facts.model] if serving is not None else [])
    architecture = next((m.architecture for m in reversed(models) if m.architecture is not None), None)
    layers = next((m.num_layers for m in models if m.num_layers is not None), None)
    ids = draft.declared_ids if draft.declared_in == "eagle_config" else None
    return served(ids, architecture=architecture, version=engine.version, num_layers=layers)


def compare_layers(case: Case, draft: DraftCheckpoint) -> Report:
    """With a serving dump: compare by content, and hold the config against what was really fed."""
    engine = case.serving.facts.engine
    answer = declared(draft, engine, case.training, case.serving)
    report = diagnose(case, None if answer is None else tuple(answer.boundaries))
    findings = [*report.findings, *_config_findings(draft, answer, engine)]
    fed = case.served
    if answer is not None and None not in fed and tuple(answer.boundaries) != fed:
        findings.append(
            Finding(
                "engine-version-rule",
                "warning",
                f"the config's ids {_ids(draft)} should make {_name(engine)} capture {list(answer.boundaries)} "
                f"({answer.rule}), the server feeds {list(fed)}",
                "check that the server runs this draft and this version, and whether it was patched",
                evidence={"rule": answer.rule, "source": answer.source},
            )
        )
    return replace(
        report,
        command="which-layers",
        findings=tuple(findings),
        verdict=verdict_of(case, report.rows, report.controls, findings),
    )


def declare_layers(training: Capture, draft: DraftCheckpoint, engine: Engine | None) -> Report:
    """Without a serving dump: what the config would make an engine version capture, against the training order."""
    trained = training.facts.slot_boundaries
    answer = declared(draft, engine, training, None)
    findings = list(_config_findings(draft, answer, engine))
    verdict: Verdict = "inconclusive"
    if trained is not None and answer is not None:
        verdict = "pass" if tuple(answer.boundaries) == trained and not answer.problems else "fail"
        if tuple(answer.boundaries) != trained:
            findings.append(_disagreement(trained, answer, draft, engine, training))
    return Report(
        command="which-layers",
        verdict=verdict,
        inputs={},
        thresholds={},
        coverage=None,
        controls=(),
        rows=(),
        findings=tuple(findings),
        layers=Layers(
            trained=trained,
            stored=training.facts.boundaries,
            declared=None if answer is None else tuple(answer.boundaries),
            trained_from=None if trained is None else "the training dump's slot_boundaries",
        ),
    )


def _disagreement(
    trained: tuple[Boundary, ...], answer: Served, draft: DraftCheckpoint, engine: Engine | None, training: Capture
) -> Finding:
    model = training.facts.model
    version = engine.version if engine is not None else None
    return Finding(
        "engine-version-rule",
        "error",
        f"the config's ids {_ids(draft)} make {_name(engine)} capture {list(answer.boundaries)} ({answer.rule}), the "
        f"draft was trained on {list(trained)}",
        fix_ids(trained, architecture=model.architecture, version=version, num_layers=model.num_layers),
        evidence={"rule": answer.rule, "source": answer.source},
    )


def _config_findings(draft: DraftCheckpoint, answer: Served | None, engine: Engine | None) -> Iterator[Finding]:
    """What is wrong with the config whatever the server does."""
    if draft.declared_in == "top-level" and engine is not None and engine.name == "sglang":
        yield Finding(
            "engine-version-rule",
            "warning",
            f"config.json has eagle_aux_hidden_state_layer_ids {_ids(draft)} at the top level, which SGLang ignores: "
            "it captures its default layers",
            f'write "eagle_config": {{"eagle_aux_hidden_state_layer_ids": {_ids(draft)}}}',
        )
    for problem in answer.problems if answer is not None else ():
        yield Finding(
            "engine-version-rule",
            "error",
            problem,
            "declare one id for each slot, all of them layers that this version can capture",
        )


def _ids(draft: DraftCheckpoint) -> list[int] | None:
    return None if draft.declared_ids is None else list(draft.declared_ids)


def _name(engine: Engine | None) -> str:
    return "this engine" if engine is None else f"SGLang {engine.version}"
