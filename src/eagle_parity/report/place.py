"""Where a finding points: a line of a file, for the formats that can annotate it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle_parity.records import Finding


@dataclass(frozen=True)
class Place:
    """A line (from 1) of a file; `inside` when `file` is relative to the working directory, which holds it."""

    file: str
    line: int
    inside: bool


def find_place(finding: Finding) -> Place | None:
    """The place in a finding's evidence; None where it has none.

    Annotations need a path inside the repository, and a workflow runs in the repository: paths below the working
    directory are made relative to it, others stay as they are.
    """
    file, line = finding.evidence.get("file"), finding.evidence.get("line")
    if not isinstance(file, str) or not isinstance(line, int):
        return None
    absolute, here = Path(file).absolute(), Path.cwd()
    if absolute.is_relative_to(here):
        return Place(absolute.relative_to(here).as_posix(), line, True)
    return Place(file, line, False)
