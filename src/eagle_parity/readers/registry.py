"""The formats that can be read, a line each, and which of them a path holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_parity.errors import InputError, UsageError
from eagle_parity.readers import angelslim, baldeagle, modelopt, nemo, specforge, speculators, torchspec, vllm
from eagle_parity.readers.contents import open_contents
from eagle_parity.readers.files import spread
from eagle_parity.readers.format import Format

FORMATS: tuple[Format, ...] = (
    specforge.FORMAT,
    speculators.V0,
    speculators.V1,
    speculators.HS,
    vllm.FORMAT,
    modelopt.FORMAT,
    angelslim.FORMAT,
    baldeagle.FORMAT,
    torchspec.FORMAT,
    nemo.FORMAT,
)
_PROBES = 4
"""Files looked at over the whole path, and as many directories of which the first file is."""
_TRIES = 256
"""Files tried when all of those are unreadable."""


def named(name: str) -> Format:
    """The format of `--reader NAME`. Raises UsageError listing the names."""
    for candidate in FORMATS:
        if candidate.name == name:
            return candidate
    raise UsageError(
        f"--reader {name}: no such reader", fix="choose one of " + ", ".join(format_.name for format_ in FORMATS)
    )


@dataclass(frozen=True)
class _Probe:
    """What one file turned out to be. The file itself is closed again."""

    file: Path
    holds: str
    matching: tuple[Format, ...]


def sniff(path: Path, files: Sequence[Path], formats: Sequence[Format] = FORMATS) -> Format:
    """The one format that recognises the files of a path, by their keys and shapes.

    Raises InputError when none or more than one does, naming what was seen and where.
    """
    probes, unreadable = _look(_probes(files), formats)
    if not probes:
        probes, unreadable = _look(files[:_TRIES], formats, enough=1)
    if not probes:
        raise _unreadable(path, unreadable)
    found = {candidate.name: (candidate, probe.file) for probe in reversed(probes) for candidate in probe.matching}
    if len(found) == 1:
        return next(iter(found.values()))[0]
    if found:
        places = ", ".join(f"{name} ({file})" for name, (_, file) in found.items())
        raise InputError(
            f"{path} could be read as more than one format: {places}",
            fix="give the directory of one of them, or choose with --reader",
        )
    names = ", ".join(candidate.name for candidate in formats)
    raise InputError(
        f"{path} is in no format that is known. {probes[0].file} holds {probes[0].holds}",
        fix=f"give the directory of the hidden states, or choose a reader with --reader ({names})",
    )


def _look(
    files: Sequence[Path], formats: Sequence[Format], enough: int | None = None
) -> tuple[list[_Probe], list[InputError]]:
    probes: list[_Probe] = []
    unreadable: list[InputError] = []
    for file in files:
        try:
            contents = open_contents(file)
        except InputError as error:
            unreadable.append(error)
            continue
        matching = tuple(
            candidate
            for candidate in formats
            if file.name.endswith(candidate.suffixes) and candidate.recognises(contents)
        )
        probes.append(_Probe(file, contents.describe(), matching))
        if len(probes) == enough:
            break
    return probes, unreadable


def _unreadable(path: Path, errors: Sequence[InputError]) -> InputError:
    if len(errors) == 1:
        return errors[0]
    return InputError(
        f"{path}: none of {len(errors)} files can be read. The first: {errors[0].message}", fix=errors[0].fix
    )


def _probes(files: Sequence[Path]) -> list[Path]:
    """Some files over the whole path, and the first of some directories: mixed formats mostly lie side by side."""
    first = list({file.parent: file for file in reversed(files)}.values())
    chosen = [files[i] for i in spread(len(files), _PROBES)] + [first[i] for i in spread(len(first), _PROBES)]
    return list(dict.fromkeys(chosen))
