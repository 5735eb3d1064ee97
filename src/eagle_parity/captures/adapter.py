"""The seam between the plugin and SGLang: every name of SGLang's that a version may spell otherwise, and its contract.

Importing this loads nothing of SGLang; `missing` does, and says what the running one lacks. A family of versions that
needs other names gets an Adapter of its own in `versions`, made from this one with `dataclasses.replace`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from inspect import isfunction, signature
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from eagle_parity.records import Phase

if TYPE_CHECKING:
    import torch

When: TypeAlias = Literal["BEFORE", "AFTER"]

_RUNNER = "sglang.srt.model_executor.model_runner"
_BATCH = "sglang.srt.model_executor.forward_batch_info"
_PHASES: Mapping[str, Phase] = {
    "EXTEND": "prefill",
    "MIXED": "prefill",
    "TARGET_VERIFY": "verify",
    "DECODE": "decode",
}


@dataclass(frozen=True)
class Place:
    """Where this process is in the server's parallel topology."""

    rank: int
    tp_size: int
    dp_rank: int = 0
    pp_rank: int = 0
    pp_size: int = 1


@dataclass(frozen=True)
class Verdict:
    """What the draft is given after a verify: rows [sum(lengths), W], their next tokens, accepted counts [B].

    Of each request its accepted rows come first; the count includes the bonus token, which is the last row's next.
    """

    rids: Sequence[str]
    lengths: Sequence[int]
    hidden: torch.Tensor
    token_ids: torch.Tensor
    accepted: torch.Tensor


@dataclass(frozen=True)
class Adapter:
    """Everything of SGLang that a version may call otherwise. `needs` is the contract of these getters.

    A contract maps the path of a class or function to the names that it must have: fields, members, parameters.
    """

    forward: str
    init: str
    draft_extends: tuple[str, ...]
    """The methods that give the draft the rows of a verify, each with (batch) or (batch, result)."""
    needs: Mapping[str, tuple[str, ...]]
    needs_for_tree: Mapping[str, tuple[str, ...]]
    needs_for_draft: Mapping[str, tuple[str, ...]]
    runner: Callable[[Any], Any]
    """The model runner of the object whose `init` has ended."""
    is_draft: Callable[[Any], bool]
    rids: Callable[[Any], Sequence[str]]
    phase: Callable[[Any], Phase | None]
    lengths: Callable[[Any, Phase], Sequence[int]]
    tokens: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
    tree: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
    given: Callable[[Any], torch.Tensor | None]
    received: Callable[[Any], torch.Tensor | None]
    graph: Callable[[Any], bool | None]
    verdict: Callable[[Any, Any], Verdict | None]
    place: Callable[[], Place]
    splits_rows: Callable[[], tuple[int, int]]
    """Rank and size of the group over which rows may be split: the attention's tensor-parallel group."""
    hook: Callable[[str, Callable[..., Any], When], None]
    """Lets a function run before or after the one at a path: BEFORE (*arguments), AFTER (result, *arguments)."""


def _lengths(batch: Any, phase: Phase) -> Sequence[int]:
    if phase == "prefill":
        lengths: Sequence[int] = batch.extend_seq_lens_cpu
        return lengths
    each = batch.spec_info.draft_token_num if phase == "verify" else 1
    return [each] * len(batch.rids)


def _verdict(batch: Any, result: Any) -> Verdict | None:
    hidden = result.logits_output.hidden_states
    if hidden is None or result.accept_lens is None:
        return None
    rids = [request.rid for request in batch.reqs]
    # Every request has all of its tree's rows here: the tree's path was moved to the front.
    lengths = [hidden.shape[0] // len(rids)] * len(rids)
    return Verdict(rids, lengths, hidden, result.next_token_ids, result.accept_lens)


def _place() -> Place:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()

    def read(name: str, default: int) -> int:
        try:
            value = getattr(parallel, name)
        except Exception:  # a rank that this topology has not raises one of several errors
            return default
        return default if value is None else int(value)

    return Place(
        rank=int(parallel.tp_rank),
        tp_size=int(parallel.tp_size),
        dp_rank=max(read("attn_dp_rank", 0), read("dp_rank", 0)),
        pp_rank=read("pp_rank", 0),
        pp_size=read("pp_size", 1),
    )


def _splits_rows() -> tuple[int, int]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    try:
        return int(parallel.attn_tp_rank), int(parallel.attn_tp_size)
    except Exception:  # a topology that knows no such group splits no rows
        return 0, 1


def _register(target: str, hook: Callable[..., Any], when: When) -> None:
    """SGLang applies the hook when all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, getattr(HookType, when))


# Read in 0.5.14 to 0.5.23.
SGLANG = Adapter(
    forward=f"{_RUNNER}.ModelRunner.forward",
    init=f"{_RUNNER}.ModelRunner.__init__",
    draft_extends=("sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode",),
    needs={
        f"{_RUNNER}:ModelRunner.forward": ("self", "forward_batch"),
        f"{_RUNNER}:ModelRunner.__init__": ("self", "model_config", "is_draft_worker"),
        f"{_RUNNER}:ModelRunnerOutput": ("logits_output", "can_run_graph"),
        f"{_BATCH}:ForwardBatch": (
            "forward_mode",
            "input_ids",
            "positions",
            "rids",
            "extend_seq_lens_cpu",
            "spec_info",
        ),
        f"{_BATCH}:ForwardMode": tuple(_PHASES),
        "sglang.srt.layers.logits_processor:LogitsProcessorOutput": ("hidden_states",),
        "sglang.srt.runtime_context:get_parallel": (),
        "sglang.srt.plugins.hook_registry:HookRegistry": ("register",),
        "sglang.srt.plugins.hook_registry:HookType": ("BEFORE", "AFTER"),
    },
    needs_for_tree={
        "sglang.srt.speculative.eagle_info:EagleVerifyInput": (
            "draft_token_num",
            "retrieve_next_token",
            "retrieve_next_sibling",
        ),
    },
    needs_for_draft={
        "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_decode": (
            "self",
            "batch",
            "batch_result",
        ),
        "sglang.srt.managers.utils:GenerationBatchResult": ("logits_output", "next_token_ids", "accept_lens"),
    },
    runner=lambda runner: runner,
    is_draft=lambda runner: bool(runner.is_draft_worker),
    rids=lambda batch: batch.rids or (),
    phase=lambda batch: _PHASES.get(batch.forward_mode.name),
    lengths=_lengths,
    tokens=lambda batch: (batch.input_ids, batch.positions),
    tree=lambda batch: (batch.spec_info.retrieve_next_token, batch.spec_info.retrieve_next_sibling),
    given=lambda result: getattr(result.logits_output, "hidden_states", None),
    received=lambda batch: getattr(batch.spec_info, "hidden_states", None),
    graph=lambda result: result.can_run_graph,
    verdict=_verdict,
    place=_place,
    splits_rows=_splits_rows,
    hook=_register,
)


def missing(needs: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What a contract asks for and this SGLang has not, one phrase each."""
    found = []
    for path, names in needs.items():
        try:
            owner = pkgutil.resolve_name(path)
        except Exception as error:
            found.append(f"{path} ({type(error).__name__}: {error})")
            continue
        has = _names(owner)
        found.extend(f"{name!r} in {path}" for name in names if name not in has)
    return found


def _names(owner: Any) -> set[str]:
    if isfunction(owner):
        return set(signature(owner).parameters)
    if isinstance(owner, type) and issubclass(owner, Enum):
        return set(owner.__members__)
    own = set(dir(owner))
    return own | {item.name for item in fields(owner)} if is_dataclass(owner) else own


def model_facts(runner: Any) -> dict[str, Any]:
    """What the engine loaded as the target, as `records.Model` has it, the name left out."""
    config = runner.model_config
    text = getattr(config, "hf_text_config", config.hf_config)
    return {
        "architecture": (getattr(config.hf_config, "architectures", None) or [None])[0],
        "hidden_size": getattr(text, "hidden_size", None),
        "num_layers": getattr(text, "num_hidden_layers", None),
        "vocab_size": getattr(text, "vocab_size", None),
        "dtype": str(getattr(config, "dtype", "")).removeprefix("torch.") or None,
        "quantization": getattr(config, "quantization", None),
    }


def draft_facts(runner: Any) -> dict[str, Any]:
    """The draft's architecture, and the layer ids that its config declares where SGLang reads them."""
    config = runner.model_config.hf_config
    # SGLang reads the ids here and nowhere else: a list at the config's top level has no effect on the capture.
    nested = getattr(config, "eagle_config", None)
    ids = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None
    return {
        "architecture": (getattr(config, "architectures", None) or [None])[0],
        "declared_ids": list(ids) if isinstance(ids, list | tuple) else None,
    }
