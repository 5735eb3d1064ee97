"""A report for a person at a terminal: the one line they need on top, then the evidence."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eagle_parity.records import Finding, Layers, Report, Row
from eagle_parity.report.columns import columns
from eagle_parity.report.content import acceptance, answers, elsewhere, inputs, notes, ranking, same_fault, summary

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
    for side, text in inputs(report):
        console.print(Text(f"{side:>9}  {text}", style="dim"))
    if report.layers is not None and report.command == "which-layers":
        _print_layers(report.layers, console)
    if report.rows:
        console.print(_rows(report.rows, console.width))
    for group in same_fault(report.findings):
        console.print(_finding(group))
    for heading, items in notes(report):
        console.print(Text(f"{heading:<9} {'; '.join(items)}", style="dim"))


def headline(report: Report) -> Text:
    """`FAIL  layer-set on slots 0, 1, 2 …`: the verdict and the first cause."""
    text = Text(report.verdict.upper(), style=_COLOUR[report.verdict])
    return text.append("  " + summary(report), style="default")


def _print_layers(layers: Layers, console: Console) -> None:
    """The four answers, what the config would mean elsewhere, and the replay."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in answers(layers):
        table.add_row(*row)
    if layers.replay is not None and layers.replay.get("why"):
        table.add_row("", "", Text(str(layers.replay["why"]), style="yellow"))
    for boundaries, by in elsewhere(layers):
        table.add_row("", boundaries, Text(by, style="dim"))
    console.print(table)
    if layers.ranking:
        heads, rows = ranking(layers)
        table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
        for number, head in enumerate(heads):
            table.add_column(head, justify="right" if number else "left")
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
    forecast = acceptance(layers)
    if forecast is not None:
        console.print(Text(f"accept length  {forecast}"))


def _rows(rows: Sequence[Row], width: int) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    shown = columns(width)
    for column in shown:
        table.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=column.name in ("layout", "status"),
        )
    for row in rows:
        style = _COLOUR[row.status]
        table.add_row(*(Text(c.cell(row), style=style if c.name == "status" else "") for c in shown))
    return table


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
