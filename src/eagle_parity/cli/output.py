"""What every command shares when it talks: errors on stderr or as JSON, the stderr console, progress."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_parity.cli import settings
from eagle_parity.cli.options import Format
from eagle_parity.errors import EnvironmentFailure

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from eagle_parity.records import Report

SCHEMA_VERSION = 1
PATIENCE = 1.0  # seconds that need no progress bar


def wants_json(args: Sequence[str]) -> bool:
    """Whether stdout was asked to be JSON, by flag, variable or settings file; the command line may not parse."""
    for flag, value in zip(args, [*args[1:], ""], strict=False):
        if flag == "--":
            break
        if flag == "--format":
            return value == "json"
        if flag.startswith("--format="):
            return flag == "--format=json"
    asked = os.environ.get("EAGLE_PARITY_FORMAT") or settings.asked_format(Path.cwd(), args)
    return bool(asked == "json")


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


def progress(*, percent: bool = False) -> Progress:
    """A progress bar on stderr with the elapsed and the remaining time; silent where stderr is no terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = stderr()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn() if percent else MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


@contextmanager
def measuring() -> Iterator[Callable[[float], None]]:
    """A progress bar over a comparison, shown once that has taken a second.

    Yields the function to call with shares of the work that are done, which add up to 1.
    """
    bar = progress(percent=True)
    task = bar.add_task("comparing", total=1.0)
    begin = time.monotonic()

    def step(share: float) -> None:
        bar.advance(task, share)
        if not bar.live.is_started and time.monotonic() - begin >= PATIENCE:
            bar.start()

    try:
        yield step
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar whose total is learnt on the way; yields the function to call with (done, total)."""
    with progress() as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def replaying() -> Iterator[Callable[[int], None]]:
    """A progress bar over rows replayed, whose total nobody knows; yields the function to call with rows done."""
    with progress() as bar:
        task = bar.add_task("replaying the draft", total=None)
        yield lambda done: bar.advance(task, done)


def say(text: str) -> None:
    """One line on stderr."""
    stderr().print(text, soft_wrap=True, markup=False)


def drop_stdout() -> None:
    """Send what is still to be printed nowhere, so that Python's own flush at the end does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def unread() -> Iterator[None]:
    """Printing a result whose reader may go away (`| head`): the exit code stays the verdict's."""
    try:
        yield
    except BrokenPipeError:
        drop_stdout()


def render(report: Report, format: Format, *, width: int | None = None) -> str:
    """A report as text; a terminal's colours are left to `deliver`."""
    from eagle_parity import report as reports

    if format is Format.json:
        return reports.to_json(report) + "\n"
    if format is Format.junit:
        return reports.to_junit(report)
    if format is Format.github:
        return reports.to_github(report)
    if format is Format.sarif:
        return reports.to_sarif(report)
    if format is Format.markdown:
        return reports.to_markdown(report)
    if format is Format.html:
        return reports.to_html(report)
    import io

    from rich.console import Console

    text = io.StringIO()
    reports.print_table(report, Console(file=text, width=width or 120, highlight=False))
    return text.getvalue()


def deliver(report: Report, format: Format, targets: Sequence[tuple[Format, Path]]) -> int:
    """Print a report, write the files asked for, and return its exit code."""
    from eagle_parity.gate import exit_code

    for kind, path in targets:
        write_text(path, render(report, kind))
    if format is Format.table:
        from rich.console import Console

        from eagle_parity.report import print_table

        with unread():
            print_table(report, Console(highlight=False))
    else:
        with unread():
            sys.stdout.write(render(report, format))
    return exit_code(report.verdict)


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():  # a pipe or a device is written to, never replaced
            path.write_text(text)
            return
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise EnvironmentFailure(
            f"cannot write {path}: {error.strerror}", fix="free disk space or choose another place"
        ) from error
