"""What became of a server's ranks while they were captured from: ended, or another server now."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from eagle_parity.captures.spool import Hello, read_hellos
from eagle_parity.errors import EnvironmentFailure

_LOOK_SECONDS = 0.02  # a rank that dies takes the others with it within a second
_GRACE_SECONDS = 1.5  # a request may fail before the process that failed it is gone


class Watch:
    """Looks at the ranks' processes while the block runs, and names those that ended when the block fails.

    Only processes of this host that were there at the start are looked at: those of another host, or of a container
    with process numbers of its own, cannot be seen. An EnvironmentFailure that leaves the block also says which rank
    ended first, and whether the capture directory knows a newer server; without either it leaves as it is.
    """

    def __init__(self, capture_dir: Path, hellos: Mapping[int, Hello]) -> None:
        here = socket.gethostname()
        self._capture_dir = capture_dir
        self._hellos = hellos
        self._seen = {rank: hello.pid for rank, hello in hellos.items() if hello.host == here and _runs(hello.pid)}
        self._first: tuple[int, ...] = ()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="eagle-parity-watch", daemon=True)

    def __enter__(self) -> Watch:
        if self._seen:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, EnvironmentFailure):
            self._over.set()
            return
        if self._seen:
            self._thread.join(_GRACE_SECONDS)
        self._over.set()
        said = [sentence for sentence in (self._ended(), self._restarted()) if sentence]
        if said:
            raise EnvironmentFailure(
                "\n".join([error.message, *said]),
                fix="see the server's log for why it ended (killed, out of memory, restarted), then capture again",
            ) from error

    def _ended(self) -> str | None:
        if not self._first:
            return None
        which = ", ".join(f"rank {rank} ({_process(self._hellos[rank])})" for rank in self._first)
        before = ", before any other rank" if len(self._seen) > len(self._first) else ""
        return f"{which} ended during the capture{before}"

    def _restarted(self) -> str | None:
        newer: dict[int, Hello] = {}
        for hello in read_hellos(self._capture_dir):
            before = None if hello.rank is None else self._hellos.get(hello.rank)
            if before is not None and hello.process != before.process and hello.started > before.started:
                newer[before.rank or 0] = hello
        if not newer:
            return None
        which = ", ".join(f"rank {rank} is {_process(hello)} now" for rank, hello in sorted(newer.items()))
        return f"the server was restarted during the capture: {which}"

    def _look(self) -> None:
        while not self._over.is_set():
            ended = tuple(rank for rank, pid in self._seen.items() if not _runs(pid))
            if ended:
                self._first = ended
                return
            time.sleep(_LOOK_SECONDS)


def _process(hello: Hello) -> str:
    return f"process {hello.pid} on {hello.host}"


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        # pid (name, which may hold anything) state …
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        pass
    if Path("/proc/self/stat").exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
