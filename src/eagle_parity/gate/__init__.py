"""A report -> one line a finding, and the exit code."""

from eagle_parity.gate.policy import exit_code, lines, worst

__all__ = ["exit_code", "lines", "worst"]
