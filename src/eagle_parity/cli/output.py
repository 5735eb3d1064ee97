"""What every command shares when it talks: errors on stderr or as JSON, the stderr console, progress."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

SCHEMA_VERSION = 1


def wants_json(args: Sequence[str]) -> bool:
    """Whether stdout was asked to be JSON, known before the command line is parsed (it may not parse)."""
    for flag, value in zip(args, [*args[1:], ""], strict=True):
        if flag == "--":
            break
        if flag == "--format":
            return value == "json"
        if flag.startswith("--format="):
            return flag == "--format=json"
    return os.environ.get("EAGLE_PARITY_FORMAT") == "json"


def show_error(code: str, message: str, fix: str, exit_code: int, *, as_json: bool, quiet: bool = False) -> int:
    """Print an error (JSON on stdout, or text on stderr) and hand its exit code back."""
    if as_json:
        error = {"code": code, "message": message, "fix": fix}
        print(json.dumps({"schema_version": SCHEMA_VERSION, "error": error}))
    elif not quiet:
        print(f"error: {message}\n  fix: {fix}", file=sys.stderr)
    return exit_code


def stderr() -> Console:
    """The console for progress and logs; stdout belongs to results."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def progress() -> Progress:
    """A progress bar on stderr with the elapsed and the remaining time; silent where stderr is no terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = stderr()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
