"""What an explanation of a tensor's content returns."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_parity.diagnosis.case import TensorCase
from eagle_parity.records import Boundary, Finding


@dataclass(frozen=True)
class Explained:
    """A tensor's fault, and the boundary that the tensor would be without it (None: cannot be said)."""

    finding: Finding
    boundary: Boundary | None


def error(
    tensor: TensorCase, code: str, message: str, fix: str, boundary: Boundary | None, **evidence: object
) -> Finding:
    """An error about a tensor; the message begins with its name."""
    return Finding(code, "error", f"{tensor.where} {message}", fix, tensor.slot, boundary, None, evidence)
