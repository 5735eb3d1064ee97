"""A report for a person at a terminal: the one line they need on top, then the evidence."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eagle_parity.records import Boundary, Distribution, Finding, Layers, Report, Row

_COLOUR = {
    "pass": "bold green",
    "fail": "bold red",
    "inconclusive": "bold yellow",
    "ok": "green",
    "skipped": "dim",
    "error": "red",
    "warning": "yellow",
    "info": "cyan",
}


def print_table(report: Report, console: Console) -> None:
    """Print headline, rows, findings and coverage; fits 80 columns and uses more where there are more."""
    console.print(headline(report))
    _print_inputs(report, console)
    if report.layers is not None and report.command == "which-layers":
        console.print(_layers(report.layers))
        if report.layers.ranking:
            console.print(_ranking(report.layers))
        if report.layers.acceptance is not None:
            console.print(_acceptance(report.layers))
    if report.rows:
        console.print(_rows(report.rows, wide=console.width >= 120))
    for group in _same_fault(report.findings):
        console.print(_finding(group))
    _print_notes(report, console)


def headline(report: Report) -> Text:
    """`FAIL  layer-set on slots 0, 1, 2 …`: the verdict and the first cause."""
    text = Text(report.verdict.upper(), style=_COLOUR[report.verdict])
    return text.append("  " + summary(report), style="default")


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


def _print_inputs(report: Report, console: Console) -> None:
    for side in ("training", "serving"):
        entry = report.inputs.get(side)
        if not entry:
            continue
        engine = (
            f", {entry['engine']} {entry['engine_version'] or '?'} TP={entry['tp_size'] or '?'}"
            if entry["engine"]
            else ""
        )
        console.print(
            Text(f"{side:>9}  {entry['path']} ({entry['source']}{engine}, {entry['tokens']} tokens)", style="dim")
        )


def show(boundary: Boundary | None) -> str:
    """A boundary as tables name it."""
    return "–" if boundary is None else str(boundary)


def _order(boundaries: Sequence[Boundary | None] | None) -> str:
    return "unknown" if boundaries is None else "[" + ", ".join(map(show, boundaries)) + "]"


def _layers(layers: Layers) -> Table:
    """The four answers, and what the config would mean elsewhere."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    unproven = "" if layers.ranking and not layers.ambiguous else "; not proven by replaying the draft"
    table.add_row("trained on", _order(layers.trained), f"{layers.trained_from or 'nobody says'}{unproven}")
    table.add_row("stored", _numbers(layers.stored), "on the training side")
    table.add_row("served", _order(layers.served), "by content")
    table.add_row("declared", _order(layers.declared), "the draft's ids under this engine version's rule")
    if layers.replay is not None and layers.replay.get("why"):
        table.add_row("", "", Text(str(layers.replay["why"]), style="yellow"))
    for entry in layers.declarations:
        engine = f" {entry['versions']}" if entry["by"] in ("SGLang", "vLLM") else ""
        by = (entry["by"] if len(entry["by"]) < 60 else f"{entry['by'][:57]}…") + engine
        table.add_row("", _order(entry["boundaries"]), Text(f"as {by}: {entry['rule']}", style="dim"))
    return table


def _numbers(boundaries: Sequence[Boundary] | None) -> str:
    """`0..61, final.norm` where they are dense."""
    numbers = [b for b in boundaries or () if isinstance(b, int)]
    if len(numbers) > 3 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return ", ".join([f"{numbers[0]}..{numbers[-1]}", *(str(b) for b in boundaries or () if b not in numbers)])
    return _order(boundaries)


def _ranking(layers: Layers) -> Table:
    """The best orderings by replay."""
    loss = "kl" if "kl" in layers.ranking[0] else "cross_entropy"
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("replayed in this order", {"kl": "KL"}.get(loss, "cross-entropy"), "worse by", "z", "agreement"):
        table.add_column(name, justify="left" if name.startswith("replayed") else "right")
    for entry in layers.ranking[:5]:
        first = entry["z"] == 0
        table.add_row(
            _order(entry["order"]),
            f"{entry[loss]:.4f}",
            "–" if first else f"{entry['excess']:.4f}",
            "–" if first else f"{entry['z']:.1f}",
            f"{entry['agreement']:.1%}",
        )
    return table


def _acceptance(layers: Layers) -> Text:
    chances = layers.acceptance or {}
    right, fed = (chances[side]["accept_length"] for side in ("training", "serving"))
    measured = "" if chances["measured"] is None else f"; {chances['measured']:.2f} measured"
    return Text(
        f"accept length  {right:.2f} forecast on the states that it was trained on, {fed:.2f} on what the server feeds"
        f"{measured}"
    )


def _rows(rows: Sequence[Row], *, wide: bool) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("", "want", "holds", *(("next",) if wide else ()), "margin", "cos", "rel L2", "norm", "width"):
        table.add_column(name, justify="right" if name else "left")
    table.add_column("layout", no_wrap=True)
    if wide:
        for name in ("floor", "cos p01", "cos centred", "rel L2 p99", "tokens"):
            table.add_column(name, justify="right")
        table.add_column("ranks")
    table.add_column("status", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, wide=wide))
    return table


def _cells(row: Row, *, wide: bool) -> list[str | Text]:
    name = f"slot {row.slot}" if row.slot is not None else f"boundary {row.boundary}"
    width = str(row.width) if row.width == row.expected_width else f"{row.width}/{row.expected_width or '?'}"
    cells: list[str | Text] = [
        name,
        show(row.expected_boundary),
        show(row.best_boundary),
        *([show(row.runner_up)] if wide else []),
        _margin(row.margin),
        _number(row.cosine, "median", ".5f"),
        _number(row.rel_l2, "median", ".2g"),
        _number(row.norm_ratio, "median", ".3f"),
        width,
        row.layout,
    ]
    if wide:
        cells += [
            "–" if row.floor is None else f"{row.floor.median:.2g}",
            _number(row.cosine, "p01", ".5f"),
            _number(row.cosine_centred, "median", ".5f"),
            _number(row.rel_l2, "p99", ".2g"),
            str(row.tokens),
            ",".join(map(str, row.ranks)) + {True: " equal", False: " differ", None: ""}[row.rank_equal],
        ]
    return [*cells, Text(row.status, style=_COLOUR[row.status])]


def _margin(margin: float | None) -> str:
    if margin is None:
        return "–"
    return f"{margin:.3g}x" if margin < 1000 else ">1000x"


def _number(values: Distribution | None, key: str, spec: str) -> str:
    return "–" if values is None else format(getattr(values, key), spec)


def _same_fault(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings that differ only by their slot, together."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.code, finding.fix), []).append(finding)
    return list(groups.values())


def _finding(group: Sequence[Finding]) -> Text:
    first = group[0]
    text = Text.assemble((f"{first.severity}: ", _COLOUR[first.severity]), (first.code, "bold"))
    if len(group) == 1:
        text.append(f"  {first.message}", style="default")
        if "line" in first.evidence:
            text.append(f"\n  at {first.evidence['file']}:{first.evidence['line']}", style="dim")
    else:
        for finding in group:
            text.append(f"\n  {finding.message}", style="default")
    return text.append(f"\n  fix: {first.fix}", style="default")


def _print_notes(report: Report, console: Console) -> None:
    ran = [f"{c.name}: {_control(c.failed_as_expected)}" for c in report.controls]
    if ran:
        console.print(Text("controls  " + "; ".join(ran), style="dim"))
    waiting = sorted({c["why"] for c in report.inputs.get("checks", ()) if c["status"] == "skipped"})
    if waiting:
        console.print(Text("not run   checks that need " + "; ".join(waiting), style="dim"))
    if report.coverage is not None and report.coverage.not_seen:
        console.print(Text("not seen  " + "; ".join(report.coverage.not_seen), style="dim"))


def _control(failed: bool | None) -> str:
    return {True: "failed as it must", False: "DID NOT FAIL", None: "could not be run"}[failed]
