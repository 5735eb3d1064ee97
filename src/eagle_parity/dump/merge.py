"""Join serving dumps of one run whose ranks were written in different places, several hosts mostly.

Everything that the parts must agree about is checked before a byte is written; rank files are then copied as they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle_parity.dump.opened import Dump
from eagle_parity.dump.writer import DEFAULT_CAP, check_room, check_target, claim, publish
from eagle_parity.errors import InputError, UsageError
from eagle_parity.records import Facts, IntArray, Request
from eagle_parity.tensorfile import disk_errors

_BLOCK = 2**24  # bytes of a tensor read at a time, when a rank is there twice
_SAME = "merge joins the ranks of one capture; "


@dataclass(frozen=True)
class Merged:
    """What `plan_merge` found: which dump each rank comes from, and the facts of the whole."""

    facts: Facts
    requests: tuple[Request, ...]
    tokens: Path
    ranks: Mapping[int, Sequence[Path]]
    """rank -> its files, ascending."""
    warnings: tuple[str, ...]


def plan_merge(parts: Sequence[Dump]) -> Merged:
    """See that dumps are parts of one run, and who has which rank.

    Raises UsageError for nothing to join, InputError for dumps of different runs, tokens or tensors, and for a rank
    that is in two of them with different content.
    """
    if len(parts) < 2:
        raise UsageError(
            f"there is {len(parts)} dump to merge, at least two are needed",
            fix="name the dump of the head host and what the other hosts wrote",
        )
    first = parts[0]
    for part in parts:
        if part.facts.side != "serving":
            raise InputError(f"{part.path} is a training dump", fix=_SAME + "a training dump has no ranks to join")
        if part is not first:
            _check_facts(first, part)
            _check_tokens(first, part)
            _check_tensors(first, part)
    sources: dict[int, Dump] = {}
    for part in parts:
        for rank in part.ranks:
            if rank in sources:
                _check_twice(rank, sources[rank], part)
            sources.setdefault(rank, part)
    missing = sorted(set().union(*(_expected(part) for part in parts)) - set(sources))
    warnings = []
    if first.facts.run is None:
        warnings.append(
            "the dumps do not say which run they are of; they are taken for one because tokens, tp and tensors are "
            "equal, and a rank of another run would look like one that disagrees"
        )
    facts = replace(
        first.facts,
        source=replace(first.facts.source, detail=_detail(parts)),
        missing_ranks=tuple(missing),
    )
    ordered = {rank: sources[rank].files[rank] for rank in sorted(sources)}
    return Merged(facts, first.tokens.requests, Path(first.path) / "tokens.safetensors", ordered, tuple(warnings))


def write_merge(merged: Merged, output: Path, *, overwrite: bool = False, cap: int = DEFAULT_CAP) -> None:
    """Write a merged dump, atomically. Raises UsageError for the target, EnvironmentFailure for the disk."""
    check_target(output, overwrite=overwrite)
    files = [merged.tokens, *(file for own in merged.ranks.values() for file in own)]
    check_room(sum(file.stat().st_size for file in files), output, cap)
    partial = output.with_name(output.name + ".partial")
    claim(partial)
    try:
        for file in files:
            with disk_errors(partial):
                shutil.copyfile(file, partial / file.name)
        publish(partial, output, merged.facts, merged.requests, overwrite=overwrite)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


# ----------------------------------------------------------------------------------------------------- checks


def _check_facts(first: Dump, other: Dump) -> None:
    """The run, the engine and the target are the same."""
    if first.facts.run != other.facts.run:
        raise InputError(
            f"the dumps are of different runs: {first.path} of {_run(first)}, {other.path} of {_run(other)}",
            fix=_SAME + "take the parts that were written for the same `dump serving`, or capture again",
        )
    for section in ("engine", "model"):
        ours, theirs = (_flat(getattr(dump.facts, section)) for dump in (first, other))
        for key in sorted({*ours, *theirs}):
            if ours.get(key) != theirs.get(key):
                raise InputError(
                    f"{section}.{key} is {ours.get(key)!r} in {first.path} and {theirs.get(key)!r} in {other.path}",
                    fix=_SAME + "these come from different servers",
                )


def _run(dump: Dump) -> str:
    return dump.facts.run or "an unnamed one"


def _flat(section: Any) -> dict[str, Any]:
    if section is None:
        return {}
    values = asdict(section)
    flags = values.pop("flags", {})
    return values | {f"flags.{key}": value for key, value in flags.items()}


def _check_tokens(first: Dump, other: Dump) -> None:
    """Token table and forwards are the same, row by row."""
    ours, theirs = first.tokens, other.tokens
    fix = _SAME + "all its ranks compute the same tokens"
    if len(ours.token_ids) != len(theirs.token_ids):
        raise InputError(
            f"{first.path} has {len(ours.token_ids)} tokens, {other.path} has {len(theirs.token_ids)}", fix=fix
        )
    for name in ("token_ids", "positions", "parents", "accepted", "loss_mask"):
        row = _first_difference(getattr(ours, name), getattr(theirs, name))
        if row is not None:
            got = [_at(getattr(tokens, name), row) for tokens in (ours, theirs)]
            raise InputError(
                f"{name} of row {row} is {got[0]} in {first.path} and {got[1]} in {other.path}",
                fix=fix,
            )
    forwards = [[(request.begin, request.end, request.phase) for request in t.requests] for t in (ours, theirs)]
    if forwards[0] != forwards[1]:
        raise InputError(f"{first.path} and {other.path} divide the same tokens into other requests", fix=fix)


def _first_difference(ours: IntArray | None, theirs: IntArray | None) -> int | None:
    if ours is None or theirs is None:
        return None if ours is theirs else 0
    unequal = np.flatnonzero(ours != theirs)
    return int(unequal[0]) if len(unequal) else None


def _at(column: IntArray | None, row: int) -> str:
    return "absent" if column is None else str(column[row])


def _check_tensors(first: Dump, other: Dump) -> None:
    """The parts hold tensors of the same names and dtypes; widths may differ, as shards do."""
    ours, theirs = _held(first), _held(other)
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            raise InputError(
                f"{name} is {_kinds(ours.get(name))} in {first.path} and {_kinds(theirs.get(name))} in {other.path}",
                fix=_SAME + "its parts hold the same tensors: capture them together",
            )


def _held(dump: Dump) -> dict[str, set[str]]:
    """name -> the dtypes that it has over the ranks."""
    found: dict[str, set[str]] = {}
    for rank in dump.ranks:
        for name in dump.names(rank):
            found.setdefault(name, set()).add(dump.spec(rank, name).dtype)
    return found


def _kinds(dtypes: set[str] | None) -> str:
    return "absent" if dtypes is None else "/".join(sorted(dtypes))


def _check_twice(rank: int, first: Dump, other: Dump) -> None:
    """A rank in two parts is allowed when both are the same to the last bit: a directory was copied twice."""
    name = _first_unequal(rank, first, other)
    if name is not None:
        raise InputError(
            f"rank {rank} is in {first.path} and in {other.path}, with different {name}",
            fix="one of the two is of another capture or was changed: leave it out",
        )


def _first_unequal(rank: int, first: Dump, other: Dump) -> str | None:
    if first.names(rank) != other.names(rank):
        return "tensors"
    for name in first.names(rank):
        if first.spec(rank, name) != other.spec(rank, name) or first.length(rank, name) != other.length(rank, name):
            return f"{name} (shape or dtype)"
        if _first_difference(first.rows(rank, name), other.rows(rank, name)) is not None:
            return f"{name} (rows)"
        for begin, end in _blocks(first, rank, name):
            ours, theirs = (_bytes(dump.read(rank, name, begin, end)) for dump in (first, other))
            if not torch.equal(ours, theirs):
                row = begin + int((ours != theirs).any(dim=1).nonzero()[0])
                return f"{name}, first in row {row}"
    return None


def _blocks(dump: Dump, rank: int, name: str) -> Iterator[tuple[int, int]]:
    length, width = dump.length(rank, name), dump.spec(rank, name).width
    step = max(1, _BLOCK // max(1, 8 * width))
    return ((begin, min(begin + step, length)) for begin in range(0, length, step))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes [T, W · itemsize]: equal only when bitwise equal, NaN and minus zero included."""
    return tensor.contiguous().view(torch.uint8)


def _expected(part: Dump) -> set[int]:
    """The ranks that a part says took part: its own and those it misses, else as many as tp_size where that is all."""
    known = {*part.ranks, *part.facts.missing_ranks}
    engine = part.facts.engine
    if part.facts.run is None and engine is not None and engine.tp_size and (engine.dp_size or 1) == 1:
        known |= set(range(engine.tp_size))
    return known


def _detail(parts: Sequence[Dump]) -> str | None:
    """What the parts say about their slots; each spoke of its own ranks."""
    said = {part.ranks: part.facts.source.detail for part in parts if part.facts.source.detail}
    if len(said) < 2:
        return next(iter(said.values()), None)
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for ranks, text in said.items())
