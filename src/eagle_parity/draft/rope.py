"""Rotary position embedding of a draft's attention, read from its config.

Formulas as in transformers, modeling_rope_utils.py (default, linear, llama3, yarn) and as DeepSeek-V3's own code has
them (the yarn magnitude; the interleaved order of MLA, and its softmax scale).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eagle_parity.errors import InputError


@dataclass(frozen=True)
class Rope:
    """Angles are position * frequencies; `magnitude` multiplies cosine and sine (yarn).

    `frequencies` is float32 [R/2] for R rotated dimensions, the first R of a head; the rest pass unchanged.
    `interleaved`: pairs are (0, 1), (2, 3), … as in DeepSeek's MLA; else (0, R/2), (1, R/2 + 1), … as in Llama.
    """

    frequencies: torch.Tensor
    magnitude: float = 1.0
    interleaved: bool = False

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Turn `heads` [..., n, T, D] to `positions` [..., T], broadcast over heads; same shape and dtype.

        Interleaved pairs come out as halves. Queries and keys are permuted alike, so their products stay the same.
        """
        half = self.frequencies.shape[0]
        angles = (positions.to(torch.float32).unsqueeze(-1) * self.frequencies).unsqueeze(-3)
        cosine, sine = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        turned, rest = heads[..., : 2 * half], heads[..., 2 * half :]
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned[..., :half], turned[..., half:]
        parts = [first * cosine - second * sine, second * cosine + first * sine]
        return torch.cat([*parts, rest] if rest.shape[-1] else parts, dim=-1)

    def to(self, device: torch.device) -> Rope:
        """The same on a device."""
        return Rope(self.frequencies.to(device), self.magnitude, self.interleaved)


def settings(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Theta and the scaling entries of a layer config, old spelling (`rope_theta`, `rope_scaling`) or new.

    transformers 5 writes `rope_parameters`; where both stand, servers read the new one (sglang llama_eagle3.py).
    """
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    scaling = new if isinstance(new, dict) else old if isinstance(old, dict) else {}
    theta = scaling.get("rope_theta", config.get("rope_theta"))
    return (float(theta) if isinstance(theta, int | float) else 10000.0), scaling


def read_rope(config: Mapping[str, Any], dimensions: int, *, interleaved: bool) -> Rope:
    """The rotary embedding that a layer config asks for, over at most `dimensions` of a head.

    Raises InputError for a scaling that is not known here: replaying with a wrong one would blame the states.
    """
    theta, scaling = settings(config)
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if isinstance(partial, int | float) and not interleaved:
        dimensions = int(dimensions * partial)
    plain = 1.0 / theta ** (torch.arange(0, dimensions, 2, dtype=torch.float32) / dimensions)
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind in ("default", "mrope"):  # mrope: text has the same position in all three of its parts
        return Rope(plain, 1.0, interleaved)
    if kind == "linear":
        return Rope(plain / _number(scaling, "factor"), 1.0, interleaved)
    if kind == "llama3":
        return Rope(_llama3(plain, scaling), 1.0, interleaved)
    if kind in ("yarn", "deepseek_yarn"):
        frequencies = _yarn(plain, scaling, config, theta, dimensions)
        return Rope(frequencies, _yarn_magnitude(scaling), interleaved)
    raise InputError(
        f"the draft's RoPE scaling {kind!r} cannot be replayed", fix="report it, with the draft's config.json"
    )


def softmax_scale(config: Mapping[str, Any], dimensions: int) -> float:
    """The factor on MLA's attention scores: 1/sqrt(D), times mscale² under yarn (DeepSeek-V3, modeling_deepseek.py)."""
    _, scaling = settings(config)
    scale = 1 / math.sqrt(dimensions)
    factor, all_dim = scaling.get("factor"), scaling.get("mscale_all_dim")
    if factor and all_dim and str(scaling.get("rope_type", scaling.get("type"))) in ("yarn", "deepseek_yarn"):
        scale *= _mscale(float(factor), float(all_dim)) ** 2
    return scale


def _number(scaling: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = scaling.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise InputError(
            f"the draft's RoPE scaling has {name} {value!r}, expected a positive number",
            fix="complete rope_scaling in the draft's config.json",
        )
    return float(value)


def _llama3(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    context = _number(scaling, "original_max_position_embeddings")
    wavelength = 2 * math.pi / plain
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain


def _yarn(
    plain: torch.Tensor, scaling: Mapping[str, Any], config: Mapping[str, Any], theta: float, dimensions: int
) -> torch.Tensor:
    context = _number(scaling, "original_max_position_embeddings", config.get("max_position_embeddings"))

    def dimension(rotations: float) -> float:
        return dimensions * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(_number(scaling, "beta_fast", 32)), dimension(_number(scaling, "beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dimensions - 1)
    ramp = (torch.arange(len(plain), dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return plain / _number(scaling, "factor") * (1 - keep) + plain * keep


def _yarn_magnitude(scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if isinstance(given, int | float):
        return float(given)
    factor = _number(scaling, "factor")
    some, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if some and all_dim:
        return _mscale(factor, float(some)) / _mscale(factor, float(all_dim))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
