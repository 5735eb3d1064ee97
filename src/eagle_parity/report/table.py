"""A report for a person at a terminal: the one line they need on top, then the evidence."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eagle_parity.records import Finding, Layers, Report, Row
from eagle_parity.report.columns import fitting
from eagle_parity.report.content import acceptance, answers, elsewhere, inputs, notes, ranking, same_fault, summary

# From the 256 colours, whose values terminals do not change: at least 3.8 in contrast on black and on white. Nothing is
# dim, and no colour means what the word beside it does not say.
GOOD, BAD, DOUBT, NOTE = "color(28)", "color(196)", "color(130)", "color(31)"
_COLOUR = {
    "pass": f"bold {GOOD}",
    "fail": f"bold {BAD}",
    "inconclusive": f"bold {DOUBT}",
    "ok": GOOD,
    "skipped": "",
    "error": f"bold {BAD}",
    "warning": f"bold {DOUBT}",
    "info": f"bold {NOTE}",
}


def print_table(report: Report, console: Console) -> None:
    """Print headline, rows, findings and coverage; shows the columns that fit, and wraps text under itself."""
    console.print(headline(report))
    _print_notes(inputs(report), console)
    if report.layers is not None and report.command == "which-layers":
        _print_layers(report.layers, console)
    if report.rows:
        _print_rows(report.rows, console)
    for group in same_fault(report.findings):
        _print_finding(group, console)
    _print_notes([(heading, "; ".join(items)) for heading, items in notes(report)], console)


def headline(report: Report) -> Text:
    """`FAIL  layer-set on slots 0, 1, 2 …`: the verdict and the first cause."""
    text = Text(report.verdict.upper(), style=_COLOUR[report.verdict])
    return text.append("  " + summary(report), style="default")


def _print_notes(lines: Sequence[tuple[str, str]], console: Console) -> None:
    for label, text in lines:
        _print_beside(f"{label:<9} ", text, console)


def _print_beside(label: str, text: str, console: Console) -> None:
    """A label, and a text that wraps beside it, not under it."""
    room = max(console.width - len(label), 20)
    for number, line in enumerate(textwrap.wrap(text, room, break_on_hyphens=False) or [""]):
        _print(Text((" " * len(label) if number else label) + line), console)


def _print(text: Text, console: Console) -> None:
    """A line as it is: without rich's wrapping, which pads it to the full width."""
    console.print(text, soft_wrap=True)


def _print_layers(layers: Layers, console: Console) -> None:
    """The four answers, what the config would mean elsewhere, and the replay."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in answers(layers):
        table.add_row(*row)
    if layers.replay is not None and layers.replay.get("why"):
        table.add_row("", "", Text(str(layers.replay["why"]), style=DOUBT))
    for boundaries, by in elsewhere(layers):
        table.add_row("", boundaries, by)
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


def _print_rows(rows: Sequence[Row], console: Console) -> None:
    shown = fitting(rows, console.width)

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(n) if column.right else c.ljust(n) for (column, n), c in zip(shown, cells, strict=True))
        return " ".join(padded).rstrip()

    _print(Text(line([column.name for column, _ in shown]), style="bold"), console)
    for row in rows:
        text = line([column.cell(row) for column, _ in shown])
        made = Text(text)
        made.stylize(_COLOUR[row.status], len(text) - len(row.status))  # the last column
        _print(made, console)


def _print_finding(group: Sequence[Finding], console: Console) -> None:
    """Findings with one fix: what is wrong, where, and the fix."""
    first = group[0]
    _print(Text.assemble((f"{first.severity}: ", _COLOUR[first.severity]), (first.code, "bold")), console)
    for finding in group:
        _print_beside("  ", finding.message, console)
    for place in dict.fromkeys((f.evidence["file"], f.evidence["line"]) for f in group if "line" in f.evidence):
        _print_beside("  at ", f"{place[0]}:{place[1]}", console)
    _print_beside("  fix: ", first.fix, console)
