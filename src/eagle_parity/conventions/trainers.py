"""What each training pipeline's layer ids mean: which boundaries a draft of it was trained on, and in which order.

One line a pipeline; each was read in the named file of the public project. A draft's config repeats the trainer's ids,
so the same list stands for other states under another trainer, and an engine reads it by a rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from eagle_parity.records import FINAL_NORM, Boundary

Last: TypeAlias = Literal["pre", "post"]
"""Whether the last state that a pipeline stores is before or after the final norm."""
Defaults: TypeAlias = Callable[[int], tuple[int, ...]]


def _outputs(layers: int) -> tuple[int, ...]:
    return (1, layers // 2 - 1, layers - 4)


def _inputs(layers: int) -> tuple[int, ...]:
    return (2, layers // 2, layers - 3)


@dataclass(frozen=True)
class Trainer:
    """A pipeline: `shift` is boundary minus id, `ascending` whether its concat is sorted whatever the ids' order."""

    name: str
    versions: str
    shift: Literal[0, 1]
    default: Defaults
    ascending: bool
    last: Last | None
    source: str

    @property
    def rule(self) -> str:
        """The meaning of an id in words."""
        return "output of layer id" if self.shift else "input of layer id"

    def trained(self, ids: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
        """The boundaries in the slots, in order, for an id list (None: its default)."""
        boundaries = tuple(i + self.shift for i in (self.default(num_layers) if ids is None else ids))
        return tuple(sorted(boundaries)) if self.ascending else boundaries

    def last_boundary(self, num_layers: int) -> Boundary | None:
        """The boundary of the last state that it stores; None when it stores none."""
        if self.last is None:
            return None
        return FINAL_NORM if self.last == "post" else num_layers


TRAINERS: tuple[Trainer, ...] = (
    Trainer(
        "SafeAILab/EAGLE",
        "cb7e084",
        0,
        _inputs,
        True,
        None,
        "SafeAILab/EAGLE modeling_llama_kv.py: states before layers 2, n//2, n-3",
    ),
    Trainer(
        "SpecForge",
        "all versions, SGLang backend",
        1,
        _outputs,
        True,
        "post",
        "SpecForge algorithms/model_providers.py; offline_capture/sglang_backend/utils.py",
    ),
    Trainer(
        "SpecForge, HF backend",
        "2025-11 to 2026-07-14",
        1,
        _outputs,
        False,
        "post",
        "SpecForge eagle3_target_model.py (removed by 7d1fbf08): config order",
    ),
    Trainer(
        "speculators v1",
        "v0.3.0 to v0.4.0.1",
        1,
        _inputs,
        True,
        "pre",
        "speculators custom_worker.py: state after each of the listed layers, a frozenset",
    ),
    Trainer(
        "speculators",
        "0.5 and later",
        0,
        _inputs,
        True,
        "pre",
        "speculators launch_vllm.py, vllm extract_hidden_states.py: ascending, not config order",
    ),
    Trainer(
        "modelopt, HF dump",
        "since 2026-04-25 (1ec931c2)",
        1,
        _outputs,
        True,
        "post",
        "Model-Optimizer compute_hidden_states_hf.py: hidden_states[id + 1] of a sorted set",
    ),
    Trainer(
        "modelopt, HF dump",
        "before 2026-04-25",
        0,
        _inputs,
        True,
        "post",
        "Model-Optimizer compute_hidden_states_hf.py before 1ec931c2: index into hidden_states",
    ),
    Trainer(
        "modelopt, vLLM dump",
        "a2fbac7",
        0,
        _outputs,
        True,
        "pre",
        "Model-Optimizer compute_hidden_states_vllm.py: ids handed to vLLM unshifted, so one layer before the HF dump",
    ),
    Trainer(
        "modelopt, Megatron",
        "a2fbac7",
        1,
        _outputs,
        True,
        None,
        "Model-Optimizer megatron_eagle.py: forward hooks, layer_number - 1",
    ),
    Trainer(
        "TorchSpec, SGLang engine",
        "6f21829",
        1,
        _outputs,
        True,
        "post",
        "TorchSpec train_config.py",
    ),
    Trainer(
        "TorchSpec, vLLM engine",
        "6f21829",
        1,
        _outputs,
        True,
        "pre",
        "TorchSpec vllm engine: adds 1 itself; train_config.py:335",
    ),
    Trainer(
        "TorchSpec, HF engine",
        "6f21829",
        1,
        _outputs,
        False,
        "post",
        "TorchSpec HFTargetModel: config order",
    ),
    Trainer(
        "NeMo Automodel",
        "36044ad3",
        1,
        _outputs,
        False,
        None,
        "NeMo Automodel eagle3_cache, target.py: config order",
    ),
    Trainer(
        "AngelSlim",
        "67394ce",
        1,
        _outputs,
        False,
        "post",
        "AngelSlim tools/generate_hidden_for_draft_model.py: hidden_states[id + 1], config order",
    ),
    Trainer(
        "BaldEagle",
        "649195f",
        0,
        _inputs,
        False,
        None,
        "BaldEagle generate_data_fused_features.py: low, mid, high of the HF tuple",
    ),
)


def who_would(order: Sequence[Boundary], ids: Sequence[int] | None, num_layers: int) -> tuple[Trainer, ...]:
    """The pipelines that, with these declared ids (or None, their default), train on exactly this order."""
    return tuple(trainer for trainer in TRAINERS if trainer.trained(ids, num_layers) == tuple(order))
