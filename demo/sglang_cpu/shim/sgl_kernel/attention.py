"""The two kernels of SGLang's `intel_amx` attention backend in plain torch, with fp32 arithmetic.

Each call is a ragged batch; a loop takes its requests one by one. What the demo's models do not use
(cross-attention, sliding windows, sinks, scaled fp8 caches) is refused.

Shapes: T tokens, H query heads, G key-value heads, D head width, Dv value width, S cache slots.
"""

from __future__ import annotations

import torch
from torch import Tensor


def extend_attention_cpu(
    query: Tensor,  # [T, H, D]
    key: Tensor,  # [T, G, D]
    value: Tensor,  # [T, G, Dv]
    output: Tensor,  # [T, H, Dv], written
    key_cache: Tensor,  # [S, G, D]
    value_cache: Tensor,  # [S, G, Dv]
    key_scale: float,
    value_scale: float,
    slot_table: Tensor,  # [requests, positions] -> cache slot
    rows: Tensor,
    lengths: Tensor,
    new_lengths: Tensor,
    new_starts: Tensor,
    max_new_length: int,
    scale: float,
    logit_cap: float,
    cross_attention: bool,
    window: int,
    encoder_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    causal: bool = True,
) -> None:
    """Attend from the new tokens of each request to its cached prefix and to one another.

    The new keys and values are read from the arguments, not from the cache: an MLA prefill passes them
    expanded per head, while the cache holds the latent. `tree_mask` is the verify step's, one square per
    request, laid end to end.
    """
    _refuse_unsupported(key_scale, value_scale, cross_attention, window, sinks)
    mask_offset = 0
    per_request = zip(rows.tolist(), lengths.tolist(), new_lengths.tolist(), new_starts.tolist(), strict=True)
    for row, length, new, start in per_request:
        prefix = length - new
        span = slice(start, start + new)
        keys = key[span].reshape(new, -1, query.shape[-1])
        values = value[span].reshape(new, -1, output.shape[-1])
        if prefix:
            slots = slot_table[row, :prefix].long()
            keys = torch.cat([key_cache[slots].to(keys.dtype), keys])
            values = torch.cat([value_cache[slots].to(values.dtype), values])
        visible = torch.ones(new, length, dtype=torch.bool)
        if tree_mask is not None:
            square = tree_mask.view(-1)[mask_offset : mask_offset + new * new]
            visible[:, prefix:] = square.view(new, new).bool()
            mask_offset += new * new
        elif causal:
            visible[:, prefix:] = torch.ones(new, new, dtype=torch.bool).tril()
        output[span] = _attend(query[span], keys, values, scale, logit_cap, visible).to(output.dtype)


def decode_attention_cpu(
    query: Tensor,  # [requests, H, D]
    key_cache: Tensor,  # [S, G, D], written
    value_cache: Tensor,  # [S, G, Dv], written
    key_scale: float,
    value_scale: float,
    output: Tensor,  # [requests, H, Dv], written
    key: Tensor | None,
    value: Tensor | None,
    new_slots: Tensor,
    scratch: Tensor,
    slot_table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    scale: float,
    logit_cap: float,
    cross_attention: bool,
    window: int,
    encoder_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Store one new key and value per request, then attend from its one new token to all of its cache."""
    _refuse_unsupported(key_scale, value_scale, cross_attention, window, sinks)
    if key is not None and value is not None:
        key_cache[new_slots] = key.view(-1, *key_cache.shape[1:]).to(key_cache.dtype)
        value_cache[new_slots] = value.view(-1, *value_cache.shape[1:]).to(value_cache.dtype)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        slots = slot_table[row, :length].long()
        visible = torch.ones(1, length, dtype=torch.bool)
        attended = _attend(query[i : i + 1], key_cache[slots], value_cache[slots], scale, logit_cap, visible)
        output[i : i + 1] = attended.to(output.dtype)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, logit_cap: float, visible: Tensor) -> Tensor:
    group = query.shape[1] // keys.shape[1]
    keys = keys.float().repeat_interleave(group, dim=1)
    values = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if logit_cap and logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def _refuse_unsupported(
    key_scale: float, value_scale: float, cross_attention: bool, window: int, sinks: Tensor | None
) -> None:
    if cross_attention or (window and window > 0) or sinks is not None:
        raise NotImplementedError("sgl_kernel stand-in: no cross-attention, sliding window or sinks")
    if (key_scale, value_scale) != (1.0, 1.0):
        raise NotImplementedError("sgl_kernel stand-in: no scaled key-value cache")
