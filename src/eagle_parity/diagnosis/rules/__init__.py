"""The registry of rules, in order of cause: tokens, ranks, order, content, rows. Add a rule by adding its line here.

A rule takes a `Case` and yields findings. A fault in what a tensor holds is a line of `content.EXPLANATIONS` instead,
where the first explanation that fits a failed tensor names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from eagle_parity.diagnosis.case import Case
from eagle_parity.diagnosis.rules import content, coverage, layout, order, rows, strays
from eagle_parity.records import Finding

Rule: TypeAlias = Callable[[Case], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    rows.token_notes,
    rows.non_finite,
    layout.capture_lost,
    layout.width_mismatch,
    layout.hidden_shard,
    layout.token_shard,
    layout.partial_sum,
    layout.late_partial_sum,
    layout.odd_rank,
    layout.rank_rounding,
    order.aliased_buffer,
    order.wrong_order,
    order.boundary_missing,
    content.content,
    strays.stray_rows,
    rows.row_faults,
    rows.situation,
    content.situations,
    coverage.declared_expectation,
    coverage.features_match,
)
