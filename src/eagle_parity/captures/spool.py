"""The spool: the directory in which a server's ranks leave what they captured, and where the client finds it.

One safetensors file a rank, probe and forward, with a JSON header, renamed into place when it is complete; and one
small JSON file a server process, the hello, which says that the plugin is there and for which rank. File names are made
of a random word and a counter: a request id is data in a header, never a part of a path.

`writer` puts the records there. What runs in the server (`write_hello` too) imports only what a server has loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
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


HEADER_KEY = "eagle_parity"
RECORD_SUFFIX = ".safetensors"
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
            names = [entry.name for entry in os.scandir(self.directory) if entry.name.endswith(RECORD_SUFFIX)]
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
                header = _decode(file.metadata.get(HEADER_KEY, ""))
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
