"""Which boundary each stored block is, and who says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle_parity.errors import InputError, UsageError
from eagle_parity.readers.format import Format, Recorded
from eagle_parity.records import FINAL_NORM, Boundary


@dataclass(frozen=True)
class Block:
    """One stored block. `boundary` is None where nobody knows it; `known` tells a fact from an assumption."""

    role: str
    """`slot J`, as the trainer joins them, or `last`."""
    boundary: Boundary | None
    known: bool
    basis: str
    """Who says so: a side file, a flag, a reference, or the pipeline's default."""


def number(
    format_: Format,
    slots: int,
    has_last: bool,
    *,
    num_layers: int | None,
    recorded: Recorded | None,
    given: Sequence[Boundary] | None,
) -> tuple[Block, ...]:
    """The blocks in stored order, the last state at the end. Facts first: `--slots`, side file, pipeline default.

    Raises UsageError for `--slots` that do not fit, InputError for a side file that contradicts the files or target.
    """
    if given is not None:
        blocks = _given(format_, slots, has_last, num_layers, tuple(given))
    elif recorded is not None and _fits(recorded, slots, has_last):
        named = [Block(f"slot {j}", b, True, recorded.where) for j, b in enumerate(recorded.slots)]
        if recorded.last is not None:
            named.append(Block("last", recorded.last, True, recorded.where))
        elif has_last:
            named.append(_default_last(format_, num_layers))
        blocks = tuple(named)
    else:
        blocks = _default(format_, slots, has_last, num_layers)
    _check(blocks, num_layers, "--slots" if given is not None else None)
    return blocks


def _fits(recorded: Recorded, slots: int, has_last: bool) -> bool:
    return len(recorded.slots) == slots and (recorded.last is None or has_last)


def _given(
    format_: Format, slots: int, has_last: bool, num_layers: int | None, given: tuple[Boundary, ...]
) -> tuple[Block, ...]:
    total = slots + has_last
    if len(given) == total and has_last and format_.one_tensor:
        roles = [*(f"slot {j}" for j in range(slots)), "last"]
        return tuple(Block(role, b, True, "--slots") for role, b in zip(roles, given, strict=True))
    if len(given) != slots:
        also = f" (or {total}, the last state with them)" if format_.one_tensor and has_last else ""
        raise UsageError(
            f"--slots names {len(given)} boundaries, the files hold {slots} slots{also}",
            fix="name one boundary a stored block, in stored order",
        )
    named = tuple(Block(f"slot {j}", b, True, "--slots") for j, b in enumerate(given))
    return (*named, _default_last(format_, num_layers)) if has_last else named


def _default(format_: Format, slots: int, has_last: bool, num_layers: int | None) -> tuple[Block, ...]:
    default = format_.default_slots(num_layers) if format_.default_slots and num_layers is not None else ()
    usable = len(default) == slots and len(set(default)) == slots and all(0 < b < (num_layers or 0) for b in default)
    basis = f"{format_.name} default" if usable else "unknown"
    named = tuple(Block(f"slot {j}", default[j] if usable else None, False, basis) for j in range(slots))
    return (*named, _default_last(format_, num_layers)) if has_last else named


def _default_last(format_: Format, num_layers: int | None) -> Block:
    if format_.last == "post":
        return Block("last", FINAL_NORM, False, f"{format_.name} default")
    return Block("last", num_layers, False, f"{format_.name} default" if num_layers is not None else "unknown")


def _check(blocks: Sequence[Block], num_layers: int | None, flag: str | None) -> None:
    kind = UsageError if flag else InputError
    numbered = [block for block in blocks if block.boundary is not None]
    for block in numbered:
        if isinstance(block.boundary, int) and not 0 <= block.boundary <= (num_layers or block.boundary):
            raise kind(
                f"{flag or block.basis} puts {block.role} at boundary {block.boundary}, the target has {num_layers}",
                fix="check the number of layers (--model) and the boundaries",
            )
    names = [block.boundary for block in numbered]
    twice = next((b for b in names if names.count(b) > 1), None)
    if twice is not None:
        raise kind(
            f"boundary {twice} is given to {' and '.join(b.role for b in numbered if b.boundary == twice)}",
            fix="name every stored block once",
        )


def assumptions(format_: Format, blocks: Sequence[Block], num_layers: int | None) -> tuple[str, ...]:
    """What is taken for granted about the blocks, a sentence each, for the report."""
    sentences = []
    slots = [block for block in blocks if block.role != "last"]
    assumed = [block for block in slots if not block.known]
    if assumed and all(block.boundary is not None for block in assumed):
        listed = ", ".join(str(block.boundary) for block in assumed)
        sentences.append(
            f"the slots are boundaries {listed}, the default for {num_layers} layers, because no file records them "
            f"({format_.default_source})"
        )
    elif assumed:
        why = (
            "no file records them, and the default needs the target's number of layers"
            if num_layers is None
            else f"no file records them, and the default for {num_layers} layers does not fit {len(slots)} slots"
        )
        sentences.append(f"the boundaries of the {len(slots)} slots are unknown: {why}")
    for block in blocks:
        if block.role == "last" and not block.known:
            sentences.append(_last_sentence(format_, block))
    return tuple(sentences)


def _last_sentence(format_: Format, block: Block) -> str:
    if block.boundary == FINAL_NORM:
        return f"the last state is after the final norm ({format_.last_source})"
    at = (
        f"boundary {block.boundary}, the last one"
        if block.boundary is not None
        else "at the last boundary, whose number is not known"
    )
    return f"the last state is {at}, before the final norm ({format_.last_source})"
