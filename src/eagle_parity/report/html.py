"""A report as one HTML page that needs nothing else: to attach to a build, or to send to whoever trained the draft."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape

from eagle_parity import __version__
from eagle_parity.records import Finding, Layers, Report, Row
from eagle_parity.report.columns import COLUMNS, Column
from eagle_parity.report.content import acceptance, answers, elsewhere, inputs, notes, ranking, same_fault, summary
from eagle_parity.report.document import plain

# Contrast of every colour with its background is at least 4.5 (WCAG AA), in both schemes.
_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --quiet: #57606a; --line: #d0d7de; --box: #f6f8fa;
  --good: #116329; --bad: #b4151f; --doubt: #7d4e00; --note: #0550ae; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --quiet: #9aa4af; --line: #30363d;
  --box: #161b22; --good: #56d364; --bad: #ff8078; --doubt: #e3b341; --note: #79c0ff; } }
body { background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 76rem; padding: 1.5rem 1rem; }
h1 { font-size: 1.5rem; line-height: 1.3; margin: 0 0 1rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0; }
p { margin: .25rem 0; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); }
.pass, .ok { color: var(--good); }
.fail, .error { color: var(--bad); }
.inconclusive, .warning { color: var(--doubt); }
.info { color: var(--note); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .7rem .3rem 0; text-align: left; }
th.right, td.right { text-align: right; }
article { border-left: 4px solid currentColor; margin: 1rem 0; padding: .1rem 0 .1rem .8rem; }
article > *, summary { color: var(--text); }
article h3 > span { color: inherit; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
pre { background: var(--box); margin: .4rem 0; overflow-x: auto; padding: .6rem; }
""".strip()


def to_html(report: Report) -> str:
    """The page: the verdict first, then what was compared, the rows, findings with evidence, and what was not seen."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    said = f"{report.verdict.upper()}  {summary(report)}"
    yield "<!DOCTYPE html>"
    yield '<html lang="en">'
    yield "<head>"
    yield '<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield f"<title>{escape(said)}</title>"
    yield f"<style>\n{_STYLE}\n</style>"
    yield "</head>"
    yield "<body>"
    yield f'<h1><span class="{report.verdict}">{report.verdict.upper()}</span> {escape(summary(report))}</h1>'
    for side, text in inputs(report):
        yield f'<p class="quiet">{side}: {escape(text)}</p>'
    if report.layers is not None and report.command == "which-layers":
        yield from _layers(report.layers)
    if report.rows:
        yield "<h2>Slots and boundaries</h2>"
        shown = [COLUMNS[0], COLUMNS[-1], *COLUMNS[1:-1]]  # the status first: a narrow window scrolls
        yield from _table([(c.name, c.right) for c in shown], [[_cell(c, row) for c in shown] for row in report.rows])
    if report.findings:
        yield "<h2>Findings</h2>"
    for group in same_fault(report.findings):
        yield from _finding(group)
    for heading, items in notes(report):
        yield f"<h2>{heading.capitalize()}</h2>"
        yield "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
    yield f'<p class="quiet">eagle-parity {__version__}, {escape(report.command)}</p>'
    yield "</body>"
    yield "</html>"


def _cell(column: Column, row: Row) -> str:
    text = escape(column.cell(row))
    return f'<span class="{row.status}">{text}</span>' if column.name == "status" else text


def _table(heads: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Heads are (text, numbers); cells are HTML already."""
    kinds = [' class="right"' if right else "" for _, right in heads]
    yield '<div class="wide"><table>'
    if any(name for name, _ in heads):
        yield "<tr>" + "".join(f"<th{k}>{escape(n)}</th>" for k, (n, _) in zip(kinds, heads, strict=True)) + "</tr>"
    for cells in rows:
        yield "<tr>" + "".join(f"<td{k}>{cell}</td>" for k, cell in zip(kinds, cells, strict=True)) + "</tr>"
    yield "</table></div>"


def _layers(layers: Layers) -> Iterator[str]:
    yield "<h2>Which layers</h2>"
    rows = [[escape(text) for text in row] for row in answers(layers)]
    rows += [
        ["", escape(boundaries), f'<span class="quiet">{escape(by)}</span>'] for boundaries, by in elsewhere(layers)
    ]
    yield from _table([("", False)] * 3, rows)
    if layers.replay is not None and layers.replay.get("why"):
        yield f'<p class="warning">{escape(str(layers.replay["why"]))}</p>'
    if layers.ranking:
        heads, entries = ranking(layers)
        yield from _table([(head, number > 0) for number, head in enumerate(heads)], entries)
    forecast = acceptance(layers)
    if forecast is not None:
        yield f"<p>accept length: {escape(forecast)}</p>"


def _finding(group: Sequence[Finding]) -> Iterator[str]:
    first = group[0]
    yield f'<article class="{first.severity}">'
    yield f'<h3><span class="{first.severity}">{first.severity}</span> {escape(first.code)}</h3>'
    for finding in group:
        yield f"<p>{escape(finding.message)}</p>"
    if "line" in first.evidence:
        yield f'<p class="quiet">at <code>{escape(str(first.evidence["file"]))}:{first.evidence["line"]}</code></p>'
    yield f"<p><strong>Fix:</strong> {escape(first.fix)}</p>"
    held = [(f"slot {f.slot}: " if f.slot is not None else "", dict(f.evidence)) for f in group if f.evidence]
    if held:
        yield "<details><summary>Evidence</summary>"
        for name, evidence in held:
            yield f"<pre>{escape(name)}{escape(json.dumps(plain(evidence), indent=1, ensure_ascii=False))}</pre>"
        yield "</details>"
    yield "</article>"
