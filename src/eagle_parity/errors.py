"""What can go wrong because of something the user can change. Everything else is a bug (exit 70).

EagleParityError
├── UsageError            exit 2   flags, config, settings
├── InputError            exit 2   a file or a dump that cannot be used
│   └── NotADumpError              not a dump, or an unfinished one
└── EnvironmentFailure    exit 4   server down, timeout, disk full, a missing optional package
"""

from __future__ import annotations

from typing import ClassVar


class EagleParityError(Exception):
    """An error with a remedy.

    `message` tells what is wrong and where (side, rank, slot, token; expected against got), `fix` what to do
    about it. `code` is a stable word for JSON consumers.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


class UsageError(EagleParityError):
    """Flags, settings or arguments that do not fit together."""

    code = "usage"


class InputError(EagleParityError):
    """A file, directory or dump that cannot be used as it is."""

    code = "input"


class NotADumpError(InputError):
    """Not a dump directory, or one whose writer did not finish."""

    code = "not-a-dump"


class EnvironmentFailure(EagleParityError):
    """The world outside: server down, timeout, disk full, optional package missing."""

    code = "environment"
    exit_code = 4
