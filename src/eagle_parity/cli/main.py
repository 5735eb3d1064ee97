"""The `eagle-parity` command: the tree of commands, and how errors become exit codes.

Commands import what they need when they run, so that `--help` loads neither torch nor sglang.
"""

from __future__ import annotations

import errno
import io
import sys
import traceback
from pathlib import Path

import typer

from eagle_parity import __version__
from eagle_parity.cli import (
    check,
    compare,
    demo,
    dump_merge,
    dump_serving,
    dump_training,
    explain,
    gate,
    inspect,
    output,
    settings,
    which_layers,
)
from eagle_parity.errors import EagleParityError, EnvironmentFailure, UsageError

BUG = 70
_SURROUNDINGS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EPIPE)
INTERRUPTED = 130
# Typer brings its own copy of click since 0.26 and uses the installed one before: ask it for the base of its errors.
ClickException = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    name="eagle-parity",
    help="Does the live server feed an EAGLE-3 draft the hidden states it was trained on?\n\n"
    "Exit codes: 0 pass, 1 parity failed, 2 usage or unreadable input, 3 inconclusive, 4 environment, 70 bug, "
    "130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
dump = typer.Typer(
    help="Record the hidden states of one side into a dump.", no_args_is_help=True, rich_markup_mode=None
)
dump.command("training")(dump_training.command)
dump.command("serving", context_settings={"allow_interspersed_args": False})(dump_serving.command)
dump.command("merge")(dump_merge.command)
app.add_typer(dump, name="dump")
app.command("compare")(compare.command)
app.command("which-layers")(which_layers.command)
app.command("check")(check.command)
app.command("gate")(gate.command)
app.command("inspect")(inspect.command)
app.command("explain")(explain.command)
app.command("demo")(demo.command)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"eagle-parity {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    del version
    context.default_map = settings.load(Path.cwd(), context.command)


def main(args: list[str]) -> int:
    """Run one command line and return its exit code. A user's mistake never shows a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a path that the terminal cannot show is no reason to fail
    try:
        result = app(args, standalone_mode=False)
        with output.unread():
            sys.stdout.flush()
    except EagleParityError as error:
        return output.show_error(error.code, error.message, error.fix, error.exit_code, as_json=output.wants_json(args))
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except OSError as error:
        if error.errno not in _SURROUNDINGS:
            return _bug(error, args)
        output.drop_stdout()  # it may be what cannot be written
        message, fix = f"{error.strerror}: {error.filename or 'the output'}", "free disk space, or check permissions"
        return output.show_error(
            EnvironmentFailure.code, message, fix, EnvironmentFailure.exit_code, as_json=output.wants_json(args)
        )
    except Exception as error:
        if isinstance(error, ClickException):
            if not output.wants_json(args):
                error.show()  # type: ignore[attr-defined]
            message = error.format_message()  # type: ignore[attr-defined]
            return output.show_error(
                UsageError.code,
                message,
                "see --help",
                UsageError.exit_code,
                as_json=output.wants_json(args),
                quiet=True,
            )
        return _bug(error, args)
    if result == INTERRUPTED:  # newer typers turn Ctrl-C into this result themselves
        print("interrupted; nothing was kept", file=sys.stderr)
    return result if isinstance(result, int) else 0


def _bug(error: Exception, args: list[str]) -> int:
    traceback.print_exception(error)
    fix = "this is a bug in eagle-parity: report it with the traceback above"
    return output.show_error("bug", f"{type(error).__name__}: {error}", fix, BUG, as_json=output.wants_json(args))


def run() -> None:
    """The console script."""
    sys.exit(main(sys.argv[1:]))
