"""Healthy servers, which must get no error: dtypes, ranks, quantisation noise, routing tails, few rows, situations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.lab import server
from tests.lab.injections import Pair
from tests.lab.sources import Source


def healthy(source: Source) -> Pair:
    return server.training(source), server.serving(source)


def quantised(source: Source, bits: int) -> Pair:
    """A server whose weights are rounded: noise that grows with depth, about 1 % a layer for 8 bits."""
    g = source.generator(20 + bits)
    spec = server.serving(source)
    drift = {}
    size = {8: 0.008, 6: 0.016}[bits]
    for k in source.usual:
        state = source.serving[k]
        # A weight's rounding moves a channel in proportion to what it adds there; massive channels are no exception
        # to that, but they are not what it adds.
        rms = state.square().mean(0).sqrt()
        usual = state[:, rms <= 5 * rms.median()]
        random = torch.randn(state.shape, generator=g) * usual.norm(dim=-1, keepdim=True) / usual.shape[1] ** 0.5
        drift[k] = state + size * k**0.5 * random
    return server.training(source), server.change(spec, lambda j, r: drift[source.usual[j]])


def int8_activations(source: Source) -> Pair:
    """Every row stored in 8 bits with a scale of its own."""

    def rounded(state: torch.Tensor) -> torch.Tensor:
        scale = state.abs().amax(-1, keepdim=True) / 127
        return (state / scale).round() * scale

    if source.name.find("massive") >= 0:
        return healthy(source)  # one scale a row cannot hold massive channels; that is no healthy server
    return server.training(source), server.change(
        server.serving(source), lambda j, r: rounded(source.serving[source.usual[j]])
    )


def fp8_activations(source: Source) -> Pair:
    """Every row stored as float8_e4m3 with a scale."""

    def rounded(state: torch.Tensor) -> torch.Tensor:
        scale = state.abs().amax(-1, keepdim=True) / 448
        return (state / scale).to(torch.float8_e4m3fn).float() * scale

    return server.training(source), server.change(
        server.serving(source), lambda j, r: rounded(source.serving[source.usual[j]])
    )


def one_rank(source: Source) -> Pair:
    training, serving = healthy(source)
    del serving.ranks[1:]
    return training, serving


def few_rows(source: Source, count: int = 12) -> Pair:
    """Only the first rows of the first prompt."""
    training, serving = healthy(source)
    count = min(count, source.spans[0][1])
    for spec in (training, serving):
        spec.ids, spec.positions = spec.ids[:count], spec.positions[:count]
        spec.requests = [{**spec.requests[0], "rows": [0, count]}]
        for rank in spec.ranks:
            for name in list(rank):
                rank[name] = rank[name][:count]
    return training, serving


def other_layers(source: Source) -> Pair | None:
    """Another healthy wiring: the embedding, an early layer, the last layer's output."""
    held = (0, 1, source.layers)
    if any(k not in source.serving for k in held):
        return None
    return server.training(source, held), server.serving(source, held)


def final_norm(source: Source) -> Pair | None:
    held = (source.usual[0], source.usual[1], "final.norm")
    if "final.norm" not in source.serving:
        return None
    return server.training(source, held), server.serving(source, held)


def verify_rows(source: Source) -> Pair | None:
    from tests.lab.injections import with_verify

    return with_verify(source, lambda state, k: state)


def flipped_rows(source: Source) -> Pair:
    """A healthy MoE of the worst kind seen: a quarter of the rows took another expert (cosine 0.7 to 0.95)."""
    g = source.generator(21)
    spec = server.serving(source)
    changed = {}
    for k in source.usual:
        state = source.serving[k]
        # Another expert moves a row where rows differ from each other: not along channels that all of them share.
        random = torch.randn(state.shape, generator=g) * state.std(0)
        size = 0.15 + 0.4 * torch.rand(len(state), 1, generator=g)
        flips = torch.rand(len(state), 1, generator=g) < 0.25
        changed[k] = torch.where(flips, state + size * random, state)
    return server.training(source), server.change(spec, lambda j, r: changed[source.usual[j]])


def other_expert(source: Source) -> Pair | None:
    """A sixth of the rows took another expert in the very layer before the slot: a part of its step is another one."""
    if not source.parts or source.rows < 40:
        return None
    g = source.generator(24)
    changed = {}
    for k in source.usual:
        part = source.parts[k][0] if source.tp > 1 else 0.6 * source.parts[k][0]
        flips = torch.rand(source.rows, 1, generator=g) < 0.17
        changed[k] = torch.where(flips, source.serving[k] - part + part.roll(11, dims=0), source.serving[k])
    return server.training(source), server.change(server.serving(source), lambda j, r: changed[source.usual[j]])


def bare(source: Source) -> Pair:
    """Training files that hold what the draft takes and nothing else."""
    return server.training(source, keep=source.usual), server.serving(source)


def shared_prefix(source: Source) -> Pair | None:
    """Two prompts that begin alike: their first rows are one state, and routing flips in some of them."""
    if len(source.spans) < 2:
        return None
    (a, b), (c, d) = source.spans[:2]
    n = min(b - a, d - c) // 2
    order = torch.arange(source.rows)
    order[c : c + n] = torch.arange(a, a + n)
    training, serving = server.training(source), server.serving(source)
    ids = [source.ids[i] for i in order]
    g = source.generator(25)
    flips = torch.rand(source.rows, 1, generator=g) < 0.1
    changed = {}
    for k in source.usual:
        state = source.serving[k][order]
        other = torch.randn(state.shape, generator=g) * state.std(0)
        changed[k] = torch.where(flips, state + 0.4 * other, state)
    training.ids = serving.ids = ids
    training.ranks = [{name: rows[order] for name, rows in rank.items()} for rank in training.ranks]
    return training, server.change(serving, lambda j, r: changed[source.usual[j]])


def dp_attention(source: Source) -> Pair | None:
    from tests.lab.injections import scattered

    if source.tp < 2:
        return None
    pair = scattered(source, torch.arange(source.rows) % source.tp)
    pair[1].manifest["engine"] |= {"dp_size": source.tp}
    return pair


def last_bits(source: Source) -> Pair | None:
    """An all-reduce that is not deterministic: ranks differ in the last bit here and there."""
    if source.tp < 2:
        return None
    training, serving = healthy(source)
    g = source.generator(22)
    for name, tensor in serving.ranks[-1].items():
        integers = tensor.clone().view(torch.int16 if tensor.dtype != torch.float32 else torch.int32)
        integers ^= (torch.rand(tensor.shape, generator=g) < 0.1).to(integers.dtype)
        serving.ranks[-1][name] = integers.view(tensor.dtype)
    return training, serving


CONTROLS: dict[str, Callable[[Source], Pair | None]] = {
    "plain": healthy,
    "8-bit weights": lambda source: quantised(source, 8),
    "6-bit weights": lambda source: quantised(source, 6),
    "int8 activations": int8_activations,
    "fp8 activations": fp8_activations,
    "one rank of several": one_rank,
    "12 rows": few_rows,
    "embedding, early layer, last layer": other_layers,
    "final norm in both": final_norm,
    "prefill and verify": verify_rows,
    "routing flips": flipped_rows,
    "only the trained boundaries stored": bare,
    "another expert in the last layer": other_expert,
    "a shared prefix and routing flips": shared_prefix,
    "data-parallel attention": dp_attention,
    "last bits differ": last_bits,
}


def controls(source: Source) -> Iterator[tuple[str, Pair]]:
    """The healthy pairs that this source can make."""
    coarse = ("8-bit", "6-bit", "int8", "fp8")
    for name, make in CONTROLS.items():
        pair = make(source)
        if pair is None:
            continue
        if name.startswith(coarse):
            pair[1].manifest["model"] = pair[1].manifest["model"] | {"quantization": name.split()[0]}
        yield name, pair
