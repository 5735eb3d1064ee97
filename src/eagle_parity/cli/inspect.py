"""`eagle-parity inspect`: what lies at a path, from headers only."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle_parity.cli import output

if TYPE_CHECKING:
    from eagle_parity.draft.checkpoint import DraftCheckpoint
    from eagle_parity.readers import Training
    from eagle_parity.records import Boundary, Capture, Facts


class Format(str, enum.Enum):
    """What --format takes."""

    table = "table"
    json = "json"


@dataclass(frozen=True)
class Sheet:
    """An answer, ready to be printed: facts, a table, lists of sentences; and the same as JSON."""

    facts: Sequence[tuple[str, str]]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    lists: Mapping[str, Sequence[str]]
    document: Mapping[str, Any] = field(default_factory=dict)


def command(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A dump, training files as they lie on disk, or a draft checkpoint.")
    ],
    reader: Annotated[
        str | None,
        typer.Option(metavar="NAME", envvar="EAGLE_PARITY_READER", help="Read training files in this format."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            envvar="EAGLE_PARITY_MODEL",
            help="The target's directory; its config.json numbers blocks.",
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            envvar="EAGLE_PARITY_LIMIT",
            help="Look at N samples, spread over the files; tokens of all are then estimated.",
        ),
    ] = 64,
    sample: Annotated[
        int, typer.Option(metavar="SEED", envvar="EAGLE_PARITY_SAMPLE", help="Which samples --limit draws.")
    ] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", envvar="EAGLE_PARITY_STRICT", help="Exit 2 if any file cannot be used.")
    ] = False,
    format_: Annotated[
        Format, typer.Option("--format", envvar="EAGLE_PARITY_FORMAT", help="What goes to stdout.")
    ] = Format.table,
) -> None:
    """Tell what lies at PATH: format, samples, tokens, blocks, dtype, bytes a token, and what is assumed.

    Reads headers and token ids, never hidden states.
    """
    # Imported here, so that --help loads no torch.
    from eagle_parity.draft.checkpoint import is_draft, open_draft
    from eagle_parity.dump import open_dump
    from eagle_parity.readers import is_own_dump, open_training, read_model

    if reader is None and is_own_dump(path):
        sheet = describe_dump(open_dump(path))
    elif reader is None and ((path / "config.json").is_file() or is_draft(path)):
        sheet = describe_draft(open_draft(path))
    else:
        target = None if model is None else read_model(model)
        with output.progress() as progress:
            task = progress.add_task("samples", total=None)
            training = open_training(
                path,
                reader=reader,
                model=target,
                limit=limit,
                seed=sample,
                strict=strict,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
        sheet = describe_training(training)
    if format_ is Format.json:
        typer.echo(json.dumps({"schema_version": output.SCHEMA_VERSION, "command": "inspect", **sheet.document}))
    else:
        _show(sheet)


# ------------------------------------------------------------------------------------------------- training files


def describe_training(training: Training) -> Sheet:
    """The sheet of training files: blocks with their boundaries and who says so."""
    from eagle_parity.dump import human
    from eagle_parity.tensorfile import DTYPES

    state = training.width * DTYPES[training.stored_dtype].itemsize * len(training.blocks)
    disk = training.bytes_read / training.tokens
    whole = len(training.units) == training.available
    tokens = training.tokens if whole else round(training.tokens / len(training.units) * training.available)
    looked = "" if training.samples == training.available else f", {training.samples:,} looked at"
    bad = f", {len(training.problems)} unusable" if training.problems else ""
    stored = "" if training.stored_dtype == training.dtype else f", stored as {training.stored_dtype}"
    facts = [
        ("path", training.path),
        ("format", f"{training.format.title} ({training.format.name})"),
        ("samples", f"{training.available:,} in {training.files:,} files{looked}{bad}"),
        ("tokens", f"{tokens:,}" if whole else f"about {tokens:,} (from {training.tokens:,} in {len(training.units)})"),
        ("dtype", training.dtype + stored),
        ("bytes a token", f"{state:,} of hidden states, {disk:,.0f} on disk ({human(disk * tokens)} in all)"),
        ("loss mask", "yes" if training.has_mask else "unknown"),
    ]
    rows = [
        (
            block.role,
            "?" if block.boundary is None else str(block.boundary),
            f"{training.width:,}",
            training.stored_dtype,
            ("known: " if block.known else "assumed: " if block.boundary is not None else "") + block.basis,
        )
        for block in training.blocks
    ]
    document = {
        "kind": "training",
        "path": training.path,
        "format": training.format.name,
        "files": training.files,
        "samples": training.available,
        "samples_read": training.samples,
        "samples_usable": len(training.units),
        "tokens": tokens,
        "tokens_exact": whole,
        "dtype": training.dtype,
        "stored_dtype": training.stored_dtype,
        "hidden_size": training.width,
        "num_layers": training.model.num_layers,
        "bytes_per_token": state,
        "bytes_per_token_on_disk": round(disk, 1),
        "loss_mask": training.has_mask,
        "blocks": [
            {"role": b.role, "boundary": b.boundary, "known": b.known, "basis": b.basis} for b in training.blocks
        ],
        "assumptions": list(training.assumptions),
        "notes": list(training.notes),
        "problems": [{"sample": p.label, "reason": p.reason, "fix": p.fix} for p in training.problems],
    }
    lists = {
        "assumed": training.assumptions,
        "notes": training.notes,
        "not used": [problem.reason for problem in training.problems],
    }
    return Sheet(facts, ("block", "boundary", "width", "dtype", "who says so"), rows, lists, document)


# ------------------------------------------------------------------------------------------------------------ dumps


def describe_dump(capture: Capture) -> Sheet:
    """The sheet of a dump: its tensors, and on how many ranks each lies."""
    from eagle_parity.tensorfile import DTYPES

    facts, tokens = capture.facts, capture.tokens
    held = [(rank, name, capture.spec(rank, name)) for rank in capture.ranks for name in capture.names(rank)]
    size = sum(capture.length(rank, name) * spec.width * DTYPES[spec.dtype].itemsize for rank, name, spec in held)
    groups: dict[tuple[str, int, str, int], list[int]] = {}
    for rank, name, spec in held:
        groups.setdefault((name, spec.width, spec.dtype, capture.length(rank, name)), []).append(rank)
    trained = "unknown" if facts.slot_boundaries is None else ", ".join(map(str, facts.slot_boundaries))
    count = len(tokens.token_ids)
    phases = sorted({request.phase for request in tokens.requests})
    shown = [
        ("path", capture.path),
        ("format", f"eagle-parity dump, {facts.side} side"),
        ("source", _joined(facts.source.pipeline, facts.source.version)),
        ("model", _model(facts)),
        ("requests", f"{len(tokens.requests):,} ({', '.join(phases)})"),
        ("tokens", f"{count:,}"),
        ("ranks", ", ".join(map(str, capture.ranks)) + _missing(facts)),
        ("slots", f"{facts.slots} stored, trained on {trained}"),
        ("bytes a token", f"{size / max(1, count):,.0f} of hidden states"),
        ("loss mask", "unknown" if tokens.loss_mask is None else "yes"),
    ]
    if facts.engine is not None:
        shown.insert(4, ("engine", f"{_joined(facts.engine.name, facts.engine.version)}, tp {facts.engine.tp_size}"))
    rows = [
        (name, f"{length:,}", f"{width:,}", dtype, _ranks(ranks))
        for (name, width, dtype, length), ranks in groups.items()
    ]
    document = {
        "kind": "dump",
        "path": capture.path,
        "side": facts.side,
        "source": facts.source.pipeline,
        "model": facts.model.name,
        "hidden_size": facts.model.hidden_size,
        "num_layers": facts.model.num_layers,
        "requests": len(tokens.requests),
        "phases": phases,
        "tokens": count,
        "run": facts.run,
        "ranks": list(capture.ranks),
        "missing_ranks": list(facts.missing_ranks),
        "slots": facts.slots,
        "slot_boundaries": _listed(facts.slot_boundaries),
        "bytes_per_token": round(size / max(1, count), 1),
        "loss_mask": tokens.loss_mask is not None,
        "tensors": [
            {"name": name, "rows": length, "width": width, "dtype": dtype, "ranks": ranks}
            for (name, width, dtype, length), ranks in groups.items()
        ],
    }
    lists = {"source": [facts.source.detail] if facts.source.detail else []}
    return Sheet(shown, ("tensor", "rows", "width", "dtype", "ranks"), rows, lists, document)


def _joined(*parts: str | None) -> str:
    return " ".join(part for part in parts if part)


def _model(facts: Facts) -> str:
    model = facts.model
    known = {"hidden": model.hidden_size, "layers": model.num_layers, "vocabulary": model.vocab_size}
    sizes = ", ".join(f"{name} {value:,}" for name, value in known.items() if value is not None)
    return "; ".join(part for part in (_joined(model.name, model.architecture), sizes) if part) or "unknown"


def _missing(facts: Facts) -> str:
    ranks = ", ".join(map(str, facts.missing_ranks))
    return f" (missing: {ranks}; dump merge adds them)" if ranks else ""


def _ranks(ranks: Sequence[int]) -> str:
    dense = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}..{ranks[-1]}" if dense else ", ".join(map(str, ranks))


def _listed(boundaries: Sequence[Boundary] | None) -> list[Boundary] | None:
    return None if boundaries is None else list(boundaries)


# ----------------------------------------------------------------------------------------------------------- drafts


def describe_draft(draft: DraftCheckpoint) -> Sheet:
    """The sheet of a draft checkpoint: what it declares, and the tensors outside its layers."""
    ids = "none" if draft.declared_ids is None else ", ".join(map(str, draft.declared_ids))
    place = {"absent": "", "eagle_config": " (in eagle_config)", "top-level": " (at the top level)"}[draft.declared_in]
    flags = [
        name
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "bias")
        if getattr(draft, name)
    ]
    config = "" if draft.dialect == "none" else f", {draft.dialect} config"
    facts = [
        ("path", str(draft.path)),
        ("format", f"draft checkpoint, {draft.style}{config}"),
        ("architecture", draft.architecture or "unknown"),
        ("declared ids", ids + place),
        ("slots", f"{draft.num_slots} of {draft.target_hidden_size:,} (from fc.weight)"),
        ("hidden size", f"{draft.hidden_size:,}, layers {draft.num_layers}"),
        ("vocabulary", f"target {_number(draft.vocab_size)}, draft {_number(draft.draft_vocab_size)}"),
        ("switched on", ", ".join(flags) or "none of the norms and biases"),
        ("not declared", ", ".join(draft.undeclared) or "nothing"),
        ("missing", ", ".join(draft.missing) or "nothing"),
    ]
    outside = [tensor for name, tensor in draft.tensors.items() if not name.startswith("layers.")]
    rows = [(tensor.stored_name, str(list(tensor.shape)), tensor.dtype) for tensor in outside]
    inside = len(draft.tensors) - len(outside)
    rows.append((f"{inside} tensors in layers", "", ""))
    document = {
        "kind": "draft",
        "path": str(draft.path),
        "dialect": draft.dialect,
        "architecture": draft.architecture,
        "style": draft.style,
        "declared_ids": None if draft.declared_ids is None else list(draft.declared_ids),
        "declared_in": draft.declared_in,
        "num_slots": draft.num_slots,
        "hidden_size": draft.hidden_size,
        "target_hidden_size": draft.target_hidden_size,
        "num_layers": draft.num_layers,
        "vocab_size": draft.vocab_size,
        "draft_vocab_size": draft.draft_vocab_size,
        "norm_before_residual": draft.norm_before_residual,
        "norm_before_fc": draft.norm_before_fc,
        "fc_norm": draft.fc_norm,
        "norm_output": draft.norm_output,
        "bias": draft.bias,
        "undeclared": list(draft.undeclared),
        "missing": list(draft.missing),
        "quantization": draft.quantization,
        "notes": list(draft.notes),
        "tensors": [
            {"name": name, "stored_name": t.stored_name, "dtype": t.dtype, "shape": list(t.shape)}
            for name, t in draft.tensors.items()
        ],
    }
    return Sheet(facts, ("tensor", "shape", "dtype"), rows, {"notes": draft.notes}, document)


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


# -------------------------------------------------------------------------------------------------------- rendering


def _show(sheet: Sheet) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in sheet.facts:
        grid.add_row(label, Text(value))
    console.print(grid)
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for i, column in enumerate(sheet.columns):
        table.add_column(column, header_style="bold", overflow="fold", no_wrap=0 < i < len(sheet.columns) - 1)
    for row in sheet.rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print()
    console.print(table)
    for title, sentences in sheet.lists.items():
        if not sentences:
            continue
        listed = Table.grid(padding=(0, 1))
        for sentence in sentences:
            listed.add_row("-", Text(sentence, overflow="fold"))
        console.print()
        console.print(Text(title, style="bold"))
        console.print(listed)
