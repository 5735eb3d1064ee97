"""Reports and a policy -> one verdict, one line a finding, and the exit code."""

from eagle_parity.gate.policy import Policy, read_policy
from eagle_parity.gate.verdict import Judged, decide, exit_code, lines, refuse_contradictions

__all__ = ["Judged", "Policy", "decide", "exit_code", "lines", "read_policy", "refuse_contradictions"]
