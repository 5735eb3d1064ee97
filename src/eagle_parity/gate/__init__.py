"""A report -> one line a finding, and the exit code."""

from eagle_parity.gate.policy import distinct, exit_code, lines, worst

__all__ = ["distinct", "exit_code", "lines", "worst"]
