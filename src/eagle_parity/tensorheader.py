"""The header of a safetensors file: names, dtypes, shapes and where the data lies. Loads no torch.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://github.com/huggingface/safetensors, README, "Format"). `tensorfile` reads and writes the data.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle_parity.errors import InputError

MAX_HEADER = 100_000_000  # the safetensors library's own limit, in bytes

ITEM_BYTES: Mapping[str, int] = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: dtype (safetensors spelling), shape, and the absolute file offset of its data."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Header:
    """The parsed and checked header of a safetensors file."""

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]

    def raw(self, name: str) -> bytes:
        """A whole tensor as the bytes in the file. Raises InputError when the file has become shorter."""
        entry = self.entries[name]
        with self.path.open("rb") as file:
            file.seek(entry.offset)
            data = file.read(entry.nbytes)
        if len(data) < entry.nbytes:
            raise broken(self.path, f"tensor {name!r} ends early (the file changed while it was read)")
        return data


def broken(path: Path, why: str) -> InputError:
    """The error for a file that is no usable safetensors file."""
    return InputError(f"{path}: not a usable safetensors file: {why}", fix="write the file again; it is damaged")


def read_header(path: Path) -> Header:
    """Read and check a header: names, dtypes, and that every shape agrees with its bytes and the file's size.

    Raises InputError naming the file and what is wrong with it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            if len(head) < 8:
                raise broken(path, f"{size} bytes are too few for a header")
            (length,) = struct.unpack("<Q", head)
            if length > min(MAX_HEADER, size - 8):
                raise broken(path, f"the header claims {length} bytes, the file has {size}")
            raw = file.read(length)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", fix="check the path and its permissions") from error
    try:
        header: Any = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise broken(path, f"the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise broken(path, "the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise broken(path, "__metadata__ is not an object")
    data = 8 + length
    entries = {name: _entry(path, name, value, data, size) for name, value in header.items()}
    return Header(path, entries, {str(k): str(v) for k, v in metadata.items()})


def _entry(path: Path, name: str, value: Any, data: int, size: int) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        ok = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        ok = False
    if not ok:
        raise broken(path, f"the header entry of {name!r} is malformed")
    if dtype not in ITEM_BYTES:
        raise broken(path, f"tensor {name!r} has unknown dtype {dtype!r}")
    want = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != want:
        raise broken(path, f"tensor {name!r}: shape {list(shape)} of {dtype} needs {want} bytes, has {end - begin}")
    if data + end > size:
        raise broken(path, f"tensor {name!r} needs {data + end} bytes of file, there are {size} (truncated?)")
    return Entry(dtype, shape, data + begin)
