"""Faults inside the real engine: a general plugin that breaks SGLang's capture of the target's states, on demand.

SGLang loads it in each of its processes through the bare dist-info folder beside this file. It does nothing unless
EAGLE_PARITY_LAB_FAULT names a file; each forward of the target reads there which fault to have now ("healthy": none),
so that one server has many in turn. Written from what SGLang 0.5.23 computes (its layers owe their sum over the ranks
to the next layer's boundary) and from the public cases; knows nothing of eagle_parity.

A point fault changes what is kept at the capture point of one layer, which is the entry of that layer's attention. A
pack fault changes the states of a whole forward, [T, K, H], before the draft is given them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SWITCH = "EAGLE_PARITY_LAB_FAULT"
HEALTHY = "healthy"
CHUNK = 32  # the server's chunked prefill size: a forward of so many prompt tokens is not the last of its prompt
_STAGE = "sglang.srt.layers.layer_boundary.stage.StageBoundary"
_TARGETS = ("sglang.srt.models.deepseek_v2.DeepseekV2Model", "sglang.srt.models.llama.LlamaModel")
_DRAFT = "sglang.srt.models.llama_eagle3.LlamaModel"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


@dataclass(frozen=True)
class Point:
    """The capture point of one slot: everything [T, H]. `full` = `before` + the ranks' `partial`s, summed."""

    slot: int
    full: torch.Tensor
    before: torch.Tensor
    partial: torch.Tensor
    norm: Callable[[torch.Tensor], torch.Tensor]
    """The target's final norm."""


@dataclass(frozen=True)
class Pack:
    """The states of one forward of the target: [T, K, H], and after the final norm [T, H]."""

    states: torch.Tensor
    normed: torch.Tensor
    verify: bool
    earlier: torch.Tensor
    """[T, K, H]: what a static buffer holds of the forwards before this one."""
    after_attention: dict[int, torch.Tensor]
    """By slot: the residual buffer when the next norm has added that layer's attention to it."""


def rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def ranks() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_size)


# ----------------------------------------------------------------------------------------------------- point faults


def half_reduced(point: Point) -> torch.Tensor:
    """Each half of the ranks summed on its own."""
    from sglang.srt.distributed import get_tp_group

    parts = get_tp_group().all_gather(point.partial.unsqueeze(0).contiguous(), dim=0)
    half = ranks() // 2
    mine = parts[:half] if rank() < half else parts[half:]
    return point.before + mine.sum(0)


POINTS: dict[str, Callable[[Point], torch.Tensor]] = {
    # SGLang 0.5.5 to 0.5.13 with fused all-reduce: residual plus this rank's part of the sum (sglang#28343).
    "captured before the all-reduce": lambda p: p.before + p.partial,
    "captured before the all-reduce, one slot": lambda p: p.before + p.partial if p.slot == 2 else p.full,
    "half of the ranks reduced together": half_reduced,
    "partial sum of the layer's output, no residual": lambda p: p.partial,
    "layer output without the residual": lambda p: p.full - p.before,
    "layer output reduced twice": lambda p: p.before + ranks() * (p.full - p.before),
    "whole state reduced again": lambda p: ranks() * p.full,
    "mean over ranks instead of sum": lambda p: p.full / ranks(),
    "the final norm on a slot in the middle": lambda p: p.norm(p.full) if p.slot == 1 else p.full,
}

# ------------------------------------------------------------------------------------------------------ pack faults


def last_normed(p: Pack) -> torch.Tensor:
    return torch.cat([p.states[:, :-1], p.normed[:, None]], dim=1)


def rms(states: torch.Tensor) -> torch.Tensor:
    return states / states.square().mean(-1, keepdim=True).add(1e-6).sqrt()


def written_later(p: Pack, slots: tuple[int, ...]) -> torch.Tensor:
    states = p.states.clone()
    for slot in slots:
        states[:, slot] = p.after_attention[slot]
    return states


def own_channels(p: Pack) -> torch.Tensor:
    """This rank's share of every state's channels."""
    return p.states.chunk(ranks(), dim=-1)[rank()]


def not_gathered(p: Pack, slots: tuple[int, ...]) -> torch.Tensor:
    """A full-width buffer of which only this rank's channels were written: the all-gather never ran."""
    states = p.states.clone()
    width = states.shape[-1] // ranks()
    for slot in slots:
        states[:, slot] = 0
        own = slice(rank() * width, (rank() + 1) * width)
        states[:, slot, own] = p.states[:, slot, own]
    return states


def gathered_askew(p: Pack) -> torch.Tensor:
    """Slot 1 gathered with the ranks' blocks in another order: each block one place further."""
    states = p.states.clone()
    states[:, 1] = states[:, 1].roll(states.shape[-1] // ranks(), dims=-1)
    return states


def own_rows(p: Pack) -> torch.Tensor:
    """A full-height buffer of which only this rank's block of rows was written."""
    rows = torch.arange(len(p.states)) * ranks() // len(p.states)
    return torch.where((rows == rank())[:, None, None], p.states, torch.zeros(()))


def exchanged_rows(p: Pack) -> torch.Tensor:
    """The rows 3 to 8 of the forward, end to front."""
    states = p.states.clone()
    states[3:9] = states[3:9].flip(0)
    return states


def one_nan(p: Pack) -> torch.Tensor:
    states = p.states.clone()
    states[2:3, 1, 5] = torch.nan
    return states


def corrupt(p: Pack) -> torch.Tensor:
    """Noise of the states' size on rank 1."""
    return torch.randn(p.states.shape) * p.states.square().mean(-1, keepdim=True).sqrt() if rank() == 1 else p.states


PACKS: dict[str, Callable[[Pack], torch.Tensor]] = {
    "the last slot after the final norm": last_normed,
    "RMS norm a slot (fc_norm) before the capture": lambda p: rms(p.states),
    "slots permuted": lambda p: p.states[:, [2, 0, 1]],
    "two slots exchanged": lambda p: p.states[:, [1, 0, 2]],
    "all slots are the last captured buffer": lambda p: p.states[:, [2, 2, 2]],
    "buffer written by the next layer's attention": lambda p: written_later(p, (0, 1, 2)),
    "one slot written by the next layer's attention": lambda p: written_later(p, (1,)),
    "channels split over the ranks": own_channels,
    "channels not gathered, zero elsewhere": lambda p: not_gathered(p, (0, 1, 2)),
    "channels not gathered, one slot": lambda p: not_gathered(p, (1,)),
    "channels gathered in the wrong order, one slot": gathered_askew,
    "rows not gathered, zero elsewhere": own_rows,
    "rank 1 holds zeros": lambda p: p.states * (rank() != 1),
    "rank 1 holds noise": corrupt,
    "the last rank holds the rows of an earlier step": lambda p: p.earlier if rank() == ranks() - 1 else p.states,
    "verify reads the buffer of an earlier step": lambda p: p.earlier if p.verify else p.states,
    "some rows of a batch exchanged": exchanged_rows,
    "verify rows in reverse": lambda p: p.states.flip(0) if p.verify else p.states,
    "a buffer of slots by rows read as rows by slots": lambda p: p.states.permute(1, 0, 2).reshape(p.states.shape),
    "only the last chunk of a prompt is kept": lambda p: p.states * (p.verify or len(p.states) != CHUNK),
    "states one token late": lambda p: p.states.roll(1, 0),
    "states one token early": lambda p: p.states.roll(-1, 0),
    "scaled by 1.25": lambda p: 1.25 * p.states,
    "rounded to 8 bits": lambda p: p.states.to(torch.float8_e4m3fn).to(p.states.dtype),
    "NaN in one row": one_nan,
}
# Faults that are not in the states themselves: which layers a verify captures; what the draft's prefill is handed.
VERIFY_LAYERS = "verify captures the default layers"
DRAFT_LATE = "the draft's prefill is handed the states one row late"
OTHERS = (VERIFY_LAYERS, DRAFT_LATE)
NAMES = (HEALTHY, *POINTS, *PACKS, *OTHERS)

# ------------------------------------------------------------------------------------------------------------ hooks


@dataclass
class Engine:
    """What the hooks of one process know between them."""

    file: Path
    fault: str = HEALTHY
    slot: int = 0
    norm: Any = None
    open_slot: int | None = None
    after_attention: dict[int, torch.Tensor] = field(default_factory=dict)
    buffer: torch.Tensor | None = None

    def target(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """A forward of the target: read the switch, and change what comes out."""
        batch = kwargs.get("forward_batch", args[2] if len(args) > 2 else None)
        self.fault = self.file.read_text().strip()
        if self.fault not in NAMES:
            raise ValueError(f"{self.file}: unknown fault {self.fault!r}")
        self.slot, self.open_slot, self.after_attention, self.norm = 0, None, {}, model.norm
        verify = batch.forward_mode.is_target_verify()
        layers = model.layers_to_capture
        if self.fault == VERIFY_LAYERS and verify:
            count = model.config.num_hidden_layers
            model.layers_to_capture = [2, count // 2, count - 3]
        try:
            result = original(model, *args, **kwargs)
        finally:
            model.layers_to_capture = layers
        return self.pack(result, verify) if isinstance(result, tuple) else result

    def pack(self, result: tuple[Any, Any], verify: bool) -> tuple[Any, Any]:
        normed, aux = result
        listed = isinstance(aux, list)
        states = torch.stack(aux, dim=1) if listed else aux.view(len(aux), -1, normed.shape[-1])
        if self.buffer is None or len(self.buffer) < len(states):
            self.buffer = torch.zeros(max(len(states), 512), *states.shape[1:], dtype=states.dtype)
        earlier = self.buffer[: len(states)].clone()
        self.buffer[: len(states)] = states
        change = PACKS.get(self.fault)
        if change is None:
            return result
        changed = change(Pack(states, normed, verify, earlier, self.after_attention)).contiguous()
        if listed:
            aux[:] = changed.unbind(1)
            return normed, aux
        return normed, changed.view(len(states), -1)

    def attention(
        self, original: Callable[..., Any], stage: Any, hidden: Any, stream: Any, *args: Any, **call: Any
    ) -> Any:
        """A layer's entry. Where it captures, a point fault puts other states into the slot."""
        from sglang.srt.layers.layer_boundary.residual.access import buffer

        name = next((n for n in ("capture_gathered", "capture") if call.get(n) is not None), None)
        if name is None:
            return original(stage, hidden, stream, *args, **call)
        slot, self.open_slot = self.slot, self.slot
        self.slot += 1
        change = POINTS.get(self.fault)
        if change is not None and stream.residual is not None:
            before, partial = stream.residual.clone(), buffer(hidden).clone()
            keep = call[name].capture if name == "capture_gathered" else call[name]

            def capture(value: torch.Tensor, *, owned: bool = False) -> None:
                keep(change(Point(slot, value, before, partial, self.norm)).to(value.dtype), owned=False)

            call[name] = _Collector(capture) if name == "capture_gathered" else capture
        return original(stage, hidden, stream, *args, **call)

    def feed_forward(self, result: tuple[Any, Any], *_: Any, **__: Any) -> None:
        """The attention was added to the residual: on a GPU in place, in the very buffer that was captured."""
        if self.open_slot is not None:
            self.after_attention[self.open_slot] = result[1].residual.clone()
            self.open_slot = None

    def draft_runner(self, runner: Any, batch: Any, *_: Any, **__: Any) -> None:
        """Before a forward of the draft's runner."""
        if runner.is_draft_worker and self.fault == DRAFT_LATE and batch.forward_mode.name == "EXTEND":
            batch.spec_info.hidden_states = batch.spec_info.hidden_states.roll(1, 0)

    def draft_model(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """A draft that is given shards would die at its fc, and the server with it: fill them up for it alone."""
        batch = kwargs.get("forward_batch", args[2] if len(args) > 2 else None)
        given = batch.spec_info.hidden_states
        wide = model.fc.in_features
        if given.shape[-1] in (wide, model.fc.out_features):
            return original(model, *args, **kwargs)
        batch.spec_info.hidden_states = torch.nn.functional.pad(given, (0, wide - given.shape[-1]))
        try:
            return original(model, *args, **kwargs)
        finally:
            batch.spec_info.hidden_states = given


@dataclass(frozen=True)
class _Collector:
    capture: Callable[..., None]


def activate() -> None:
    """Register the hooks, if there is a switch. SGLang calls this in each of its processes."""
    file = os.environ.get(SWITCH)
    if not file:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    engine = Engine(Path(file))
    for name in _TARGETS:
        HookRegistry.register(f"{name}.forward", _plain(engine.target), HookType.AROUND)
    HookRegistry.register(f"{_STAGE}._prepare_attention", _plain(engine.attention), HookType.AROUND)
    HookRegistry.register(f"{_STAGE}._prepare_input", engine.feed_forward, HookType.AFTER)
    HookRegistry.register(f"{_RUNNER}.forward", engine.draft_runner, HookType.BEFORE)
    HookRegistry.register(f"{_DRAFT}.forward", _plain(engine.draft_model), HookType.AROUND)


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function, as the registry wants one."""
    return lambda *args, **kwargs: method(*args, **kwargs)
