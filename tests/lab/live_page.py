"""The live part of docs/fault-lab.md: a section a server, each rewritten by its own run, and totals over all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.lab.live_runs import SERVERS, Live

MARK = "## In a live server"
HEAD = "| injected | asked | right names | verdict | errors and warnings, in order | named first |"
RULE = "| --- | --- | --- | --- | --- | --- |"
CONTROL = "healthy"  # what stands for the right names of a control
INTRODUCTION = """The real SGLang 0.5.23 on the CPU with an EAGLE-3 draft, captured by the plugin with `dump serving`
(prefill in chunks, and verify rows), against transformers' forward of the same weights and tokens. Written by
`python -m tests.lab --live [SERVER...]`. The faults are in the server: a plugin of their own (`tests/lab/engine`)
changes what SGLang keeps at its capture point, and other configs and drafts are served. What is called healthy ran in
the same server, between them."""


def split(document: str) -> tuple[str, str]:
    """The document without its live part, and the live part."""
    before, mark, after = document.partition(MARK)
    return before.rstrip() + "\n", mark + after


def render(live_part: str, found: Mapping[str, Sequence[Live]]) -> str:
    """The live part with the sections of these servers (keys of SERVERS) written again."""
    sections = {name: _body(live_part, title) for name, (title, _) in SERVERS.items()}
    sections |= {name: [HEAD, RULE, *map(_row, runs)] for name, runs in found.items()}
    rows = [line for body in sections.values() for line in body if line.endswith(("| yes |", "| **no** |"))]
    faults = [row for row in rows if row.split(" | ")[2] != CONTROL]
    controls = [row for row in rows if row.split(" | ")[2] == CONTROL]
    lines = [MARK, "", INTRODUCTION, "", "| | target | measured |", "| --- | --- | --- |"]
    silent = sum(row.split(" | ")[3] == "pass" for row in faults)
    lines.append(f"| named first | >= 95 % | {_right(faults)} of {len(faults)} |")
    lines.append(f"| detected (not passed) | 100 % | {len(faults) - silent} of {len(faults)} |")
    lines.append(f"| healthy, passed | all | {_right(controls)} of {len(controls)} |")
    for name, body in sections.items():
        if body:
            lines += ["", f"### {SERVERS[name][0]}", "", *body]
    return "\n".join(lines) + "\n"


def claims(live_part: str, name: str) -> list[tuple[str, ...]]:
    """What the document says of one server, row by row: injected, asked, right names, verdict, named first."""
    rows = [row.strip("| ").split(" | ") for row in _body(live_part, SERVERS[name][0])[2:]]
    return [(*row[:4], row[-1]) for row in rows]


def _right(rows: Sequence[str]) -> int:
    return sum(row.endswith("| yes |") for row in rows)


def _body(live_part: str, title: str) -> list[str]:
    _, mark, after = live_part.partition(f"### {title}\n")
    return after.partition("\n### ")[0].strip().splitlines() if mark else []


def _row(run: Live) -> str:
    outcome = run.outcome
    said = [
        f"{code} x{outcome.errors.count(code)}" if outcome.errors.count(code) > 1 else code
        for code in dict.fromkeys(outcome.errors)
    ]
    said += [f"{code} (warning)" for code in dict.fromkeys(outcome.warnings)]
    words = ", ".join(said) + (f" ({run.note})" if run.note else "")
    right = CONTROL if run.healthy else ", ".join(run.expected)
    return (
        f"| {run.fault} | {run.asked} | {right} | {outcome.verdict} | {words.strip()} | "
        f"{'yes' if run.right else '**no**'} |"
    )
