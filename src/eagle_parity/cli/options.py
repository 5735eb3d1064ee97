"""Options that several commands share."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from eagle_parity.errors import UsageError


class Format(str, enum.Enum):
    """What stdout is."""

    table = "table"
    json = "json"
    junit = "junit"
    github = "github"
    sarif = "sarif"
    markdown = "markdown"
    html = "html"


Training = Annotated[
    Path, typer.Argument(help="The training side: a dump, or training files as they lie on disk.", show_default=False)
]
Serving = Annotated[Path, typer.Argument(help="The serving dump.", show_default=False)]
DraftOption = Annotated[
    Path | None,
    typer.Option("--draft", envvar="EAGLE_PARITY_DRAFT", help="The draft checkpoint (its declared layer ids)."),
]
TargetOption = Annotated[
    Path | None,
    typer.Option(
        "--target",
        metavar="DIR",
        envvar="EAGLE_PARITY_TARGET",
        help="The target model's directory: its embedding and head, for replaying the draft.",
    ),
]
FloorOption = Annotated[
    list[Path] | None,
    typer.Option("--floor", help="A serving dump known to be healthy; its distances are the floor. Repeatable."),
]
FormatOption = Annotated[
    Format, typer.Option("--format", envvar="EAGLE_PARITY_FORMAT", help="What to print on stdout.")
]
ReportOption = Annotated[
    list[str] | None,
    typer.Option("--report", metavar="FORMAT=PATH", help="Also write a report to a file. Repeatable."),
]


def report_targets(values: list[str] | None) -> tuple[tuple[Format, Path], ...]:
    """Parse `--report FORMAT=PATH`; UsageError before any work is done for a bad one."""
    targets = []
    for value in values or ():
        name, separator, path = value.partition("=")
        if not separator or name not in Format.__members__ or not path:
            raise UsageError(
                f"--report {value!r} is not FORMAT=PATH", fix=f"FORMAT is one of {', '.join(Format.__members__)}"
            )
        if not Path(path).absolute().parent.is_dir():
            raise UsageError(f"--report: {Path(path).parent} is not a directory", fix="create it first")
        targets.append((Format[name], Path(path)))
    return tuple(targets)
