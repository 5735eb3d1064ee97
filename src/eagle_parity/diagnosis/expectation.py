"""What each slot should hold, and who says so."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_parity.conventions import served
from eagle_parity.records import Boundary, Facts, Finding


@dataclass(frozen=True)
class Expectation:
    """The expected boundary of each slot; None where no source knows it."""

    boundaries: tuple[Boundary, ...] | None
    source: str
    findings: tuple[Finding, ...] = ()


def declared_boundaries(training: Facts, serving: Facts, ids: tuple[int, ...] | None) -> tuple[Boundary, ...] | None:
    """What the declared ids mean for the serving side's engine and version; None when that is not known."""
    if serving.engine is None or serving.engine.name != "sglang":
        return None
    answer = served(
        ids,
        architecture=serving.model.architecture or training.model.architecture,
        version=serving.engine.version,
        num_layers=serving.model.num_layers or training.model.num_layers,
    )
    return None if answer is None else tuple(answer.boundaries)


def expect(
    training: Facts,
    serving: Facts,
    ids: tuple[int, ...] | None = None,
    proven: tuple[tuple[Boundary, ...], str] | None = None,
) -> Expectation:
    """The `proven` order and who says so; else the training dump's `slot_boundaries`; else the declared ids under the
    engine version's rule; else nothing.

    `compare` gives `proven`, what replaying the draft shows, only where the training side declares nothing;
    `which-layers` believes the draft first. `ids` are the draft checkpoint's, when one was given; otherwise those that
    the serving dump recorded.
    """
    if proven is not None:
        return Expectation(*proven)
    if training.slot_boundaries is not None:
        return Expectation(training.slot_boundaries, "the training dump's slot_boundaries")
    if ids is None and serving.draft is not None:
        ids = serving.draft.declared_ids
    declared = None if ids is None else declared_boundaries(training, serving, ids)
    if declared is None:
        return Expectation(None, "nothing says which boundaries the slots should hold")
    finding = Finding(
        "undetermined",
        "info",
        f"the trained order is unknown; expecting {list(declared)}, which the declared ids {list(ids or ())} mean for "
        f"{serving.engine.name if serving.engine else ''} {serving.engine.version if serving.engine else ''}",
        "record what the draft was trained on with `dump training --slots`, or run which-layers",
        evidence={"declared_ids": list(ids or ())},
    )
    return Expectation(declared, "the declared ids under the engine version's rule", (finding,))
