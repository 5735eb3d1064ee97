"""One sample as a reader yields it: tokens, loss mask, and the stored blocks, still on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eagle_parity.errors import InputError
from eagle_parity.readers.contents import Contents
from eagle_parity.records import IntArray

_WRITE_AGAIN = "write the file again, or leave it out"
_CHUNK = 256  # rows looked at together when values are checked
NO_MASK = "no loss mask is stored"


@dataclass(frozen=True)
class Rows:
    """One block of one sample, [T, W], not read yet; `scales` [T] where the values are float8."""

    values: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """T."""
        return self.values.shape[0]

    @property
    def width(self) -> int:
        """W."""
        return self.values.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that `read` gives."""
        return self.values.dtype if self.scales is None else torch.bfloat16

    def cut(self, begin: int, end: int) -> Rows:
        """The rows [begin, end), still not read."""
        return Rows(self.values[begin:end], None if self.scales is None else self.scales[begin:end])

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) as a copy, [end - begin, W]; float8 becomes bf16 as its consumers do it.

        speculators, hs-connectors fp8_hidden_states_connector: value.to(bf16) * scale.to(bf16), one scale a token.
        """
        rows = self.values[begin:end]
        if self.scales is None:
            return rows.clone(memory_format=torch.contiguous_format)
        return rows.to(torch.bfloat16) * self.scales[begin:end].to(torch.bfloat16).unsqueeze(1)


@dataclass(frozen=True)
class Stored:
    """A sample. `slots` are what the trainer hands to the draft's fc, in the order in which it joins them.

    `token_ids`, `positions`, `loss_mask` [T]; every block has T rows, and row t is the state computed when
    token_ids[t] was the input at positions[t]. `notes` name what was done to get there, without numbers, so that
    they can be counted over samples.
    """

    token_ids: IntArray
    positions: IntArray
    loss_mask: IntArray | None
    slots: tuple[Rows, ...]
    last: Rows | None
    notes: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def blocks(self) -> tuple[Rows, ...]:
        """The slots, then the last state where there is one."""
        return self.slots if self.last is None else (*self.slots, self.last)

    @property
    def width(self) -> int:
        """Hidden size."""
        return self.blocks[0].width

    def cut(self, begin: int, end: int, note: str) -> Stored:
        """The rows [begin, end), with the reason for it."""
        return Stored(
            self.token_ids[begin:end],
            self.positions[begin:end],
            None if self.loss_mask is None else self.loss_mask[begin:end],
            tuple(rows.cut(begin, end) for rows in self.slots),
            None if self.last is None else self.last.cut(begin, end),
            (*self.notes, note),
        )


def broken(path: Path, why: str, fix: str = _WRITE_AGAIN) -> InputError:
    """The error for a file that cannot be used, which the opener collects and reports."""
    return InputError(f"{path}: {why}", fix=fix)


def tensor(contents: Contents, name: str) -> torch.Tensor:
    """A tensor that the format cannot do without. Raises InputError where the file has none, or None, in its place."""
    found = contents.tensors.get(name)
    if found is not None:
        return found
    held = "is missing" if name not in contents.others else f"is {_kind(contents.others[name])}"
    raise broken(contents.path, f"{name} {held}, expected a tensor; the file holds {contents.describe()}")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def integers(path: Path, name: str, values: torch.Tensor) -> IntArray:
    """An integer column [T], given as [T] or [1, T]. Raises InputError for anything else."""
    if values.dim() == 2 and values.shape[0] == 1:
        values = values[0]
    if values.dim() != 1 or values.dtype.is_floating_point or values.dtype.is_complex:
        raise broken(path, f"{name} is {values.dtype} {list(values.shape)}, expected integers [T]")
    return np.asarray(values.to(torch.int64).numpy(), dtype=np.int64)


def mask(values: torch.Tensor | None, length: int) -> IntArray | None:
    """A loss mask [T] of 0 and 1 from [T], [1, T] or [1, T, 1] of any dtype; None where it does not fit."""
    if values is None or values.numel() < length or values.numel() != max((1, *values.shape)):
        return None
    return np.asarray((values.reshape(-1)[:length] != 0).to(torch.int64).numpy(), dtype=np.int64)


def states(path: Path, name: str, values: torch.Tensor) -> torch.Tensor:
    """Hidden states [T, W], given as [T, W] or [1, T, W]. Raises InputError for another shape or no float dtype."""
    if values.dim() == 3 and values.shape[0] == 1:
        values = values[0]
    if values.dim() != 2 or not values.dtype.is_floating_point or 0 in values.shape:
        raise broken(path, f"{name} is {values.dtype} {list(values.shape)}, expected floats [T, W] or [1, T, W]")
    if values.dtype.itemsize == 1:
        raise broken(path, f"{name} is {values.dtype}, and no scales belong to it", fix="store the scales, or bf16")
    return values


def split(
    path: Path, joined: torch.Tensor, last: torch.Tensor, *, names: tuple[str, str], vocab_size: int | None
) -> tuple[Rows, ...]:
    """The blocks of a joined state [T, K*H] beside a last state [T, H], which tells H.

    Raises InputError where the last state cannot be one: SpecForge wrote the target's logits in its place from
    35504d45 to cd32229d (2025-11-08 to 11-12).
    """
    total, width = joined.shape[1], last.shape[1]
    if width == vocab_size or total % width:
        raise broken(
            path,
            f"{names[1]} is {width} wide, {names[0]} {total}: expected H and K*H. These look like logits in place of a "
            "state (SpecForge from 2025-11-08 to 11-12 wrote them)",
            fix="write the hidden states again with a later SpecForge",
        )
    return tuple(Rows(joined[:, at : at + width]) for at in range(0, total, width))


def assemble(
    path: Path,
    token_ids: IntArray,
    loss_mask: torch.Tensor | None,
    slots: Sequence[Rows],
    last: Rows | None,
    notes: Sequence[str] = (),
) -> Stored:
    """Put a sample together, positions 0..T-1. Raises InputError where rows and tokens do not belong together.

    One id more than rows is the sampled token of a server, which never was an input (vllm
    ExampleHiddenStatesConnector, TorchSpec). Many more mean a prefix cache that hid rows: nobody can tell which.
    """
    notes = list(notes)
    blocks = (*slots, last) if last is not None else tuple(slots)
    lengths = sorted({rows.length for rows in blocks})
    if len(lengths) != 1 or lengths[0] == 0:
        raise broken(path, f"the blocks have {lengths} rows, expected one number of at least 1")
    rows, ids = lengths[0], len(token_ids)
    if ids == rows + 1:
        token_ids = token_ids[:rows]
        notes.append("the ids are one longer than the rows: the last one was sampled, never an input, and is left out")
    elif ids != rows:
        why = "; a prefix cache leaves out the rows of a cached prefix" if ids > rows else ""
        raise broken(
            path,
            f"{ids} token ids, {rows} rows of hidden states{why}",
            fix="switch prefix caching off and write the file again",
        )
    known = mask(loss_mask, rows)
    if loss_mask is None:
        notes.append(NO_MASK)
    elif known is None:
        notes.append("the loss mask does not fit the rows and counts as unknown")
    positions = np.arange(rows, dtype=np.int64)
    return Stored(token_ids, positions, known, tuple(slots), last, tuple(notes))


def check_finite(path: Path, sample: Stored) -> None:
    """Look at every value of a sample. Raises InputError with block, row and column of the first NaN or infinity."""
    for number, block in enumerate(sample.blocks):
        for begin in range(0, block.length, _CHUNK):
            end = min(begin + _CHUNK, block.length)
            rows = block.values[begin:end] if block.scales is None else block.read(begin, end)
            # Smallest and largest carry NaN and infinity along, in one pass and without a mask of all elements.
            if all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(rows)):
                continue
            row, column = (int(i) for i in (~torch.isfinite(rows)).nonzero()[0])
            role = f"slot {number}" if number < len(sample.slots) else "the last state"
            raise broken(path, f"{role} is {float(rows[row, column])} in row {begin + row}, column {column}")
