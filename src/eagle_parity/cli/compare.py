"""`eagle-parity compare TRAINING SERVING`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eagle_parity.cli import options, output
from eagle_parity.cli import training as sides

if TYPE_CHECKING:
    from eagle_parity.diagnosis.replay import Replay
    from eagle_parity.records import Boundary, Finding, Report


@sides.takes_files
def command(
    training: options.Training,
    serving: options.Serving,
    draft: options.DraftOption = None,
    target: options.TargetOption = None,
    floor: options.FloorOption = None,
    how: sides.Files = sides.USUAL,
    format: options.FormatOption = options.Format.table,
    report: options.ReportOption = None,
) -> int:
    """Does each slot that the server feeds hold the boundary that the draft was trained on?

    Aligns both dumps by token, measures every slot on every rank against every stored boundary, and names what is
    wrong. Exit code: 0 pass, 1 fail, 3 inconclusive.
    """
    targets = options.report_targets(report)
    return output.deliver(measure(training, serving, draft, tuple(floor or ()), how, target), format, targets)


def measure(
    training: Path,
    serving: Path,
    draft: Path | None,
    floors: tuple[Path, ...],
    how: sides.Files,
    target: Path | None = None,
) -> Report:
    """Open both sides, measure and diagnose.

    Where the training side does not say what the slots were trained on and there is a draft, the draft is asked.
    """
    from eagle_parity.diagnosis.diagnose import diagnose
    from eagle_parity.diagnosis.expectation import declared_boundaries
    from eagle_parity.diagnosis.files.pointing import point
    from eagle_parity.diagnosis.layers import heed
    from eagle_parity.diagnosis.study import study
    from eagle_parity.draft.checkpoint import open_draft
    from eagle_parity.dump import open_dump

    theirs = open_dump(serving)
    ours = sides.open_side(training, how, theirs.facts.model)
    checkpoint = None if draft is None else open_draft(draft)
    ids = None if checkpoint is None else checkpoint.declared_ids
    proven: tuple[tuple[Boundary, ...], str] | None = None
    found: Replay | None = None
    doubt: Finding | None = None
    if checkpoint is not None and ours.facts.slot_boundaries is None:
        from eagle_parity.diagnosis.replay import try_replay

        with output.replaying() as step:
            found, doubt = try_replay(checkpoint, ours, target, step=step)
        proven = None if found is None or found.order is None else (found.order, found.source)
    with output.measuring() as step:
        case = study(
            ours,
            theirs,
            ids,
            floors=tuple(open_dump(path) for path in floors),
            references=sides.maps(how, theirs),
            proven=proven,
            step=step,
        )
        if ids is None and theirs.facts.draft is not None:
            ids = theirs.facts.draft.declared_ids
        declared = None if ids is None else declared_boundaries(ours.facts, theirs.facts, ids)
        return point(heed(diagnose(case, declared), case, found, doubt), checkpoint)
