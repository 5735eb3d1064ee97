"""Training files as a capture: compare and which-layers take them without a dump in between."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from eagle_parity.errors import InputError
from eagle_parity.readers.stored import Stored
from eagle_parity.readers.training import Training
from eagle_parity.records import Boundary, Facts, Request, Source, TensorSpec, Tokens, boundary_name
from eagle_parity.tensorfile import DTYPES

RANK = 0


@dataclass(frozen=True)
class TrainingCapture:
    """The samples of a `Training` as a `records.Capture` of rank 0. Rows are read from their files on demand."""

    path: str
    facts: Facts
    tokens: Tokens
    assumptions: tuple[str, ...]
    """What no file says and was taken for granted, for the report."""
    _specs: Mapping[str, tuple[int, TensorSpec]]
    """Tensor name -> number of the block, and its width and dtype."""
    _begins: tuple[int, ...]
    """First row of each sample, and the number of all rows."""
    _samples: _Samples

    @property
    def ranks(self) -> tuple[int, ...]:
        """Training pipelines store whole states, once."""
        return (RANK,)

    def names(self, rank: int) -> tuple[str, ...]:
        """`boundary.K` ascending, then `final.norm`."""
        return tuple(self._specs) if rank == RANK else ()

    def spec(self, rank: int, name: str) -> TensorSpec:
        """Width and dtype of a tensor, as it is read."""
        del rank
        return self._specs[name][1]

    def length(self, rank: int, name: str) -> int:
        """Rows: all tokens."""
        del rank, name
        return self._begins[-1]

    def rows(self, rank: int, name: str) -> None:
        """Every tensor holds all tokens in order."""
        del rank, name

    def read(self, rank: int, name: str, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of a tensor, [end - begin, W]. Only the samples in it are open.

        Raises InputError when a file has changed since it was opened.
        """
        del rank
        block, spec = self._specs[name]
        if begin >= end:
            return torch.empty((0, spec.width), dtype=DTYPES[spec.dtype])
        first = bisect.bisect_right(self._begins, begin) - 1
        last = bisect.bisect_left(self._begins, end)
        parts = []
        for number, sample in zip(range(first, last), self._samples.get(first, last), strict=True):
            start, stop = self._begins[number], self._begins[number + 1]
            parts.append(sample.blocks[block].read(max(begin, start) - start, min(end, stop) - start))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Samples:
    """The samples of a `Training`. Those of the last stretch stay open: callers read it tensor by tensor."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._open: dict[int, Stored] = {}

    def get(self, first: int, last: int) -> list[Stored]:
        """The samples first..last-1."""
        # The ones that are not wanted any more go before others come. A dict of its own makes it safe for threads.
        held = {number: sample for number, sample in self._open.items() if first <= number < last}
        self._open = held
        for number in range(first, last):
            if number not in held:
                held[number] = self._load(number)
        return [held[number] for number in range(first, last)]

    def _load(self, number: int) -> Stored:
        sample = self._training.load(number)
        if sample.length != self._training.lengths[number]:
            raise InputError(
                f"{self._training.units[number].file} has {sample.length} rows, it had "
                f"{self._training.lengths[number]} when it was opened",
                fix="do not write into training files while they are read",
            )
        return sample


def tensor_specs(training: Training) -> dict[str, tuple[int, TensorSpec]]:
    """Name -> block number and spec, in the order of a dump: `boundary.K` ascending, then `final.norm`.

    Raises InputError when a slot's boundary is unknown: it would have no name. A last state without a number is left
    out (`training.assumptions` tells of it).
    """
    boundaries = [block.boundary for block in training.blocks]
    if training.slot_boundaries is None:
        raise InputError(
            f"{training.path}: {next(s for s in training.assumptions if 'unknown' in s)}",
            fix="name the target with --model DIR, the boundaries with --slots 3,31,59 (in stored order), or a dump of "
            "the target on the same tokens with --reference DUMP",
        )
    numbered = [(boundary, i) for i, boundary in enumerate(boundaries) if boundary is not None]
    if not numbered:
        raise InputError(f"{training.path}: no block has a known boundary", fix="name the target with --model DIR")
    return {
        boundary_name(boundary): (i, TensorSpec(boundary_name(boundary), training.width, training.dtype))
        for boundary, i in sorted(numbered, key=lambda item: _order(item[0]))
    }


def _order(boundary: Boundary) -> tuple[bool, int]:
    return (False, boundary) if isinstance(boundary, int) else (True, 0)


def training_facts(training: Training) -> Facts:
    """What a dump's manifest says of these samples; assumptions go into the source's detail."""
    return Facts(
        side="training",
        source=Source(
            training.format.name, None, "assumed: " + "; ".join(training.assumptions) if training.assumptions else None
        ),
        model=training.model,
        boundaries=tuple(sorted(b.boundary for b in training.blocks if isinstance(b.boundary, int))),
        slot_boundaries=training.slot_boundaries or None,
    )


def capture_training(training: Training) -> TrainingCapture:
    """A capture over the samples of `training`. Reads their token ids; hidden states stay on disk.

    Raises InputError when the boundaries of its slots are unknown.
    """
    specs = tensor_specs(training)
    begins = [0]
    ids, positions, masks, requests = [], [], [], []
    for i, unit in enumerate(training.units):
        sample = training.load(i)
        begins.append(begins[-1] + sample.length)
        ids.append(sample.token_ids)
        positions.append(sample.positions)
        masks.append(sample.loss_mask)
        requests.append(Request(unit.label, begins[-2], begins[-1], forward_tokens=sample.length))
    known = [mask for mask in masks if mask is not None]
    return TrainingCapture(
        path=training.path,
        facts=training_facts(training),
        tokens=Tokens(
            np.concatenate(ids),
            np.concatenate(positions),
            tuple(requests),
            np.concatenate(known) if len(known) == len(masks) else None,
        ),
        assumptions=training.assumptions,
        _specs=specs,
        _begins=tuple(begins),
        _samples=_Samples(training),
    )
