"""What formats for people say of a report, as plain text: summary, inputs, answers, notes."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_parity.diagnosis.files.check import SGLANG_ALONE
from eagle_parity.records import Boundary, Finding, Layers, Report
from eagle_parity.report.columns import show


def summary(report: Report) -> str:
    """The cause in half a line."""
    errors = [finding for finding in report.findings if finding.severity == "error"]
    if errors:
        return "; ".join(_grouped(errors))
    if report.verdict == "inconclusive":
        return _why_inconclusive(report)
    if report.command == "check":
        return f"nothing wrong in {len([c for c in report.inputs['checks'] if c['status'] != 'skipped'])} checks"
    if report.command == "which-layers":
        return "the server feeds the draft what it was trained on"
    return f"{len([row for row in report.rows if row.slot is not None])} slots hold what the draft was trained on"


def _grouped(findings: Sequence[Finding]) -> list[str]:
    slots: dict[str, list[str]] = {}
    for finding in findings:
        slots.setdefault(finding.code, [])
        if finding.slot is not None:
            slots[finding.code].append(str(finding.slot))
    return [
        f"{code} on slot{'s' if len(held) > 1 else ''} {', '.join(dict.fromkeys(held))}" if held else code
        for code, held in slots.items()
    ]


def _why_inconclusive(report: Report) -> str:
    unmet = report.inputs.get("unmet")
    if unmet and all(entry["verdict"] == "pass" for entry in report.inputs["reports"]):
        return "required and not shown: " + ", ".join(str(sentence).split(":")[0] for sentence in unmet)
    if report.command == "check":
        return "what the layer ids mean is not known for this engine and model"
    aligned = report.inputs.get("aligned_rows")
    least = report.thresholds.get("min_rows", 0)
    if isinstance(aligned, int) and aligned < least:
        return f"{aligned} rows have the same tokens on both sides, {least} are needed"
    if any(control.failed_as_expected is False for control in report.controls):
        return "a negative control matched: the data cannot tell right from wrong"
    if report.layers is not None and report.layers.trained is None:
        return "nothing says which boundaries the slots should hold (dump training --slots)"
    if report.layers is not None and not any(row.slot is not None for row in report.rows):
        return "the serving dump holds no slots: nothing was handed to a draft"
    unsure = [str(row.slot) for row in report.rows if row.slot is not None and row.status != "ok"]
    if unsure:
        return f"slot {', '.join(unsure)}: best boundary and runner-up, or the expected one, cannot be told apart"
    return "nothing could be judged"


def inputs(report: Report) -> list[tuple[str, str]]:
    """What was compared: (side, sentence)."""
    lines = []
    for side in ("training", "serving"):
        entry = report.inputs.get(side)
        if entry:
            engine = (
                f", {entry['engine']} {entry['engine_version'] or '?'} TP={entry['tp_size'] or '?'}"
                if entry["engine"]
                else ""
            )
            lines.append((side, f"{entry['path']} ({entry['source']}{engine}, {entry['tokens']} tokens)"))
    return lines


def order(boundaries: Sequence[Boundary | None] | None) -> str:
    """An order of boundaries as tables name it."""
    return "unknown" if boundaries is None else "[" + ", ".join(map(show, boundaries)) + "]"


def numbers(boundaries: Sequence[Boundary] | None) -> str:
    """`0..61, final.norm` where they are dense."""
    numbers = [b for b in boundaries or () if isinstance(b, int)]
    if len(numbers) > 3 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return ", ".join([f"{numbers[0]}..{numbers[-1]}", *(str(b) for b in boundaries or () if b not in numbers)])
    return order(boundaries)


def answers(layers: Layers) -> list[tuple[str, str, str]]:
    """The four answers to "which layers?": (question, boundaries, who says so)."""
    unproven = "" if layers.ranking and not layers.ambiguous else "; not proven by replaying the draft"
    return [
        ("trained on", order(layers.trained), f"{layers.trained_from or 'nobody says'}{unproven}"),
        ("stored", numbers(layers.stored), "on the training side"),
        ("served", order(layers.served), "by content"),
        ("declared", order(layers.declared), "the draft's ids under this engine version's rule"),
    ]


def elsewhere(layers: Layers) -> list[tuple[str, str]]:
    """What the config's ids would mean elsewhere: (boundaries, under whose rule)."""
    lines = []
    for entry in layers.declarations:
        engine = f" {entry['versions']}" if entry["by"] in ("SGLang", "vLLM") else ""
        by = (entry["by"] if len(entry["by"]) < 60 else f"{entry['by'][:57]}…") + engine
        lines.append((order(entry["boundaries"]), f"as {by}: {entry['rule']}"))
    return lines


def ranking(layers: Layers) -> tuple[list[str], list[list[str]]]:
    """The best orderings by replay: heads and rows, the first column an order, the others numbers."""
    loss = "kl" if "kl" in layers.ranking[0] else "cross_entropy"
    heads = ["replayed in this order", {"kl": "KL"}.get(loss, "cross-entropy"), "worse by", "z", "agreement"]
    rows = []
    for entry in layers.ranking[:5]:
        first = entry["z"] == 0
        rows.append(
            [
                order(entry["order"]),
                f"{entry[loss]:.4f}",
                "–" if first else f"{entry['excess']:.4f}",
                "–" if first else f"{entry['z']:.1f}",
                f"{entry['agreement']:.1%}",
            ]
        )
    return heads, rows


def acceptance(layers: Layers) -> str | None:
    """The forecast accept length, and the measured one; None where it was not forecast."""
    if layers.acceptance is None:
        return None
    chances = layers.acceptance
    right, fed = (chances[side]["accept_length"] for side in ("training", "serving"))
    measured = "" if chances["measured"] is None else f"; {chances['measured']:.2f} measured"
    return f"{right:.2f} forecast on the states that it was trained on, {fed:.2f} on what the server feeds{measured}"


def same_fault(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings that differ only by their slot, together."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.code, finding.fix), []).append(finding)
    return list(groups.values())


def notes(report: Report) -> list[tuple[str, list[str]]]:
    """What a verdict rests on and what it says nothing about: (heading, items)."""
    lines = []
    ran = [f"{control.name}: {_control(control.failed_as_expected)}" for control in report.controls]
    if ran:
        lines.append(("controls", ran))
    skipped = [c for c in report.inputs.get("checks", ()) if c["status"] == "skipped"]
    waiting = sorted({c["why"] for c in skipped if c["why"] is not None and c["why"] != SGLANG_ALONE})
    if waiting:
        lines.append(("not run", [f"checks that need {'; '.join(waiting)}"]))
    foreign = [c["check"] for c in skipped if c["why"] == SGLANG_ALONE]
    if foreign:
        lines.append(("not run", [f"checks of SGLang alone: {', '.join(foreign)}"]))
    if report.coverage is not None and report.coverage.not_seen:
        lines.append(("not seen", list(report.coverage.not_seen)))
    return lines


def _control(failed: bool | None) -> str:
    return {True: "failed as it must", False: "DID NOT FAIL", None: "could not be run"}[failed]
