"""A draft layer's attention, Llama-style (GQA, optional q/k norm) or MLA, for a prompt and for drafted tokens.

Both read [embedding ; hidden state], 2H wide. The two halves are projected one by one: an ordering search changes the
hidden half only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from eagle_parity.draft.products import Products, rms_norm
from eagle_parity.draft.rope import Rope, read_rope, softmax_scale
from eagle_parity.errors import InputError

Parts = Mapping[str, torch.Tensor]
"""Projections of one half of the input by weight name, to be added to those of the other half; [B, Q, *] each."""
SCORES = 2**25  # attention scores that are in memory at once where they are formed one by one


@dataclass(frozen=True)
class Entries:
    """Keys [B, heads, T, D] and values [B, heads, T, Dv], rotated, one head a query head."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Attention:
    """Weights' names are those of layers.0.self_attn. D: width of a query head, Dv: of a value head."""

    kind: str
    heads: int
    kv_heads: int
    width: int
    """D: for MLA its part without and its part with position."""
    value_width: int
    rotated: int
    """MLA: the part of D with a position."""
    rope: Rope
    scale: float
    eps: float
    products: Products
    weights: Mapping[str, torch.Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        """The weights that read the 2H-wide input."""
        if self.kind == "llama":
            return ("q_proj", "k_proj", "v_proj")
        return ("q_a_proj" if "q_a_proj.weight" in self.weights else "q_proj", "kv_a_proj_with_mqa")

    def half(self, states: torch.Tensor, begin: int) -> dict[str, torch.Tensor]:
        """Project one half [B, Q, H] of the input; `begin` is its first column, 0 for the embedding."""
        end = begin + states.shape[-1]
        return {name: self.products.linear(states, self.weights[f"{name}.weight"][:, begin:end]) for name in self.names}

    def project(self, ours: Parts, theirs: Parts, positions: torch.Tensor) -> tuple[torch.Tensor, Entries]:
        """Queries [B, heads, Q, D] and the entries that they and later queries attend to."""
        both = {}
        for name in self.names:
            both[name] = ours[name] + theirs[name]
            bias = self.weights.get(f"{name}.bias")
            if bias is not None:
                both[name] = both[name] + bias
        return self._llama(both, positions) if self.kind == "llama" else self._mla(both, positions)

    def _llama(self, parts: Parts, positions: torch.Tensor) -> tuple[torch.Tensor, Entries]:
        queries = _heads(parts["q_proj"], self.heads)
        keys, values = _heads(parts["k_proj"], self.kv_heads), _heads(parts["v_proj"], self.kv_heads)
        if "q_norm.weight" in self.weights:  # Qwen3: one norm a head, before the rotation
            queries = rms_norm(queries, self.weights["q_norm.weight"], self.eps)
            keys = rms_norm(keys, self.weights["k_norm.weight"], self.eps)
        queries, keys = self.rope.rotate(queries, positions), self.rope.rotate(keys, positions)
        group = self.heads // self.kv_heads
        if group > 1:
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        return queries, Entries(keys, values)

    def _mla(self, parts: Parts, positions: torch.Tensor) -> tuple[torch.Tensor, Entries]:
        """DeepSeek-V3's latent attention, unfolded: keys and values of each head from the latent of kv_a."""
        linear, weights = self.products.linear, self.weights
        if "q_a_proj" in parts:
            latent = rms_norm(parts["q_a_proj"], weights["q_a_layernorm.weight"], self.eps)
            queries = _heads(linear(latent, weights["q_b_proj.weight"]), self.heads)
        else:
            queries = _heads(parts["q_proj"], self.heads)
        rank = parts["kv_a_proj_with_mqa"].shape[-1] - self.rotated
        latent, shared = torch.split(parts["kv_a_proj_with_mqa"], [rank, self.rotated], dim=-1)
        latent = rms_norm(latent, weights["kv_a_layernorm.weight"], self.eps)
        plain = self.width - self.rotated
        both = _heads(linear(latent, weights["kv_b_proj.weight"]), self.heads)
        keys, values = torch.split(both, [plain, self.value_width], dim=-1)
        turned = self.rope.rotate(shared.unsqueeze(1), positions).expand(-1, self.heads, -1, -1)
        queries = torch.cat([queries[..., :plain], self.rope.rotate(queries[..., plain:], positions)], dim=-1)
        return queries, Entries(torch.cat([keys, turned], dim=-1), values)

    def causal(self, queries: torch.Tensor, entries: Entries) -> torch.Tensor:
        """Each query [B, heads, T, D] over the entries up to its own; [B, T, heads * Dv]."""
        short = self.width - self.value_width
        # Values as wide as keys let torch take the way that does not store all scores.
        values = functional.pad(entries.values, (0, short)) if short > 0 else entries.values
        mixed = functional.scaled_dot_product_attention(queries, entries.keys, values, is_causal=True, scale=self.scale)
        return self._output(mixed[..., : self.value_width])

    def branched(self, queries: torch.Tensor, prompt: Entries, anchors: torch.Tensor, own: Entries) -> torch.Tensor:
        """Drafted tokens: query q over the prompt's entries up to anchors[q], and over its own branch.

        `queries` [B, heads, Q, D]; `own` holds [B, heads, Q, S, D]: the S entries of each query's branch, its own one
        included. Returns [B, Q, heads * Dv].
        """
        step = max(1, SCORES // max(1, queries.shape[0] * self.heads * prompt.keys.shape[2]))
        mixed = [
            self._branched(
                queries[:, :, at : at + step],
                prompt,
                anchors[at : at + step],
                Entries(own.keys[:, :, at : at + step], own.values[:, :, at : at + step]),
            )
            for at in range(0, queries.shape[2], step)
        ]
        return self._output(mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2))

    def _branched(self, queries: torch.Tensor, prompt: Entries, anchors: torch.Tensor, own: Entries) -> torch.Tensor:
        count = prompt.keys.shape[2]
        later = torch.arange(count, device=anchors.device) > anchors.unsqueeze(1)
        ahead = (queries @ prompt.keys.transpose(-1, -2)).masked_fill(later, -torch.inf)
        branch = (own.keys @ queries.unsqueeze(-1)).squeeze(-1)
        shares = torch.softmax(torch.cat([ahead, branch], dim=-1) * self.scale, dim=-1)
        mixed = shares[..., :count] @ prompt.values
        return mixed + (shares[..., count:].unsqueeze(-2) @ own.values).squeeze(-2)

    def _output(self, mixed: torch.Tensor) -> torch.Tensor:
        joined = mixed.transpose(1, 2).flatten(2)
        return self.products.linear(joined, self.weights["o_proj.weight"], self.weights.get("o_proj.bias"))

    def to(self, device: torch.device) -> Attention:
        """The same with its rotary table on a device (weights are moved by who loaded them)."""
        return replace(self, rope=self.rope.to(device))


def _heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, Q, heads * D] -> [B, heads, Q, D]."""
    return states.view(*states.shape[:-1], heads, -1).transpose(1, 2)


def read_attention(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], hidden: int, eps: float, products: Products
) -> Attention:
    """Attention from a layer config and the weights of layers.0.self_attn, which decide where both speak.

    Raises InputError when heads cannot be told or shapes contradict the config.
    """
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or heads <= 0:
        raise InputError(
            "the draft's config.json names no num_attention_heads, so it cannot be replayed",
            fix="give the draft's directory with its full config.json",
        )
    if "kv_a_proj_with_mqa.weight" in weights:
        return _read_mla(config, weights, heads, eps, products)
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    _check(weights, "q_proj.weight", heads * width)
    _check(weights, "k_proj.weight", kv_heads * width)
    if "q_norm.weight" in weights:
        _check(weights, "q_norm.weight", width)
    rope = read_rope(config, width, interleaved=False)
    return Attention("llama", heads, kv_heads, width, width, width, rope, width**-0.5, eps, products, weights)


def _read_mla(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], heads: int, eps: float, products: Products
) -> Attention:
    rotated, plain, value = (int(config.get(f"{n}_head_dim") or 0) for n in ("qk_rope", "qk_nope", "v"))
    if not (rotated and plain and value):
        raise InputError(
            "the draft has MLA weights, and its config.json lacks qk_rope_head_dim, qk_nope_head_dim or v_head_dim",
            fix="give the draft's directory with its full config.json",
        )
    width = plain + rotated
    _check(weights, "q_b_proj.weight" if "q_b_proj.weight" in weights else "q_proj.weight", heads * width)
    _check(weights, "kv_b_proj.weight", heads * (plain + value))
    # DeepSeek's own code and both servers interleave; transformers can be told not to.
    rope = read_rope(config, rotated, interleaved=config.get("rope_interleave") is not False)
    scale = softmax_scale(config, width)
    # transformers takes 1e-6 for the latents' norms whatever the config says; DeepSeek and SGLang take the config's.
    return Attention("mla", heads, heads, width, value, rotated, rope, scale, eps, products, weights)


def _check(weights: Mapping[str, torch.Tensor], name: str, rows: int) -> None:
    tensor = weights.get(name)
    if tensor is None or tensor.shape[0] != rows:
        got = "is missing" if tensor is None else f"has {tensor.shape[0]} rows"
        raise InputError(
            f"the draft's self_attn.{name} {got}, its config.json makes {rows}",
            fix="give the config.json that belongs to these weights",
        )
