"""Settings files: eagle-parity.toml, else [tool.eagle-parity] in pyproject.toml, of the current directory.

A table a command, a key an option (`[compare] format = "json"`, `[dump.serving] timeout = 900`). A flag beats an
EAGLE_PARITY_* variable, that beats the file, that beats the default.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_parity.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load(directory: Path, command: Any) -> dict[str, Any]:
    """The defaults that the settings file gives, as click's `default_map`. `command` is the root command.

    Raises UsageError for a file that is no TOML, and for a table or key that no command knows.
    """
    path, table = _read(directory)
    return _checked(path, table, command, ()) if table else {}


def asked_format(directory: Path, args: Sequence[str]) -> Any:
    """What the settings file says of the `format` of the command that `args` start with.

    For error messages, which may be about this very file: what cannot be read says nothing.
    """
    try:
        _, table = _read(directory)
    except UsageError:
        return None
    asked = None
    for word in args:
        if not isinstance(table.get(word), dict):
            break
        table = table[word]
        asked = table.get("format")
    return asked


def _read(directory: Path) -> tuple[Path, dict[str, Any]]:
    """The settings file and its content; the first one that says anything. UsageError when it is no TOML."""
    for name, keys in (("eagle-parity.toml", ()), ("pyproject.toml", ("tool", "eagle-parity"))):
        path = directory / name
        if not path.is_file():
            continue
        try:
            table: Any = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is not TOML: {error}", fix="correct the file, or remove it") from None
        for key in keys:
            table = table.get(key, {}) if isinstance(table, dict) else {}
        if table and isinstance(table, dict):
            return path, table
    return directory, {}


def _checked(path: Path, table: Mapping[str, Any], command: Any, place: tuple[str, ...]) -> dict[str, Any]:
    commands = getattr(command, "commands", {})
    options = {option.lstrip("-"): parameter.name for parameter in command.params for option in parameter.opts}
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key in commands and isinstance(value, dict):
            found[key] = _checked(path, value, commands[key], (*place, key))
        elif key in options and place:
            found[options[key]] = value
        else:
            known = ", ".join(sorted([*commands, *(options if place else ())]))
            raise UsageError(f"{path}: [{'.'.join(place)}] has no setting {key!r}", fix=f"known here: {known}")
    return found
