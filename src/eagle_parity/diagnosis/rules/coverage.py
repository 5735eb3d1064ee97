"""Notes that change no verdict: what the expectation rests on, and what a clean result means."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_parity.diagnosis.case import Case
from eagle_parity.diagnosis.rules.content import explained
from eagle_parity.records import Finding


def declared_expectation(case: Case) -> Iterator[Finding]:
    """The expected order comes from the declared ids, or from nothing."""
    yield from case.expectation.findings


def features_match(case: Case) -> Iterator[Finding]:
    """Every slot is at the floor: if acceptance is still low, the draft is to be looked at."""
    if case.slots and all(slot.judgement.status == "ok" for slot in case.slots) and not explained(case):
        yield Finding(
            "features-match-check-draft",
            "info",
            "every slot holds the state that the draft was trained on",
            "if acceptance is still low the cause is not in these states: check the draft (norm flags, vocab map, "
            "rope, lm_head), or situations that the dump does not cover",
        )
