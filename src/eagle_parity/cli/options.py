"""Options that several commands share."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle_parity.errors import UsageError

if TYPE_CHECKING:
    from eagle_parity.records import Engine


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
OutputOption = Annotated[
    Path, typer.Option("-o", "--output", metavar="DIR", envvar="EAGLE_PARITY_OUTPUT", help="The dump to write.")
]
MaxBytesOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", envvar="EAGLE_PARITY_MAX_BYTES", help="Refuse a larger dump.  [default: 64 GiB]"),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what is at -o.")]


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


def parse_engine(text: str | None, known: tuple[str, ...] = ("sglang",)) -> Engine | None:
    """`sglang==0.5.23` -> Engine. UsageError for anything else, and for an engine that the command does not know."""
    from eagle_parity.records import Engine

    if text is None:
        return None
    name, separator, version = text.partition("==")
    spelled = " or ".join(f"{engine}==VERSION" for engine in known)
    if separator and name not in known:
        raise UsageError(f"--engine {text!r}: {name!r} is no engine that is known here", fix=f"give {spelled}")
    if not separator or not version[:1].isdigit():
        raise UsageError(f"--engine {text!r} is not {spelled}", fix="for example --engine sglang==0.5.23")
    return Engine(name=name, version=version)
