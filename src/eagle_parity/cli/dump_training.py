"""`eagle-parity dump training`: the states that the draft was trained on, from a forward of the target."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from eagle_parity.cli import output
from eagle_parity.cli import training as sides
from eagle_parity.cli.options import MaxBytesOption
from eagle_parity.errors import InputError, UsageError
from eagle_parity.records import FINAL_NORM

if TYPE_CHECKING:
    from eagle_parity.captures.prompts import TokenSequence
    from eagle_parity.captures.target import Target
    from eagle_parity.dump import DumpWriter
    from eagle_parity.records import Stream

T = TypeVar("T")


class Dtype(str, enum.Enum):
    """What --dtype takes."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(str, enum.Enum):
    """What --device takes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def command(
    out: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", envvar="EAGLE_PARITY_OUTPUT", help="Where the dump goes.")
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", envvar="EAGLE_PARITY_MODEL", help="The target: a directory, or a hub name."),
    ] = None,
    source_files: Annotated[
        Path | None,
        typer.Option("--from", metavar="PATH", help="Take the states from training files instead of a forward."),
    ] = None,
    reader: sides.ReaderOption = None,
    reference: sides.ReferenceOption = None,
    strict: sides.StrictOption = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="EAGLE_PARITY_PROMPTS",
            help="JSONL with text, messages or token_ids a line; or plain text, one prompt a line.",
        ),
    ] = None,
    tokens_from: Annotated[
        Path | None,
        typer.Option(metavar="DUMP", envvar="EAGLE_PARITY_TOKENS_FROM", help="Replay the token ids of this dump."),
    ] = None,
    boundaries: Annotated[
        str,
        typer.Option(
            metavar="LIST|all",
            envvar="EAGLE_PARITY_BOUNDARIES",
            help="Boundaries to store: k enters layer k, 0 is the embedding; and final.norm.",
        ),
    ] = "all",
    slots: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            envvar="EAGLE_PARITY_SLOTS",
            help="What the draft was trained on, in the order of its fc input, as boundaries: 3,31,59.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", envvar="EAGLE_PARITY_LIMIT", help="Take N prompts: the first N, or see --sample."
        ),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(metavar="SEED", envvar="EAGLE_PARITY_SAMPLE", help="Draw the N prompts of --limit at random."),
    ] = None,
    max_tokens_per_prompt: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", envvar="EAGLE_PARITY_MAX_TOKENS_PER_PROMPT", help="Cut longer prompts after N tokens."
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(envvar="EAGLE_PARITY_DTYPE", help="Compute in this dtype.  [default: the config's]"),
    ] = None,
    device: Annotated[Device, typer.Option(envvar="EAGLE_PARITY_DEVICE", help="Where to run.")] = Device.auto,
    max_bytes: MaxBytesOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", envvar="EAGLE_PARITY_OVERWRITE", help="Replace what is at DIR.")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", envvar="EAGLE_PARITY_TRUST_REMOTE_CODE", help="Run code that comes with the model."
        ),
    ] = False,
) -> None:
    """Record what the draft should be fed: the target's hidden states at its layer boundaries.

    From a forward with Hugging Face transformers, one prompt at a time in the model's dtype (--model, and either
    --prompts or --tokens-from), or from training files as they lie on disk (--from).
    """
    if source_files is not None:
        if prompts is not None or tokens_from is not None:
            raise UsageError(
                "--from takes tokens and states from the files", fix="leave out --prompts and --tokens-from"
            )
        how = sides.files(reference, reader, slots, limit, sample or 0, strict)
        _convert(source_files, how, model, boundaries, out, overwrite, max_bytes)
        return
    if model is None:
        raise UsageError("no source was given", fix="give --model DIR with --prompts FILE, or --from PATH")
    if (prompts is None) == (tokens_from is None):
        raise UsageError(
            "expected one of --prompts and --tokens-from, got " + ("none" if prompts is None else "both"),
            fix="give --prompts FILE, or --tokens-from with a dump whose token ids are to be replayed",
        )
    if sample is not None and limit is None:
        raise UsageError("--sample draws the prompts that --limit counts", fix="give --limit N too")
    chosen = None if boundaries.strip() == "all" else sides.parse_boundaries(boundaries, "--boundaries")
    trained = None if slots is None else sides.parse_boundaries(slots, "--slots")

    # Imported here, so that a wrong command line is answered, and --help printed, without loading torch.
    from eagle_parity import dump
    from eagle_parity.captures import hf, target

    dump.check_target(out, overwrite=overwrite)
    source = target.read_target(model, dtype=dtype and dtype.value, trust_remote_code=trust_remote_code)
    hf.check_boundaries(source, chosen or (), "--boundaries")
    hf.check_boundaries(source, trained or (), "--slots")
    if prompts is not None:
        sequences = _from_prompts(prompts, source, limit, sample)
    else:
        assert tokens_from is not None
        sequences = _from_dump(tokens_from, source, limit, sample)
    sequences = [_cut(sequence, max_tokens_per_prompt) for sequence in sequences]
    stream = hf.capture(
        source,
        sequences,
        hf.all_boundaries(source) if chosen is None else chosen,
        slot_boundaries=trained,
        device=device.value,
        say=output.say,
    )
    size = dump.human(dump.planned_bytes(stream.plan))
    output.say(
        f"{len(sequences)} prompts, {stream.plan.tokens} tokens, {len(stream.plan.tensors[0])} boundaries: {size}"
    )
    cap = dump.DEFAULT_CAP if max_bytes is None else max_bytes
    # The writer claims its place before the weights are loaded: minutes, for a large target.
    with dump.DumpWriter(out, stream.plan, overwrite=overwrite, cap=cap) as writer:
        output.say(f"loading {model}")
        _write(writer, stream)
    typer.echo(f"{out}: {len(sequences)} requests, {stream.plan.tokens} tokens, {size}")
    typer.echo("boundaries " + _listed(stream) + ("" if trained is None else f"; slots {', '.join(map(str, trained))}"))


def _convert(
    path: Path, how: sides.Files, model: str | None, boundaries: str, out: Path, overwrite: bool, max_bytes: int | None
) -> None:
    """Write a dump from training files, or from a part of another dump."""
    from eagle_parity import dump, readers

    dump.check_target(out, overwrite=overwrite)
    chosen = None if boundaries.strip() == "all" else sides.parse_boundaries(boundaries, "--boundaries")
    if readers.is_own_dump(path):
        stream = readers.stream_capture(dump.open_dump(path), chosen, limit=how.limit, seed=how.seed)
    else:
        target = None if model is None else readers.read_model(Path(model))
        stream = readers.stream_training(sides.open_files(path, how, target, limit=how.limit), chosen)
    size = dump.human(dump.planned_bytes(stream.plan))
    output.say(f"{stream.plan.tokens} tokens, {len(stream.plan.tensors[0])} boundaries: {size}")
    cap = dump.DEFAULT_CAP if max_bytes is None else max_bytes
    with dump.DumpWriter(out, stream.plan, overwrite=overwrite, cap=cap) as writer:
        _write(writer, stream)
    typer.echo(f"{out}: {stream.plan.tokens} tokens, {size}")
    trained = stream.plan.facts.slot_boundaries
    typer.echo("boundaries " + _listed(stream) + ("" if trained is None else f"; slots {', '.join(map(str, trained))}"))


def _from_prompts(path: Path, source: Target, limit: int | None, seed: int | None) -> list[TokenSequence]:
    from eagle_parity.captures import prompts, target

    loaded = _chosen(prompts.load_prompts(path), limit, seed)
    tokenizer = None
    if any(prompt.token_ids is None for prompt in loaded):
        tokenizer = target.read_tokenizer(source)
    return [prompts.tokenize(prompt, tokenizer) for prompt in loaded]


def _from_dump(path: Path, source: Target, limit: int | None, seed: int | None) -> list[TokenSequence]:
    from eagle_parity.captures.replay import replay
    from eagle_parity.dump import open_dump

    opened = open_dump(path)
    served = opened.facts.model
    for name, theirs, ours in (
        ("hidden_size", served.hidden_size, source.hidden_size),
        ("num_layers", served.num_layers, source.num_layers),
    ):
        if theirs is not None and theirs != ours:
            raise InputError(
                f"{path} is a dump of another model: {name} {theirs}, {source.name} has {ours}",
                fix="give the --model that the server runs",
            )
    found = replay(opened.tokens)
    for why in found.skipped:
        output.say(f"warning: not replayed: {why}")
    if not found.sequences:
        raise InputError(
            f"{path}: none of its {len(opened.tokens.requests)} requests can be replayed"
            + (f": {found.skipped[0]}" if found.skipped else ""),
            fix="record the server again with a cold prefix cache, so that the dump holds whole prompts",
        )
    return _chosen(found.sequences, limit, seed)


def _chosen(items: Sequence[T], limit: int | None, seed: int | None) -> list[T]:
    if limit is None or limit >= len(items):
        return list(items)
    kept = range(limit) if seed is None else sorted(random.Random(seed).sample(range(len(items)), limit))
    return [items[i] for i in kept]


def _cut(sequence: TokenSequence, most: int | None) -> TokenSequence:
    from eagle_parity.captures.prompts import TokenSequence

    return TokenSequence(sequence.id, sequence.token_ids[:most])


def _write(writer: DumpWriter, stream: Stream) -> None:
    with output.progress() as progress:
        task = progress.add_task("tokens", total=stream.plan.tokens)
        for sample in stream.samples:
            writer.add(sample)
            progress.advance(task, len(sample.token_ids))


def _listed(stream: Stream) -> str:
    """Boundaries as people write them: 0..6, final.norm or 2, 3, 5."""
    numbers = stream.plan.facts.boundaries
    dense = len(numbers) > 2 and numbers == tuple(range(numbers[0], numbers[-1] + 1))
    parts = [f"{numbers[0]}..{numbers[-1]}"] if dense else [str(k) for k in numbers]
    if any(spec.name == FINAL_NORM for spec in stream.plan.tensors[0]):
        parts.append(FINAL_NORM)
    return ", ".join(parts)
