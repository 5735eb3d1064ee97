"""`eagle-parity which-layers --draft D TRAINING [SERVING]`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle_parity.cli import options, output
from eagle_parity.cli import training as sides
from eagle_parity.errors import UsageError

if TYPE_CHECKING:
    from eagle_parity.records import Engine, Report


@sides.takes_files
def command(
    training: options.Training,
    serving: Annotated[Path | None, typer.Argument(help="The serving dump.", show_default=False)] = None,
    draft: Annotated[
        Path | None, typer.Option("--draft", envvar="EAGLE_PARITY_DRAFT", help="The draft checkpoint (required).")
    ] = None,
    target: options.TargetOption = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", metavar="sglang==VERSION", help="Without SERVING: the engine to judge the config for."
        ),
    ] = None,
    how: sides.Files = sides.USUAL,
    format: options.FormatOption = options.Format.table,
    report: options.ReportOption = None,
) -> int:
    """Which layers, in which order: trained on, fed by the server, declared by the config; and the line to write.

    The trained order is proven by replaying the draft on the training states in every order; where the data cannot
    tell, it is what the training side declares (--slots).
    """
    if draft is None:
        raise UsageError("which-layers needs the draft checkpoint", fix="give it with --draft DIR")
    targets = options.report_targets(report)
    return output.deliver(measure(training, serving, draft, how, options.parse_engine(engine), target), format, targets)


def measure(
    training: Path,
    serving: Path | None,
    draft: Path,
    how: sides.Files,
    engine: Engine | None = None,
    target: Path | None = None,
) -> Report:
    """Open what is given, replay the draft, and put the answers side by side."""
    from eagle_parity.diagnosis.files.pointing import point
    from eagle_parity.diagnosis.layers import compare_layers, declare_layers, trained_order
    from eagle_parity.diagnosis.replay import try_replay
    from eagle_parity.diagnosis.study import study
    from eagle_parity.draft.checkpoint import open_draft
    from eagle_parity.dump import open_dump

    checkpoint = open_draft(draft)
    theirs = None if serving is None else open_dump(serving)
    ours = sides.open_side(training, how, None if theirs is None else theirs.facts.model)
    with output.replaying() as step:
        found, doubt = try_replay(checkpoint, ours, target, step=step)
    if theirs is None:
        return point(declare_layers(ours, checkpoint, engine, found, doubt), checkpoint)
    known = trained_order(ours, found)
    with output.measuring() as step:
        references = sides.maps(how, theirs)
        case = study(ours, theirs, checkpoint.declared_ids, references=references, proven=known, step=step)
        return point(compare_layers(case, checkpoint, found, doubt), checkpoint)
