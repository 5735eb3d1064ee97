"""What the ranks of a server recorded of one dump's probes: collected from the spool, and given as a stream."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from eagle_parity.captures.forwards import Forward, Probe
from eagle_parity.captures.site import Site
from eagle_parity.captures.spool import END, Record, Spool, probe_number
from eagle_parity.errors import EnvironmentFailure
from eagle_parity.records import (
    FINAL_NORM,
    Draft,
    Facts,
    Phase,
    Plan,
    Sample,
    Source,
    Stream,
    TensorSpec,
    rank_names,
    slot_name,
)

if TYPE_CHECKING:
    import torch

DEFAULT_SLOTS = 3  # what SGLang captures where a draft declares nothing
PHASES: tuple[Phase, ...] = ("prefill", "verify", "decode")
_RECORD_SECONDS = 60.0  # after the last answer
_POLL_SECONDS = 0.05
_FULL_BYTES = 2**16  # with less a rank cannot even write that a record was lost


@dataclass
class Notes:
    """What was seen while the samples were read; complete when the last sample is out."""

    compared: int = 0
    """Rows of which it is known what the target gave and what the draft was given."""
    unequal: int = 0
    """Those where the two differ."""
    shifted: list[str] = field(default_factory=list)
    """Prompts whose tokens the draft was not given shifted by one."""


@dataclass(frozen=True)
class Recording:
    """A capture: its stream, what it measured, one sentence for each thing to know, and how to tidy up."""

    stream: Stream
    notes: Notes
    messages: tuple[str, ...]
    accept_length: float | None
    phases: Mapping[str, int]
    discard: Callable[[], None]

    def facts(self) -> Facts:
        """The final facts, to be asked for when the stream is exhausted: they say what the slots are."""
        facts = self.stream.plan.facts
        return replace(facts, source=replace(facts.source, detail=_detail(self.notes, facts.slots)))


# ------------------------------------------------------------------------------------------------- collecting


def collect(site: Site, spool: Spool, key: str) -> dict[int, dict[int, list[Record]]]:
    """rank -> probe number -> records in order, once every rank has written the end of the dump."""
    found: dict[int, dict[int, list[Record]]] = {rank: {} for rank in site.hellos}

    def poll() -> list[int]:
        """Take what has come; the ranks that are not at their end."""
        for record in spool.poll():
            number = probe_number(record.header.probe, key)
            if number is not None and record.header.rank in found:
                found[record.header.rank].setdefault(number, []).append(record)
        return [rank for rank, probes in found.items() if END not in probes]

    deadline = time.monotonic() + min(_RECORD_SECONDS, site.server.timeout)
    while silent := poll():
        if time.monotonic() > deadline:
            raise _missing(site, found, silent)
        time.sleep(_POLL_SECONDS)
    poll()  # a listing may show a file and miss an older one that was made while it was read
    _check_processes(site, found)
    _check_lost(found)
    for probes in found.values():
        for records in probes.values():
            records.sort(key=lambda record: record.header.order)
    return found


def _missing(site: Site, found: Mapping[int, Mapping[int, object]], silent: Sequence[int]) -> EnvironmentFailure:
    wrote = [rank for rank in found if found[rank]]
    hosts = ", ".join(f"rank {rank}: process {site.hellos[rank].pid} on {site.hellos[rank].host}" for rank in silent)
    if not wrote:
        what = f"no rank wrote a record into {site.capture_dir}, although the server answered"
        fix = "check that this is the capture directory of the server that runs now, and see the server's log"
    else:
        what = (
            f"{rank_names(silent)} did not finish writing into {site.capture_dir} ({rank_names(wrote)} wrote something)"
        )
        fix = "check that this rank is alive, that its disk is not full and that all hosts share the directory"
    free = shutil.disk_usage(site.capture_dir).free
    full = f"; its disk is full ({free} bytes free)" if free < _FULL_BYTES else ""
    return EnvironmentFailure(f"{what}{full}; waited for {hosts}", fix=fix)


def _check_processes(site: Site, found: Mapping[int, Mapping[int, Sequence[Record]]]) -> None:
    """The records of a rank come from the process that was there before the first probe, and from no other."""
    for rank, probes in found.items():
        hello = site.hellos[rank]
        others = {r.header.process for records in probes.values() for r in records} - {hello.process}
        if others:
            raise EnvironmentFailure(
                f"records of rank {rank} came from another process than the one that was there before the first probe, "
                f"{hello.pid} on {hello.host}: the server was restarted, or two servers share {site.capture_dir}",
                fix="capture again while the server stays up; give each server a capture directory of its own",
            )


def _check_lost(found: Mapping[int, Mapping[int, Sequence[Record]]]) -> None:
    lost = [
        record.header
        for probes in found.values()
        for records in probes.values()
        for record in records
        if record.header.kind == "lost"
    ]
    if not lost:
        return
    ranks = sorted({header.rank for header in lost})
    raise EnvironmentFailure(
        f"the capture is incomplete: {rank_names(ranks)} lost {len(lost)} records; the first: {lost[0].reason}",
        fix="send fewer or shorter prompts (--limit), make room in the capture directory, or have fewer "
        "boundaries recorded (EAGLE_PARITY_CAPTURE_BOUNDARIES=2,30,58 at the start)",
    )


# ----------------------------------------------------------------------------------------------------- stream


def record(site: Site, probes: Sequence[Probe], spool: Spool, key: str) -> Recording:
    """The probes as a stream, prefill first, with the slots (where there is a draft) and the boundaries asked for.

    Raises EnvironmentFailure for shapes that are not slots of one width, and where no forward shows a boundary.
    """
    ordered = sorted(
        ((probe, forward) for probe in probes for forward in probe.forwards),
        key=lambda item: item[1].phase != "prefill",
    )
    ordered, names, messages = _with_boundaries(site.boundaries, ordered)
    specs = {rank: _specs(site, [forward.given[rank] for _, forward in ordered], names) for rank in site.hellos}
    draft = site.draft
    slots = 0 if draft is None else max(len(own) for own in specs.values()) - len(names)
    accept_length = _accept_length([probe.answer.meta for probe in probes])
    facts = Facts(
        side="serving",
        source=Source("sglang", str(site.info["version"])),
        model=site.model,
        engine=site.engine,
        draft=None
        if draft is None
        else Draft(draft.name, draft.declared_ids, num_slots=slots, spec_accept_length=accept_length),
        boundaries=tuple(sorted(int(name.removeprefix("boundary.")) for name in names if name != FINAL_NORM)),
        slots=slots,
        run=key,
        missing_ranks=site.missing,
    )
    tokens = sum(len(forward.token_ids) for _, forward in ordered)
    phases: dict[str, int] = {}
    for _, forward in ordered:
        phases[forward.phase] = phases.get(forward.phase, 0) + len(forward.token_ids)
    columns = ("parents", "accepted") if "verify" in phases else ()
    split = any(record.header.rows is not None for _, forward in ordered for record in forward.given.values())
    held = {rank: sum(len(forward.given[rank].rows) for _, forward in ordered) for rank in site.hellos}
    notes = Notes()
    plan = Plan(facts, tokens, specs, rank_rows=held if split else None, columns=columns)
    stream = Stream(plan, _samples(ordered, specs, notes))
    said = (*_messages(site, probes, {forward.phase for probe in probes for forward in probe.forwards}), *messages)
    return Recording(stream, notes, said, accept_length, phases, spool.discard)


_Ordered = list[tuple[Probe, Forward]]


def _with_boundaries(wanted: Sequence[str], ordered: _Ordered) -> tuple[_Ordered, tuple[str, ...], list[str]]:
    """The forwards that show boundaries on every rank, the names that all of these show, and what is left out.

    A dump's tensors have the same rows, so a forward that shows none (the replay of a graph) has no place beside them.
    """
    if not wanted:
        return ordered, (), []
    kept = [(p, f) for p, f in ordered if all(set(wanted) & set(r.states) for r in f.given.values())]
    names = [name for name in wanted if all(name in r.states for _, f in kept for r in f.given.values())]
    unseen = {name: why for _, f in ordered for r in f.given.values() for name, why in r.header.unseen.items()}
    if not kept or not names:
        why = next((unseen[name] for name in wanted if name in unseen), "every forward was the replay of a CUDA graph")
        raise EnvironmentFailure(
            f"no boundary was recorded in {len(ordered)} forwards: {why}",
            fix="start the server without CUDA graphs (--disable-cuda-graph, or --cuda-graph-backend-decode and "
            "--cuda-graph-backend-prefill disabled), or send shorter prompts and fewer boundaries",
        )
    messages = []
    lost = {
        phase: sum(f.phase == phase for _, f in ordered) - sum(f.phase == phase for _, f in kept) for phase in PHASES
    }
    if any(lost.values()):
        listed = " and ".join(f"{count} {phase}" for phase, count in lost.items() if count)
        messages.append(
            f"warning: {listed} forwards have no rows: no boundary was seen in them (the replay of a CUDA graph runs "
            "no hook); record without --boundaries for their slots"
        )
    lacking = [name for name in wanted if name not in names]
    if lacking:
        why = next((unseen[name] for name in lacking if name in unseen), "its layer's hook did not run")
        messages.append(f"warning: {', '.join(lacking)} is not recorded: {why}")
    return kept, tuple(names), messages


def _specs(site: Site, records: Sequence[Record], names: Sequence[str]) -> list[TensorSpec]:
    """The tensors of a rank: slots where there is a draft to hand them to, and boundaries."""
    rank = records[0].header.rank
    for name in (*names, *(["hidden"] if site.draft is not None else [])):
        shapes = {(record.width(name), record.dtype(name)) if record.has(name) else None for record in records}
        if None in shapes or len(shapes) != 1:
            raise EnvironmentFailure(
                f"rank {rank} gave {'hidden states' if name == 'hidden' else name} of more than one shape: "
                + ", ".join("none" if shape is None else f"{shape[0]} wide {shape[1]}" for shape in shapes),
                fix="capture prefill and the rest apart; report it with the server's arguments",
            )
    first = records[0]
    boundaries = [TensorSpec(name, first.width(name), first.dtype(name)) for name in names]
    return boundaries if site.draft is None else [*_slot_specs(site, first), *boundaries]


def _slot_specs(site: Site, record: Record) -> list[TensorSpec]:
    width, hidden, draft = record.width(), site.model.hidden_size, site.draft
    declared = len(draft.declared_ids) if draft and draft.declared_ids else DEFAULT_SLOTS
    # Normally the slots are hidden-wide. Where they are not, they are shards, and only their number can be known.
    slots = width // hidden if hidden and width % hidden == 0 else declared
    if width % slots:
        raise EnvironmentFailure(
            f"rank {record.header.rank}: the draft is given {width} values a token, which are neither slots of "
            f"{hidden} nor {slots} slots of one width",
            fix="check the draft's config: num_aux_hidden_states and eagle_aux_hidden_state_layer_ids",
        )
    return [TensorSpec(slot_name(j), width // slots, record.dtype()) for j in range(slots)]


def _samples(ordered: _Ordered, specs: Mapping[int, Sequence[TensorSpec]], notes: Notes) -> Iterator[Sample]:
    for probe, forward in ordered:
        header = forward.header
        yield Sample(
            probe.prompt.id,
            forward.token_ids,
            forward.positions,
            {rank: _tensors(probe, forward, rank, own, notes) for rank, own in specs.items()},
            phase=forward.phase,
            batch=header.batch,
            graph=header.graph,
            forward_tokens=header.forward_tokens,
            cached_tokens=probe.cached if forward.phase == "prefill" else None,
            parents=forward.parents,
            accepted=forward.accepted,
            rows={rank: forward.given[rank].rows for rank in specs},
        )


def _tensors(
    probe: Probe, forward: Forward, rank: int, specs: Sequence[TensorSpec], notes: Notes
) -> dict[str, torch.Tensor]:
    """The tensors of one rank."""
    record = forward.given[rank]
    slots = [spec for spec in specs if spec.name.startswith("slot.")]
    found = {spec.name: record.read(spec.name) for spec in specs[len(slots) :]}
    if slots:
        states, width = _handed(probe, forward, rank, notes), slots[0].width
        found |= {spec.name: states[:, j * width : (j + 1) * width] for j, spec in enumerate(slots)}
    return found


def _handed(probe: Probe, forward: Forward, rank: int, notes: Notes) -> torch.Tensor:
    """The slots side by side, [T', W]: the target's rows, replaced by the draft's where both were seen."""
    import torch

    record = forward.given[rank]
    given, received = record.read(), forward.received.get(rank)
    if received is None:
        return given
    path = forward.path
    # Rows of the request that both hold; the draft's are counted along the accepted path.
    rows = [(path[i], i - received.rows.start) for i in received.rows if i < len(path) and path[i] in record.rows]
    ours = [row - record.rows.start for row, _ in rows]
    mine, theirs = given[ours], received.read()[[place for _, place in rows]]
    notes.compared += len(rows)
    if mine.shape == theirs.shape and mine.dtype == theirs.dtype:
        notes.unequal += int((mine.view(torch.uint8) != theirs.view(torch.uint8)).any(dim=1).sum())
        given[ours] = theirs
    else:
        notes.unequal += len(rows)
    _check_shift(probe, forward, received, notes)
    return given


def _check_shift(probe: Probe, forward: Forward, received: Record, notes: Notes) -> None:
    """EAGLE pairs the state at t with the embedding of token t + 1; see that the draft was given those tokens."""
    if forward.phase == "prefill" and received.integers("token_ids")[: len(forward.token_ids) - 1] != list(
        forward.token_ids[1:]
    ):
        notes.shifted.append(probe.prompt.id)


def _detail(notes: Notes, slots: int) -> str:
    if not slots:
        return "boundaries of the target alone: there is no draft"
    if not notes.compared:
        return "slots are what the target gave; what the draft was given was not seen"
    if not notes.unequal:
        return (
            "slots are what the draft was given, bitwise what the target gave in all "
            f"{notes.compared} rows compared, over all ranks"
        )
    return (
        "slots are what the draft was given, which is not what the target gave in "
        f"{notes.unequal} of {notes.compared} rows compared, over all ranks"
    )


def _messages(site: Site, probes: Sequence[Probe], phases: Collection[str]) -> tuple[str, ...]:
    messages = []
    warm = [probe for probe in probes if probe.cached]
    if warm:
        cached = sum(probe.cached for probe in warm)
        messages.append(
            f"warning: {cached} tokens of {len(warm)} prompts came from the server's prefix cache and have no rows "
            f"(the first: {warm[0].prompt.id}, {warm[0].cached} tokens); without --warm-cache they would"
        )
    if site.draft is not None and "verify" not in phases:
        messages.append("warning: no verify rows: every prompt ended with its first token")
    for gap in {gap for hello in site.hellos.values() for gap in hello.gaps}:
        messages.append(f"warning: this SGLang gives {gap}")
    retracted = [probe.prompt.id for probe in probes if probe.answer.meta.get("num_retractions")]
    if retracted:
        messages.append(f"note: the server was short of memory and computed {', '.join(retracted)} more than once")
    return tuple(messages)


def _accept_length(metas: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens a verify over all probes, from the server's own count for each."""
    total, verifies = 0.0, 0
    for meta in metas:
        length, count = meta.get("spec_accept_length"), meta.get("spec_verify_ct")
        if isinstance(length, int | float) and isinstance(count, int) and count > 0:
            total += length * count
            verifies += count
    return total / verifies if verifies else None
