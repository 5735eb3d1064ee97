"""A large matrix, rows on demand: an embedding or a head of 163,840 rows need not be in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_parity.draft.weights import DraftTensor
from eagle_parity.errors import InputError
from eagle_parity.tensorfile import TensorFile, open_tensorfile

RESIDENT = 2**29  # bytes up to which a matrix is kept in memory
BLOCK_BYTES = 2**27


@dataclass(frozen=True)
class Table:
    """[rows, width], in memory or in a safetensors file."""

    length: int
    width: int
    memory: torch.Tensor | None
    file: TensorFile | None = None
    name: str = ""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows by id, float32 [*ids.shape, width], on the ids' device. InputError for an id that it has not."""
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self.length):
            odd = int(ids.max() if ids.min() >= 0 else ids.min())
            raise InputError(
                f"token id {odd} has no row in the embedding of {self.length}",
                fix="give the draft's own target, and a dump that was made with its tokenizer",
            )
        if self.memory is not None:
            return self.memory[ids].float()
        assert self.file is not None
        wanted, where = torch.unique(ids.cpu(), return_inverse=True)
        found = torch.stack([self.file.read(self.name, i, i + 1)[0] for i in wanted.tolist()])
        return found[where].float().to(ids.device)

    def blocks(self, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, rows) over the whole table, in its own dtype."""
        if self.memory is not None:
            yield 0, self.memory
            return
        assert self.file is not None
        step = max(1, BLOCK_BYTES // max(1, self.file.entries[self.name].row_bytes))
        for at in range(0, self.length, step):
            yield at, self.file.read(self.name, at, min(at + step, self.length)).to(device)


def in_memory(matrix: torch.Tensor) -> Table:
    """A table of a matrix [rows, width]."""
    return Table(matrix.shape[0], matrix.shape[1], matrix)


def open_table(tensor: DraftTensor, device: torch.device) -> Table:
    """A checkpoint's matrix: left in its file where that is safetensors and the matrix is large, and on a CPU."""
    rows, width = tensor.shape
    itemsize = {"F32": 4, "F64": 8}.get(tensor.dtype, 2)
    if device.type == "cpu" and tensor.file.suffix == ".safetensors" and rows * width * itemsize > RESIDENT:
        return Table(rows, width, None, open_tensorfile(Path(tensor.file)), tensor.stored_name)
    return in_memory(tensor.load().to(device))
