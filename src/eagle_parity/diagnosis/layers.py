"""The answer to "which layers?": trained, served and declared side by side, and what to write where they disagree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from eagle_parity.conventions import Served, served
from eagle_parity.diagnosis.case import Case
from eagle_parity.diagnosis.declarations import declarations
from eagle_parity.diagnosis.diagnose import diagnose, verdict_of
from eagle_parity.diagnosis.replay import Replay, accept, acceptance, ranking, refuted, summary
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


def heed(report: Report, case: Case, found: Replay | None, doubt: Finding | None) -> Report:
    """Add to a comparison what the draft says of the order that is served, and judge anew."""
    against = tuple(refuted(case, found))
    kept = tuple(f for f in report.findings if not (against and f.code == "features-match-check-draft"))
    findings = (*against, *kept, *_doubts(case.training, doubt))
    return replace(report, findings=findings, verdict=verdict_of(case, report.rows, report.controls, findings))


def compare_layers(
    case: Case, draft: DraftCheckpoint, found: Replay | None = None, doubt: Finding | None = None
) -> Report:
    """With a serving dump: compare by content, and hold the config against what was really fed.

    `found` is the replay of the draft on the training side, `doubt` why it proves nothing, which is a
    finding only where nobody declares what the draft was trained on.
    """
    engine = case.serving.facts.engine
    answer = declared(draft, engine, case.training, case.serving)
    report = diagnose(case, None if answer is None else tuple(answer.boundaries))
    findings = [*report.findings, *_config_findings(draft, answer, engine)]
    findings += contradiction(case.training, found)
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
    layers = _answers(report.layers or Layers(), draft, case.training, case.serving, found, doubt)
    if found is not None and found.ordering.ranking:
        chances = accept(case, found, found.ordering.ranking[0].order)
        layers = replace(layers, acceptance=None if chances is None else acceptance(chances))
    report = replace(report, command="which-layers", layers=layers, findings=tuple(findings))
    return heed(report, case, found, doubt)


def trained_order(training: Capture, found: Replay | None) -> tuple[tuple[Boundary, ...], str] | None:
    """What the draft was trained on and who says so: the proven order, else what the training side declares."""
    if found is not None and found.order is not None:
        return found.order, found.source
    declared = training.facts.slot_boundaries
    return None if declared is None else (declared, "the training dump's slot_boundaries")


def contradiction(training: Capture, found: Replay | None) -> Iterator[Finding]:
    """The training side declares another order than the draft proves."""
    said = training.facts.slot_boundaries
    if said is None or found is None or found.order is None or said == found.order:
        return
    yield Finding(
        "concat-order" if Counter(said) == Counter(found.order) else "layer-set",
        "warning",
        f"{training.path} says that the slots are {list(said)}, the draft's weights say {list(found.order)} "
        f"({found.ordering.z:.1f} standard errors)",
        f"make the dump again with --slots {','.join(map(str, found.order))}, and look for who wrote {list(said)}",
        evidence={"declared": said, "proven": found.order, "z": found.ordering.z},
    )


def _doubts(training: Capture, doubt: Finding | None) -> Iterator[Finding]:
    if doubt is not None and training.facts.slot_boundaries is None:
        yield doubt


def _answers(
    layers: Layers,
    draft: DraftCheckpoint,
    training: Capture,
    serving: Capture | None,
    found: Replay | None,
    doubt: Finding | None,
) -> Layers:
    """Put the replay and the conventions beside the answers that need neither."""
    models = [side.facts.model for side in (serving, training) if side is not None]
    architecture = next((m.architecture for m in models if m.architecture is not None), None)
    count = next((m.num_layers for m in models if m.num_layers is not None), None)
    layers = replace(layers, declarations=declarations(draft, architecture, count, layers.trained))
    if found is None:
        return replace(layers, replay=None if doubt is None else {"why": f"{doubt.message}; {doubt.fix}"})
    return replace(
        layers,
        ranking=ranking(found.ordering),
        replay=summary(found.ordering),
        ambiguous=layers.ambiguous or found.ordering.ambiguous,
    )


def declare_layers(
    training: Capture,
    draft: DraftCheckpoint,
    engine: Engine | None,
    found: Replay | None = None,
    doubt: Finding | None = None,
) -> Report:
    """Without a serving dump: what the config would make an engine version capture, against the training order."""
    known = trained_order(training, found)
    trained = None if known is None else known[0]
    answer = declared(draft, engine, training, None)
    findings = [*contradiction(training, found), *_config_findings(draft, answer, engine), *_doubts(training, doubt)]
    verdict: Verdict = "inconclusive"
    if trained is None and answer is not None and found is not None:
        standing = found.proof.refutes(tuple(answer.boundaries))
        if standing is not None:
            verdict = "fail"
            best = found.ordering.ranking[0].order
            findings.append(_disagreement(best, answer, draft, engine, training, "does better on", standing.z))
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
        layers=_answers(
            Layers(
                trained=trained,
                stored=training.facts.boundaries,
                declared=None if answer is None else tuple(answer.boundaries),
                trained_from=None if known is None else known[1],
            ),
            draft,
            training,
            None,
            found,
            doubt,
        ),
    )


def _disagreement(
    trained: tuple[Boundary, ...],
    answer: Served,
    draft: DraftCheckpoint,
    engine: Engine | None,
    training: Capture,
    how: str = "was trained on",
    z: float | None = None,
) -> Finding:
    model = training.facts.model
    version = engine.version if engine is not None else None
    return Finding(
        "engine-version-rule",
        "error",
        f"the config's ids {_ids(draft)} make {_name(engine)} capture {list(answer.boundaries)} ({answer.rule}), the "
        f"draft {how} {list(trained)}" + (f" ({z:.1f} standard errors)" if z is not None else ""),
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
