"""`eagle-parity gate TRAINING SERVING [--draft D]`: stands in front of a deploy."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from eagle_parity.cli import compare, options, output, which_layers
from eagle_parity.cli import training as sides


def command(
    training: options.Training,
    serving: options.Serving,
    draft: options.DraftOption = None,
    floor: options.FloorOption = None,
    slots: sides.SlotsOption = None,
    reference: sides.ReferenceOption = None,
    reader: sides.ReaderOption = None,
    limit: sides.LimitOption = None,
    sample: sides.SampleOption = 0,
    strict: sides.StrictOption = False,
    format: Annotated[
        options.Format, typer.Option("--format", envvar="EAGLE_PARITY_FORMAT", help="What to print on stdout.")
    ] = options.Format.table,
    report: options.ReportOption = None,
) -> int:
    """compare and, with --draft, which-layers: the verdict, one line a finding, one exit code for a shell script."""
    from eagle_parity.gate import distinct, exit_code, lines, worst
    from eagle_parity.report import summary, to_document

    targets = options.report_targets(report)
    how = sides.files(reference, reader, slots, limit, sample, strict)
    reports = [compare.measure(training, serving, draft, tuple(floor or ()), how)]
    if draft is not None:
        reports.append(which_layers.measure(training, serving, draft, how))
    verdict = worst(reports)
    decisive = next((r for r in reports if r.verdict == verdict), reports[0])
    text = "\n".join([f"{verdict.upper()} {summary(decisive)}", *lines(reports)]) + "\n"
    document = to_document(decisive) | {"command": "gate", "verdict": verdict}
    whole = replace(decisive, command="gate", verdict=verdict, findings=distinct(reports))

    def content(kind: options.Format) -> str:
        if kind is options.Format.table:
            return text
        if kind is options.Format.json:
            return json.dumps(document, indent=1) + "\n"
        return output.render(whole, kind)

    for kind, path in targets:
        output.write_text(path, content(kind))
    with output.unread():
        typer.echo(content(format), nl=False)
    return exit_code(verdict)
