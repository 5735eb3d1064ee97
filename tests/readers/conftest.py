"""Ground truth from Hugging Face transformers alone: every boundary of the tiny target, `pre` through a hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from eagle_parity.records import Facts, Model, Request, Source, TensorSpec, Tokens, boundary_name
from tests.readers.samples import LAYERS, TARGET

Truth = Callable[[Sequence[int]], dict[int | str, torch.Tensor]]


@pytest.fixture(scope="session")
def truth() -> Truth:
    """Token ids -> every boundary's states [T, 64] in bf16, one unbatched forward of the target."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16).eval()
    known: dict[tuple[int, ...], dict[int | str, torch.Tensor]] = {}

    def forward(ids: Sequence[int]) -> dict[int | str, torch.Tensor]:
        key = tuple(int(i) for i in ids)
        if key in known:
            return known[key]
        before: list[torch.Tensor] = []
        # The HF tuple holds no state between the last layer and the final norm; the norm's input is that state.
        hook = model.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
        with torch.no_grad():
            states = model(torch.tensor([key]), output_hidden_states=True).hidden_states
        hook.remove()
        found: dict[int | str, torch.Tensor] = {k: states[k][0] for k in range(LAYERS)}
        found[LAYERS] = before[0][0]
        found["final.norm"] = states[LAYERS][0]
        known[key] = found
        return found

    return forward


@dataclass(frozen=True)
class MemoryCapture:
    """A capture in memory, so that references need none of the code under test."""

    tokens: Tokens
    tensors: dict[str, torch.Tensor]
    path: str = "reference"
    facts: Facts = field(default_factory=lambda: Facts("training", Source("hf"), Model(num_layers=LAYERS)))
    ranks: tuple[int, ...] = (0,)

    def names(self, rank: int) -> tuple[str, ...]:
        return tuple(self.tensors)

    def spec(self, rank: int, name: str) -> TensorSpec:
        return TensorSpec(name, self.tensors[name].shape[1], "BF16")

    def length(self, rank: int, name: str) -> int:
        return len(self.tensors[name])

    def rows(self, rank: int, name: str) -> None:
        return None

    def read(self, rank: int, name: str, begin: int, end: int) -> torch.Tensor:
        return self.tensors[name][begin:end]


def reference(truth: Truth, sequences: Sequence[Sequence[int]]) -> MemoryCapture:
    """A dump of the target on these prompts, as `dump training --model` would make it."""
    states = [truth(ids) for ids in sequences]
    ends = np.cumsum([0, *(len(ids) for ids in sequences)]).tolist()
    return MemoryCapture(
        Tokens(
            np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sequences]),
            np.concatenate([np.arange(len(ids), dtype=np.int64) for ids in sequences]),
            tuple(Request(f"r{i}", ends[i], ends[i + 1]) for i in range(len(sequences))),
        ),
        {boundary_name(b): torch.cat([s[b] for s in states]) for b in states[0]},  # type: ignore[arg-type]
    )
