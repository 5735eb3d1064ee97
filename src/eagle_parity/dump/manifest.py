"""manifest.json of dump format schema 1: to JSON and back, with every key checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, get_args

from eagle_parity.errors import InputError
from eagle_parity.records import FINAL_NORM, Boundary, Draft, Engine, Facts, Model, Phase, Request, Source

FORMAT = "eagle-parity-dump"
SCHEMA_VERSION = 1
NAME = "manifest.json"

T = TypeVar("T")


def encode(facts: Facts, requests: tuple[Request, ...], *, tool: str, created: str) -> str:
    """The text of a manifest."""
    document = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "side": facts.side,
        "source": asdict(facts.source),
        "model": asdict(facts.model),
        "engine": None if facts.engine is None else asdict(facts.engine),
        "draft": None if facts.draft is None else asdict(facts.draft),
        "boundaries": list(facts.boundaries),
        "slots": facts.slots,
        "slot_boundaries": None if facts.slot_boundaries is None else list(facts.slot_boundaries),
        "requests": [_encode_request(request) for request in requests],
        "tool": tool,
        "created": created,
    }
    if facts.run is not None:
        document["run"] = facts.run
    if facts.missing_ranks:
        document["missing_ranks"] = list(facts.missing_ranks)
    return json.dumps(document, indent=1) + "\n"


def _encode_request(request: Request) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": request.id,
        "rows": [request.begin, request.end],
        "phase": request.phase,
        "batch": request.batch,
    }
    optional = {
        "graph": request.graph,
        "forward_tokens": request.forward_tokens,
        "cached_tokens": request.cached_tokens,
    }
    return entry | {key: value for key, value in optional.items() if value is not None}


def decode(text: str, path: Path) -> tuple[Facts, tuple[Request, ...]]:
    """Facts and requests of a manifest. Raises InputError naming the key that is wrong and what was expected."""
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}", fix="capture again; the manifest is damaged") from None
    return _Reader(document, path).manifest()


class _Reader:
    """Typed access to a JSON document, with errors that name the key."""

    def __init__(self, document: Any, path: Path) -> None:
        self.document = document
        self.path = path

    def fail(self, key: str, want: str, got: Any) -> InputError:
        return InputError(
            f"{self.path}: {key} must be {want}, is {json.dumps(got)[:80]}",
            fix="write the manifest as dump format schema 1 says, or capture again",
        )

    def get(self, owner: Any, key: str, kind: type[T], *, where: str = "", optional: bool = True) -> T | None:
        name = f"{where}.{key}" if where else key
        value = owner.get(key)
        if value is None:
            if optional:
                return None
            raise self.fail(name, f"given ({kind.__name__})", value)
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fail(name, f"of type {kind.__name__}", value)
        return value

    def need(self, owner: Any, key: str, kind: type[T], *, where: str = "") -> T:
        value = self.get(owner, key, kind, where=where, optional=False)
        assert value is not None
        return value

    def section(self, key: str) -> Mapping[str, Any] | None:
        return self.get(self.document, key, dict)

    def count(self, owner: Any, key: str, *, where: str, least: int = 1) -> int | None:
        value = self.get(owner, key, int, where=where)
        if value is not None and value < least:
            raise self.fail(f"{where}.{key}", f"at least {least}", value)
        return value

    def manifest(self) -> tuple[Facts, tuple[Request, ...]]:
        document = self.document
        if not isinstance(document, dict):
            raise self.fail("the manifest", "a JSON object", document)
        if document.get("format") != FORMAT:
            raise self.fail("format", f'"{FORMAT}"', document.get("format"))
        version = document.get("schema_version")
        if version != SCHEMA_VERSION:
            raise InputError(
                f"{self.path}: schema_version is {json.dumps(version)}, this tool reads {SCHEMA_VERSION}",
                fix="use the eagle-parity that wrote it, or capture again with this one",
            )
        side = self.need(document, "side", str)
        if side not in ("training", "serving"):
            raise self.fail("side", '"training" or "serving"', side)
        facts = Facts(
            side="training" if side == "training" else "serving",
            source=self.source(),
            model=self.model(),
            engine=self.engine(),
            draft=self.draft(),
            boundaries=self.boundaries(),
            slots=self.slots(),
            slot_boundaries=self.slot_boundaries(),
            run=self.get(document, "run", str),
            missing_ranks=self.missing_ranks(),
        )
        return facts, self.requests()

    def source(self) -> Source:
        entry = self.section("source") or {}
        pipeline = self.get(entry, "pipeline", str, where="source") or "unknown"
        version = self.get(entry, "version", str, where="source")
        detail = entry.get("detail")
        return Source(pipeline, version, None if detail is None else str(detail))

    def model(self) -> Model:
        entry = self.section("model") or {}

        def text(key: str) -> str | None:
            return self.get(entry, key, str, where="model")

        return Model(
            name=text("name"),
            architecture=text("architecture"),
            hidden_size=self.count(entry, "hidden_size", where="model"),
            num_layers=self.count(entry, "num_layers", where="model"),
            vocab_size=self.count(entry, "vocab_size", where="model"),
            dtype=text("dtype"),
            quantization=text("quantization"),
        )

    def engine(self) -> Engine | None:
        entry = self.section("engine")
        if entry is None:
            return None
        sizes = {key: self.count(entry, key, where="engine") for key in ("tp_size", "dp_size", "pp_size", "ep_size")}
        return Engine(
            name=self.get(entry, "name", str, where="engine") or "unknown",
            version=self.get(entry, "version", str, where="engine"),
            flags=self.get(entry, "flags", dict, where="engine") or {},
            **sizes,
        )

    def draft(self) -> Draft | None:
        entry = self.section("draft")
        if entry is None:
            return None
        ids = self.get(entry, "declared_ids", list, where="draft")
        if ids is not None and not all(type(i) is int for i in ids):
            raise self.fail("draft.declared_ids", "a list of integers", ids)
        return Draft(
            name=self.get(entry, "name", str, where="draft"),
            declared_ids=None if ids is None else tuple(ids),
            num_slots=self.count(entry, "num_slots", where="draft"),
            spec_accept_length=self.get(entry, "spec_accept_length", float, where="draft"),
        )

    def boundaries(self) -> tuple[int, ...]:
        values = self.get(self.document, "boundaries", list) or []
        # Writers may list final.norm too; it is found from the rank files.
        numbers = [value for value in values if value != FINAL_NORM]
        if not all(type(value) is int and value >= 0 for value in numbers):
            raise self.fail("boundaries", "a list of layer boundaries (0, 1, …)", values)
        return tuple(numbers)

    def slots(self) -> int:
        value = self.get(self.document, "slots", int) or 0
        if value < 0:
            raise self.fail("slots", "0 or more", value)
        return value

    def slot_boundaries(self) -> tuple[Boundary, ...] | None:
        values = self.get(self.document, "slot_boundaries", list)
        if values is None:
            return None
        if not all(value == FINAL_NORM or (type(value) is int and value >= 0) for value in values):
            raise self.fail("slot_boundaries", f'a list of layer boundaries or "{FINAL_NORM}"', values)
        return tuple(values)

    def missing_ranks(self) -> tuple[int, ...]:
        values = self.get(self.document, "missing_ranks", list) or []
        if not all(type(value) is int and value >= 0 for value in values):
            raise self.fail("missing_ranks", "a list of ranks (0, 1, …)", values)
        return tuple(sorted(set(values)))

    def requests(self) -> tuple[Request, ...]:
        entries = self.need(self.document, "requests", list)
        return tuple(self.request(entry, f"requests[{i}]") for i, entry in enumerate(entries))

    def request(self, entry: Any, where: str) -> Request:
        if not isinstance(entry, dict):
            raise self.fail(where, "an object", entry)
        rows = entry.get("rows")
        if not (isinstance(rows, list) and len(rows) == 2 and all(type(n) is int for n in rows)):
            raise self.fail(f"{where}.rows", "[begin, end)", rows)
        phase: Any = entry.get("phase", "prefill")
        if phase not in get_args(Phase):
            raise self.fail(f"{where}.phase", "prefill, verify or decode", phase)
        return Request(
            id=str(entry.get("id", "")),
            begin=rows[0],
            end=rows[1],
            phase=phase,
            batch=self.count(entry, "batch", where=where) or 1,
            graph=self.get(entry, "graph", bool, where=where),
            forward_tokens=self.count(entry, "forward_tokens", where=where),
            cached_tokens=self.count(entry, "cached_tokens", where=where, least=0),
        )
