"""A server that is started here, watched while it is needed, and stopped with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from eagle_parity.captures.server import API_KEY, Server, connect
from eagle_parity.captures.spool import CAPTURE_DIR
from eagle_parity.errors import EnvironmentFailure, UsageError

DEFAULT_PORT = 30000  # SGLang's
LOG_LINES = 30
STOP_SECONDS = 15.0
_DYING_SECONDS = 5.0
_POLL_SECONDS = 0.5


def listen_address(command: Sequence[str], environ: Mapping[str, str]) -> tuple[str, int]:
    """Where a server command will listen: --host and --port, else PORT in the environment, else SGLang's default.

    Raises UsageError for a port that is no number.
    """
    host = _flag(command, "--host") or "127.0.0.1"
    port = _flag(command, "--port") or environ.get("PORT") or str(DEFAULT_PORT)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"the server's port should be 1 to 65535, is {port!r}", fix="check --port after --launch --")
    if host in ("0.0.0.0", "::", "[::]"):
        host = "127.0.0.1"  # it listens everywhere, so here as well
    return host, int(port)


def _flag(command: Sequence[str], name: str) -> str | None:
    found = None
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == name:
            found = following
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def check_port_free(host: str, port: int) -> None:
    """Raise EnvironmentFailure when somebody listens there: their server would be taken for ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise EnvironmentFailure(
                f"port {port} on {host} is taken ({error.strerror}); the server was not started",
                fix="stop what listens there, or give the server another --port; "
                "to capture from the server that runs there, use --server",
            ) from None


@contextmanager
def launched(
    command: Sequence[str],
    *,
    timeout: float,
    environ: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Server, Path]]:
    """Start a server command, wait until it is healthy, and stop it at the end, whatever happens.

    Gives the server and its capture directory, fresh and private. `environ` is added to the command's environment. It
    runs in a process group of its own; SIGTERM and SIGHUP end this process as Ctrl-C does, so that the server does not
    outlive it. Raises UsageError for a command that cannot be run, EnvironmentFailure when the port is taken, or the
    server dies (with the end of its log) or is not ready after `timeout` seconds.
    """
    if not command:
        raise UsageError(
            "--launch needs the server's command", fix="append it: --launch -- python -m sglang.launch_server …"
        )
    host, port = listen_address(command, os.environ)
    check_port_free(host, port)
    with tempfile.TemporaryDirectory(prefix="eagle-parity-", ignore_cleanup_errors=True) as scratch:
        capture_dir, log = Path(scratch) / "capture", Path(scratch) / "server.log"
        capture_dir.mkdir(mode=0o700)
        with _signals_interrupt(), log.open("wb") as sink:
            process = _start(command, {**os.environ, **(environ or {}), CAPTURE_DIR: str(capture_dir)}, sink)
            try:
                server = connect(f"http://{host}:{port}", timeout=timeout, api_key=os.environ.get(API_KEY))
                say(f"server starting on {host}:{port} (process {process.pid})")
                _wait_until_healthy(server, process, log, timeout)
                yield server, capture_dir
            except EnvironmentFailure as error:
                if "log:" in error.message or not _ended(server, process):
                    raise
                raise EnvironmentFailure(
                    f"{error.message}\nThe server has ended. The end of its log:\n{_tail(log)}", fix=error.fix
                ) from error
            finally:
                stop(process)


def _ended(server: Server, process: subprocess.Popen[bytes]) -> bool:
    """Whether a server is gone; one that answers no more is given a moment to go."""
    if process.poll() is None and not server.healthy():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_DYING_SECONDS)
    return process.poll() is not None


def _start(command: Sequence[str], environ: Mapping[str, str], sink: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(command),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(
            f"the server command cannot be run: {command[0]}: {error.strerror}", fix="check what follows --launch --"
        ) from None


def _wait_until_healthy(server: Server, process: subprocess.Popen[bytes], log: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        status = process.poll()
        if status is not None:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise EnvironmentFailure(
                f"the server {how} before it was ready. The end of its log:\n{_tail(log)}",
                fix="make the command work by itself first",
            )
        if server.healthy():
            return
        if time.monotonic() > deadline:
            raise EnvironmentFailure(
                f"the server was not ready at {server.url} after {timeout:g} s. The end of its log:\n{_tail(log)}",
                fix="raise --timeout if it is still loading; check that --port is the one it listens on",
            )
        time.sleep(_POLL_SECONDS)


def _tail(log: Path) -> str:
    lines = log.read_bytes()[-20_000:].decode(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join(f"    {line}" for line in lines) or "    (empty)"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group: SIGTERM, and after a while SIGKILL. Returns when the process is gone."""
    _signal_group(process.pid, signal.SIGTERM)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    finally:
        # Its children too, which may have ignored the first signal or be waiting for each other.
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # nobody is left


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
