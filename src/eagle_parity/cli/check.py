"""`eagle-parity check --draft D`: files and flags only, no GPU, no server needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle_parity.cli import options, output
from eagle_parity.errors import UsageError

if TYPE_CHECKING:
    from eagle_parity.diagnosis.files.deployment import Deployment
    from eagle_parity.records import Engine

_SECONDS = 10.0


def command(
    draft: Annotated[
        Path | None, typer.Option("--draft", envvar="EAGLE_PARITY_DRAFT", help="The draft checkpoint (required).")
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            "--target", envvar="EAGLE_PARITY_TARGET", help="The target model's directory, or its config.json."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="ENGINE==VERSION",
            envvar="EAGLE_PARITY_ENGINE",
            help="The engine that will serve the draft: sglang==VERSION or vllm==VERSION.",
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option("--tp", min=1, metavar="N", envvar="EAGLE_PARITY_TP", help="Its tensor-parallel size."),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL", envvar="EAGLE_PARITY_SERVER", help="Take version, sizes and flags from a running server."
        ),
    ] = None,
    format: options.FormatOption = options.Format.table,
    report: options.ReportOption = None,
    server_command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- CMD...]", help="The server's command line, for its flags."),
    ] = None,
) -> int:
    """Is anything wrong already on paper? Draft config and headers, target config, engine, version, flags.

    Every finding has a source and a fix, and points at its line in config.json (--format github annotates it). Exit
    code: 0 nothing wrong, 1 something is, 3 the meaning of the layer ids is not known for this engine and model.
    """
    from eagle_parity.diagnosis.files.inspection import inspect_files

    if draft is None:
        raise UsageError("check needs the draft checkpoint", fix="give it with --draft DIR")
    targets = options.report_targets(report)
    return output.deliver(
        inspect_files(gather(draft, target, engine, tp, server, server_command or [])), format, targets
    )


def gather(
    draft: Path, target: Path | None, engine: str | None, tp: int | None, server: str | None, words: list[str]
) -> Deployment:
    """Open the files and put the engine together from --engine, --tp, the server, or its command line."""
    from eagle_parity.diagnosis.files.deployment import Deployment, command_flags, read_target
    from eagle_parity.draft.checkpoint import open_draft

    if server is not None and words:
        raise UsageError("give either --server URL or the server's command, not both", fix="leave one out")
    flags = _ask(server) if server is not None else command_flags(words)
    return Deployment(
        open_draft(draft), None if target is None else read_target(target), _engine(engine, tp, flags, server)
    )


def _engine(text: str | None, tp: int | None, flags: Mapping[str, Any], server: str | None) -> Engine | None:
    from eagle_parity.diagnosis.files.deployment import engine_of

    asked = options.parse_engine(text, ("sglang", "vllm"))
    version = flags.get("version") if server is not None else None
    if asked is None and version is None:
        if tp is not None or flags:
            raise UsageError(
                "--tp and the server's flags mean nothing without its version",
                fix="add --engine sglang==VERSION or vllm==VERSION, or ask a running server with --server",
            )
        return None
    if asked is not None and version is not None and (asked.name, asked.version) != ("sglang", version):
        raise UsageError(f"--engine {text}, but {server} runs sglang=={version}", fix="leave --engine out")
    name = "sglang" if asked is None else asked.name
    return engine_of(name, str(version if asked is None else asked.version), flags, tp)


def _ask(url: str) -> Mapping[str, Any]:
    from eagle_parity.captures.server import API_KEY, connect

    return connect(url, timeout=_SECONDS, api_key=os.environ.get(API_KEY)).info()
