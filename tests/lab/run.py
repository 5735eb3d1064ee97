"""One case through compare: write both dumps, study, diagnose, and say what came out."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.synthetic import DumpSpec


@dataclass(frozen=True)
class Outcome:
    """What compare said: the verdict, and finding codes in its order."""

    verdict: str
    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    error_slots: tuple[int | None, ...] = ()

    @property
    def first(self) -> str:
        """The code that a reader sees first: of the first error, else of the first warning."""
        named = self.errors or self.warnings
        return named[0] if named else self.verdict


def compare(training: DumpSpec, serving: DumpSpec, work: Path) -> Outcome:
    """Run both specs through the code that the command line runs."""
    from eagle_parity.diagnosis.diagnose import diagnose
    from eagle_parity.diagnosis.study import study
    from eagle_parity.dump import open_dump

    for side in ("training", "serving"):
        shutil.rmtree(work / side, ignore_errors=True)
    ours, theirs = open_dump(training.write(work / "training")), open_dump(serving.write(work / "serving"))
    report = diagnose(study(ours, theirs))
    return Outcome(
        report.verdict,
        tuple(f.code for f in report.findings if f.severity == "error"),
        tuple(f.code for f in report.findings if f.severity == "warning"),
        tuple(f.slot for f in report.findings if f.severity == "error"),
    )
