"""Inside the server: copies of the residual stream at the boundaries of the target's layers, for a probe's rows.

Only where EAGLE_PARITY_CAPTURE_BOUNDARIES asked for it when the server started: the hooks are Python, run in every
eager forward, and never run when a CUDA graph is replayed.

A layer's output is no boundary: under tensor parallelism its sum over the ranks may still be owed. The stream is
complete where the next layer has read it, so that is where it is copied, one of three ways after the layer's own make:

- a stage boundary (SGLang 0.5.21 on): after `prepare`, the batch's residual stream holds it;
- a layer communicator (before): `prepare_attn` returns it;
- neither: the layer is given it, in one tensor or as a pair to be added. A tensor that SGLang marks as still to be
  summed is not recorded, and the record says so.

Boundary n is the pair that the final norm is given. Nothing here completes a sum itself: that would be a collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

from eagle_parity.captures.shard import common, own_rows
from eagle_parity.captures.writer import PENDING_BYTES
from eagle_parity.records import FINAL_NORM, boundary_name

if TYPE_CHECKING:
    import torch

ALL = "all"
_OWED = "_sglang_needs_allreduce_fusion"  # how SGLang marks a tensor whose all-reduce is left to the next layer


def parse(text: str) -> tuple[str, ...] | None:
    """`2,3,final.norm` -> tensor names; None for `all`. Raises ValueError for anything else."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if parts == [ALL]:
        return None
    if not parts or any(part != FINAL_NORM and not part.isdecimal() for part in parts):
        raise ValueError(f"expected {ALL}, or numbers and {FINAL_NORM} separated by commas, got {text!r}")
    return tuple(FINAL_NORM if part == FINAL_NORM else boundary_name(int(part)) for part in parts)


@dataclass(frozen=True)
class Seen:
    """One probe's part of a forward: tensors [T', H] by name, which of the forward's tokens they are, what is missing.

    `unseen` says why, by name. A boundary that no hook saw is in neither: a graph was replayed.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: range | None = None
    unseen: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Forward:
    spans: Sequence[range]
    total: int
    place: tuple[int, int]
    states: dict[str, tuple[range, list[torch.Tensor]]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    size: int = 0


class Boundaries:
    """The hooks on one rank's target, and what they saw of the forward that runs now."""

    def __init__(self, wanted: Sequence[str] | None = None, *, cap: int = PENDING_BYTES) -> None:
        """`wanted`: tensor names, None for all; `cap`: bytes of copies a forward."""
        self._wanted = None if wanted is None else frozenset(wanted)
        self._cap = cap
        self._hidden = 0
        self._now: _Forward | None = None

    def attach(self, model: torch.nn.Module, num_layers: int, hidden_size: int) -> tuple[str, ...]:
        """Hook a target; the names that can be recorded. Raises ValueError for a model without the usual structure."""
        self._hidden = hidden_size
        layers, norm = _decoder(model, num_layers, hidden_size)
        found = []
        for number, layer in enumerate(layers):
            name = boundary_name(number)
            # Layers of another pipeline stage are place holders without parameters.
            if self._wants(name) and next(layer.parameters(), None) is not None and self._watch(layer, name):
                found.append(name)
        last, final = boundary_name(num_layers), FINAL_NORM
        ends = [name for name in (last, final) if self._wants(name)]
        if ends and next(norm.parameters(), None) is not None:
            norm.register_forward_hook(self._norm_hook(last, final), with_kwargs=True)
            found.extend(ends)
        return tuple(found)

    def begin(self, spans: Sequence[range], total: int, place: tuple[int, int]) -> None:
        """A forward of `total` tokens begins in which the probes' tokens are `spans`; `place`: rank and size of the
        group that may split rows."""
        self._now = _Forward(spans, total, place)

    def end(self, rows: range | None = None) -> list[Seen]:
        """What was seen since `begin`, a span each. All tensors of a record have the same rows: `rows`, where given."""
        now, self._now = self._now, None
        if now is None:
            return []
        if rows is None:
            most = Counter(held for held, _ in now.states.values()).most_common(1)
            rows = most[0][0] if most else range(now.total)
        problems = dict(now.problems)
        for name, (held, _) in now.states.items():
            if held != rows:
                problems[name] = f"the rank holds it for tokens {_span(held)}, and others for tokens {_span(rows)}"
        kept = {name: copies for name, (_, copies) in now.states.items() if name not in problems}
        return [
            Seen({name: copies[i] for name, copies in kept.items()}, common(span, rows), problems)
            for i, span in enumerate(now.spans)
        ]

    def _wants(self, name: str) -> bool:
        return self._wanted is None or name in self._wanted

    def _watch(self, layer: torch.nn.Module, name: str) -> bool:
        """Hook one layer at the point where it has read its input; False for a layer of unknown make."""
        stage, communicator = getattr(layer, "attn_boundary", None), getattr(layer, "layer_communicator", None)
        if hasattr(stage, "prepare"):
            _after(stage, "prepare", self._stage_hook(name))
            return True
        if hasattr(communicator, "prepare_attn"):
            _after(communicator, "prepare_attn", self._communicator_hook(name))
            return True
        parameters = list(signature(layer.forward).parameters)
        if "hidden_states" not in parameters:
            return False
        layer.register_forward_pre_hook(self._layer_hook(name, parameters), with_kwargs=True)
        return True

    def _stage_hook(self, name: str) -> Callable[..., None]:
        def hook(_: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            if self._now is not None:
                batch = args[1] if len(args) > 1 else kwargs["forward_batch"]
                self._keep(name, batch.residual_stream.residual)

        return self._guarded(name, hook)

    def _communicator_hook(self, name: str) -> Callable[..., None]:
        def hook(result: Any, *_: Any) -> None:
            if self._now is not None:
                self._keep(name, result[1])

        return self._guarded(name, hook)

    def _layer_hook(self, name: str, parameters: Sequence[str]) -> Callable[..., None]:
        def hook(_: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            if self._now is not None:
                given = dict(zip(parameters, args, strict=False)) | dict(kwargs)
                if getattr(given.get("forward_batch"), "residual_stream", None) is not None:
                    raise NotImplementedError(
                        "the batch keeps the stream, and this layer has no attn_boundary to read it"
                    )
                self._keep(name, given["hidden_states"], given.get("residual"))

        return self._guarded(name, hook)

    def _norm_hook(self, last: str, final: str) -> Callable[..., None]:
        def hook(_: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
            if self._now is None:
                return
            normed, residual = output if isinstance(output, tuple) else (output, None)
            if self._wants(last):
                given = args[0] if args else next(iter(kwargs.values()))
                if getattr(given, _OWED, False):
                    self._keep(last, given)
                else:
                    self._keep(last, given if residual is None else residual)
            if self._wants(final):
                self._keep(final, normed)

        return self._guarded(last, hook)

    def _guarded(self, name: str, hook: Callable[..., None]) -> Callable[..., None]:
        """A hook that never raises into the forward: what goes wrong is why this boundary is missing."""

        def guarded(*args: Any) -> None:
            try:
                hook(*args)
            except Exception as error:
                if self._now is not None:
                    self._now.problems[name] = f"the hook failed: {type(error).__name__}: {error}"

        return guarded

    def _keep(self, name: str, state: torch.Tensor, other: torch.Tensor | None = None) -> None:
        """Copy the probes' rows of a state, or of the sum of a pair, on the forward's own stream."""
        now = self._now
        assert now is not None
        if name in now.problems:
            return
        held = None
        if getattr(state, _OWED, False):
            problem = "its sum over the ranks was still owed where the layer is given it"
        elif name in now.states:
            problem = "it was seen twice in one forward (two batches overlapped?)"
        elif state.dim() != 2 or state.shape[1] != self._hidden:
            problem = f"the stream has shape {list(state.shape)}, not [tokens, {self._hidden}]"
        elif (held := own_rows(state.shape[0], now.total, *now.place)) is None:
            problem = f"the rank holds {state.shape[0]} of {now.total} tokens, and which ones cannot be told"
        else:
            parts = [common(span, held) for span in now.spans]
            now.size += sum(len(part) for part in parts) * self._hidden * state.element_size()
            if now.size <= self._cap:
                cuts = [slice(part.start - held.start, part.stop - held.start) for part in parts]
                copies = [state[cut].clone() if other is None else state[cut] + other[cut] for cut in cuts]
                now.states[name] = (held, copies)
                return
            problem = f"the boundaries of this forward take more than the {self._cap} bytes that may wait for the disk"
        now.states.pop(name, None)
        now.problems[name] = problem


def _span(rows: range) -> str:
    return f"{rows.start}..{rows.stop - 1}" if len(rows) else "none"


def _after(owner: Any, method: str, hook: Callable[..., None]) -> None:
    """Call a hook after a method of this one object. Not the class: the draft's layers may be of it too."""
    original = getattr(owner, method)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        hook(result, args, kwargs)
        return result

    setattr(owner, method, wrapped)


def _decoder(
    model: torch.nn.Module, num_layers: int, hidden_size: int
) -> tuple[Sequence[torch.nn.Module], torch.nn.Module]:
    """The layers and the final norm of a target, wherever a multimodal wrapper nests them.

    Found by structure: the module that owns a list of `num_layers` layers and, after it, a norm over the hidden size.
    """
    import torch

    found = []
    for module in model.modules():
        children = list(module.children())
        lists = [c for c in children if isinstance(c, torch.nn.ModuleList) and len(c) == num_layers]
        norms = [
            c for c in children if [tuple(p.shape) for p in c.parameters()] in ([(hidden_size,)], [(hidden_size,)] * 2)
        ]
        if len(lists) == 1 and norms:
            found.append((list(lists[0]), norms[-1]))
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(found)} modules with {num_layers} layers and a norm of {hidden_size}"
        )
    return found[0]
