"""Dumps of a source: the training side, and a healthy server's, which injections then change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.lab.sources import Source
from tests.synthetic import DumpSpec

Make = Callable[[int, int], torch.Tensor | None]
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float16: "float16"}


def model_of(source: Source) -> dict[str, Any]:
    return {
        "name": source.name.split()[0],
        "architecture": source.architecture,
        "hidden_size": source.hidden,
        "num_layers": source.layers,
        "vocab_size": source.vocabulary,
        "dtype": DTYPES[source.dtype],
        "quantization": None,
    }


def requests(source: Source, **more: Any) -> list[dict[str, Any]]:
    batch = len(source.prompts)
    return [
        {"id": f"p{i}", "rows": [b, e], "phase": "prefill", "batch": batch, "graph": False, "cached_tokens": 0} | more
        for i, (b, e) in enumerate(source.spans)
    ]


def positions(source: Source) -> list[int]:
    return [i for prompt in source.prompts for i in range(len(prompt))]


def training(source: Source, slots: Sequence[Any] | None = None, keep: Sequence[Any] | None = None) -> DumpSpec:
    """`slots`: what the draft was trained on (the usual three); `keep`: the boundaries stored (all)."""
    tensors = {
        "final.norm" if k == "final.norm" else f"boundary.{k}": value
        for k, value in source.training.items()
        if keep is None or k in keep
    }
    order = list(source.usual if slots is None else slots)
    return DumpSpec(
        "training",
        source.ids,
        positions(source),
        requests(source),
        [tensors],
        {"model": model_of(source), "slot_boundaries": order},
    )


def serving(source: Source, held: Sequence[Any] | None = None, tp: int | None = None) -> DumpSpec:
    """A healthy server: every rank holds the same `held` boundaries (the usual three)."""
    size = source.tp if tp is None else tp
    states = [source.serving[k].to(source.dtype, copy=True) for k in (source.usual if held is None else held)]
    rank = {f"slot.{j}": state for j, state in enumerate(states)}
    engine = {
        "name": "sglang",
        "version": "0.5.23",
        "tp_size": size,
        "dp_size": 1,
        "pp_size": 1,
        "ep_size": 1,
        "flags": {},
    }
    return DumpSpec(
        "serving",
        source.ids,
        positions(source),
        requests(source),
        [dict(rank) for _ in range(size)],
        {"model": model_of(source), "engine": engine},
    )


def change(spec: DumpSpec, make: Make, slots: Sequence[int] | None = None) -> DumpSpec:
    """Replace slot j of rank r by make(j, r), rounded to the slot's dtype, where that is not None."""
    for r, rank in enumerate(spec.ranks):
        for name in [n for n in rank if n.startswith("slot.")]:
            j = int(name.split(".")[1])
            if slots is not None and j not in slots:
                continue
            tensor = make(j, r)
            if tensor is not None:
                rank[name] = tensor.to(rank[name].dtype, copy=True)
    return spec
