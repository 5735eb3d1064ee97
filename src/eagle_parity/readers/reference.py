"""Which boundary a stored block is, established by content: against a capture of the target on the same tokens.

Formats that record no layer ids can be numbered in no other way, and a recorded id can be checked in no other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from eagle_parity.errors import InputError
from eagle_parity.readers.numbering import Block, assumptions
from eagle_parity.readers.stored import Stored
from eagle_parity.readers.training import Training
from eagle_parity.records import FINAL_NORM, Boundary, Capture, IntArray, boundary_of

MARGIN = 2.0
"""The runner-up's distance over the best's that is asked for: contrast decides, no absolute threshold."""
SAMPLES = 8
ROWS = 256
"""Samples, and rows of each, that are compared. A boundary shows in a few rows."""
KEY = 8
"""Rows that a sample and the reference must share."""


@dataclass(frozen=True)
class Distance:
    """Median relative L2 of a block to a boundary of the reference."""

    boundary: Boundary
    rel_l2: float


@dataclass(frozen=True)
class Established:
    """One block's answer: the nearest boundaries, nearest first. `boundary` is None where two are about as near."""

    role: str
    boundary: Boundary | None
    ranking: tuple[Distance, ...]


def measure(training: Training, reference: Capture) -> tuple[Established, ...]:
    """Measure every block against every boundary that the reference stores on rank 0.

    Raises InputError when fewer than 8 rows are common, or the reference's states have another width.
    """
    stored = (name for name in reference.names(0) if name == FINAL_NORM or name.startswith("boundary."))
    names = {boundary_of(name): name for name in stored}
    sums: list[dict[Boundary, list[torch.Tensor]]] = [{b: [] for b in names} for _ in training.blocks]
    rows = 0
    for i in range(min(SAMPLES, len(training.units))):
        sample = training.load(i)
        for mine, theirs in _common(sample, reference):
            rows += len(mine)
            _add(sums, sample, mine, reference, theirs, names)
    if rows < KEY:
        raise InputError(
            f"{reference.path} and {training.path} have {rows} rows of the same tokens in common, at least {KEY} are "
            "needed",
            fix="make the reference with `dump training --model DIR --tokens-from` these files",
        )
    return tuple(_judged(block.role, held) for block, held in zip(training.blocks, sums, strict=True))


def establish(training: Training, reference: Capture) -> Training:
    """The same training files with the boundaries that their content proves.

    A block whose content decides gets that boundary, whatever was assumed or recorded; where it contradicts, a note
    says so. Raises InputError as `measure` does, and when two blocks turn out to be the same boundary.
    """
    blocks: list[Block] = []
    notes: list[str] = []
    for block, answer in zip(training.blocks, measure(training, reference), strict=True):
        if answer.boundary is None:
            blocks.append(block)
            best, second = answer.ranking[:2] if len(answer.ranking) > 1 else (answer.ranking[0], None)
            notes.append(
                f"{block.role}: the reference cannot tell boundary {best.boundary} ({best.rel_l2:.3g}) "
                + ("alone from others" if second is None else f"from {second.boundary} ({second.rel_l2:.3g})")
            )
            continue
        blocks.append(Block(block.role, answer.boundary, True, "content"))
        if block.boundary is not None and block.boundary != answer.boundary:
            said = f"{'recorded' if block.known else 'assumed'} as {block.boundary} ({block.basis})"
            notes.append(f"{block.role} was {said}, its content is boundary {answer.boundary}")
    found = [block.boundary for block in blocks if block.boundary is not None]
    if len(set(found)) < len(found):
        raise InputError(
            f"{training.path}: two blocks have the content of one boundary: {found}",
            fix="this is a fault of the files: the pipeline stored one state twice",
        )
    return replace(
        training,
        blocks=tuple(blocks),
        assumptions=assumptions(training.format, blocks, training.model.num_layers),
        notes=(*training.notes, *notes),
    )


def _common(sample: Stored, reference: Capture) -> list[tuple[IntArray, IntArray]]:
    """(rows of the sample, rows of the reference) with the same tokens at the same positions from the start on."""
    tokens = reference.tokens
    for request in tokens.requests:
        span = slice(request.begin, request.end)
        where = {int(p): request.begin + i for i, p in enumerate(tokens.positions[span])}
        theirs = [where.get(int(p), -1) for p in sample.positions[:ROWS]]
        same = 0
        for row, other in enumerate(theirs):
            if other < 0 or tokens.token_ids[other] != sample.token_ids[row]:
                break
            same = row + 1
        if same >= min(KEY, sample.length):
            return [(np.arange(same, dtype=np.int64), np.asarray(theirs[:same], dtype=np.int64))]
    return []


def _add(
    sums: Sequence[dict[Boundary, list[torch.Tensor]]],
    sample: Stored,
    mine: IntArray,
    reference: Capture,
    theirs: IntArray,
    names: dict[Boundary, str],
) -> None:
    begin, end = int(theirs.min()), int(theirs.max()) + 1
    picked = torch.from_numpy(theirs - begin)
    blocks = [block.read(0, len(mine)).double() for block in sample.blocks]
    for boundary, name in names.items():
        truth = reference.read(0, name, begin, end)[picked].double()
        for held, block in zip(sums, blocks, strict=True):
            if truth.shape != block.shape:
                raise InputError(
                    f"{reference.path}: {name} is {truth.shape[1]} wide, the training files {block.shape[1]}",
                    fix="give a reference of the same target",
                )
            held[boundary].append((block - truth).norm(dim=1) / truth.norm(dim=1).clamp_min(1e-30))


def _judged(role: str, held: dict[Boundary, list[torch.Tensor]]) -> Established:
    distances = [Distance(b, float(torch.cat(parts).median())) for b, parts in held.items()]
    ranking = tuple(sorted(distances, key=lambda item: (item.rel_l2 != item.rel_l2, item.rel_l2)))
    if len(ranking) < 2:
        return Established(role, None, ranking)
    clear = ranking[0].rel_l2 * MARGIN <= ranking[1].rel_l2 and ranking[1].rel_l2 > 0
    return Established(role, ranking[0].boundary if clear else None, ranking)
