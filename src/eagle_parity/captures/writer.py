"""The writer of the spool: takes records from the forward's thread and stores them from one of its own.

It must not disturb the server: it imports only what a server has loaded anyway, never blocks a forward, takes a small
share of the interpreter's time, and turns every failure into a `lost` record.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_parity.captures.spool import HEADER_KEY, MAX_BYTES, RECORD_SUFFIX, Header

if TYPE_CHECKING:
    import torch

KEPT_BYTES = 16 * 2**30  # a rank's records that no client has collected yet
PENDING_BYTES = 512 * 2**20  # a rank's records in memory, waiting for the disk
SPARE_BYTES = 2**30  # of the disk, left to the server whatever happens …
SPARE_FRACTION = 0.05  # … or this part of a disk that is smaller than that
QUIET_SECONDS = 0.05  # without a new record, after which the waiting ones are written …
LAZY_BYTES = 64 * 2**20  # … or as soon as this much waits
REST = 30  # how long the writer rests after a record, in times of what the record took …
REST_SECONDS = 0.02  # … at most: what a big record takes is copying, which keeps nobody from the interpreter
STALE_SECONDS = 3600.0  # after which a record that nobody has collected may be deleted to make room


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

        target = self._directory / f"{self._process}-{header.order:08d}{RECORD_SUFFIX}"
        temporary = target.with_suffix(".tmp")
        specs: dict[str, tuple[str, Sequence[int]]] = {
            name: (dtype_name(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()
        }
        file = None
        try:
            file = TensorFileWriter(temporary, specs, {HEADER_KEY: json.dumps(asdict(header))})
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
