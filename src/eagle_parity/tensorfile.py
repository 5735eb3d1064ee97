"""A safetensors file read and written row by row.

The safetensors library maps whole files (mapped pages count as resident memory) and writes from tensors that are
all in memory at once. A dump of 61 boundaries is larger than both allow, so rows go through fixed buffers here.
The format is described in `tensorheader`.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from eagle_parity.errors import EnvironmentFailure, InputError
from eagle_parity.tensorheader import Entry, read_header

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Filler: TypeAlias = Callable[[int, memoryview], None]
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def bytes_of(rows: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    data: memoryview = rows.view(-1).view(torch.uint8).numpy().data
    return data


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors spelling of a dtype; InputError for one that the format lacks."""
    try:
        return NAMES[dtype]
    except KeyError:
        raise InputError(
            f"tensors of {dtype} cannot be stored in safetensors", fix="convert them to a float or integer dtype"
        ) from None


@dataclass(frozen=True)
class TensorFile:
    """The parsed and checked header of a safetensors file; reads rows on demand."""

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows [begin, end) of a tensor in its own dtype. A scalar or whole tensor with the defaults.

        Raises InputError when the file has become shorter than its header promised.
        """
        entry = self.entries[name]
        rows = entry.shape[0] if entry.shape else 1
        end = rows if end is None else end
        shape = (end - begin, *entry.shape[1:]) if entry.shape else ()
        buffer = torch.empty(shape, dtype=DTYPES[entry.dtype])
        self.read_into(name, begin, buffer)
        return buffer

    def read_into(self, name: str, begin: int, buffer: torch.Tensor) -> None:
        """Fill a contiguous buffer of the tensor's dtype with the rows from `begin` on."""
        if buffer.numel():
            self.filler(name)(begin, bytes_of(buffer))

    def filler(self, name: str) -> Filler:
        """What fills bytes with the tensor's rows from a number on. Any number of threads may call it."""
        entry, handle = self.entries[name], self._opened()
        offset, size = entry.offset, entry.row_bytes

        def fill(begin: int, into: memoryview) -> None:
            done, wanted = os.preadv(handle.number, [into], offset + begin * size), len(into)
            while done < wanted:
                got = os.preadv(handle.number, [into[done:]], offset + begin * size + done)
                if not got:
                    raise InputError(
                        f"{self.path}: tensor {name} ends early (the file changed while it was read)",
                        fix="capture again, and do not write into a dump",
                    )
                done += got

        return fill

    def _opened(self) -> _Handle:
        held: _Handle | None = self.__dict__.get("_handle")
        if held is None:  # two threads may come here at once: both must get the one that stays
            held = self.__dict__.setdefault("_handle", _Handle(self.path))
        return held


class _Handle:
    """A file open for reading for as long as somebody holds this: opening it takes longer than reading a row."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # os may be gone when Python ends
        if hasattr(self, "number"):  # it is not open where opening it failed
            close(self.number)


def open_tensorfile(path: Path) -> TensorFile:
    """Read and check a header (see `tensorheader.read_header`); the file's rows are then read on demand."""
    header = read_header(path)
    return TensorFile(header.path, header.entries, header.metadata)


class TensorFileWriter:
    """Writes a safetensors file whose shapes are known beforehand, in any order of rows, in flat memory."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[str, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Create the file and write its header. `tensors`: name -> (dtype in safetensors spelling, shape)."""
        self.path = path
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        # Widest dtype first keeps every tensor aligned, as the safetensors library does.
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -DTYPES[item[1][0]].itemsize):
            size = math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        base = 8 + len(raw)
        self._entries = {
            name: Entry(value["dtype"], tuple(value["shape"]), base + value["data_offsets"][0])
            for name, value in header.items()
            if name != "__metadata__"
        }
        with disk_errors(path):
            self._file = path.open("wb")
            self._file.write(struct.pack("<Q", len(raw)) + raw)
            # Sparse until written: a hole reads as zeros, so the caller must write every row.
            self._file.truncate(base + offset)

    def write(self, name: str, begin: int, rows: torch.Tensor) -> None:
        """Write rows from index `begin` on; dtype and trailing shape must be those announced."""
        entry = self._entries[name]
        if dtype_name(rows.dtype) != entry.dtype or tuple(rows.shape[1:]) != entry.shape[1:]:
            raise ValueError(f"{name}: announced {entry}, got {rows.dtype} {tuple(rows.shape)}")
        if begin + rows.shape[0] > entry.shape[0]:
            raise ValueError(f"{name}: rows {begin}..{begin + rows.shape[0]} are beyond {entry.shape[0]}")
        if rows.numel() == 0:
            return
        data = bytes_of(rows.detach().cpu().contiguous())
        with disk_errors(self.path):
            self._file.seek(entry.offset + begin * entry.row_bytes)
            self._file.write(data)

    def close(self) -> None:
        """Flush to disk."""
        with disk_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Close without promise; the caller deletes the file."""
        self._file.close()


class disk_errors:
    """Turns OSError while writing `path` into EnvironmentFailure with the remedy."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise EnvironmentFailure(
                f"cannot write {self._path}: {error.strerror or error}",
                fix="free disk space or choose another place with -o",
            ) from error
