"""Training files, opened: which samples can be used, what their blocks are, what was assumed and what was wrong."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eagle_parity.errors import InputError
from eagle_parity.readers.contents import Contents, open_contents
from eagle_parity.readers.files import being_written, find_files, numbering_notes, stratified
from eagle_parity.readers.format import Format, Recorded
from eagle_parity.readers.numbering import Block, assumptions, number
from eagle_parity.readers.registry import named, sniff
from eagle_parity.readers.stored import NO_MASK, Stored, check_finite
from eagle_parity.records import Boundary, Model
from eagle_parity.tensorfile import dtype_name

Progress = Callable[[int, int], None]
"""Called with (done, total)."""
DIRECT_LIMIT = 64
"""Samples that a command takes which is given training files where a dump is meant."""


@dataclass(frozen=True)
class Unit:
    """One sample's place: a file, and which of its samples. `label` is relative to the path that was opened."""

    file: Path
    index: int
    label: str


@dataclass(frozen=True)
class Problem:
    """A sample or file that is not used, and why."""

    label: str
    reason: str
    fix: str


@dataclass(frozen=True)
class Training:
    """Samples of one directory of training files. Nothing but headers and token ids has been read."""

    path: str
    format: Format
    files: int
    """Sample files at the path, looked at or not."""
    available: int
    """Samples in them; equal to `files` where a file holds one."""
    samples: int
    """Samples that were looked at, the unusable ones with them."""
    units: tuple[Unit, ...]
    """The usable samples among those that were looked at, in file order."""
    lengths: tuple[int, ...]
    """Rows of each unit."""
    bytes_read: int
    """Size on disk of the files looked at."""
    blocks: tuple[Block, ...]
    width: int
    dtype: str
    """As read, in safetensors spelling."""
    stored_dtype: str
    has_mask: bool
    """Every sample has a loss mask."""
    model: Model
    problems: tuple[Problem, ...]
    assumptions: tuple[str, ...]
    """What no file says and was taken for granted, a sentence each, for the report."""
    notes: tuple[str, ...]
    """What was done to the samples, or is odd about the directory, a sentence each."""

    @property
    def tokens(self) -> int:
        """Rows of all units."""
        return sum(self.lengths)

    @property
    def slot_boundaries(self) -> tuple[Boundary, ...] | None:
        """The boundary of each slot in the order in which the trainer joins them; None when one is unknown."""
        slots = [block.boundary for block in self.blocks if block.role != "last"]
        known = tuple(boundary for boundary in slots if boundary is not None)
        return known if len(known) == len(slots) else None

    def load(self, number: int) -> Stored:
        """Unit `number`, its blocks not read. Raises InputError when the file has changed."""
        return load_unit(self.format, self.units[number], self.model)

    def finite(self, *, strict: bool = False, progress: Progress | None = None) -> Training:
        """The same without the samples that hold NaN or infinity: reads every value once, one sample at a time.

        Raises InputError when none is left, or with `strict` when one is bad.
        """
        problems: list[Problem] = []
        good: list[int] = []
        for i, unit in enumerate(self.units):
            try:
                check_finite(unit.file, self.load(i))
                good.append(i)
            except InputError as error:
                problems.append(Problem(unit.label, error.message, error.fix))
            if progress is not None:
                progress(i + 1, len(self.units))
        if not problems:
            return self
        checked = replace(
            self,
            units=tuple(self.units[i] for i in good),
            lengths=tuple(self.lengths[i] for i in good),
            problems=(*self.problems, *problems),
        )
        _judge(self.path, checked.problems, len(good), strict)
        return checked


def open_training(
    path: Path | str,
    *,
    reader: str | None = None,
    model: Model | None = None,
    num_layers: int | None = None,
    slots: Sequence[Boundary] | None = None,
    limit: int | None = None,
    seed: int = 0,
    strict: bool = False,
    progress: Progress | None = None,
) -> Training:
    """Open training files as they lie on disk, a file or a directory, any format in registry.py.

    `reader` forces a format. `model` (see readers/target.py) or `num_layers` number the blocks where the files do not;
    `slots` names the boundaries of the stored slots and overrules both. `limit` takes that many samples, one from
    each of as many equal stretches of the files in natural order, drawn with `seed`; only their files are opened.

    Unusable files are left out and listed in `problems`; with `strict` one of them is an InputError, as is a path
    where none is usable.
    """
    path = Path(path)
    target = model or Model()
    if num_layers is not None:
        target = replace(target, num_layers=num_layers)
    files = find_files(path)
    format_ = named(reader) if reader is not None else sniff(path, files)
    chosen, available, problems = _chosen(path, format_, files, limit, seed)
    samples = len(chosen) + len(problems)
    heads: list[_Head] = []
    for i, unit in enumerate(chosen):
        try:
            heads.append(_head(format_, unit, target))
        except InputError as error:
            problems.append(Problem(unit.label, error.message, error.fix))
        if progress is not None:
            progress(i + 1, len(chosen))
    heads, odd = _alike(heads)
    problems += odd
    heads, repeated = _unique(heads)
    _judge(str(path), problems, len(heads), strict)
    kind = heads[0].kind
    target = _target(path, target, kind)
    folder = heads[0].unit.file.parent
    recorded = format_.recorded(folder) if format_.recorded else None
    blocks = number(format_, kind.slots, kind.last, num_layers=target.num_layers, recorded=recorded, given=slots)
    return Training(
        path=str(path),
        format=format_,
        files=len(files),
        available=available,
        samples=samples,
        units=tuple(head.unit for head in heads),
        lengths=tuple(head.length for head in heads),
        bytes_read=sum(file.stat().st_size for file in {head.unit.file for head in heads}),
        blocks=blocks,
        width=kind.width,
        dtype=kind.dtype,
        stored_dtype=kind.stored_dtype,
        has_mask=all(head.masked for head in heads),
        model=target,
        problems=tuple(problems),
        assumptions=assumptions(format_, blocks, target.num_layers),
        notes=_notes(format_, files, heads, repeated, folder, recorded, kind),
    )


def load_unit(format_: Format, unit: Unit, target: Model) -> Stored:
    """Open one sample. Raises InputError naming the file and what is wrong with it."""
    if being_written(unit.file):
        raise InputError(
            f"{unit.file} is being written: a running process holds {unit.file.name}.lock",
            fix="wait until the writer has ended",
        )
    sample = format_.read(_contents(format_, unit), target)
    if format_.loss_mask is None:
        return sample
    found = format_.loss_mask(unit.file, sample)
    notes = tuple(note for note in sample.notes if note != NO_MASK)
    return replace(sample, loss_mask=found.values, notes=notes if found.note is None else (*notes, found.note))


def _contents(format_: Format, unit: Unit) -> Contents:
    contents = open_contents(unit.file)
    return contents if format_.batch is None else format_.batch.pick(contents, unit.index)


def _chosen(
    path: Path, format_: Format, files: Sequence[Path], limit: int | None, seed: int
) -> tuple[list[Unit], int, list[Problem]]:
    """The samples to look at, and how many there are. Only where a file holds several must all files be asked."""
    root = path if path.is_dir() else path.parent
    if format_.batch is None:
        chosen = [files[i] for i in stratified(len(files), limit, seed)]
        return [Unit(file, 0, file.relative_to(root).as_posix()) for file in chosen], len(files), []
    units: list[Unit] = []
    problems: list[Problem] = []
    for file in files:
        label = file.relative_to(root).as_posix()
        try:
            count = format_.batch.count(open_contents(file))
        except InputError as error:
            problems.append(Problem(label, error.message, error.fix))
            continue
        units += [Unit(file, i, f"{label}#{i}") for i in range(count)]
    return [units[i] for i in stratified(len(units), limit, seed)], len(units), problems


@dataclass(frozen=True)
class _Kind:
    """What all samples of a directory have in common."""

    slots: int
    last: bool
    width: int
    dtype: str
    stored_dtype: str

    def __str__(self) -> str:
        return f"{self.slots} slots{' and a last state' if self.last else ''} of {self.width} {self.stored_dtype}"


@dataclass(frozen=True)
class _Head:
    """What is kept of a sample that was looked at."""

    unit: Unit
    kind: _Kind
    length: int
    masked: bool
    digest: bytes
    notes: tuple[str, ...]


def _head(format_: Format, unit: Unit, target: Model) -> _Head:
    sample = load_unit(format_, unit, target)
    first = sample.blocks[0]
    kind = _Kind(
        len(sample.slots),
        sample.last is not None,
        sample.width,
        dtype_name(first.dtype),
        dtype_name(first.values.dtype),
    )
    for block in sample.blocks:
        if (block.width, block.dtype) != (first.width, first.dtype):
            raise InputError(
                f"{unit.file}: its blocks are {first.width} wide {first.dtype} and {block.width} wide {block.dtype}",
                fix="write the file again, all blocks alike",
            )
    digest = hashlib.blake2b(sample.token_ids.tobytes() + sample.positions.tobytes(), digest_size=16).digest()
    return _Head(unit, kind, sample.length, sample.loss_mask is not None, digest, sample.notes)


def _alike(heads: Sequence[_Head]) -> tuple[list[_Head], list[Problem]]:
    """The samples of the commonest kind; the others are problems."""
    if not heads:
        return [], []
    common = Counter(head.kind for head in heads).most_common(1)[0][0]
    return [head for head in heads if head.kind == common], [
        Problem(
            head.unit.label,
            f"{head.unit.file} holds {head.kind}, most of the others hold {common}",
            "keep files of different runs in different directories",
        )
        for head in heads
        if head.kind != common
    ]


def _unique(heads: Sequence[_Head]) -> tuple[list[_Head], int]:
    first: dict[bytes, _Head] = {}
    for head in heads:
        first.setdefault(head.digest, head)
    return list(first.values()), len(heads) - len(first)


def _judge(path: str, problems: Sequence[Problem], usable: int, strict: bool) -> None:
    """Raise InputError when nothing is usable, or when `strict` and something is not."""
    if usable and not (strict and problems):
        return
    total = usable + len(problems)
    if total == 1 and not usable:
        raise InputError(problems[0].reason, fix=problems[0].fix)
    raise InputError(
        f"{path}: {len(problems)} of {total} samples cannot be used. The first: {problems[0].reason}",
        fix=problems[0].fix,
    )


def _target(path: Path, target: Model, kind: _Kind) -> Model:
    if target.hidden_size is not None and target.hidden_size != kind.width:
        raise InputError(
            f"{path} holds states {kind.width} wide, the target {target.name or ''} has hidden_size "
            f"{target.hidden_size}",
            fix="name the target on which these files were made",
        )
    return replace(target, hidden_size=kind.width, dtype=_TORCH_NAMES.get(kind.dtype))


_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def _notes(
    format_: Format,
    files: Sequence[Path],
    heads: Sequence[_Head],
    repeated: int,
    folder: Path,
    recorded: Recorded | None,
    kind: _Kind,
) -> tuple[str, ...]:
    notes = list(numbering_notes(files)) if format_.numbered else []
    if repeated:
        notes.append(f"{repeated} samples repeat the token ids of another and are left out")
    counts = Counter(note for head in heads for note in head.notes)
    notes += [f"{note} ({count} of {len(heads)} samples)" for note, count in counts.items()]
    longest = format_.longest(folder) if format_.longest else None
    cut = sum(head.length == longest for head in heads)
    if cut:
        notes.append(f"{cut} samples have {longest} rows, the most that their pipeline kept: probably cut there")
    if recorded is not None and len(recorded.slots) != kind.slots:
        notes.append(f"{recorded.where} names {len(recorded.slots)} slots, the files hold {kind.slots}: not believed")
    if kind.stored_dtype != kind.dtype:
        notes.append(f"stored as {kind.stored_dtype} with a scale a token: read as {kind.dtype}, exact to about 3 %")
    return tuple(notes)
