"""Faults in which boundary a slot holds: another layer, another order, an aliased buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from eagle_parity.conventions import ids_for
from eagle_parity.diagnosis.case import Case, TensorCase
from eagle_parity.records import FINAL_NORM, Boundary, Finding


def aliased_buffer(case: Case) -> Iterator[Finding]:
    """Two slots that are equal bit by bit: two captures of one buffer, which holds what was written last."""
    slots = [slot for slot in case.slots if slot.view is not None]
    if len(case.probe) == 0:
        return
    rows = {slot.slot: case.serving_rows(slot) for slot in slots}
    for slot in slots:
        twins = [
            other.slot
            for other in slots
            if other is not slot and slot.expected != other.expected and torch.equal(rows[slot.slot], rows[other.slot])
        ]
        if twins and slot.judgement.status != "ok":
            yield Finding(
                "aliased-buffer",
                "error",
                f"{slot.where} and slot {', '.join(map(str, twins))} are bit by bit the same tensor",
                "clone the state when it is captured: the buffer is written again by a later layer",
                slot=slot.slot,
                boundary=slot.match.best,
                evidence={"same_as": twins},
            )


def is_another_boundary(tensor: TensorCase) -> bool:
    """Whether a tensor is, at its floor, a boundary other than the expected one."""
    return (
        tensor.expected is not None
        and tensor.partial is None
        and tensor.best_is_sound
        and tensor.match.best != tensor.expected
        and tensor.judgement.status == "fail"
    )


def wrong_order(case: Case) -> Iterator[Finding]:
    """Slots that hold another boundary than the expected one, at the floor."""
    wrong = [slot for slot in case.tensors if is_another_boundary(slot)]
    served = [slot.match.best for slot in case.slots]
    expected = [slot.expected for slot in case.slots]
    aliased = {finding.slot for finding in aliased_buffer(case)}
    for slot in wrong:
        if slot.slot is not None and slot.slot in aliased:
            continue
        code = _code(slot, wrong, expected, served)
        best, second = slot.match.best, slot.match.runner_up
        medians = slot.match.medians()
        yield Finding(
            code,
            "error",
            f"{slot.where} holds boundary {best}, the draft was trained on {slot.expected}"
            if slot.slot is not None
            else f"{slot.where} holds boundary {best}",
            fix_order(case),
            slot=slot.slot,
            boundary=best,
            evidence={
                "expected_boundary": slot.expected,
                "best_boundary": best,
                "rel_l2_to_best": medians[best] if best is not None else None,
                "rel_l2_to_expected": medians.get(slot.expected) if slot.expected is not None else None,
                "runner_up": second,
                "margin": slot.match.margin,
                "served_order": served,
                "expected_order": expected,
            },
        )


def _code(
    slot: TensorCase, wrong: list[TensorCase], expected: list[Boundary | None], served: list[Boundary | None]
) -> str:
    """The name of a wrong order, from all slots together."""
    best = slot.match.best
    if best == FINAL_NORM:
        return "final-norm"
    if slot.slot is None:
        return "layer-shift"
    if expected != served and Counter(expected) == Counter(served):
        return "concat-order"
    if slot.expected == 0:
        return "embedding-missing"
    shifts = {_shift(s) for s in wrong if s.slot is not None}
    moved = _shift(slot)
    if moved is not None and (len(shifts) == 1 or (abs(moved) == 1 and len(wrong) == 1)):
        return "layer-shift"
    return "layer-set"


def _shift(slot: TensorCase) -> int | None:
    best, expected = slot.match.best, slot.expected
    return best - expected if isinstance(best, int) and isinstance(expected, int) else None


def fix_order(case: Case) -> str:
    """What to write into the draft's config so that the serving engine captures the trained order."""
    engine = case.serving.facts.engine
    if case.expectation.boundaries is None:
        return "run which-layers to learn what the draft was trained on"
    return fix_ids(
        case.expectation.boundaries,
        architecture=case.serving.facts.model.architecture or case.training.facts.model.architecture,
        version=engine.version if engine is not None and engine.name == "sglang" else None,
        num_layers=case.num_layers,
    )


def fix_ids(
    wanted: tuple[Boundary, ...], *, architecture: str | None, version: str | None, num_layers: int | None
) -> str:
    """The config line that makes a version of SGLang capture `wanted`, or why no line does."""
    numbers = [b for b in wanted if isinstance(b, int)]
    only_numbers = len(numbers) == len(wanted)
    if only_numbers and numbers != sorted(numbers):
        return (
            f"no id list gives {list(wanted)}: the server captures in ascending layer order; retrain the draft on the "
            "ascending order, or permute what the server hands to the fc"
        )
    if version is None:
        return f"make the server capture the boundaries {list(wanted)}, in this order"
    ids = None
    if only_numbers:
        ids = ids_for(numbers, architecture=architecture, version=version, num_layers=num_layers)
    if ids is None:
        return (
            f"no id list is known that makes {architecture or 'this model'} on SGLang {version} capture "
            f"{list(wanted)}: upgrade SGLang, or retrain the draft on boundaries that it can capture"
        )
    return (
        f'in the draft\'s config.json write "eagle_config": {{"eagle_aux_hidden_state_layer_ids": {list(ids)}}} '
        f"(SGLang {version} then captures {list(wanted)})"
    )


def boundary_missing(case: Case) -> Iterator[Finding]:
    """An expected boundary that the training side does not store, so nothing can be said against it."""
    for slot in case.slots:
        if slot.expected is not None and slot.expected not in case.boundaries:
            yield Finding(
                "boundary-missing",
                "warning",
                f"{slot.where} should hold boundary {slot.expected}, which the training side does not store",
                f"capture it: dump training --boundaries all (or at least {slot.expected} and its neighbours)",
                slot=slot.slot,
                boundary=slot.expected,
                evidence={"stored": list(case.boundaries)},
            )
