"""Dumps made without the code under test: a random residual network, json and the safetensors library.

A layer adds a little of a random nonlinear map of the stream to the stream, so neighbouring boundaries are close
(cosine 0.9 and more), as they are in real models. The map has an attention-like half (mixes earlier tokens) and an
MLP half whose output is a sum over ranks, as under tensor parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Rank = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Net:
    """States of a random network for some prompts; row i of every tensor is token i of all prompts in a row."""

    hidden: int
    layers: int
    prompts: list[list[int]]
    streams: list[torch.Tensor]
    """Boundary k, float32 [T, hidden]."""
    residuals: list[torch.Tensor]
    """What every rank holds of boundary k: the stream with layer k-1's attention, without its MLP (k >= 1)."""
    parts: list[list[torch.Tensor]]
    """parts[k][r]: rank r's share of layer k-1's MLP output."""
    final: torch.Tensor
    final_weight: torch.Tensor

    @property
    def ids(self) -> list[int]:
        return [token for prompt in self.prompts for token in prompt]

    @property
    def positions(self) -> list[int]:
        return [i for prompt in self.prompts for i in range(len(prompt))]


def make_net(
    *,
    hidden: int = 96,
    layers: int = 6,
    prompts: Sequence[int] = (20, 17, 24),
    vocab: int = 200,
    tp: int = 2,
    seed: int = 0,
) -> Net:
    g = torch.Generator().manual_seed(seed)
    ids = [torch.randint(5, vocab, (n,), generator=g).tolist() for n in prompts]
    table = torch.randn(vocab, hidden, generator=g)
    stream = torch.cat([table[p] for p in ids])
    streams, residuals, parts = [stream], [stream], [[torch.zeros_like(stream)] * tp]
    begins = [sum(prompts[:i]) for i in range(len(prompts))]
    for _ in range(layers):
        mix = torch.randn(hidden, hidden, generator=g) / hidden**0.5
        up = torch.randn(hidden, 4 * hidden, generator=g) / hidden**0.5
        down = torch.randn(4 * hidden, hidden, generator=g) / (4 * hidden) ** 0.5
        normed = stream / stream.square().mean(-1, keepdim=True).sqrt()
        past = torch.cat(
            [
                normed[b : b + n].cumsum(0) / torch.arange(1, n + 1).sqrt().unsqueeze(-1)
                for b, n in zip(begins, prompts, strict=True)
            ]
        )
        residual = stream + 0.25 * past @ mix
        inner = torch.relu(residual / residual.square().mean(-1, keepdim=True).sqrt() @ up)
        width = 4 * hidden // tp
        shares = [0.5 * inner[:, r * width : (r + 1) * width] @ down[r * width : (r + 1) * width] for r in range(tp)]
        stream = residual + sum(shares)
        streams.append(stream)
        residuals.append(residual)
        parts.append(shares)
    weight = 1 + 0.3 * torch.randn(hidden, generator=g)
    final = stream / stream.square().mean(-1, keepdim=True).sqrt() * weight
    return Net(hidden, layers, ids, streams, residuals, parts, final, weight)


def noisy(tensor: torch.Tensor, seed: int, rel: float = 0.004) -> torch.Tensor:
    """What another engine computes: the same up to relative noise of a bf16 run."""
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return tensor + rel * tensor.norm(dim=-1, keepdim=True) / tensor.shape[-1] ** 0.5 * noise


@dataclass
class DumpSpec:
    """A dump to be written; tests change what they need."""

    side: str
    ids: list[int]
    positions: list[int]
    requests: list[dict[str, Any]]
    ranks: list[Rank]
    manifest: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, torch.Tensor] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        path.mkdir(parents=True)
        names = {name for rank in self.ranks for name in rank}
        columns = {
            "token_ids": torch.tensor(self.ids, dtype=torch.int64),
            "positions": torch.tensor(self.positions, dtype=torch.int64),
        }
        save_file(columns | self.columns, path / "tokens.safetensors")
        for number, tensors in enumerate(self.ranks):
            save_file({k: v.contiguous().clone() for k, v in tensors.items()}, path / f"rank-{number:04d}.safetensors")
        manifest = {
            "format": "eagle-parity-dump",
            "schema_version": 1,
            "side": self.side,
            "source": {"pipeline": "hf" if self.side == "training" else "sglang", "version": None, "detail": None},
            "boundaries": sorted(int(n.split(".")[1]) for n in names if n.startswith("boundary.")),
            "slots": len([n for n in names if n.startswith("slot.")]),
            "slot_boundaries": None,
            "draft": None,
            "engine": None,
            "requests": self.requests,
            "tool": "tests",
            "created": "2026-01-01T00:00:00+00:00",
        } | self.manifest
        (path / "manifest.json").write_text(json.dumps(manifest))
        return path


def requests_of(net: Net, **more: Any) -> list[dict[str, Any]]:
    found, begin = [], 0
    for number, prompt in enumerate(net.prompts):
        end = begin + len(prompt)
        found.append({"id": f"r{number}", "rows": [begin, end], "phase": "prefill", "batch": 1} | more)
        begin = end
    return found


def model_of(net: Net) -> dict[str, Any]:
    return {
        "name": "random",
        "architecture": "DeepseekV3ForCausalLM",
        "hidden_size": net.hidden,
        "num_layers": net.layers,
        "vocab_size": 200,
        "dtype": "bfloat16",
        "quantization": None,
    }


def training_spec(
    net: Net, slots: Sequence[int | str] | None = (2, 3, 5), boundaries: Sequence[int] | None = None
) -> DumpSpec:
    kept = range(net.layers + 1) if boundaries is None else boundaries
    tensors = {f"boundary.{k}": net.streams[k].bfloat16() for k in kept}
    if boundaries is None:
        tensors["final.norm"] = net.final.bfloat16()
    manifest = {"model": model_of(net), "slot_boundaries": None if slots is None else list(slots)}
    return DumpSpec("training", net.ids, net.positions, requests_of(net), [tensors], manifest)


def serving_spec(net: Net, held: Sequence[int | str] = (2, 3, 5), *, tp: int = 2, rel: float = 0.004) -> DumpSpec:
    """A healthy server whose slots hold these boundaries, replicated over tp ranks."""

    def state(k: int | str) -> torch.Tensor:
        return net.final if k == "final.norm" else net.streams[int(k)]

    slots = {
        f"slot.{j}": (state(k) if k == 0 else noisy(state(k), seed=100 + j, rel=rel)).bfloat16()
        for j, k in enumerate(held)
    }
    engine = {
        "name": "sglang",
        "version": "0.5.23",
        "tp_size": tp,
        "dp_size": 1,
        "pp_size": 1,
        "ep_size": 1,
        "flags": {},
    }
    manifest = {"model": model_of(net), "engine": engine}
    return DumpSpec("serving", net.ids, net.positions, requests_of(net), [dict(slots) for _ in range(tp)], manifest)


def each_rank(spec: DumpSpec, change: Callable[[Rank], None]) -> DumpSpec:
    """Apply a change to every rank's tensors."""
    for rank in spec.ranks:
        change(rank)
    return spec


def slots_from(spec: DumpSpec, make: Callable[[int, int], torch.Tensor | None]) -> DumpSpec:
    """Replace slot j on rank r by make(j, r) where that is not None."""
    for r, rank in enumerate(spec.ranks):
        for j in range(len([n for n in rank if n.startswith("slot.")])):
            tensor = make(j, r)
            if tensor is not None:
                rank[f"slot.{j}"] = tensor
    return spec


def codes(report: Mapping[str, Any], severity: str = "error") -> set[str]:
    return {finding["code"] for finding in report["findings"] if finding["severity"] == severity}
