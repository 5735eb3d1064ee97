"""What a team asks of a deploy beyond a pass, as a TOML file.

require = ["verify", "graph", "long", "ranks"]   # situations that a report must have seen, else inconclusive (3)
fail_on = ["precision"]                          # warnings that fail the deploy (1)
min_rows = 256                                   # rows that each comparison must have aligned, else inconclusive
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle_parity.diagnosis.faults import FAULTS
from eagle_parity.diagnosis.files.serving import LONG
from eagle_parity.errors import UsageError
from eagle_parity.records import Coverage, Report

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KEYS = ("fail_on", "min_rows", "require")


@dataclass(frozen=True)
class Requirement:
    """A situation that some report must have seen, and how to see it."""

    what: str
    seen: Callable[[Coverage], bool]
    how: str


REQUIREMENTS: Mapping[str, Requirement] = {
    "verify": Requirement(
        "verify rows",
        lambda coverage: "verify" in coverage.phases,
        "dump serving --prompts, then dump training --tokens-from that dump",
    ),
    "graph": Requirement(
        "graph replay", lambda coverage: True in coverage.graph, "capture a server that runs with CUDA graphs"
    ),
    "long": Requirement(
        f"forwards of more than {LONG} tokens",
        lambda coverage: (coverage.max_forward_tokens or 0) > LONG,
        f"add a prompt of more than {LONG} tokens",
    ),
    "batch": Requirement("a batch above 1", lambda coverage: coverage.batch > 1, "send prompts together"),
    "warm-cache": Requirement(
        "a warm prefix cache", lambda coverage: coverage.warm_cache is True, "dump serving --warm-cache"
    ),
}
RANKS = "ranks"
"""Of every comparison, not of some: what one report saw on all ranks says nothing for another's rows."""


@dataclass(frozen=True)
class Policy:
    """A policy; the default asks for nothing."""

    path: str | None = None
    require: tuple[str, ...] = ()
    fail_on: tuple[str, ...] = ()
    min_rows: int = 0

    def tighten(self, report: Report) -> Report:
        """The report with the warnings that must fail as errors."""
        if not any(finding.severity == "warning" and finding.code in self.fail_on for finding in report.findings):
            return report
        findings = tuple(
            replace(finding, severity="error", evidence={**finding.evidence, "policy": self.path})
            if finding.severity == "warning" and finding.code in self.fail_on
            else finding
            for finding in report.findings
        )
        return replace(report, verdict="fail", findings=findings)

    def unmet(self, reports: Sequence[Report]) -> list[str]:
        """What is asked for and was not seen, one sentence each, with what to do about it."""
        compared = [report for report in reports if report.coverage is not None]
        sentences = []
        for name in self.require:
            if name == RANKS:
                sentences += [text for text in map(_ranks_not_seen, compared) if text is not None][:1]
                continue
            requirement = REQUIREMENTS[name]
            if not any(requirement.seen(report.coverage) for report in compared if report.coverage is not None):
                sentences.append(f"{requirement.what}: required, and no report has seen them ({requirement.how})")
        aligned = [report.inputs.get("aligned_rows") for report in compared]
        few = [count for count in aligned if not isinstance(count, int) or count < self.min_rows]
        if few and self.min_rows:
            sentences.append(f"{self.min_rows} aligned rows: required, and a report has {few[0]} (add prompts)")
        return sentences


def _ranks_not_seen(report: Report) -> str | None:
    serving = report.inputs.get("serving")
    size = serving.get("tp_size") if isinstance(serving, Mapping) else None
    held = len(report.coverage.ranks) if report.coverage is not None else 0
    if isinstance(size, int) and held >= size:
        return None
    return (
        f"all ranks: required, and a report holds {held} of {size or 'an unknown number'} (let every rank write to one "
        "directory, or join copies with dump merge)"
    )


def read_policy(path: Path) -> Policy:
    """Read a policy file. UsageError for what is no TOML, and for keys, situations or codes that nobody knows."""
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--policy {path}: {error.strerror or error}", fix="give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--policy {path} is not TOML: {error}", fix="correct the file") from None
    unknown = next((key for key in table if key not in _KEYS), None)
    if unknown is not None:
        raise UsageError(f"--policy {path}: no setting is called {unknown!r}", fix=f"known: {', '.join(_KEYS)}")
    least = table.get("min_rows", 0)
    if not isinstance(least, int) or isinstance(least, bool) or least < 0:
        raise UsageError(f"--policy {path}: min_rows is {least!r}", fix="write a whole number of rows")
    return Policy(
        path=str(path),
        require=_words(path, table, "require", [*REQUIREMENTS, RANKS]),
        fail_on=_words(path, table, "fail_on", [fault.code for fault in FAULTS]),
        min_rows=least,
    )


def _words(path: Path, table: Mapping[str, Any], key: str, known: Sequence[str]) -> tuple[str, ...]:
    words = table.get(key, [])
    if not isinstance(words, list) or any(not isinstance(word, str) for word in words):
        raise UsageError(
            f"--policy {path}: {key} is {words!r}", fix=f'write a list of words, as in {key} = ["{known[0]}"]'
        )
    for word in words:
        if word not in known:
            raise UsageError(f"--policy {path}: {key} does not know {word!r}", fix=f"known: {', '.join(known)}")
    return tuple(words)
