"""`eagle-parity explain [CODE]`: what a finding means. Prints from the one catalogue, `diagnosis.faults`."""

from __future__ import annotations

import difflib
import enum
import json
from typing import Annotated

import typer

from eagle_parity.cli import output
from eagle_parity.errors import UsageError


class ExplainFormat(str, enum.Enum):
    """What explain can print."""

    text = "text"
    markdown = "markdown"
    json = "json"


def command(
    code: Annotated[str | None, typer.Argument(help="A finding code.", show_default=False)] = None,
    format: Annotated[ExplainFormat, typer.Option("--format", help="What to print.")] = ExplainFormat.text,
) -> None:
    """What a finding code means: cause, how it looks, how to confirm, how to fix, public sources.

    Without CODE: the list of codes; with --format markdown, docs/faults.md.
    """
    from eagle_parity.diagnosis.faults import FAULTS, find
    from eagle_parity.report import explanation

    if code is None:
        faults = FAULTS
    else:
        found = find(code)
        if found is None:
            near = difflib.get_close_matches(code, [fault.code for fault in FAULTS], n=1, cutoff=0.4)
            raise UsageError(
                f"no finding is called {code!r}",
                fix=(f"did you mean {near[0]}? " if near else "") + "`eagle-parity explain` lists the codes",
            )
        faults = (found,)
    if format is ExplainFormat.json:
        documents = [explanation.to_document(fault) for fault in faults]
        content = documents if code is None else documents[0]
        key = "faults" if code is None else "fault"
        print(json.dumps({"schema_version": output.SCHEMA_VERSION, key: content}, indent=1))
    elif format is ExplainFormat.markdown:
        print(explanation.to_markdown(faults, whole=code is None), end="")
    elif code is None:
        print(explanation.to_list(faults), end="")
    else:
        print(explanation.to_text(faults[0]), end="")
