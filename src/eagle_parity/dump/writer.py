"""Write a dump: atomically, in flat memory, with its size known and capped beforehand."""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch

from eagle_parity import __version__
from eagle_parity.dump import manifest
from eagle_parity.errors import EnvironmentFailure, InputError, UsageError
from eagle_parity.records import Facts, Plan, Request, Sample, TensorSpec
from eagle_parity.tensorfile import DTYPES, TensorFileWriter, disk_errors, dtype_name

DEFAULT_CAP = 64 * 2**30  # bytes; `--max-bytes` raises it
ROWS = "rows"
COLUMNS = {"loss_mask": torch.uint8, "parents": torch.int64, "accepted": torch.uint8}


def planned_bytes(plan: Plan) -> int:
    """Size of a plan's tensors on disk, headers left out."""
    total = plan.tokens * (2 * 8 + sum(COLUMNS[name].itemsize for name in plan.columns))
    for rank, specs in plan.tensors.items():
        held = plan.tokens if plan.rank_rows is None else plan.rank_rows[rank]
        total += held * sum(spec.width * DTYPES[spec.dtype].itemsize for spec in specs)
    return total


def check_target(path: Path, *, overwrite: bool = False) -> None:
    """Refuse a target that holds something; with `overwrite`, something that is no dump.

    Raises UsageError, so call it before any expensive work.
    """
    file = next((parent for parent in path.absolute().parents if parent.exists() and not parent.is_dir()), None)
    if file is not None:
        raise UsageError(f"{path} cannot be made: {file} is a file", fix="choose another place with -o")
    if not path.exists():
        return
    if not path.is_dir():
        raise UsageError(f"{path} exists and is not a directory", fix="choose another place with -o")
    if not any(path.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{path} exists and is not empty", fix="choose another -o, or replace it with --overwrite")
    if not _holds_dump(path):
        raise UsageError(
            f"{path} holds something that is no dump; --overwrite replaces dumps only",
            fix="choose another place with -o",
        )


def _holds_dump(path: Path) -> bool:
    try:
        document = json.loads((path / manifest.NAME).read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == manifest.FORMAT


def check_size(plan: Plan, path: Path, cap: int = DEFAULT_CAP) -> None:
    """Refuse a dump above the cap (UsageError) or above the free disk space (EnvironmentFailure)."""
    check_room(planned_bytes(plan), path, cap)


def check_room(size: int, path: Path, cap: int = DEFAULT_CAP) -> None:
    """As `check_size`, for a number of bytes."""
    if size > cap:
        raise UsageError(
            f"the dump would take {human(size)}, the cap is {human(cap)}",
            fix="take fewer tokens or boundaries (--limit, --boundaries), or raise the cap with --max-bytes",
        )
    parent = next(p for p in (path, *path.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if size > free:
        raise EnvironmentFailure(
            f"the dump would take {human(size)}, {parent} has {human(free)} free",
            fix="free disk space or choose another place with -o",
        )


def human(size: float) -> str:
    """A byte count as people read it, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


class DumpWriter:
    """Collects samples in `<path>.partial` and renames it to `path` when the last row is there.

    Use as a context manager and call `add` until all of the plan's tokens are written; leaving the block without
    an exception finishes the dump, leaving it with one deletes the partial directory.
    """

    def __init__(self, path: Path, plan: Plan, *, overwrite: bool = False, cap: int = DEFAULT_CAP) -> None:
        check_target(path, overwrite=overwrite)
        check_size(plan, path, cap)
        self.path = path
        self.plan = plan
        self._overwrite = overwrite
        self._partial = path.with_name(path.name + ".partial")
        self._requests: list[Request] = []
        self._done = 0
        self._held = dict.fromkeys(plan.tensors, 0)

    def __enter__(self) -> DumpWriter:
        claim(self._partial)
        count = self.plan.tokens
        try:
            self._tokens = TensorFileWriter(
                self._partial / "tokens.safetensors",
                {
                    "token_ids": ("I64", [count]),
                    "positions": ("I64", [count]),
                    **{name: (dtype_name(COLUMNS[name]), [count]) for name in self.plan.columns},
                },
            )
            self._ranks = {rank: self._rank_file(rank, specs) for rank, specs in self.plan.tensors.items()}
        except BaseException:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise
        return self

    def _rank_file(self, rank: int, specs: Sequence[TensorSpec]) -> TensorFileWriter:
        rows = self.plan.tokens if self.plan.rank_rows is None else self.plan.rank_rows[rank]
        tensors: dict[str, tuple[str, Sequence[int]]] = {s.name: (s.dtype, [rows, s.width]) for s in specs}
        if self.plan.rank_rows is not None:
            tensors[ROWS] = ("I64", [rows])
        return TensorFileWriter(self._partial / f"rank-{rank:04d}.safetensors", tensors)

    def add(self, sample: Sample) -> None:
        """Write one sample's rows. Raises InputError when the plan is exceeded or a tensor does not fit it."""
        count, begin = len(sample.token_ids), self._done
        if begin + count > self.plan.tokens:
            raise InputError(
                f"sample {sample.id}: {begin + count} tokens, the plan has {self.plan.tokens}",
                fix="this is a bug in the capture",
            )
        self._tokens.write("token_ids", begin, torch.as_tensor(sample.token_ids, dtype=torch.int64))
        self._tokens.write("positions", begin, torch.as_tensor(sample.positions, dtype=torch.int64))
        for name in self.plan.columns:
            values = torch.as_tensor(getattr(sample, name), dtype=COLUMNS[name])
            if name == "parents":
                values = torch.where(values >= 0, values + begin, -1)
            self._tokens.write(name, begin, values)
        for rank, writer in self._ranks.items():
            self._add_rank(rank, writer, sample, begin)
        self._requests.append(
            Request(
                sample.id,
                begin,
                begin + count,
                sample.phase,
                sample.batch,
                sample.graph,
                sample.forward_tokens,
                sample.cached_tokens,
            )
        )
        self._done += count

    def _add_rank(self, rank: int, writer: TensorFileWriter, sample: Sample, begin: int) -> None:
        at = self._held[rank]
        held = len(sample.token_ids)
        if self.plan.rank_rows is not None:
            own = (sample.rows or {}).get(rank, range(held))
            held = len(own)
            writer.write(ROWS, at, torch.tensor([begin + row for row in own], dtype=torch.int64))
        for spec in self.plan.tensors[rank]:
            tensor = sample.tensors[rank].get(spec.name)
            if tensor is None or tuple(tensor.shape) != (held, spec.width):
                got = "nothing" if tensor is None else str(list(tensor.shape))
                raise InputError(
                    f"sample {sample.id}, rank {rank}: {spec.name} should be [{held}, {spec.width}], got {got}",
                    fix="capture again; if it stays, report it with the server's log",
                )
            writer.write(spec.name, at, tensor)
        self._held[rank] = at + held

    def revise(self, facts: Facts) -> None:
        """Replace the facts before the dump is finished (an accept length is known only at the end)."""
        self.plan = replace(self.plan, facts=facts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        writers = [self._tokens, *self._ranks.values()]
        if error is not None:
            for writer in writers:
                writer.abandon()
            shutil.rmtree(self._partial, ignore_errors=True)
            return
        try:
            self._finish(writers)
        except BaseException:
            for writer in writers:
                writer.abandon()
            shutil.rmtree(self._partial, ignore_errors=True)
            raise

    def _finish(self, writers: Sequence[TensorFileWriter]) -> None:
        if self._done != self.plan.tokens:
            raise InputError(
                f"{self._done} of {self.plan.tokens} tokens were captured",
                fix="capture again; if it stays, report it with the server's log",
            )
        for writer in writers:
            writer.close()
        publish(self._partial, self.path, self.plan.facts, tuple(self._requests), overwrite=self._overwrite)


_OWNER = "writer.pid"


def publish(partial: Path, path: Path, facts: Facts, requests: tuple[Request, ...], *, overwrite: bool) -> None:
    """Write the manifest into a claimed directory that holds everything else, and give the directory its name."""
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    text = manifest.encode(facts, requests, tool=f"eagle-parity {__version__}", created=created)
    with disk_errors(partial):
        temporary = partial / (manifest.NAME + ".tmp")
        temporary.write_text(text)
        temporary.rename(partial / manifest.NAME)
        (partial / _OWNER).unlink()
        with replaced(path, overwrite=overwrite):
            partial.rename(path)


def claim(partial: Path) -> None:
    """Create a partial directory; take over one whose writer has died, refuse one that is being written."""
    with disk_errors(partial):
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.mkdir()
        except FileExistsError:
            pid = _owner(partial)
            if pid is None or _alive(pid):
                raise UsageError(
                    f"{partial} exists" + ("" if pid is None else f" and process {pid} is writing it"),
                    fix="wait for that dump to end, or delete the directory if nothing writes it",
                ) from None
            shutil.rmtree(partial)
            partial.mkdir()
        (partial / _OWNER).write_text(str(os.getpid()))


def _owner(partial: Path) -> int | None:
    try:
        return int((partial / _OWNER).read_text())
    except (OSError, ValueError):
        return None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def replaced(path: Path, *, overwrite: bool) -> Iterator[None]:
    """Make room at `path` for a rename, and put the old content back when the rename fails."""
    check_target(path, overwrite=overwrite)
    old = path.with_name(path.name + ".replaced")
    if path.exists():
        path.rename(old)
    try:
        yield
    except BaseException:
        if old.exists():
            old.rename(path)
        raise
    if old.exists():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
