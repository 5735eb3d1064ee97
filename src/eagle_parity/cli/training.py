"""The TRAINING argument: a dump, or training files as they lie on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from eagle_parity.cli import output
from eagle_parity.cli.bundle import bundle
from eagle_parity.errors import UsageError
from eagle_parity.records import FINAL_NORM, Boundary

if TYPE_CHECKING:
    from eagle_parity.readers import Training
    from eagle_parity.records import Capture, Model

ReferenceOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--reference",
        metavar="DUMP",
        help="A dump with all boundaries of the target: the blocks of training files are recognised by it, and compare "
        "names by it what a slot holds that TRAINING does not store.",
    ),
]
ReaderOption: TypeAlias = Annotated[
    str | None, typer.Option("--reader", metavar="NAME", help="Training files only: their format, instead of guessing.")
]
SlotsOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--slots",
        metavar="LIST",
        envvar="EAGLE_PARITY_SLOTS",
        help="What the draft was trained on, in the order of its fc input, as boundaries: 3,31,59.",
    ),
]
LimitOption: TypeAlias = Annotated[
    int | None,
    typer.Option("--limit", min=1, metavar="N", help="Training files only: samples to take.  [default: 64]"),
]
SampleOption: TypeAlias = Annotated[
    int, typer.Option("--sample", metavar="SEED", help="Training files only: which samples --limit draws.")
]
StrictOption: TypeAlias = Annotated[
    bool, typer.Option("--strict", help="Training files only: one unusable file is an error (exit code 2).")
]


@dataclass(frozen=True)
class Files:
    """How training files are to be opened."""

    reference: Path | None = None
    reader: str | None = None
    slots: tuple[Boundary, ...] | None = None
    limit: int | None = None
    seed: int = 0
    strict: bool = False


USUAL = Files()


def parse_boundaries(text: str, flag: str) -> tuple[Boundary, ...]:
    """`2,3,final.norm` -> (2, 3, "final.norm"). Raises UsageError naming the flag."""
    found: list[Boundary] = []
    for part in (part.strip() for part in text.split(",")):
        if part == FINAL_NORM:
            found.append(FINAL_NORM)
        elif part.removeprefix("-").isdecimal():
            found.append(int(part))
        else:
            raise UsageError(
                f"{flag}: expected numbers and {FINAL_NORM}, separated by commas, got {text!r}",
                fix=f"write it like {flag} 2,3,5",
            )
    return tuple(found)


def files(
    reference: ReferenceOption = None,
    reader: ReaderOption = None,
    slots: SlotsOption = None,
    limit: LimitOption = None,
    sample: SampleOption = 0,
    strict: StrictOption = False,
) -> Files:
    """The options as given on a command line. Raises UsageError for --slots that are no boundaries."""
    chosen = None if slots is None else parse_boundaries(slots, "--slots")
    return Files(reference, reader, chosen, limit, sample, strict)


takes_files = bundle("how", files)
"""Decorates a command that takes training files: `how` comes from the options of `files`."""


def open_side(path: Path, how: Files, model: Model | None = None) -> Capture:
    """The training side of a comparison. `model` (the serving side's) numbers blocks that the files do not number."""
    from eagle_parity import readers
    from eagle_parity.dump import open_dump

    layers = None if model is None else model.num_layers
    beyond = [b for b in how.slots or () if layers is not None and isinstance(b, int) and b > layers]
    if beyond:
        raise UsageError(
            f"--slots: {beyond} is beyond the model's boundaries 0 to {layers}", fix=f"name boundaries of 0 to {layers}"
        )
    if not path.exists() or readers.is_own_dump(path):
        dump = open_dump(path)
        return dump if how.slots is None else replace(dump, facts=replace(dump.facts, slot_boundaries=how.slots))
    return readers.capture_training(open_files(path, how, model, limit=how.limit or readers.DIRECT_LIMIT))


def maps(how: Files, serving: Capture) -> tuple[Capture, ...]:
    """Captures that stand in for boundaries which the training side lacks: --reference, and what the server shows."""
    from eagle_parity.dump import open_dump

    given = () if how.reference is None else (open_dump(how.reference),)
    return (*given, serving) if serving.facts.boundaries else given


def open_files(path: Path, how: Files, model: Model | None, *, limit: int | None) -> Training:
    """Open training files, recognise their blocks, leave out samples that are not finite; says what it met."""
    from eagle_parity import readers
    from eagle_parity.dump import open_dump

    with output.counting("training files") as step:
        training = readers.open_training(
            path,
            reader=how.reader,
            model=model,
            slots=how.slots,
            limit=limit,
            seed=how.seed,
            strict=how.strict,
            progress=step,
        )
        if how.reference is not None:
            training = readers.establish(training, open_dump(how.reference))
        training = training.finite(strict=how.strict, progress=step)
    for problem in training.problems:
        output.say(f"warning: {problem.reason}")
    for sentence in _distinct((*training.assumptions, *training.notes)):
        output.say(sentence)
    return training


def _distinct(sentences: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(sentences))
