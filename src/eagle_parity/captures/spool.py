"""The spool: the directory in which a server's ranks leave what they captured, and where the client finds it.

One safetensors file a rank, probe and forward, with a JSON header, renamed into place when it is complete; and one
small JSON file a server process, the hello, which says that the plugin is there and for which rank. File names are made
of a random word and a counter: a request id is data in a header, never a part of a path.

The server's side (`SpoolWriter`, `write_hello`) must not disturb the server: it imports only what a server has loaded
anyway, never blocks a forward, and turns every failure into a `lost` record.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import re
import secrets
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from eagle_parity.errors import EnvironmentFailure, InputError
from eagle_parity.records import Phase

if TYPE_CHECKING:
    import torch

    from eagle_parity.tensorfile import TensorFile

CAPTURE_DIR = "EAGLE_PARITY_CAPTURE_DIR"
MAX_BYTES = "EAGLE_PARITY_CAPTURE_MAX_BYTES"
BOUNDARIES = "EAGLE_PARITY_CAPTURE_BOUNDARIES"

PREFIX = "eagle-parity-"
END = 999_999_999
_PROBE = re.compile(r"eagle-parity-([0-9a-f]{16})-([0-9]{1,9})")

KEPT_BYTES = 16 * 2**30  # a rank's records that no client has collected yet
PENDING_BYTES = 512 * 2**20  # a rank's records in memory, waiting for the disk
SPARE_BYTES = 2**30  # of the disk, left to the server whatever happens …
SPARE_FRACTION = 0.05  # … or this part of a disk that is smaller than that
QUIET_SECONDS = 0.05  # without a new record, after which the waiting ones are written …
LAZY_BYTES = 64 * 2**20  # … or as soon as this much waits
REST = 30  # how long the writer rests after a record, in times of what the record took …
REST_SECONDS = 0.02  # … at most: what a big record takes is copying, which keeps nobody from the interpreter
STALE_SECONDS = 3600.0  # after which a record that nobody has collected may be deleted to make room

_HEADER = "eagle_parity"
_RECORD_SUFFIX = ".safetensors"
_HELLO_PREFIX = "hello-"

Kind: TypeAlias = Literal["target", "draft", "lost", "end"]

# ------------------------------------------------------------------------------------------------- probe ids


def new_dump_key() -> str:
    """The 16 hex digits that all probes of one dump share."""
    return secrets.token_hex(8)


def probe_id(dump_key: str, number: int) -> str:
    """The request id of a dump's probe."""
    return f"{PREFIX}{dump_key}-{number}"


def end_id(dump_key: str) -> str:
    """The request id of the last request of a dump. Ranks write in order: when its record is there, all others are."""
    return probe_id(dump_key, END)


def is_end(rid: str) -> bool:
    """Whether a probe is the last of its dump; of it, that it came is all that is recorded."""
    return rid.endswith(f"-{END}")


def is_probe(rid: object) -> bool:
    """Whether a request id is one of ours, to the letter."""
    return isinstance(rid, str) and _PROBE.fullmatch(rid) is not None


def probe_number(rid: str, dump_key: str) -> int | None:
    """Which probe of this dump a request is; None for another dump's."""
    match = _PROBE.fullmatch(rid)
    return int(match[2]) if match and match[1] == dump_key else None


# --------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True)
class Header:
    """What a record's tensors are.

    kind `target`: what the target's forward gave for this request: `token_ids` and `positions` [T]; `hidden` [T', W]
    (the slots side by side; absent on a server without a draft); where boundaries are recorded, `boundary.K` and
    `final.norm` [T', H]; for a draft tree also `child` and `sibling` [T], the first-child, next-sibling links within
    the request (-1: none). T' is T, or else the header's `rows` says which of the T this rank held: begin and end.
    kind `draft`: what the draft was then given: `hidden` [T', W], `token_ids` [T] (already shifted by one, as the draft
    embeds them), `rows` as above, and for verify `accepted` [1], how many rows at the front are accepted.
    kind `lost`: no tensors, `reason` tells why. kind `end`: no tensors, the dump's last request came.
    `unseen`: boundaries that were asked for and are not there, and why.
    """

    probe: str
    kind: Kind
    phase: Phase | None = None
    batch: int = 1
    forward_tokens: int | None = None
    graph: bool | None = None
    reason: str | None = None
    rows: tuple[int, int] | None = None
    unseen: Mapping[str, str] = field(default_factory=dict)
    process: str = ""
    order: int = 0
    """Counts the records of a process. Filled in by the writer, as are rank and process."""
    rank: int = -1


@dataclass(frozen=True)
class Record:
    """A record on disk. Tensor data is read on demand."""

    header: Header
    file: TensorFile

    @property
    def tokens(self) -> int:
        """T: the request's tokens in this forward."""
        return self.file.entries["token_ids"].shape[0]

    @property
    def rows(self) -> range:
        """Which of the T rows `hidden` and the boundaries hold."""
        return range(self.tokens) if self.header.rows is None else range(*self.header.rows)

    @property
    def fits(self) -> bool:
        """Whether every state tensor has the rows that it should."""
        return all(self.file.entries[name].shape[0] == len(self.rows) for name in self.states)

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the state tensors: `hidden`, `boundary.K`, `final.norm`."""
        return tuple(name for name, entry in self.file.entries.items() if len(entry.shape) == 2)

    def width(self, name: str = "hidden") -> int:
        """W of a state tensor."""
        return self.file.entries[name].shape[1]

    def dtype(self, name: str = "hidden") -> str:
        """Dtype of a state tensor, in safetensors spelling."""
        return self.file.entries[name].dtype

    def read(self, name: str = "hidden") -> torch.Tensor:
        """A state tensor [T', W] in its own dtype."""
        return self.file.read(name)

    def has(self, name: str) -> bool:
        """Whether a tensor is there."""
        return name in self.file.entries

    def integers(self, name: str) -> list[int]:
        """A small integer tensor."""
        return [int(value) for value in self.file.read(name).tolist()]


# ---------------------------------------------------------------------------------------------------- hellos


@dataclass(frozen=True)
class Hello:
    """One server process says that the plugin is there: which rank it is, what it runs, whether it can capture.

    `error` names what this SGLang lacks, and then nothing is captured. `gaps` name what is captured without.
    `boundaries`: the names that are recorded beside the slots, None where the server was not started for that.
    `model` and `draft` are what the engine loaded: architecture, hidden_size, … and declared_ids.
    """

    process: str
    pid: int
    host: str
    started: float
    versions: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None
    tp_size: int | None = None
    dp_rank: int = 0
    pp_rank: int = 0
    pp_size: int = 1
    error: str | None = None
    gaps: tuple[str, ...] = ()
    boundaries: tuple[str, ...] | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    draft: Mapping[str, Any] | None = None


def new_hello(versions: Mapping[str, str]) -> Hello:
    """The hello of this process, before its rank is known."""
    return Hello(secrets.token_hex(6), os.getpid(), socket.gethostname(), time.time(), versions)


def write_hello(directory: Path, hello: Hello) -> None:
    """Write or replace a process's hello, atomically."""
    target = directory / f"{_HELLO_PREFIX}{hello.process}.json"
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(hello)))
    temporary.replace(target)


def read_hellos(directory: Path) -> list[Hello]:
    """The hellos of a capture directory, oldest first; files that are no hello are passed over."""
    known = {item.name for item in fields(Hello)}
    found = []
    for path in directory.glob(f"{_HELLO_PREFIX}*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            document = json.loads(path.read_text())
            values = {key: value for key, value in document.items() if key in known}
            names = values.get("boundaries")
            lists = {"gaps": tuple(values.get("gaps", ())), "boundaries": None if names is None else tuple(names)}
            found.append(Hello(**values | lists))
    return sorted(found, key=lambda hello: hello.started)


# --------------------------------------------------------------------------------------------- server's side


@dataclass(frozen=True)
class _Job:
    header: Header
    tensors: Mapping[str, torch.Tensor]
    ready: Any
    """A CUDA event after which the tensors hold what they should; None where there is nothing to wait for."""
    size: int


class SpoolWriter:
    """Takes records from the forward's thread and writes them from a thread of its own.

    `submit` never blocks, waits for no device and never raises. Above `pending_bytes` in memory, above `kept_bytes` on
    disk that no client has collected, or when the disk gets full, a record becomes a `lost` record instead.
    """

    def __init__(
        self,
        directory: Path,
        process: str,
        rank: int,
        *,
        warn: Callable[[str], None] = lambda _: None,
        pending_bytes: int = PENDING_BYTES,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self._directory = directory
        self._process = process
        self._rank = rank
        self._warn = warn
        self._pending_limit = pending_bytes
        self._kept_limit = kept_bytes
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._order = 0
        self._finished = 0
        self._latest = 0.0
        self._closing = False
        self._kept: deque[tuple[Path, int, float]] = deque()
        self._kept_bytes = 0
        self._thread: threading.Thread | None = None
        self._warned = False
        self._streams: dict[Any, Any] = {}

    def submit(self, header: Header, tensors: Mapping[str, torch.Tensor]) -> None:
        """Queue a record. The tensors must be the caller's own copies: nobody else writes to them any more."""
        try:
            size = sum(tensor.nbytes for tensor in tensors.values())
            with self._lock:
                self._order += 1
                header = replace(header, process=self._process, order=self._order, rank=self._rank)
                if self._pending + size > self._pending_limit:
                    why = f"more than {self._pending_limit} bytes were waiting for the disk"
                    header, tensors, size = _lost(header, why), {}, 0
                self._pending += size
                self._latest = time.monotonic()
            self._jobs.put(_Job(header, tensors, _event(tensors), size))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="eagle-parity-spool", daemon=True)
                self._thread.start()
                # A daemon thread that is inside torch when the interpreter ends aborts the process.
                atexit.register(self.close)
        except Exception as error:
            self._complain(error)

    def close(self, timeout: float = 5.0) -> None:
        """Write what is queued and end the thread; give up on it after `timeout` seconds."""
        if self._thread is not None:
            self._closing = True
            self._jobs.put(None)
            self._thread.join(timeout)

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until the queue is empty; for tests. False when it is not by then."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with self._lock:
                if self._order == self._finished:
                    return True
            time.sleep(0.005)
        return False

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            self._wait_for_quiet(job)
            began = time.thread_time()
            try:
                self._store(job)
            except BaseException as error:
                # Whatever it was costs this record; the next one may do, and the client must hear of it.
                self._complain(error)
                with contextlib.suppress(Exception):
                    self._write(_lost(job.header, f"{type(error).__name__}: {error}"), {})
            with self._lock:
                self._pending -= job.size
                self._finished += 1
            del job
            self._rest(time.thread_time() - began)

    def _rest(self, took: float) -> None:
        """Never take more than a small share of the interpreter's time, or the request after a probe's pays for it."""
        if self._pending < LAZY_BYTES and not self._closing:
            time.sleep(min(REST * took, REST_SECONDS))

    def _wait_for_quiet(self, job: _Job) -> None:
        """Let a request's forwards go by first: this thread takes turns with the scheduler's, which costs it."""
        if job.header.kind == "end" or self._closing:
            return
        while self._pending < LAZY_BYTES and (wait := self._latest + QUIET_SECONDS - time.monotonic()) > 0:
            time.sleep(wait)

    def _store(self, job: _Job) -> None:
        why = self._no_room(job.size) if job.size else None
        if why is not None:
            self._complain(why)
            self._write(_lost(job.header, why), {})
            return
        path = self._write(job.header, self._to_host(job))
        self._kept.append((path, job.size, time.time()))
        self._kept_bytes += job.size

    def _no_room(self, size: int) -> str | None:
        usage = shutil.disk_usage(self._directory)
        spare = min(SPARE_BYTES, int(usage.total * SPARE_FRACTION))
        if usage.free - size < spare:
            return f"the disk is full ({usage.free} bytes free, {spare} are left to the server, the record has {size})"
        if self._kept_bytes + size <= self._kept_limit:
            return None
        self._kept = deque(entry for entry in self._kept if entry[0].exists())
        while self._kept and time.time() - self._kept[0][2] > STALE_SECONDS:
            self._kept.popleft()[0].unlink(missing_ok=True)
        self._kept_bytes = sum(kept for _, kept, _ in self._kept)
        if self._kept_bytes + size > self._kept_limit:
            return f"{self._kept_limit} bytes are in the capture directory already ({MAX_BYTES} raises the cap)"
        return None

    def _to_host(self, job: _Job) -> Mapping[str, torch.Tensor]:
        if job.ready is None:
            return job.tensors
        import torch

        device = next(iter(job.tensors.values())).device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stream.wait_event(job.ready)
            host = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for name, tensor in job.tensors.items()
            }
            # Waits in this thread only, and job.tensors stays referenced until then.
            stream.synchronize()
        return host

    def _write(self, header: Header, tensors: Mapping[str, torch.Tensor]) -> Path:
        from eagle_parity.tensorfile import TensorFileWriter, dtype_name

        target = self._directory / f"{self._process}-{header.order:08d}{_RECORD_SUFFIX}"
        temporary = target.with_suffix(".tmp")
        specs: dict[str, tuple[str, Sequence[int]]] = {
            name: (dtype_name(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()
        }
        file = None
        try:
            file = TensorFileWriter(temporary, specs, {_HEADER: json.dumps(asdict(header))})
            for name, tensor in tensors.items():
                file.write(name, 0, tensor)
            file.close()
            temporary.replace(target)
        except BaseException:
            if file is not None:
                file.abandon()
            temporary.unlink(missing_ok=True)
            raise
        return target

    def _complain(self, error: object) -> None:
        """Once: a server's log is not the place for a line a token."""
        if not self._warned:
            self._warned = True
            with contextlib.suppress(Exception):
                self._warn(f"eagle-parity: a record was lost, the server is not affected: {error}")


def _lost(header: Header, reason: str) -> Header:
    return replace(header, kind="lost", reason=reason)


def _event(tensors: Mapping[str, torch.Tensor]) -> Any:
    """A point on the stream of the forward after which the copies are complete; recording it waits for nothing."""
    first = next(iter(tensors.values()), None)
    if first is None or not first.is_cuda:
        return None
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(first.device))
    return event


# --------------------------------------------------------------------------------------------- client's side


class Spool:
    """The client's view of a capture directory: the records of one dump, as they arrive."""

    def __init__(self, directory: Path, dump_key: str) -> None:
        self.directory = directory
        self._key = dump_key
        self._seen: set[str] = set()
        self._own: list[Path] = []

    def poll(self) -> Iterator[Record]:
        """The records of this dump that have come since the last call, in no particular order.

        Raises EnvironmentFailure for a directory that cannot be read or a record that is damaged.
        """
        from eagle_parity.tensorfile import open_tensorfile

        try:
            names = [entry.name for entry in os.scandir(self.directory) if entry.name.endswith(_RECORD_SUFFIX)]
        except OSError as error:
            raise EnvironmentFailure(
                f"the capture directory {self.directory} cannot be read: {error.strerror}",
                fix=f"give the directory that the server has in {CAPTURE_DIR}, readable for this user",
            ) from error
        for name in names:
            if name in self._seen:
                continue
            self._seen.add(name)
            path = self.directory / name
            try:
                file = open_tensorfile(path)
                header = _decode(file.metadata.get(_HEADER, ""))
            except (InputError, ValueError, TypeError, AttributeError) as error:
                if not path.exists():
                    continue  # another client has collected its own
                raise EnvironmentFailure(
                    f"the captured record {path} is damaged: {error}",
                    fix="check the disk of the capture directory, empty the directory and capture again",
                ) from error
            if probe_number(header.probe, self._key) is not None:
                self._own.append(path)
                yield Record(header, file)

    def discard(self) -> None:
        """Delete this dump's records, so that they do not count against the server's cap."""
        with contextlib.suppress(EnvironmentFailure):
            for _ in self.poll():
                pass
        for path in self._own:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _decode(text: str) -> Header:
    known = {item.name for item in fields(Header)}
    document = json.loads(text)
    values = {key: value for key, value in document.items() if key in known}
    rows = values.get("rows")
    return Header(**values | {"rows": None if rows is None else (int(rows[0]), int(rows[1]))})
