"""`eagle-parity dump serving`: record what a live SGLang server hands to its draft."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle_parity.cli.dump_from import convert
from eagle_parity.cli.dump_returned import record
from eagle_parity.cli.options import MaxBytesOption, OutputOption, OverwriteOption
from eagle_parity.cli.output import say
from eagle_parity.cli.training import parse_boundaries
from eagle_parity.errors import EnvironmentFailure, InputError, UsageError

if TYPE_CHECKING:
    from eagle_parity.captures.prompts import Prompt
    from eagle_parity.captures.recording import Recording
    from eagle_parity.captures.server import Server
    from eagle_parity.records import Boundary

CAPTURE_DIR = "EAGLE_PARITY_CAPTURE_DIR"
BOUNDARIES = "EAGLE_PARITY_CAPTURE_BOUNDARIES"


@dataclass(frozen=True)
class _Probing:
    max_new_tokens: int
    warm_cache: bool
    started_here: bool
    allow_missing: bool
    boundaries: tuple[Boundary, ...] | None
    """To record beside the slots; None for all."""


def command(
    output: OutputOption,
    tokens_from: Annotated[
        Path | None,
        typer.Option(
            metavar="DUMP",
            envvar="EAGLE_PARITY_TOKENS_FROM",
            help="Send the token ids of this dump, a training dump mostly.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="EAGLE_PARITY_PROMPTS",
            help="Send these prompts through the server's own tokenizer and chat template.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", envvar="EAGLE_PARITY_SERVER", help="A server that runs with the capture plugin."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="Take what was recorded before, by SGLang's dumper, its --debug-tensor-dump-output-folder or "
            "vLLM's hidden-states connector.",
        ),
    ] = None,
    launch: Annotated[
        bool, typer.Option("--launch", help="Start a server with what follows `--`, and stop it at the end.")
    ] = False,
    capture_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", envvar=CAPTURE_DIR, help="With --server: the server's own EAGLE_PARITY_CAPTURE_DIR."
        ),
    ] = None,
    boundaries: Annotated[
        str,
        typer.Option(
            metavar="LIST|all",
            envvar="EAGLE_PARITY_BOUNDARIES",
            help="Record these boundaries of the target too, on a server started for that; then it needs no draft.",
        ),
    ] = "",
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", envvar="EAGLE_PARITY_MAX_NEW_TOKENS", help="Tokens generated a prompt, for verify rows."
        ),
    ] = 8,
    warm_cache: Annotated[
        bool,
        typer.Option(
            "--warm-cache",
            envvar="EAGLE_PARITY_WARM_CACHE",
            help="Let probes find prefixes in the server's cache; tokens found there have no rows.",
        ),
    ] = False,
    allow_missing_ranks: Annotated[
        bool,
        typer.Option(
            "--allow-missing-ranks",
            help="Record the ranks that write into --capture-dir and no others: those of other hosts, which write to "
            "disks of their own, are added by `dump merge`.",
        ),
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", envvar="EAGLE_PARITY_LIMIT", help="Only the first N prompts.")
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            metavar="S",
            envvar="EAGLE_PARITY_TIMEOUT",
            help="Seconds for the server to start, and for one answer.",
        ),
    ] = 600.0,
    max_bytes: MaxBytesOption = None,
    overwrite: OverwriteOption = False,
    server_command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD...]", help="The server's command, for --launch.")
    ] = None,
) -> None:
    """Record what a live SGLang server hands to its draft, on every tensor-parallel rank.

    The server needs the capture plugin: eagle-parity installed in its Python environment, and
    EAGLE_PARITY_CAPTURE_DIR set when it starts; for --boundaries, EAGLE_PARITY_CAPTURE_BOUNDARIES=all as well. --launch
    sets both. A server without it still gives the states of one rank if it was started with
    --enable-return-hidden-states; --from takes what was recorded before.
    """
    from eagle_parity.dump import DEFAULT_CAP, check_target

    words = server_command or []
    if source is not None:
        _check_alone(server is not None or launch or bool(words), prompts, boundaries)
        check_target(output, overwrite=overwrite)
        convert(source, tokens_from, output, limit, max_bytes or DEFAULT_CAP, overwrite=overwrite)
        return
    _check_choice(server, launch, words, prompts, tokens_from)
    chosen = _boundaries(boundaries)
    check_target(output, overwrite=overwrite)
    wanted = _prompts(prompts, tokens_from)[:limit]
    bare = None if server is None or boundaries.strip() else _without_plugin(server, capture_dir, timeout)
    if bare is not None:
        record(
            *bare,
            wanted,
            output,
            tokens_from=tokens_from,
            max_new_tokens=max_new_tokens,
            warm_cache=warm_cache,
            cap=max_bytes or DEFAULT_CAP,
            overwrite=overwrite,
        )
        return
    with _site(server, words, capture_dir, timeout, boundaries) as (running, directory):
        probing = _Probing(max_new_tokens, warm_cache, launch, allow_missing_ranks, chosen)
        _record(running, directory, wanted, probing, output, max_bytes or DEFAULT_CAP, overwrite)


def _check_alone(live: bool, prompts: Path | None, boundaries: str) -> None:
    """--from stands alone, but for --tokens-from."""
    unwanted = "--server and --launch" if live else "--prompts" if prompts else "--boundaries" if boundaries else None
    if unwanted is not None:
        raise UsageError(
            f"--from takes all states that were recorded before: {unwanted} can change nothing about them",
            fix=f"leave out {unwanted}; --tokens-from may give token ids that were not recorded",
        )


def _check_choice(
    server: str | None, launch: bool, words: list[str], prompts: Path | None, tokens_from: Path | None
) -> None:
    if launch == (server is not None):
        raise UsageError(
            "give either --server URL or --launch -- CMD…" + (", not both" if launch else ""),
            fix="--server records from a server that runs already, --launch starts one, --from PATH takes what was "
            "recorded before",
        )
    if launch and not words:
        raise UsageError(
            "--launch needs the server's command", fix="append it: --launch -- python -m sglang.launch_server …"
        )
    if words and not launch:
        raise UsageError(f"unexpected argument {words[0]!r}", fix="a server's command follows --launch --")
    if (prompts is None) == (tokens_from is None):
        raise UsageError(
            "give either --tokens-from DUMP or --prompts FILE" + ("" if prompts is None else ", not both"),
            fix="--tokens-from sends a dump's token ids; --prompts sends text through the server's tokenizer",
        )


def _boundaries(text: str) -> tuple[Boundary, ...] | None:
    """What --boundaries names; None for all, () where it is not given."""
    return None if text.strip() == "all" else parse_boundaries(text, "--boundaries") if text.strip() else ()


def _prompts(path: Path | None, tokens_from: Path | None) -> list[Prompt]:
    from eagle_parity.captures.prompts import Prompt, load_prompts

    if path is not None:
        return load_prompts(path)
    from eagle_parity.captures.replay import replay
    from eagle_parity.dump import open_dump

    assert tokens_from is not None
    found = replay(open_dump(tokens_from).tokens)
    for sentence in found.skipped:
        say(f"warning: {tokens_from}: {sentence}")
    if not found.sequences:
        raise InputError(
            f"{tokens_from} holds no sequence that begins at position 0, so there is nothing to send",
            fix="give a training dump, or a serving dump of prompts that did not come from a prefix cache",
        )
    return [Prompt(sequence.id, token_ids=sequence.token_ids) for sequence in found.sequences]


def _without_plugin(url: str, capture_dir: Path | None, timeout: float) -> tuple[Server, Mapping[str, Any]] | None:
    """A server that must be asked over HTTP alone, and its facts: no plugin has said hello, and it gives states."""
    from eagle_parity.captures.returned import allows
    from eagle_parity.captures.server import API_KEY, connect
    from eagle_parity.captures.spool import read_hellos

    if capture_dir is not None and read_hellos(capture_dir):
        return None
    running = connect(url, timeout=timeout, api_key=os.environ.get(API_KEY))
    info = running.info()
    return (running, info) if allows(info) else None


@contextmanager
def _site(
    server: str | None, words: list[str], capture_dir: Path | None, timeout: float, boundaries: str
) -> Iterator[tuple[Server, Path]]:
    from eagle_parity.captures.launch import launched
    from eagle_parity.captures.server import API_KEY, connect

    if server is None:
        environ = {BOUNDARIES: boundaries} if boundaries.strip() else {}
        with launched(words, timeout=timeout, environ=environ, say=say) as started:
            yield started
        return
    running = connect(server, timeout=timeout, api_key=os.environ.get(API_KEY))
    if capture_dir is None:
        from eagle_parity.captures.returned import FLAG
        from eagle_parity.captures.site import restart_advice

        version = running.info()["version"]
        raise EnvironmentFailure(
            f"{running.url} runs SGLang {version}, but neither --capture-dir nor {CAPTURE_DIR} says where its capture "
            "plugin writes",
            fix=f"{restart_advice(version)}. A server started with {FLAG} gives the states of one rank without it",
        )
    yield running, capture_dir


def _record(
    server: Server, directory: Path, prompts: list[Prompt], probing: _Probing, output: Path, cap: int, overwrite: bool
) -> None:
    from eagle_parity.captures.sglang import capture, estimate
    from eagle_parity.captures.site import check
    from eagle_parity.cli.output import progress
    from eagle_parity.dump import DumpWriter, check_size, human, planned_bytes

    site = check(
        server,
        directory,
        boundaries=probing.boundaries,
        started_here=probing.started_here,
        allow_missing=probing.allow_missing,
    )
    expected = estimate(site, prompts, probing.max_new_tokens)
    check_size(expected, output, cap)
    say(
        f"SGLang {site.info['version']}, {len(site.hellos)} ranks, {len(prompts)} prompts, about "
        f"{human(planned_bytes(expected))}"
    )
    with progress() as bar:
        task = bar.add_task("probing", total=len(prompts))
        recording = capture(
            site,
            prompts,
            max_new_tokens=probing.max_new_tokens,
            warm_cache=probing.warm_cache,
            progress=lambda done, what: bar.update(task, completed=done, description=what[:40]),
        )
        try:
            task = bar.add_task("writing", total=recording.stream.plan.tokens)
            with DumpWriter(output, recording.stream.plan, overwrite=overwrite, cap=cap) as writer:
                for sample in recording.stream.samples:
                    writer.add(sample)
                    bar.advance(task, len(sample.token_ids))
                writer.revise(recording.facts())
        finally:
            recording.discard()
    for message in recording.messages:
        say(message)
    _say_notes(recording)
    _say_missing(recording, output)
    print(_summary(output, recording))


def _say_notes(recording: Recording) -> None:
    notes = recording.notes
    if notes.unequal:
        say(
            f"warning: the draft was not given what the target computed in {notes.unequal} of {notes.compared} rows; "
            "the slots hold what the draft was given"
        )
    if notes.shifted:
        say(
            f"warning: the draft was not given the next tokens beside the states of {notes.shifted[0]} "
            f"and {len(set(notes.shifted)) - 1} more prompts"
        )


def _say_missing(recording: Recording, output: Path) -> None:
    from eagle_parity.records import rank_names

    missing = recording.stream.plan.facts.missing_ranks
    if missing:
        where = "another host and is" if len(missing) == 1 else "other hosts and are"
        say(
            f"warning: {rank_names(missing)} wrote on {where} not in {output}; copy the {CAPTURE_DIR} of each such "
            f"host here, then: eagle-parity dump merge -o FULL {output} COPY…"
        )


def _summary(output: Path, recording: Recording) -> str:
    from eagle_parity.dump import human, planned_bytes

    plan = recording.stream.plan
    specs = next(iter(plan.tensors.values()))
    rows = " + ".join(f"{count} {phase}" for phase, count in recording.phases.items())
    accept = "unknown" if recording.accept_length is None else f"{recording.accept_length:.2f}"
    parts = [f"{len(plan.tensors)} ranks"]
    for what, count in (("slots", plan.facts.slots), ("boundaries", len(specs) - plan.facts.slots)):
        if count:
            own = [
                s for specs in plan.tensors.values() for s in specs if s.name.startswith("slot.") == (what == "slots")
            ]
            parts.append(f"{count} {what} of {'/'.join(map(str, sorted({s.width for s in own})))} {own[0].dtype}")
    parts += [f"{rows} tokens", human(planned_bytes(plan))]
    if plan.facts.draft is not None:
        parts.append(f"accept length {accept}")
    return f"{output}: {', '.join(parts)}\n{recording.facts().source.detail}"
