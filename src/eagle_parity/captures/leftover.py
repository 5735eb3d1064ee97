"""The ranks of a run that wrote on another host: their records, still in that host's capture directory or a copy of it.

A run is asked for once, on one host; ranks that write to a disk of their own leave their records there. What the server
answered is known from the dump that was made then, so that here nothing is asked and nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle_parity.captures.forwards import Answer, Probe
from eagle_parity.captures.prompts import Prompt
from eagle_parity.captures.recording import Recording, collect, record
from eagle_parity.captures.server import Server
from eagle_parity.captures.site import Site
from eagle_parity.captures.spool import END, Hello, Record, Spool
from eagle_parity.errors import InputError
from eagle_parity.records import FINAL_NORM, Capture, Request, Tokens, rank_names


def is_spool(path: Path) -> bool:
    """Whether a directory is a capture directory, or a copy of one: it holds hellos or a writer's records."""
    patterns = ("hello-*.json", "[0-9a-f]*-[0-9]???????.safetensors")
    return path.is_dir() and any(found for pattern in patterns for found in path.glob(pattern))


def read_leftover(directory: Path, dump: Capture) -> Recording:
    """What a capture directory holds of the run that `dump` is a part of, as a recording of its ranks.

    Raises InputError when the dump names no run or the directory has nothing of it or only a part, EnvironmentFailure
    for records that are damaged, lost or missing, as `capture` does.
    """
    key = dump.facts.run
    if key is None:
        raise InputError(
            f"{directory} is a capture directory, and {dump.path} does not say which run it is of",
            fix="name first the dump that `dump serving --allow-missing-ranks` wrote",
        )
    found = list(Spool(directory, key).poll())
    processes = {entry.header.rank: entry.header.process for entry in found}
    if not processes:
        raise InputError(
            f"{directory} holds no record of the run {key}",
            fix="copy the capture directory of a host of that server, after the capture; records are deleted once they "
            "are collected, and after an hour where room is needed",
        )
    ended = {entry.header.rank for entry in found if entry.header.kind == "end"}
    if ended != set(processes):
        raise InputError(
            f"{directory} holds no end of the run {key} for {rank_names(sorted(set(processes) - ended))}",
            fix="the directory was copied too early, or the rank died: copy it again, or capture again",
        )
    spool = Spool(directory, key)
    site = _site(directory, dump, processes)
    records = collect(site, spool, key)
    prompts = _prompts(dump, {rank: {n: r for n, r in own.items() if n != END} for rank, own in records.items()})
    probes = [
        Probe.make(prompt, answer, {rank: own.get(number, []) for rank, own in records.items()}, complete=False)
        for number, prompt, answer in prompts
    ]
    return record(site, probes, spool, key)


def _site(directory: Path, dump: Capture, processes: Mapping[int, str]) -> Site:
    """The server as the dump describes it."""
    facts = dump.facts
    info: dict[str, Any] = {"version": None} | ({} if facts.engine is None else asdict(facts.engine))
    info |= info.pop("flags", {})
    draft = None if facts.draft is None else {"declared_ids": facts.draft.declared_ids}
    hellos = {
        rank: Hello(process, 0, str(directory), 0.0, rank=rank, model=asdict(facts.model), draft=draft)
        for rank, process in sorted(processes.items())
    }
    return Site(Server(str(directory), timeout=0.0), info, directory, hellos, _boundaries(dump))


def _boundaries(dump: Capture) -> tuple[str, ...]:
    return tuple(name for name in dump.names(dump.ranks[0]) if name == FINAL_NORM or name.startswith("boundary."))


def _prompts(
    dump: Capture, records: Mapping[int, Mapping[int, Sequence[Record]]]
) -> Iterator[tuple[int, Prompt, Answer]]:
    """Each probe's number, prompt and answer, from the dump: its requests are all prompts, then all trees, in order."""
    tokens = dump.tokens
    prefill = [request for request in tokens.requests if request.phase == "prefill"]
    rest = [request for request in tokens.requests if request.phase != "prefill"]
    first, boundaries = records[min(records)], set(_boundaries(dump))
    for number in sorted({number for own in records.values() for number in own}):
        phases = [entry.header.phase for entry in first.get(number, ()) if _kept(entry, boundaries)]
        count = phases.count("prefill")
        chunks, prefill = prefill[:count], prefill[count:]
        trees, rest = rest[: len(phases) - count], rest[len(phases) - count :]
        if not chunks or len(chunks) + len(trees) != len(phases):
            raise InputError(
                f"probe {number} has other forwards in the capture directory than in {dump.path}",
                fix="the two are of one run by name, so a part is missing or was changed: capture again",
            )
        sent = tuple(token for chunk in chunks for token in _ids(tokens, range(chunk.begin, chunk.end)))
        # Tokens from a warm prefix cache are not in the dump; then the prompt is not known.
        known = int(tokens.positions[chunks[0].begin]) == 0
        output = tuple(token for tree in trees for token in _ids(tokens, _accepted(tokens, tree)))
        yield number, Prompt(chunks[0].id, token_ids=sent if known else None), Answer(output, {})


def _kept(entry: Record, boundaries: set[str]) -> bool:
    """Whether a record is of a forward that the dump has: beside boundaries, one that shows none has no place."""
    return entry.header.kind == "target" and (not boundaries or bool(boundaries & set(entry.states)))


def _accepted(tokens: Tokens, tree: Request) -> list[int]:
    """The rows of a draft tree that the server kept, from its root on."""
    rows = range(tree.begin, tree.end)
    kept = [row for row in rows if tokens.accepted is None or tokens.accepted[row]]
    return sorted(kept, key=lambda row: int(tokens.positions[row]))


def _ids(tokens: Tokens, rows: Sequence[int]) -> list[int]:
    return [int(tokens.token_ids[row]) for row in rows]
