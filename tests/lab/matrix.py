"""Run injections, pairs and controls over sources; count what they were called."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.controls import controls
from tests.lab.injections import INJECTIONS, Injection
from tests.lab.pairs import PAIRS, Stacked
from tests.lab.run import Outcome, compare
from tests.lab.sources import Source


@dataclass
class Lab:
    """What came out of all runs."""

    faults: list[tuple[Injection, str, Outcome]] = field(default_factory=list)
    pairs: list[tuple[Stacked, str, Outcome]] = field(default_factory=list)
    healthy: list[tuple[str, str, Outcome]] = field(default_factory=list)

    def named(self) -> tuple[int, int]:
        return sum(outcome.first in i.expected for i, _, outcome in self.faults), len(self.faults)

    def detected(self) -> tuple[int, int]:
        return sum(found(i, outcome) for i, _, outcome in self.faults), len(self.faults)

    def false_errors(self) -> list[tuple[str, str, Outcome]]:
        return [run for run in self.healthy if run[2].errors or run[2].verdict == "fail"]

    def both(self) -> tuple[int, int]:
        return sum(pair.named(outcome) for pair, _, outcome in self.pairs), len(self.pairs)

    def confusion(self) -> dict[str, Counter[str]]:
        table: dict[str, Counter[str]] = defaultdict(Counter)
        for injection, _, outcome in self.faults:
            right = outcome.first in injection.expected
            table[injection.expected[0]][injection.expected[0] if right else outcome.first] += 1
        return dict(table)


def found(injection: Injection, outcome: Outcome) -> bool:
    """Not silently passed: an error, or for what is a warning by contract that warning."""
    if injection.severity == "warning":
        return bool(set(injection.expected) & set(outcome.warnings + outcome.errors))
    return outcome.verdict == "fail"


def run(
    sources: Iterable[Source], work: Path, only: Sequence[str] | None = None, pairs: bool = True, healthy: bool = True
) -> Lab:
    """Everything that the sources can make; `only` keeps injections by name."""
    lab = Lab()
    for source in sources:
        for injection in INJECTIONS:
            if only is not None and injection.name not in only:
                continue
            made = injection.make(source)
            if made is not None:
                lab.faults.append((injection, source.name, compare(*made, work)))
        for pair in PAIRS if pairs else ():
            made = pair.make(source)
            if made is not None:
                lab.pairs.append((pair, source.name, compare(*made, work)))
        if healthy:
            lab.healthy += [(name, source.name, compare(*made, work)) for name, made in controls(source)]
    return lab
