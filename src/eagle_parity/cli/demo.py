"""`eagle-parity demo`: a wiring fault found and named, then the healthy pass, on dumps that come with the package."""

from __future__ import annotations

from pathlib import Path

import typer

import eagle_parity
from eagle_parity.cli import compare, output
from eagle_parity.cli import training as sides
from eagle_parity.cli.options import Format

_STEPS = (
    ("A draft that was trained on boundaries 2, 4, 6; its config.json says [0, 2, 4]:", "serving-wrong", "fail"),
    ("The same server with [2, 4, 6]:", "serving", "pass"),
)


def command() -> int:
    """A wiring fault found and named, then the healthy pass: recorded on two H200 GPUs, no server, seconds.

    Exit code: 0 when both came out as they must.
    """
    place = Path(eagle_parity.__file__).parent / "demo"
    typer.echo("Recorded from a live SGLang server at TP=2 on two H200 GPUs; every 112th channel of 7168.")
    for text, serving, verdict in _STEPS:
        typer.echo(f"\n{text}\n$ eagle-parity compare {place / 'training'} {place / serving}\n")
        report = compare.measure(place / "training", place / serving, None, (), sides.Files())
        output.deliver(report, Format.table, ())
        if report.verdict != verdict:
            raise RuntimeError(f"the demo's {serving} came out as {report.verdict}, not {verdict}")
    typer.echo("\nOn your own: `eagle-parity check`, `dump training`, `dump serving`, `compare`; each has --help.")
    return 0
