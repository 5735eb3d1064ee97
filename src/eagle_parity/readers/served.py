"""What people recorded of a server before they had this program -> samples of a serving dump.

Which tool wrote a directory is told by content. What it does not say is left out or named as unknown, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_parity.errors import InputError
from eagle_parity.readers import dumper, modules, tensordump, vllm
from eagle_parity.readers.contents import open_contents
from eagle_parity.readers.files import find_files, is_own_dump
from eagle_parity.readers.modules import Recipe
from eagle_parity.readers.passes import TOKEN_IDS, Pass, Passes
from eagle_parity.readers.spans import Found, LengthsDiffer, Span, given, has_tokens, spans
from eagle_parity.records import Facts, Model, Plan, Sample, Source, Stream, TensorSpec
from eagle_parity.tensorfile import dtype_name

_SOURCES: tuple[tuple[Callable[[Sequence[Path]], bool], Callable[[Path, Sequence[Path]], Passes]], ...] = (
    (dumper.recognises, dumper.open_passes),
    (tensordump.recognises, tensordump.open_passes),
)


@dataclass(frozen=True)
class Known:
    """What the user knows beside the files: a dump's sequences in order, its number of layers and slots."""

    path: str
    sequences: tuple[tuple[str, tuple[int, ...]], ...]
    num_layers: int | None = None
    slots: int | None = None


@dataclass(frozen=True)
class Served:
    """A stream for the dump writer, and a sentence for each thing that is not in it."""

    stream: Stream
    title: str
    notes: tuple[str, ...]


def open_served(path: Path, known: Known | None = None, *, limit: int | None = None) -> Served:
    """Open a directory that a server's debugging aid or connector wrote; `limit` takes the first N sequences.

    Raises InputError naming what was seen: no such directory, nothing of use in it, ranks that saw different tokens,
    token ids that nobody recorded and `known` does not fit.
    """
    if path.is_dir() and is_own_dump(path):
        raise InputError(f"{path} is an eagle-parity dump already", fix="use it as it is; `dump merge` joins several")
    files = find_files(path)
    torch_files = [file for file in files if file.name.endswith(".pt")]
    for recognises, open_passes in _SOURCES:
        if recognises(torch_files):
            return _from_passes(open_passes(path, torch_files), known, limit)
    stacks = [file for file in files if file.suffix == ".safetensors"]
    if stacks and vllm.recognises(stacks):
        connector = vllm.open_connector(path, stacks, None if known is None else known.slots)
        return Served(connector.stream(None if known is None else known.num_layers, limit), vllm.TITLE, connector.notes)
    raise InputError(
        f"{path} is nothing that a server's debugging aid wrote. {files[0]} holds {_describe(files[0])}",
        fix="give a directory of SGLang's dumper, of --debug-tensor-dump-output-folder, or of vLLM's hidden-states "
        "connector; training files are for `dump training --from`",
    )


def _describe(file: Path) -> str:
    try:
        return open_contents(file).describe()
    except InputError as error:
        return f"something else ({error.message})"


# ------------------------------------------------------------------------------------------------------ passes


def _from_passes(source: Passes, known: Known | None, limit: int | None) -> Served:
    first = min(source.ranks)
    usable, layers, left_out = _target_passes(source, None if known is None else known.num_layers)
    recipe_of = usable[min(usable)]
    own = {number: source.ranks[first][number] for number in usable}
    found = _spans(source, own, recipe_of, known)
    _check_ranks(source, usable)
    chosen = _first(found.spans, limit)
    if not chosen:
        raise InputError(
            f"{source.path}: none of {len(own)} forwards has rows whose tokens and context are known: "
            + "; ".join(f"{count} {why}" for why, count in found.left_out.items()),
            fix="record whole prompts: after the dumping began, with a cold prefix cache",
        )
    specs = {rank: _specs(source, rank, min(usable), recipe_of) for rank in source.ranks}
    notes = [*left_out, *(f"{count} {why}" for why, count in found.left_out.items())]
    notes += _gaps(source, recipe_of)
    plan = Plan(
        _facts(source, recipe_of, specs[first], layers, notes),
        sum(span.end - span.begin for span in chosen),
        specs,
        columns=("parents", "accepted") if any(span.phase == "verify" for span in chosen) else (),
    )
    return Served(Stream(plan, _samples(source, chosen, recipe_of, specs)), source.title, tuple(notes))


def _target_passes(
    source: Passes, num_layers: int | None
) -> tuple[dict[int, dict[str, Recipe]], int | None, list[str]]:
    """The passes that all ranks have and that hold the most, the number of layers, and why the others are out."""
    common = set.intersection(*(set(passes) for passes in source.ranks.values()))
    everything = set.union(*(set(passes) for passes in source.ranks.values()))
    first = source.ranks[min(source.ranks)]
    targets = [number for number in sorted(common) if not modules.is_draft(first[number].tensors)]
    proofs = (modules.proven_layers(first[number]) for number in targets)
    layers = next((count for count in proofs if count is not None), num_layers)
    made = {number: modules.recipes(first[number], layers) for number in targets}
    made = {
        number: found
        for number, found in made.items()
        if found and all(_holds(passes[number], found) for passes in source.ranks.values())
    }
    if not made:
        raise InputError(
            f"{source.path}: {source.title} of {len(common)} forwards without a tensor that is a boundary or a slot. "
            f"It holds {_names(first)}",
            fix="with the dumper set DUMPER_NON_INTRUSIVE_MODE=all and let DUMPER_FILTER pass input_layernorm, norm, "
            "embed_tokens and logits_processor; CUDA graphs must be off",
        )
    richest = max(made.values(), key=len)
    usable = {number: found for number, found in made.items() if found == richest}
    notes = []
    if len(common) > len(usable):
        notes.append(f"{len(common) - len(usable)} of {len(common)} forwards are a draft's, or hold fewer tensors")
    if len(everything) > len(common):
        notes.append(f"{len(everything) - len(common)} forwards are not there on all ranks")
    return usable, layers, notes


def _holds(one: Pass, found: Mapping[str, Recipe]) -> bool:
    return all(part in one.tensors for recipe in found.values() for part in recipe.parts)


def _names(passes: Mapping[int, Pass]) -> str:
    seen = list(dict.fromkeys(name for one in passes.values() for name in one.tensors))
    return ", ".join(seen[:6]) + (f", … ({len(seen)} names)" if len(seen) > 6 else "") or "nothing"


def _spans(source: Passes, own: Mapping[int, Pass], recipe_of: Mapping[str, Recipe], known: Known | None) -> Found:
    if has_tokens(own):
        return spans(own)
    if known is None:
        raise InputError(
            f"{source.path}: the forwards do not say their token ids ({TOKEN_IDS} and positions were not recorded)",
            fix="give the dump whose tokens were sent, with --tokens-from; it must have as many sequences of the same "
            "lengths in the same order",
        )
    measured = next(iter(recipe_of.values()))
    rows = {number: measured.make(one).shape[0] for number, one in sorted(own.items())}
    try:
        return _as_recorded(source, own, known, given(own, rows, known.sequences))
    except LengthsDiffer as error:
        raise InputError(
            f"{source.path}: its forwards of more than one row have {_counts(error.lengths)} rows, the sequences of "
            f"{known.path} have {_counts([len(ids) for _, ids in known.sequences])}; nothing else says which is which",
            fix="send exactly the sequences of that dump, one after the other, each in one forward, and record again",
        ) from None


def _as_recorded(source: Passes, own: Mapping[int, Pass], known: Known, found: Found) -> Found:
    """Token ids may be there where positions are not: then they must be those given."""
    for span in found.spans:
        recorded = own[span.number].integers(TOKEN_IDS)
        if recorded is not None and recorded != list(span.token_ids):
            raise InputError(
                f"{source.path}: {own[span.number].label} computed other tokens than those of {span.request} in "
                f"{known.path}",
                fix="give the dump whose tokens were sent, in that order",
            )
    return found


def _counts(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths[:8])) + (f", … ({len(lengths)} in all)" if len(lengths) > 8 else "") or "no"


def _check_ranks(source: Passes, usable: Mapping[int, object]) -> None:
    """All ranks must have seen the same tokens. Raises InputError naming the first forward where they did not."""
    first = min(source.ranks)
    for number in usable:
        want = source.ranks[first][number].integers(TOKEN_IDS)
        for rank, passes in source.ranks.items():
            if passes[number].integers(TOKEN_IDS) != want:
                raise InputError(
                    f"{source.path}: forward {number}: rank {rank} computed other tokens than rank {first}",
                    fix="with data-parallel attention every group of ranks has its own tokens: give one group's files",
                )


def _first(found: Sequence[Span], limit: int | None) -> list[Span]:
    labels = list(dict.fromkeys(span.request for span in found))[:limit]
    return [span for span in found if span.request in labels]


def _specs(source: Passes, rank: int, number: int, recipe_of: Mapping[str, Recipe]) -> list[TensorSpec]:
    one = source.ranks[rank][number]
    made = {name: recipe.make(one) for name, recipe in recipe_of.items()}
    return [TensorSpec(name, tensor.shape[1], dtype_name(tensor.dtype)) for name, tensor in made.items()]


def _facts(
    source: Passes,
    recipe_of: Mapping[str, Recipe],
    specs: Sequence[TensorSpec],
    layers: int | None,
    notes: Sequence[str],
) -> Facts:
    slots = sum(name.startswith("slot.") for name in recipe_of)
    unknown = ["version", "flags", "model", "draft"]
    if any(recipe.parts[0].startswith("layers.") and len(recipe.parts) > 1 for recipe in recipe_of.values()):
        notes = [*notes, "some boundaries are a layer's own part plus the stream, as each rank held them"]
    detail = "; ".join([f"{source.title}; not recorded: {', '.join(unknown)}", *notes])
    dtype = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(specs[0].dtype)
    return Facts(
        side="serving",
        source=Source("sglang", None, detail),
        model=Model(hidden_size=specs[0].width, num_layers=layers, dtype=dtype),
        engine=source.engine,
        boundaries=tuple(int(name.split(".")[1]) for name in recipe_of if name.startswith("boundary.")),
        slots=slots,
    )


def _gaps(source: Passes, recipe_of: Mapping[str, Recipe]) -> list[str]:
    """What a reader of the dump would look for in vain."""
    notes = []
    missing = sorted(set(range(source.engine.tp_size or 0)) - set(source.ranks))
    if missing:
        notes.append(f"no files of rank {', '.join(map(str, missing))} of {source.engine.tp_size}")
    elif len(source.ranks) == 1:
        notes.append("one rank only: how the ranks hold a tensor cannot be judged")
    if not any(name.startswith("slot.") for name in recipe_of):
        notes.append("what the target hands to a draft is not among the tensors: boundaries only")
    return notes


def _samples(
    source: Passes,
    chosen: Sequence[Span],
    recipe_of: Mapping[str, Recipe],
    specs: Mapping[int, Sequence[TensorSpec]],
) -> Iterator[Sample]:
    made: dict[int, dict[str, torch.Tensor]] = {}
    number = None
    for span in chosen:
        if span.number != number:  # the spans of a pass follow one another
            number = span.number
            made = {
                rank: {name: recipe.make(passes[number]) for name, recipe in recipe_of.items()}
                for rank, passes in source.ranks.items()
            }
            for rank, own in made.items():
                _check_shapes(source, source.ranks[rank][number], own, specs[rank], span.forward_tokens)
        count = span.end - span.begin
        yield Sample(
            span.request,
            span.token_ids,
            span.positions,
            {rank: {name: own[name][span.begin : span.end] for name in own} for rank, own in made.items()},
            phase=span.phase,
            batch=span.batch,
            graph=source.graph,
            forward_tokens=span.forward_tokens,
            parents=tuple(range(-1, count - 1)),
            accepted=(1,) * count,
        )


def _check_shapes(
    source: Passes, one: Pass, own: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec], rows: int
) -> None:
    """Every tensor of a pass has a row a token, and the width and dtype of the first pass. Raises InputError."""
    for spec in specs:
        tensor = own[spec.name]
        if tuple(tensor.shape) != (rows, spec.width) or dtype_name(tensor.dtype) != spec.dtype:
            raise InputError(
                f"{source.path}: {one.label}: {spec.name} is {list(tensor.shape)} {tensor.dtype}, expected "
                f"{[rows, spec.width]} {spec.dtype}",
                fix="record again; this forward does not fit its tokens or the other forwards",
            )
