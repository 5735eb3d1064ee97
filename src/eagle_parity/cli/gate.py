"""`eagle-parity gate TRAINING SERVING [--draft D]`: stands in front of a deploy."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from eagle_parity.cli import compare, options, output, which_layers


def command(
    training: options.Training,
    serving: options.Serving,
    draft: options.DraftOption = None,
    floor: options.FloorOption = None,
    format: Annotated[
        options.Format, typer.Option("--format", envvar="EAGLE_PARITY_FORMAT", help="What to print on stdout.")
    ] = options.Format.table,
    report: options.ReportOption = None,
) -> int:
    """compare and, with --draft, which-layers: the verdict, one line a finding, one exit code for a shell script."""
    from eagle_parity.gate import exit_code, lines, worst
    from eagle_parity.report import summary, to_document

    targets = options.report_targets(report)
    reports = [compare.measure(training, serving, draft, tuple(floor or ()))]
    if draft is not None:
        reports.append(which_layers.measure(training, serving, draft))
    verdict = worst(reports)
    decisive = next((r for r in reports if r.verdict == verdict), reports[0])
    text = "\n".join([f"{verdict.upper()} {summary(decisive)}", *lines(reports)]) + "\n"
    document = to_document(decisive) | {"command": "gate", "verdict": verdict}
    as_json = json.dumps(document, indent=1) + "\n"
    for kind, path in targets:
        output.write_text(path, as_json if kind is options.Format.json else text)
    typer.echo(as_json if format is options.Format.json else text, nl=False)
    return exit_code(verdict)
