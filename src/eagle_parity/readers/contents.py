"""One training file, opened: its tensors as views of the mapped file, and whatever else it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_parity.errors import InputError
from eagle_parity.readers import pickled
from eagle_parity.tensorfile import DTYPES, TensorFile, open_tensorfile


@dataclass(frozen=True)
class Contents:
    """A file's named values. `tensors` cost nothing until their elements are looked at."""

    path: Path
    tensors: Mapping[str, torch.Tensor]
    others: Mapping[str, Any]
    """Lists, dicts, strings and None: what a torch.save file may hold beside tensors."""

    @property
    def keys(self) -> frozenset[str]:
        """All names."""
        return frozenset(self.tensors) | frozenset(self.others)

    def describe(self) -> str:
        """What was seen, for an error: `input_ids int64 [40], hidden_states list, …`."""
        seen = [f"{k} {_dtype(v)} {list(v.shape)}" for k, v in self.tensors.items()]
        seen += [f"{key} {type(value).__name__}" for key, value in self.others.items()]
        more = f", … ({len(seen)} in all)" if len(seen) > 8 else ""
        return (", ".join(seen[:8]) + more) or "nothing"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def open_contents(path: Path) -> Contents:
    """Open a .safetensors file, or what torch.save wrote (.pt, .ckpt, .ckpt.gz). Reads headers only, gzip excepted.

    Raises InputError naming the file and what is wrong with it.
    """
    if path.suffix == ".safetensors":
        file = open_tensorfile(path)
        return Contents(path, _mapped(file), {})
    content = pickled.load(path)
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InputError(
            f"{path} holds a {type(content).__name__}, expected a dict of tensors",
            fix="give hidden-state files as the training pipeline writes them",
        )
    tensors = {key: value.detach() for key, value in content.items() if isinstance(value, torch.Tensor)}
    return Contents(path, tensors, {key: value for key, value in content.items() if key not in tensors})


def _mapped(file: TensorFile) -> dict[str, torch.Tensor]:
    """A file's tensors as views of its mapping; pages are read when their elements are."""
    size = max((entry.offset + _size(file, name) for name, entry in file.entries.items()), default=0)
    if size == 0:
        return {}
    data = torch.from_file(str(file.path), shared=False, size=size, dtype=torch.uint8)
    return {name: _view(file, name, data) for name in file.entries}


def _size(file: TensorFile, name: str) -> int:
    entry = file.entries[name]
    return entry.row_bytes * entry.shape[0] if entry.shape else entry.row_bytes


def _view(file: TensorFile, name: str, data: torch.Tensor) -> torch.Tensor:
    entry, dtype = file.entries[name], DTYPES[file.entries[name].dtype]
    if entry.offset % dtype.itemsize:
        # Old writers did not align the data; torch cannot look at it in place.
        return file.read(name)
    return data[entry.offset : entry.offset + _size(file, name)].view(dtype).view(entry.shape)
