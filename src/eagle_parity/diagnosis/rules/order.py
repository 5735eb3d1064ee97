"""Faults in which boundary a slot holds: another layer, another order, an aliased buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from eagle_parity.conventions import ids_for
from eagle_parity.conventions.sglang import upgrade_for
from eagle_parity.diagnosis.case import Case, TensorCase
from eagle_parity.diagnosis.rules.content import explained
from eagle_parity.diagnosis.rules.layout import late_sums
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


def held(case: Case) -> dict[str, Boundary | None]:
    """What each tensor would hold but for its other faults, by the tensor's name; None where that cannot be said."""
    found: dict[str, Boundary | None] = {}
    for tensor in case.tensors:
        partial = tensor.partial or late_sums(case).get(tensor.name)
        if partial is not None:
            found[tensor.name] = partial.boundary
        elif tensor.name in explained(case):
            found[tensor.name] = explained(case)[tensor.name].boundary
        else:
            found[tensor.name] = tensor.holds
    return found


def wrong_order(case: Case) -> Iterator[Finding]:
    """Slots that hold another boundary than the expected one, at the floor or behind another fault."""
    content = held(case)
    aliased = {finding.slot for finding in aliased_buffer(case)}
    wrong = [t for t in case.tensors if t.expected is not None and content[t.name] not in (None, t.expected)]
    served = [content[slot.name] for slot in case.slots]
    expected = [slot.expected for slot in case.slots]
    for tensor in wrong:
        if tensor.slot is not None and tensor.slot in aliased:
            continue
        boundary = content[tensor.name]
        medians = tensor.match.medians()
        yield Finding(
            _code(case, tensor, boundary, expected, served),
            "error",
            f"{tensor.where} holds boundary {boundary}, the draft was trained on {tensor.expected}"
            if tensor.slot is not None
            else f"{tensor.where} holds boundary {boundary}",
            fix_order(case),
            slot=tensor.slot,
            boundary=boundary,
            evidence={
                "expected_boundary": tensor.expected,
                "best_boundary": boundary,
                "rel_l2_to_best": medians.get(boundary) if boundary is not None else None,
                "rel_l2_to_expected": medians.get(tensor.expected) if tensor.expected is not None else None,
                "runner_up": tensor.match.runner_up,
                "margin": tensor.match.margin,
                **(
                    {"boundary_from": case.borrowed[boundary]}
                    if boundary is not None and boundary in case.borrowed
                    else {}
                ),
                "served_order": served,
                "expected_order": expected,
            },
        )


def _code(
    case: Case,
    tensor: TensorCase,
    boundary: Boundary | None,
    expected: list[Boundary | None],
    served: list[Boundary | None],
) -> str:
    """The name of a wrong order, from all slots together."""
    if boundary == FINAL_NORM or (tensor.expected == FINAL_NORM and boundary == case.num_layers):
        return "final-norm"
    if tensor.slot is None:
        return "layer-shift"
    if Counter(expected) == Counter(served):
        return "concat-order"
    moves = [_shift(e, s) for e, s in zip(expected, served, strict=True) if e != s and s is not None]
    one_move = len(set(moves)) == 1 and moves[0] is not None
    if one_move and len(moves) == len(expected) > 1:
        return "layer-shift"
    if tensor.expected == 0:
        return "embedding-missing"
    if one_move and (len(moves) > 1 or abs(moves[0] or 0) == 1):
        return "layer-shift"
    return "layer-set"


def _shift(expected: Boundary | None, served: Boundary | None) -> int | None:
    return served - expected if isinstance(served, int) and isinstance(expected, int) else None


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
    later = upgrade_for(numbers, architecture=architecture, version=version, num_layers=num_layers)
    if ids is None and only_numbers and later is not None:
        return (
            f"SGLang {version} cannot capture {list(wanted)}: upgrade to {later[0]}, and write "
            f'"eagle_config": {{"eagle_aux_hidden_state_layer_ids": {list(later[1])}}}'
        )
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
        if slot.expected is not None and (slot.expected not in case.boundaries or slot.expected in case.borrowed):
            yield Finding(
                "boundary-missing",
                "warning",
                f"{slot.where} should hold boundary {slot.expected}, which the training side does not store",
                f"capture it: dump training --boundaries all (or at least {slot.expected} and its neighbours)",
                slot=slot.slot,
                boundary=slot.expected,
                evidence={"stored": [b for b in case.boundaries if b not in case.borrowed]},
            )
