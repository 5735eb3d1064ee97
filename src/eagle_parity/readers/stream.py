"""Samples on their way into a dump: from training files, or from a capture that is one already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from eagle_parity.errors import InputError, UsageError
from eagle_parity.readers.capture import RANK, tensor_specs, training_facts
from eagle_parity.readers.files import stratified
from eagle_parity.readers.training import Training
from eagle_parity.records import Boundary, Capture, Plan, Request, Sample, Stream, TensorSpec, boundary_name


def stream_training(training: Training, boundaries: Sequence[Boundary] | None = None) -> Stream:
    """The plan and samples of training files, T known from their headers. One sample is in memory at a time.

    `boundaries` keeps only these. Call `training.finite()` before, or NaN goes into the dump. Raises InputError when
    the boundaries of the slots are unknown, UsageError for a boundary that is not stored.
    """
    specs = _kept({name: spec for name, (_, spec) in tensor_specs(training).items()}, boundaries, training.path)
    plan = Plan(
        facts=replace(training_facts(training), boundaries=_numbers(specs)),
        tokens=training.tokens,
        tensors={RANK: tuple(specs.values())},
        columns=("loss_mask",) if training.has_mask else (),
    )
    return Stream(plan, _samples(training, tuple(specs)))


def _samples(training: Training, names: Sequence[str]) -> Iterator[Sample]:
    where = {name: number for name, (number, _) in tensor_specs(training).items()}
    for i, unit in enumerate(training.units):
        stored = training.load(i)
        yield Sample(
            id=unit.label,
            token_ids=stored.token_ids.tolist(),
            positions=stored.positions.tolist(),
            tensors={RANK: {name: stored.blocks[where[name]].read(0, stored.length) for name in names}},
            forward_tokens=stored.length,
            loss_mask=None if stored.loss_mask is None else stored.loss_mask.tolist(),
        )


def stream_capture(
    capture: Capture, boundaries: Sequence[Boundary] | None = None, *, limit: int | None = None, seed: int = 0
) -> Stream:
    """The plan and samples of a training capture (`dump training --from DUMP`): rank 0, whole requests.

    Raises InputError for a serving dump or one whose rank 0 holds only some rows.
    """
    if capture.facts.side != "training":
        raise InputError(f"{capture.path} is a serving dump", fix="give training files or a training dump to --from")
    specs = _kept({name: capture.spec(RANK, name) for name in capture.names(RANK)}, boundaries, capture.path)
    for name in specs:
        if capture.rows(RANK, name) is not None:
            raise InputError(f"{capture.path}: {name} holds only some rows", fix="give a training dump with whole rows")
    requests = [capture.tokens.requests[i] for i in stratified(len(capture.tokens.requests), limit, seed)]
    plan = Plan(
        facts=replace(capture.facts, boundaries=_numbers(specs), engine=None, draft=None),
        tokens=sum(request.end - request.begin for request in requests),
        tensors={RANK: tuple(specs.values())},
        columns=() if capture.tokens.loss_mask is None else ("loss_mask",),
    )
    return Stream(plan, (_copied(capture, request, tuple(specs)) for request in requests))


def _copied(capture: Capture, request: Request, names: Sequence[str]) -> Sample:
    span = slice(request.begin, request.end)
    mask = capture.tokens.loss_mask
    return Sample(
        id=request.id,
        token_ids=capture.tokens.token_ids[span].tolist(),
        positions=capture.tokens.positions[span].tolist(),
        tensors={RANK: {name: capture.read(RANK, name, request.begin, request.end) for name in names}},
        phase=request.phase,
        batch=request.batch,
        graph=request.graph,
        forward_tokens=request.forward_tokens,
        cached_tokens=request.cached_tokens,
        loss_mask=None if mask is None else mask[span].tolist(),
    )


def _kept(specs: dict[str, TensorSpec], boundaries: Sequence[Boundary] | None, path: str) -> dict[str, TensorSpec]:
    if boundaries is None:
        return specs
    wanted = [boundary_name(boundary) for boundary in boundaries]
    missing = [name for name in wanted if name not in specs]
    if missing:
        raise UsageError(
            f"{path} stores {', '.join(specs)}, not {missing[0]}", fix="choose --boundaries among those stored"
        )
    return {name: spec for name, spec in specs.items() if name in wanted}


def _numbers(specs: dict[str, TensorSpec]) -> tuple[int, ...]:
    parts = [name.split(".") for name in specs]
    return tuple(sorted(int(number) for kind, number in parts if kind == "boundary"))
