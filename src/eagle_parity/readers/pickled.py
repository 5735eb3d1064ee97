"""The one place where a pickle is opened. Nothing in it is ever executed.

`torch.save` writes a zip archive with one pickle (the structure) and one stored record a tensor (the data). Here such
an archive is checked first, then read by `torch.load(weights_only=True)`, whose unpickler knows tensors and plain
containers and nothing else. Files are mapped: shapes and dtypes cost no reading of tensor data.
Format: https://github.com/pytorch/pytorch, torch/serialization.py (`_save`, `_load`).
"""

from __future__ import annotations

import gzip
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from eagle_parity.errors import EnvironmentFailure, InputError

MAX_DECOMPRESSED = 4 * 2**30
"""Bytes that one gzip file may become. A sample of 32,768 tokens of 4 x 7168 bf16 has 1.8 GiB."""
MAX_RATIO = 200
"""How much gzip may have saved. Hidden states hardly shrink; a decompression bomb has about 1,000."""
MAX_STRUCTURE = 64 * 2**20
"""Bytes of the pickle itself, tensor data not counted. A sample has under 1 KiB, a large checkpoint under 1 MiB."""
_CHUNK = 2**20
_GZIP_MAGIC = b"\x1f\x8b"
_FORBIDDEN = re.compile(r"GLOBAL (\S+)")


def load(path: Path, *, max_decompressed: int = MAX_DECOMPRESSED) -> Any:
    """What `torch.save` wrote at `path`, plain or inside gzip; tensors are views of the mapped file.

    A gzip file is decompressed into a temporary file first, up to `max_decompressed` bytes. Raises InputError naming
    the file: not such an archive, truncated, damaged, or holding anything that is not a tensor, a number, a string or
    a container; EnvironmentFailure when there is no room to decompress it.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP_MAGIC
        if not packed:
            return _opened(path, path)
        # A file rather than memory: it is mapped like any other, and what was mapped goes back to the system at once.
        with tempfile.NamedTemporaryFile(prefix="eagle-parity-") as unpacked:
            _decompress(path, unpacked, max_decompressed)
            return _opened(path, Path(unpacked.name))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", fix="check the path and its permissions") from None


def _opened(path: Path, plain: Path) -> Any:
    with plain.open("rb") as file:
        sizes = _check_archive(path, file)
    return _checked(path, _load(path, plain), sizes)


def _broken(path: Path, why: str) -> InputError:
    return InputError(f"{path}: not a usable torch.save file: {why}", fix="write the file again; it is damaged")


def _decompress(path: Path, into: IO[bytes], limit: int) -> None:
    limit = min(limit, MAX_RATIO * path.stat().st_size + _CHUNK)
    done = 0
    try:
        with gzip.open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                done += len(chunk)
                if done > limit:
                    raise InputError(
                        f"{path}: decompresses to more than {limit} bytes",
                        fix="this is no hidden-state file; remove it",
                    )
                _write(path, into, chunk)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _broken(path, f"the gzip stream is damaged ({error}); truncated?") from None


def _write(path: Path, into: IO[bytes], chunk: bytes) -> None:
    try:
        into.write(chunk)
        into.flush()
    except OSError as error:
        raise EnvironmentFailure(
            f"{path} cannot be decompressed in {tempfile.gettempdir()}: {error.strerror or error}",
            fix="free disk space there, or point TMPDIR to a directory that has some",
        ) from error


def _check_archive(path: Path, file: IO[bytes]) -> frozenset[int]:
    """The sizes of the tensor records of an archive that is laid out as torch.save does it."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    # The zip parser raises many types on arbitrary bytes (BadZipFile, struct.error, UnicodeDecodeError, …): all mean
    # that this is no such archive.
    except Exception as error:
        raise _broken(path, f"{error} (truncated, or not written by torch.save?)") from None
    pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise _broken(path, f"the zip archive holds {len(pickles)} data.pkl, expected 1")
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        raise _broken(path, "it is a TorchScript archive, that is, a program")
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries):
        raise _broken(path, "its records are compressed, torch.save never does that")
    if pickles[0].file_size > MAX_STRUCTURE:
        raise _broken(path, f"its pickle has {pickles[0].file_size} bytes, a list of tensors has under {MAX_STRUCTURE}")
    return frozenset(entry.file_size for entry in entries if "/data/" in entry.filename) | {0}


def _load(path: Path, plain: Path) -> Any:
    try:
        return torch.load(str(plain), map_location="cpu", weights_only=True, mmap=True)
    # The unpickler raises nearly every type on arbitrary bytes; whatever it is, the file cannot be used.
    except Exception as error:
        forbidden = _FORBIDDEN.search(str(error))
        if forbidden:
            raise InputError(
                f"{path}: refused: the pickle asks for {forbidden[1]}, which is no tensor (nothing was executed)",
                fix="do not load this file with anything else; save tensors, numbers and strings only",
            ) from None
        reason = (str(error).strip().splitlines() or [""])[0][:160]
        raise _broken(path, f"{type(error).__name__}: {reason}") from None


def _checked(path: Path, content: Any, sizes: frozenset[int]) -> Any:
    """The content, after every tensor was found to be a plain one that lies within its record."""
    for tensor in _tensors(content):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise _broken(path, f"it holds a {type(tensor).__name__} of layout {tensor.layout}, expected plain tensors")
        if tensor.is_quantized or tensor.device.type != "cpu":
            raise _broken(path, f"it holds a {tensor.dtype} tensor on {tensor.device}")
        held = tensor.untyped_storage().nbytes()
        if held not in sizes:
            raise _broken(path, f"a tensor of shape {list(tensor.shape)} claims {held} bytes, no record has that many")
        # Strides of zero could make an enormous shape out of a few bytes.
        if tensor.numel() * tensor.element_size() > held:
            raise _broken(path, f"a tensor of shape {list(tensor.shape)} is larger than the {held} bytes of its record")
    return content


def _tensors(content: Any) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    waiting = [content]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (Mapping, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(_children(item))


def _children(item: Mapping[Any, Any] | Sequence[Any]) -> Sequence[Any]:
    return list(item.values()) if isinstance(item, Mapping) else item
