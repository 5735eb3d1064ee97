"""The training capture: one forward of the target a prompt through transformers, its residual stream recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from eagle_parity.captures.decoder import Decoder, load_decoder, pick_device
from eagle_parity.captures.prompts import TokenSequence
from eagle_parity.captures.target import Target
from eagle_parity.errors import EnvironmentFailure, InputError, UsageError
from eagle_parity.records import FINAL_NORM, Boundary, Facts, Plan, Sample, Source, Stream, TensorSpec, boundary_name

if TYPE_CHECKING:
    import torch


def all_boundaries(target: Target) -> tuple[Boundary, ...]:
    """Every boundary of a target: 0..n and `final.norm`."""
    return (*range(target.num_layers + 1), FINAL_NORM)


def check_boundaries(target: Target, boundaries: Sequence[Boundary], flag: str) -> None:
    """Raise UsageError, naming the flag, for a boundary that the target has not."""
    for boundary in boundaries:
        if boundary != FINAL_NORM and not 0 <= boundary <= target.num_layers:
            raise UsageError(
                f"{flag}: {boundary} is no boundary of {target.name}, which has {target.num_layers} layers",
                fix=f"give numbers from 0 (embedding) to {target.num_layers} (after the last layer), or {FINAL_NORM}",
            )


def capture(
    target: Target,
    sequences: Sequence[TokenSequence],
    boundaries: Sequence[Boundary],
    *,
    slot_boundaries: Sequence[Boundary] | None = None,
    device: str = "auto",
    say: Callable[[str], None] = lambda _: None,
) -> Stream:
    """Record boundaries of the target for token sequences, one sample [T, H] each, as rank 0 in the model's dtype.

    `slot_boundaries` is what the draft was trained on; those boundaries are recorded too. The weights are loaded when
    the first sample is asked for, so the plan costs nothing; `say` receives warnings then. Raises UsageError for
    boundaries that the target has not and InputError for token ids or lengths that it has not; the samples raise what
    `load_decoder` raises, and EnvironmentFailure when memory runs out.
    """
    from eagle_parity.tensorfile import dtype_name

    check_boundaries(target, boundaries, "--boundaries")
    check_boundaries(target, slot_boundaries or (), "--slots")
    for sequence in sequences:
        _check_sequence(target, sequence)
    wanted = {*boundaries, *(slot_boundaries or ())}
    numbers = tuple(sorted(k for k in wanted if k != FINAL_NORM))
    stored: tuple[Boundary, ...] = (*numbers, FINAL_NORM) if FINAL_NORM in wanted else numbers
    facts = Facts(
        side="training",
        source=Source("hf", version("transformers"), f"transformers forward on {pick_device(device)}, batch 1"),
        model=target.facts,
        boundaries=numbers,
        slot_boundaries=None if slot_boundaries is None else tuple(slot_boundaries),
    )
    specs = [TensorSpec(boundary_name(k), target.hidden_size, dtype_name(target.dtype)) for k in stored]
    plan = Plan(facts, sum(len(sequence.token_ids) for sequence in sequences), {0: specs})
    return Stream(plan, _samples(target, sequences, stored, device, say))


def _check_sequence(target: Target, sequence: TokenSequence) -> None:
    ids, vocabulary = sequence.token_ids, target.facts.vocab_size
    if vocabulary is not None and ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        wrong = next(i for i, token in enumerate(ids) if not 0 <= token < vocabulary)
        raise InputError(
            f"prompt {sequence.id}: token {wrong} has id {ids[wrong]}, {target.name} knows 0 to {vocabulary - 1}",
            fix="use the token ids of this model's tokenizer",
        )
    if target.max_positions is not None and len(ids) > target.max_positions:
        raise InputError(
            f"prompt {sequence.id}: {len(ids)} tokens, {target.name} has {target.max_positions} positions",
            fix="cut long prompts with --max-tokens-per-prompt",
        )


def _samples(
    target: Target,
    sequences: Sequence[TokenSequence],
    boundaries: Sequence[Boundary],
    device: str,
    say: Callable[[str], None],
) -> Iterator[Sample]:
    decoder = load_decoder(target, device, say)
    states: dict[str, torch.Tensor] = {}
    with _recorded(decoder, boundaries, states):
        for sequence in sequences:
            states.clear()
            _forward(decoder, sequence)
            _check_states(target, sequence, states)
            count = len(sequence.token_ids)
            yield Sample(
                sequence.id, sequence.token_ids, range(count), {0: dict(states)}, graph=False, forward_tokens=count
            )


def _recorded(decoder: Decoder, boundaries: Sequence[Boundary], states: dict[str, torch.Tensor]) -> ExitStack:
    """Put the boundaries of every forward into `states`, until the stack is closed.

    Boundary k is what layer k is given, and n what the final norm is given: transformers' own hidden_states never hold
    the latter.
    """

    def entering(boundary: Boundary) -> Callable[..., None]:
        def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(boundary, args[0] if args else kwargs["hidden_states"])

        return hook

    def leaving(_: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
        keep(FINAL_NORM, output)

    def keep(boundary: Boundary, state: torch.Tensor) -> None:
        # A copy, since layers may add to their input in place.
        states[boundary_name(boundary)] = state[0].detach().to("cpu", copy=True)

    stack = ExitStack()
    for boundary in boundaries:
        if boundary == FINAL_NORM:
            handle = decoder.norm.register_forward_hook(leaving)
        else:
            module = (*decoder.layers, decoder.norm)[boundary]
            handle = module.register_forward_pre_hook(entering(boundary), with_kwargs=True)
        stack.callback(handle.remove)
    return stack


def _forward(decoder: Decoder, sequence: TokenSequence) -> None:
    import torch

    ids = torch.tensor([sequence.token_ids], dtype=torch.int64, device=decoder.embedding.weight.device)
    try:
        with torch.no_grad():
            decoder.module(input_ids=ids, use_cache=False)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise EnvironmentFailure(
            f"prompt {sequence.id}: not enough memory for a forward of {len(sequence.token_ids)} tokens",
            fix="cut long prompts with --max-tokens-per-prompt, or use --device cpu",
        ) from error


def _check_states(target: Target, sequence: TokenSequence, states: dict[str, torch.Tensor]) -> None:
    shape = [len(sequence.token_ids), target.hidden_size]
    for name, state in states.items():
        if list(state.shape) != shape or state.dtype != target.dtype:
            raise InputError(
                f"prompt {sequence.id}: {name} should be {target.dtype} {shape}, is {state.dtype} {list(state.shape)}",
                fix=f"choose --dtype {str(state.dtype).removeprefix('torch.')}, if it is the dtype that differs",
            )
