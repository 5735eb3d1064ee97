"""The states of a Hugging Face model under the names of a dump, for tests: transformers is the ground truth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def load(path: Path) -> Any:
    """A decoder-only model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def states(model: Any, token_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """`boundary.0` to `boundary.n`, `final.norm`, and `residual.K`: the stream before layer K-1's MLP; each [T, H]."""
    named: dict[str, torch.Tensor] = {}

    def watch(module: Any, name: str) -> Any:
        return module.register_forward_pre_hook(lambda _, given: named.update({name: given[0][0]}))

    layers = model.model.layers
    hooks = [watch(layer.post_attention_layernorm, f"residual.{k}") for k, layer in enumerate(layers, 1)]
    hooks.append(watch(model.model.norm, f"boundary.{len(layers)}"))
    with torch.no_grad():
        found = model(input_ids=torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    return named | {f"boundary.{k}": found[k][0] for k in range(len(layers))} | {"final.norm": found[-1][0]}


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest relative L2 over the rows."""
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
