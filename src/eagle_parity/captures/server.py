"""A running SGLang server, asked over HTTP; and a server that is started, watched and stopped here.

Standard library only. `Transport` is the seam: `HttpTransport` talks to the network, `MemoryTransport` answers from a
function, so that every failure of a server can be tested without one.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol
from urllib.parse import urlsplit

from eagle_parity.captures.spool import CAPTURE_DIR
from eagle_parity.errors import EnvironmentFailure, UsageError

API_KEY = "EAGLE_PARITY_API_KEY"
DEFAULT_PORT = 30000  # SGLang's
LOG_LINES = 30
STOP_SECONDS = 15.0
_DYING_SECONDS = 5.0
_POLL_SECONDS = 0.5
_QUICK_SECONDS = 10.0  # for a question that costs a server nothing

# ------------------------------------------------------------------------------------------------- transport


@dataclass(frozen=True)
class Reply:
    """An HTTP answer, of any status."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON. Raises ValueError."""
        return json.loads(self.body)


class Unreachable(Exception):
    """There was no answer: refused, reset, timed out."""


class Transport(Protocol):
    """Sends one request."""

    def send(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout: float) -> Reply:
        """The answer, whatever its status. Raises Unreachable when there is none within `timeout` seconds."""


class HttpTransport:
    """urllib, past any proxy: the server and the client share a file system, so no proxy lies between them."""

    def __init__(self) -> None:
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def send(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout: float) -> Reply:
        """See Transport."""
        request = urllib.request.Request(url, data=body, headers=dict(headers), method=method)
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                return Reply(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.read())
        except TimeoutError:
            raise Unreachable(f"no answer within {timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise Unreachable(f"no answer within {timeout:g} s") from None
            raise Unreachable(getattr(reason, "strerror", None) or str(reason) or type(reason).__name__) from None


@dataclass(frozen=True)
class MemoryTransport:
    """Answers from a function of (method, path, JSON body); it may raise Unreachable. For tests."""

    answer: Callable[[str, str, Any], Reply]

    def send(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout: float) -> Reply:
        """See Transport."""
        del headers, timeout
        return self.answer(method, urlsplit(url).path, None if body is None else json.loads(body))


# ---------------------------------------------------------------------------------------------------- server


@dataclass(frozen=True)
class Server:
    """The HTTP face of an SGLang server. Every failure is an EnvironmentFailure with the server's own words."""

    url: str
    timeout: float = 600.0
    """Seconds to wait for one answer."""
    transport: Transport = field(default_factory=HttpTransport)
    api_key: str | None = None

    def healthy(self) -> bool:
        """Whether it says of itself that it is ready. False when it does not answer."""
        try:
            return self._send("GET", "/health", None, _QUICK_SECONDS).status == 200
        except Unreachable:
            return False

    def info(self) -> Mapping[str, Any]:
        """`/server_info`: the resolved server arguments, flat, and the version."""
        quick = min(self.timeout, 60.0)
        try:
            reply = self._send("GET", "/server_info", None, quick)
            if reply.status == 404:  # its name in old versions
                reply = self._send("GET", "/get_server_info", None, quick)
        except Unreachable as error:
            raise EnvironmentFailure(
                f"no server answers at {self.url}: {error}", fix="start the server, or check --server"
            ) from None
        self._check(reply, "server_info")
        try:
            document = reply.json()
        except ValueError:
            document = None
        if not isinstance(document, dict) or "version" not in document or "tp_size" not in document:
            raise EnvironmentFailure(
                f"{self.url} answers, but not as an SGLang server does: /server_info has no version and tp_size",
                fix="give the address of the SGLang server itself, not of a router or another engine",
            )
        return document

    def generate(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """POST /generate. The answer to one request."""
        return self._post("/generate", body)

    def chat(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """POST /v1/chat/completions."""
        return self._post("/v1/chat/completions", body)

    def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        what = f"request {body.get('rid')}"
        try:
            reply = self._send("POST", path, json.dumps(body).encode(), self.timeout)
        except Unreachable as error:
            raise EnvironmentFailure(
                f"{self.url}{path}: {what} got no answer: {error}",
                fix="see the server's log; if it is only slow, raise --timeout",
            ) from None
        self._check(reply, what)
        try:
            document = reply.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise EnvironmentFailure(
                f"{self.url}{path}: {what} was answered with something that is no JSON object: {_excerpt(reply.body)}",
                fix="give the address of the SGLang server itself",
            )
        return document

    def _send(self, method: str, path: str, body: bytes | None, timeout: float) -> Reply:
        headers = {"Content-Type": "application/json"} if body else {}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return self.transport.send(method, self.url + path, body, headers, timeout)

    def _check(self, reply: Reply, what: str) -> None:
        if reply.status == 200:
            return
        said = _message(reply)
        if reply.status in (401, 403):
            raise EnvironmentFailure(
                f"{self.url} refuses {what} (HTTP {reply.status}): {said}",
                fix=f"put the server's --api-key into {API_KEY}",
            )
        if 400 <= reply.status < 500:
            raise EnvironmentFailure(
                f"{self.url} rejected {what} (HTTP {reply.status}): {said}",
                fix="change the prompt or the server's limits as its message says",
            )
        raise EnvironmentFailure(
            f"{self.url} failed on {what} (HTTP {reply.status}): {said}", fix="see the server's log"
        )


def connect(
    url: str, *, timeout: float = 600.0, transport: Transport | None = None, api_key: str | None = None
) -> Server:
    """A server by its address; `host:port` is enough. Raises UsageError for what is no address."""
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"--server {url} is no address of a server", fix="give it as http://host:port")
    return Server(full.rstrip("/"), timeout, transport or HttpTransport(), api_key)


def _message(reply: Reply) -> str:
    """The server's own words: {"error": {"message"}}, {"message"}, {"error"} or the body."""
    try:
        document = reply.json()
    except ValueError:
        return _excerpt(reply.body)
    for key in ("error", "message", "detail"):
        inner = document.get(key) if isinstance(document, dict) else None
        if isinstance(inner, dict):
            inner = inner.get("message")
        if isinstance(inner, str) and inner:
            return inner
    return _excerpt(reply.body)


def _excerpt(body: bytes) -> str:
    text = " ".join(body.decode(errors="replace").split())
    return text[:300] or "(empty answer)"


# -------------------------------------------------------------------------------------------- starting a server


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
