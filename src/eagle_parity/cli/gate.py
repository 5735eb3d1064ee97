"""`eagle-parity gate (REPORT... | TRAINING SERVING)`: stands in front of a deploy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle_parity.cli import compare, options, output, which_layers
from eagle_parity.cli import training as sides
from eagle_parity.errors import UsageError

if TYPE_CHECKING:
    from eagle_parity.gate import Judged

_MEASURING = ("draft", "floor", "slots", "reference", "reader", "limit", "sample", "strict")


@sides.takes_files
def command(
    context: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="REPORT... | TRAINING SERVING",
            help="JSON reports written before, or both sides, which are then compared.",
            show_default=False,
        ),
    ],
    policy: Annotated[
        Path | None,
        typer.Option(
            "--policy",
            metavar="FILE",
            envvar="EAGLE_PARITY_POLICY",
            help="TOML: situations that must have been seen, warnings that fail, rows that must be aligned.",
        ),
    ] = None,
    draft: options.DraftOption = None,
    floor: options.FloorOption = None,
    how: sides.Files = sides.USUAL,
    format: options.FormatOption = options.Format.table,
    report: options.ReportOption = None,
) -> int:
    """The worst verdict of reports, or of compare and (with --draft) which-layers; one line a finding; one exit code.

    0 only where a slot was measured, everything passed, and what the policy requires was seen.
    """
    from eagle_parity.gate import Policy, decide, exit_code, lines, read_policy
    from eagle_parity.report import summary

    targets = options.report_targets(report)
    asked = Policy() if policy is None else read_policy(policy)
    if _are_reports(paths):
        given = [name for name in _MEASURING if _on_command_line(context, name)]
        if given:
            raise UsageError(f"--{given[0]} means nothing for reports that are measured", fix="leave it out")
        judged = _read(paths)
    else:
        judged = _measure(paths[0], paths[1], draft, tuple(floor or ()), how)
    whole = decide(judged, asked)
    text = "\n".join([f"{whole.verdict.upper()} {summary(whole)}", *lines(whole)]) + "\n"

    def content(kind: options.Format) -> str:
        return text if kind is options.Format.table else output.render(whole, kind)

    for kind, path in targets:
        output.write_text(path, content(kind))
    with output.unread():
        typer.echo(content(format), nl=False)
    return exit_code(whole.verdict)


def _are_reports(paths: Sequence[Path]) -> bool:
    """A serving dump is a directory, a report is a file."""
    if len(paths) == 2 and not paths[1].is_file() and paths[1].suffix != ".json":
        return False
    if len(paths) == 1 and not paths[0].is_file() and paths[0].suffix != ".json":
        raise UsageError(
            f"gate needs reports, or TRAINING and SERVING; got {paths[0]} alone",
            fix="gate TRAINING SERVING, or gate REPORT.json…",
        )
    return True


def _on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _read(paths: Sequence[Path]) -> list[Judged]:
    from eagle_parity.gate import Judged, refuse_contradictions
    from eagle_parity.report import read_report

    judged = [Judged(str(path), read_report(path)) for path in paths]
    for entry in judged:
        refuse_contradictions(entry)
    return judged


def _measure(
    training: Path, serving: Path, draft: Path | None, floors: tuple[Path, ...], how: sides.Files
) -> list[Judged]:
    from eagle_parity.gate import Judged

    judged = [Judged(None, compare.measure(training, serving, draft, floors, how))]
    if draft is not None:
        judged.append(Judged(None, which_layers.measure(training, serving, draft, how)))
    return judged
