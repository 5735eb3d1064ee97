"""A running SGLang server, asked over HTTP.

Standard library only. `Transport` is the seam: `HttpTransport` talks to the network, `MemoryTransport` answers from a
function, so that every failure of a server can be tested without one.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from eagle_parity.errors import EnvironmentFailure, UsageError

API_KEY = "EAGLE_PARITY_API_KEY"
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
