"""The JSON document of a report -> the report again, for a gate that judges what was measured before.

Everything that schema 1 promises is checked, and nothing is guessed: what is missing or of another type is an error.
Keys that this version does not know are left alone (additions are allowed).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from eagle_parity.errors import InputError
from eagle_parity.records import (
    Boundary,
    Control,
    Coverage,
    Distribution,
    Finding,
    Floor,
    Layers,
    Layout,
    RankMetrics,
    Report,
    Row,
    Severity,
    Status,
    Verdict,
)
from eagle_parity.report.document import SCHEMA_VERSION

_FIX = "write the report again: eagle-parity compare … --report json=FILE"
_NUMBER = (int, float)


def read_report(path: Path) -> Report:
    """Read a report that `--report json=FILE` wrote. InputError says which key of which file is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", fix=_FIX) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        what = "is empty" if path.stat().st_size == 0 else f"is not JSON: {error}"
        raise InputError(f"{path} {what}", fix=_FIX) from None
    if not isinstance(document, dict) or "schema_version" not in document:
        raise InputError(f"{path} is no report of eagle-parity: it has no schema_version", fix=_FIX)
    version = document["schema_version"]
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise InputError(
            f"{path} has schema_version {version!r}, this eagle-parity reads {SCHEMA_VERSION}",
            fix="write the report with this version, or judge it with the version that wrote it",
        )
    if isinstance(document.get("error"), dict):
        raise InputError(
            f"{path} is no verdict but an error: {document['error'].get('message')}",
            fix=str(document["error"].get("fix") or _FIX),
        )
    return _report(_Table(document, str(path)))


class _Table:
    """An object of the document with its place, which messages name."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values, self.place = values, place

    def get(self, key: str, *kinds: type, none: bool = False) -> Any:
        if key not in self.values:
            raise InputError(f"{self.place}: {key} is missing", fix=_FIX)
        value = self.values[key]
        if value is None and none:
            return None
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(dict.fromkeys(kind.__name__ for kind in kinds))
            raise InputError(f"{self.place}: {key} is {json.dumps(value)[:60]}, expected {wanted}", fix=_FIX)
        return value

    def word(self, key: str, words: Sequence[str]) -> Any:
        value = self.get(key, str)
        if value not in words:
            raise InputError(f"{self.place}: {key} is {value!r}, expected one of {', '.join(words)}", fix=_FIX)
        return value

    def table(self, key: str) -> _Table | None:
        value = self.get(key, dict, none=True)
        return None if value is None else _Table(value, f"{self.place}: {key}")

    def tables(self, key: str) -> list[_Table]:
        found = []
        for number, value in enumerate(self.get(key, list)):
            place = f"{self.place}: {key}[{number}]"
            if not isinstance(value, dict):
                raise InputError(f"{place} is {json.dumps(value)[:60]}, expected an object", fix=_FIX)
            found.append(_Table(value, place))
        return found

    def number(self, key: str) -> float:
        value = self.get(key, *_NUMBER, none=True)  # null is what a number that is not finite becomes
        return math.nan if value is None else float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        values = self.get(key, list)
        if any(not isinstance(value, int) or isinstance(value, bool) for value in values):
            raise InputError(f"{self.place}: {key} is {json.dumps(values)[:60]}, expected integers", fix=_FIX)
        return tuple(values)

    def boundary(self, key: str) -> Boundary | None:
        value: Boundary | None = self.get(key, int, str, none=True)
        return value


def _report(document: _Table) -> Report:
    coverage, layers = document.table("coverage"), document.table("layers")
    document.get("tool", str)
    _check_inputs(document)
    return Report(
        command=document.word("command", ("compare", "which-layers", "check", "gate")),
        verdict=document.word("verdict", get_args(Verdict)),
        inputs=document.get("inputs", dict),
        thresholds=document.get("thresholds", dict),
        coverage=None if coverage is None else _coverage(coverage),
        controls=tuple(
            Control(control.get("name", str), control.get("failed_as_expected", bool, none=True))
            for control in document.tables("controls")
        ),
        rows=tuple(map(_row, document.tables("rows"))),
        findings=tuple(map(_finding, document.tables("findings"))),
        layers=None if layers is None else _layers(layers),
    )


def _check_inputs(document: _Table) -> None:
    """What the formats for people take from `inputs` and `thresholds`."""
    inputs = document.table("inputs")
    thresholds = document.table("thresholds")
    if inputs is None or thresholds is None:
        raise InputError(f"{document.place}: inputs or thresholds are null", fix=_FIX)
    for table, key in ((inputs, "aligned_rows"), (thresholds, "min_rows")):
        if key in table.values:
            table.get(key, int)
    for side in ("training", "serving"):
        entry = inputs.table(side) if side in inputs.values else None
        if entry is not None:
            for key, kind in (("path", str), ("source", str), ("tokens", int)):
                entry.get(key, kind)
            for key, kind in (("engine", str), ("engine_version", str), ("tp_size", int)):
                entry.get(key, kind, none=True)
    for check in inputs.tables("checks") if "checks" in inputs.values else ():
        for key in ("check", "code"):
            check.get(key, str)
        check.word("status", ("ok", "error", "warning", "skipped"))
        check.get("why", str, none=True)


def _coverage(table: _Table) -> Coverage:
    return Coverage(
        phases=tuple(table.get("phases", list)),
        graph=tuple(table.get("graph", list)),
        max_forward_tokens=table.get("max_forward_tokens", int, none=True),
        batch=table.get("batch", int),
        warm_cache=table.get("warm_cache", bool, none=True),
        ranks=table.integers("ranks"),
        not_seen=tuple(map(str, table.get("not_seen", list))),
    )


def _row(table: _Table) -> Row:
    floor = table.table("floor")
    return Row(
        slot=table.get("slot", int, none=True),
        boundary=table.boundary("boundary"),
        expected_boundary=table.boundary("expected_boundary"),
        width=table.get("width", int),
        expected_width=table.get("expected_width", int, none=True),
        layout=table.word("layout", get_args(Layout)),
        ranks=table.integers("ranks"),
        rank_equal=table.get("rank_equal", bool, none=True),
        tokens=table.get("tokens", int),
        cosine=_distribution(table.table("cosine")),
        rel_l2=_distribution(table.table("rel_l2")),
        norm_ratio=_distribution(table.table("norm_ratio")),
        cosine_no_massive=_distribution(table.table("cosine_no_massive")),
        cosine_centred=_distribution(table.table("cosine_centred")),
        per_rank=tuple(
            RankMetrics(rank.get("rank", int), rank.number("cosine"), rank.number("rel_l2"), rank.number("norm_ratio"))
            for rank in table.tables("per_rank")
        ),
        floor=None if floor is None else _floor(floor),
        best_boundary=table.boundary("best_boundary"),
        runner_up=table.boundary("runner_up"),
        margin=table.get("margin", *_NUMBER, none=True),
        status=table.word("status", get_args(Status)),
    )


def _distribution(table: _Table | None) -> Distribution | None:
    """The document keeps the statistics that matter for a quantity; the others are NaN here."""
    if table is None:
        return None
    table.number("median")
    known = {field.name: table.number(field.name) for field in fields(Distribution) if field.name in table.values}
    return Distribution(**{field.name: known.get(field.name, math.nan) for field in fields(Distribution)})


def _floor(table: _Table) -> Floor:
    distance = table.table("rel_l2")
    if distance is None:
        raise InputError(f"{table.place}: rel_l2 is null", fix=_FIX)
    return Floor(table.get("source", str), distance.number("median"), distance.number("p99"))


def _finding(table: _Table) -> Finding:
    return Finding(
        code=table.get("code", str),
        severity=table.word("severity", get_args(Severity)),
        message=table.get("message", str),
        fix=table.get("fix", str),
        slot=table.get("slot", int, none=True),
        boundary=table.boundary("boundary"),
        ranks=None if table.get("ranks", list, none=True) is None else table.integers("ranks"),
        evidence=table.get("evidence", dict),
    )


def _layers(table: _Table) -> Layers:
    def order(key: str) -> tuple[Any, ...] | None:
        value = table.get(key, list, none=True)
        return None if value is None else tuple(value)

    return Layers(
        trained=order("trained"),
        stored=order("stored"),
        served=order("served"),
        declared=order("declared"),
        trained_from=table.get("trained_from", str, none=True),
        ranking=tuple(entry.values for entry in table.tables("ranking")),
        ambiguous=table.get("ambiguous", bool),
        replay=table.get("replay", dict, none=True),
        declarations=tuple(entry.values for entry in table.tables("declarations")),
        acceptance=table.get("acceptance", dict, none=True),
    )
