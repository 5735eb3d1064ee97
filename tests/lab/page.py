"""The lab's numbers as Markdown: docs/fault-lab.md."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from tests.lab.matrix import Lab, found
from tests.lab.sources import Source

INTRODUCTION = """Faults injected into captures, and what `compare` calls them. Written by `python -m tests.lab`; the
injections are `tests/lab/injections.py` and `pairs.py`, which know nothing of the rules. Numbers stay as they come
out."""
SOURCES = """Random residual networks (`net`: attention-like and MLP-like halves, ranks' parts; massive channels, slow
layers, routing tails), tiny random llama and DeepSeek-V3 (MLA, MoE) models through transformers and `dump training`,
served by a forward in tensor-parallel parts, and recordings of SGLang on two H200s. The networks' engine noise is
drawn; that of the models and recordings is real."""


def render(lab: Lab, sources: Sequence[Source]) -> str:
    return "\n".join(_lines(lab, sources)) + "\n"


def _share(part: tuple[int, int]) -> str:
    return f"{part[0]} of {part[1]} ({part[0] / part[1]:.1%})" if part[1] else "none run"


def _lines(lab: Lab, sources: Sequence[Source]) -> Iterator[str]:
    false = lab.false_errors()
    undecided = [run for run in lab.healthy if run[2].verdict == "inconclusive" and not run[2].errors]
    yield "# Fault lab"
    yield ""
    yield INTRODUCTION
    yield ""
    yield "| | target | measured |"
    yield "| --- | --- | --- |"
    yield f"| named first | >= 95 % | {_share(lab.named())} |"
    yield f"| detected (not passed) | 100 % | {_share(lab.detected())} |"
    yield f"| two faults at once, both named | >= 80 % | {_share(lab.both())} |"
    yield f"| errors on healthy servers | 0 of >= 200 | {len(false)} of {len(lab.healthy)} |"
    yield f"| healthy servers left inconclusive | | {len(undecided)} of {len(lab.healthy)} |"
    yield ""
    yield "## Sources"
    yield ""
    yield SOURCES
    yield ""
    for source in sources:
        yield f"- {source.name}"
    yield ""
    yield "## Confusion matrix"
    yield ""
    yield "Rows: what was injected (the first of its right names). Columns: what was named first."
    yield ""
    yield from _matrix(lab)
    yield ""
    yield "## Injections"
    yield ""
    yield "| injection | right names | cases | runs | named first | detected | otherwise called |"
    yield "| --- | --- | --- | ---: | ---: | ---: | --- |"
    yield from _injections(lab)
    yield ""
    yield "## Two faults at once"
    yield ""
    yield "| pair | runs | both named |"
    yield "| --- | ---: | ---: |"
    by_pair: dict[str, list[bool]] = defaultdict(list)
    for pair, _, outcome in lab.pairs:
        by_pair[pair.name].append(pair.named(outcome))
    for name, hits in by_pair.items():
        yield f"| {name} | {len(hits)} | {sum(hits)} |"
    yield ""
    yield "## Healthy controls"
    yield ""
    yield "| control | runs | errors | inconclusive |"
    yield "| --- | ---: | ---: | ---: |"
    by_control: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for name, _, outcome in lab.healthy:
        by_control[name].append((bool(outcome.errors), outcome.verdict == "inconclusive"))
    for name, results in by_control.items():
        yield f"| {name} | {len(results)} | {sum(e for e, _ in results)} | {sum(i for _, i in results)} |"
    misses = [(i, s, o) for i, s, o in lab.faults if o.first not in i.expected or not found(i, o)]
    rest = [(p.name, s, o) for p, s, o in lab.pairs if not p.named(o)]
    yield ""
    yield "## What went wrong"
    yield ""
    if not misses and not rest and not false:
        yield "Nothing in these runs."
    for injection, source, outcome in misses:
        called = ", ".join(outcome.errors or outcome.warnings) or "nothing"
        yield f"- {injection.name}, {source}: {outcome.verdict}, {called}"
    for name, source, outcome in [*rest, *false]:
        yield f"- {name}, {source}: {outcome.verdict}, {', '.join(outcome.errors + outcome.warnings) or 'nothing'}"


def _matrix(lab: Lab) -> Iterator[str]:
    table = lab.confusion()
    columns = sorted({name for counts in table.values() for name in counts})
    yield "| | " + " | ".join(columns) + " |"
    yield "| --- |" + " ---: |" * len(columns)
    for row in sorted(table):
        yield f"| {row} | " + " | ".join(str(table[row][c] or "") for c in columns) + " |"


def _injections(lab: Lab) -> Iterator[str]:
    names = list(dict.fromkeys(injection.name for injection, _, _ in lab.faults))
    for name in names:
        runs = [(i, o) for i, _, o in lab.faults if i.name == name]
        injection = runs[0][0]
        right = sum(o.first in i.expected for i, o in runs)
        seen = sum(found(i, o) for i, o in runs)
        other = Counter(o.first for i, o in runs if o.first not in i.expected)
        called = ", ".join(f"{code} {count}" for code, count in other.most_common())
        codes = ", ".join(injection.expected) + (" (warning)" if injection.severity == "warning" else "")
        yield f"| {name} | {codes} | {injection.cases} | {len(runs)} | {right} | {seen} | {called} |"
