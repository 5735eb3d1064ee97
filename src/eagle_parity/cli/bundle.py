"""Options that several commands share, as one parameter of each command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

Result = TypeVar("Result")


def bundle(name: str, make: Callable[..., object]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """The command line gets the parameters of `make` in the place of parameter `name`; the command what `make` returns.

    Typer sees the options of `make` as if they stood in the command's own signature.
    """
    shared = _parameters(make)

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        parameters = [q for p in _parameters(command) for q in (shared if p.name == name else [p])]

        @functools.wraps(command)
        def run(**given: Any) -> Result:
            made = make(**{parameter.name: given.pop(parameter.name) for parameter in shared})
            return command(**given, **{name: made})

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True)
    return [p.replace(annotation=hints[p.name]) for p in inspect.signature(function).parameters.values()]
