"""The catalogue of findings: what each code means. `explain`, docs/faults.md and nothing else are made from it."""

from eagle_parity.diagnosis.faults import content, drafts, layers, ranks, rows
from eagle_parity.diagnosis.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (*layers.FAULTS, *ranks.FAULTS, *content.FAULTS, *rows.FAULTS, *drafts.FAULTS)

__all__ = ["FAULTS", "Fault", "find"]


def find(code: str) -> Fault | None:
    """The entry of a finding code, None for an unknown one."""
    return next((fault for fault in FAULTS if fault.code == code), None)
