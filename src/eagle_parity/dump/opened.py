"""Open a dump: check everything that can be checked from headers, read rows on demand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from eagle_parity.dump import manifest
from eagle_parity.dump.writer import ROWS
from eagle_parity.errors import InputError, NotADumpError
from eagle_parity.records import FINAL_NORM, Facts, IntArray, Request, TensorSpec, Tokens
from eagle_parity.tensorfile import Filler, TensorFile, open_tensorfile

_RANK_FILE = re.compile(r"rank-(\d{4,})(?:-(\d{5}))?\.safetensors")
_TENSOR = re.compile(r"(boundary|slot|residual)\.(\d+)")


@dataclass(frozen=True)
class _Part:
    file: TensorFile
    begin: int
    """First of the tensor's stored rows that lies in this file."""
    end: int


@dataclass(frozen=True)
class _Tensor:
    spec: TensorSpec
    parts: tuple[_Part, ...]
    rows: IntArray | None

    @property
    def length(self) -> int:
        return self.parts[-1].end


@dataclass(frozen=True)
class Dump:
    """A dump on disk, as a `records.Capture`. No tensor data is read before `read`."""

    path: str
    facts: Facts
    tokens: Tokens
    _tensors: Mapping[int, Mapping[str, _Tensor]]
    files: Mapping[int, Sequence[Path]]
    """rank -> its files, in the order in which its tensors go on."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a file, ascending."""
        return tuple(self._tensors)

    def names(self, rank: int) -> tuple[str, ...]:
        """The tensors in a rank's files, `rows` left out."""
        return tuple(self._tensors[rank])

    def spec(self, rank: int, name: str) -> TensorSpec:
        """Width and dtype of a tensor."""
        return self._tensors[rank][name].spec

    def length(self, rank: int, name: str) -> int:
        """Stored rows of a tensor."""
        return self._tensors[rank][name].length

    def rows(self, rank: int, name: str) -> IntArray | None:
        """The token rows of a tensor's stored rows; None when it holds every token in order."""
        return self._tensors[rank][name].rows

    def read(self, rank: int, name: str, begin: int, end: int) -> torch.Tensor:
        """Stored rows [begin, end) of a tensor, [end - begin, W], in its own dtype."""
        parts = self._tensors[rank][name].parts
        if begin >= end:
            return parts[0].file.read(name, 0, 0)
        blocks = [
            part.file.read(name, max(begin, part.begin) - part.begin, min(end, part.end) - part.begin)
            for part in parts
            if part.begin < end and begin < part.end
        ]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def filler(self, rank: int, name: str) -> Filler:
        """What fills bytes with a tensor's stored rows from a number on, in its own dtype. Any thread may call it."""
        parts = [(part.begin, part.end, part.file.filler(name)) for part in self._tensors[rank][name].parts]
        if len(parts) == 1:
            return parts[0][2]
        size = self._tensors[rank][name].parts[0].file.entries[name].row_bytes

        def fill(begin: int, into: memoryview) -> None:
            end = begin + (len(into) // size if size else 0)
            for start, stop, fill_part in parts:
                first, last = max(begin, start), min(end, stop)
                if first < last:
                    fill_part(first - start, into[(first - begin) * size : (last - begin) * size])

        return fill


def open_dump(path: Path | str) -> Dump:
    """Open a dump directory.

    Raises NotADumpError for what is not one or is unfinished, InputError for a damaged one; both name the file, what
    was expected and what was found.
    """
    path = Path(path)
    if not path.exists():
        raise NotADumpError(f"{path} does not exist", fix="check the path, or make it with `eagle-parity dump`")
    if not path.is_dir():
        raise NotADumpError(f"{path} is not a dump directory", fix="give the directory that holds manifest.json")
    manifest_path = path / manifest.NAME
    if not manifest_path.is_file():
        if path.name.endswith(".partial") or (path / "tokens.safetensors").exists() or _rank_files(path):
            raise NotADumpError(
                f"{path} is an unfinished dump: it has no {manifest.NAME}",
                fix="its writer was interrupted; capture again",
            )
        raise NotADumpError(
            f"{path} is not a dump: it has no {manifest.NAME}", fix="make a dump with `eagle-parity dump`"
        )
    try:
        text = manifest_path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{manifest_path} cannot be read: {error}", fix="check the file and its permissions") from None
    facts, requests = manifest.decode(text, manifest_path)
    tokens = _tokens(path, requests)
    files = _rank_files(path)
    tensors = _ranks(path, files, len(tokens.token_ids))
    _check_slots(path, facts, tensors)
    _check_dtypes(path, tensors)
    names = {name for held in tensors.values() for name in held}
    numbers = sorted({int(m[2]) for m in map(_TENSOR.fullmatch, names) if m and m[1] == "boundary"})
    return Dump(str(path), replace(facts, boundaries=tuple(numbers)), tokens, tensors, files)


def _rank_files(path: Path) -> dict[int, list[Path]]:
    found: dict[int, list[tuple[int, Path]]] = {}
    for file in path.iterdir():
        match = _RANK_FILE.fullmatch(file.name)
        if match:
            found.setdefault(int(match[1]), []).append((int(match[2] or 0), file))
    return {rank: [file for _, file in sorted(parts)] for rank, parts in sorted(found.items())}


def _column(file: TensorFile, name: str, count: int | None, *, required: bool = False) -> IntArray | None:
    entry = file.entries.get(name)
    if entry is None:
        if required:
            raise InputError(f"{file.path}: {name} is missing", fix="write it as dump format schema 1 says")
        return None
    if entry.dtype in ("BF16", "F16", "F32", "F64") or len(entry.shape) != 1 or count not in (None, entry.shape[0]):
        want = "an integer [T]" if count is None else f"an integer [{count}]"
        raise InputError(
            f"{file.path}: {name} should be {want}, is {entry.dtype} {list(entry.shape)}",
            fix="write it as dump format schema 1 says",
        )
    return np.asarray(file.read(name).to(torch.int64).numpy(), dtype=np.int64)


def _tokens(path: Path, requests: tuple[Request, ...]) -> Tokens:
    if not (path / "tokens.safetensors").is_file():
        raise InputError(f"{path}: tokens.safetensors is missing", fix="capture again, or copy the whole directory")
    file = open_tensorfile(path / "tokens.safetensors")
    ids = _column(file, "token_ids", None, required=True)
    assert ids is not None
    count = len(ids)
    positions = _column(file, "positions", count, required=True)
    assert positions is not None
    parents = _column(file, "parents", count)
    _check_structure(file.path, positions, parents)
    end = 0
    for i, request in enumerate(sorted(requests, key=lambda r: r.begin)):
        if not (0 <= request.begin <= request.end <= count) or request.begin < end:
            raise InputError(
                f"{path}: request {i} ({request.id!r}) has rows [{request.begin}, {request.end}), which overlap "
                f"another request or lie outside the {count} rows",
                fix="write the manifest as dump format schema 1 says",
            )
        end = request.end
    return Tokens(
        ids,
        positions,
        requests,
        _column(file, "loss_mask", count),
        parents,
        _column(file, "accepted", count),
    )


def _check_structure(path: Path, positions: IntArray, parents: IntArray | None) -> None:
    """Positions from 0 up; a parent is -1 or the row of an earlier position."""
    if len(positions) and positions.min() < 0:
        row = int(np.flatnonzero(positions < 0)[0])
        raise InputError(f"{path}: row {row} is at position {positions[row]}, below 0", fix="capture again")
    if parents is None or len(parents) == 0:
        return
    outside = (parents < -1) | (parents >= len(parents))
    later = ~outside & (parents >= 0) & (positions[np.where(outside, 0, parents)] >= positions)
    wrong = np.flatnonzero(outside | later)
    if len(wrong):
        row = int(wrong[0])
        raise InputError(
            f"{path}: the parent of row {row} is {parents[row]}; it must be -1 or a row (0 to {len(parents) - 1}) of "
            "an earlier position",
            fix="write parents as dump format schema 1 says",
        )


def _ranks(path: Path, files: Mapping[int, Sequence[Path]], count: int) -> dict[int, dict[str, _Tensor]]:
    if not files:
        raise InputError(f"{path}: no rank-NNNN.safetensors", fix="capture again, or copy the whole directory")
    return {rank: _tensors([open_tensorfile(file) for file in paths], count) for rank, paths in files.items()}


def _tensors(files: Sequence[TensorFile], count: int) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    for file in files:
        rows = _column(file, ROWS, None)
        for name, entry in file.entries.items():
            if name == ROWS:
                continue
            if name != FINAL_NORM and not _TENSOR.fullmatch(name):
                raise InputError(
                    f"{file.path}: unknown tensor {name!r}",
                    fix="names are boundary.K, final.norm, slot.J, residual.K and rows",
                )
            if len(entry.shape) != 2 or entry.shape[1] == 0 or (rows is not None and entry.shape[0] != len(rows)):
                raise InputError(
                    f"{file.path}: {name} should be [{count if rows is None else len(rows)}, W], "
                    f"is {list(entry.shape)}",
                    fix="write it as dump format schema 1 says",
                )
            spec = TensorSpec(name, entry.shape[1], entry.dtype)
            known = tensors.get(name)
            if known is None:
                tensors[name] = _Tensor(spec, (_Part(file, 0, entry.shape[0]),), rows)
                continue
            if known.spec != spec or (known.rows is None) != (rows is None):
                raise InputError(
                    f"{file.path}: {name} goes on as {spec}, it began as {known.spec}", fix="capture again"
                )
            part = _Part(file, known.length, known.length + entry.shape[0])
            both = None if rows is None or known.rows is None else np.concatenate([known.rows, rows])
            tensors[name] = _Tensor(spec, (*known.parts, part), both)
    for tensor in tensors.values():
        _check_rows(files[0].path, tensor, count)
    return dict(sorted(tensors.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[str, int]:
    match = _TENSOR.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, 0)


def _check_rows(path: Path, tensor: _Tensor, count: int) -> None:
    if tensor.rows is None:
        if tensor.length != count:
            raise InputError(
                f"{path}: {tensor.spec.name} has {tensor.length} rows, there are {count} tokens and no `rows` tensor "
                "that names those it holds",
                fix="capture again, or store `rows`",
            )
        return
    rows = tensor.rows
    if len(rows) and (rows.min() < 0 or rows.max() >= count or len(np.unique(rows)) != len(rows)):
        raise InputError(f"{path}: `rows` names rows outside 0..{count - 1} or names one twice", fix="capture again")


def _check_slots(path: Path, facts: Facts, tensors: Mapping[int, Mapping[str, _Tensor]]) -> None:
    names = {name for held in tensors.values() for name in held}
    stored = {int(m[2]) for m in map(_TENSOR.fullmatch, names) if m and m[1] == "slot"}
    if stored != set(range(facts.slots)):
        raise InputError(
            f"{path}: the manifest says {facts.slots} slots, the rank files hold {sorted(stored)}",
            fix="capture again, or write the manifest as dump format schema 1 says",
        )
    if facts.slot_boundaries is not None and facts.slots and len(facts.slot_boundaries) != facts.slots:
        raise InputError(
            f"{path}: slot_boundaries names {len(facts.slot_boundaries)} slots, {facts.slots} are stored",
            fix="capture again, or write the manifest as dump format schema 1 says",
        )


def _check_dtypes(path: Path, tensors: Mapping[int, Mapping[str, _Tensor]]) -> None:
    """A tensor is of one dtype on all ranks: ranks are compared bit by bit."""
    first: dict[str, tuple[int, str]] = {}
    for rank, held in tensors.items():
        for name, tensor in held.items():
            other, dtype = first.setdefault(name, (rank, tensor.spec.dtype))
            if tensor.spec.dtype != dtype:
                raise InputError(
                    f"{path}: {name} is {dtype} on rank {other} and {tensor.spec.dtype} on rank {rank}",
                    fix="start all ranks with one --dtype and capture again",
                )
