"""Matrix products of a draft's weights with states: float32 results, weights in the dtype in which they are stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

BLOCK = 16 * 2**20  # elements of a weight that are turned into float32 at once


@dataclass(frozen=True)
class Products:
    """`fast` multiplies in the weight's own dtype (bf16, summed in float32): right to bf16 rounding.

    Otherwise a bf16 weight is widened block by block, so that it never lies in memory twice.
    """

    fast: bool = False

    def linear(self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """states [..., I] times weight [O, I] transposed, plus bias [O]; float32 [..., O]."""
        if weight.dtype == states.dtype:
            return functional.linear(states, weight, bias)
        if self.fast:
            product = functional.linear(states.to(weight.dtype), weight).float()
            return product if bias is None else product + bias
        out = states.new_empty((*states.shape[:-1], weight.shape[0]))
        step = max(1, BLOCK // weight.shape[1])
        for at in range(0, weight.shape[0], step):
            out[..., at : at + step] = functional.linear(states, weight[at : at + step].to(states.dtype))
        return out if bias is None else out + bias


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, in float32 (what every trainer and server does, whatever it rounds to after)."""
    scaled = states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + eps)
    return scaled * weight.to(scaled.dtype)
