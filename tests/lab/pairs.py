"""Two faults at once. Each must be named; which first does not matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.lab import server
from tests.lab.injections import Pair, noise, normed, per_prompt, replaced
from tests.lab.run import Outcome
from tests.lab.sources import Source


@dataclass(frozen=True)
class Stacked:
    """Two faults; `first` and `second` are the codes that count as naming each."""

    name: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    make: Callable[[Source], Pair | None]
    cases: str

    def named(self, outcome: Outcome) -> bool:
        said = set(outcome.errors) | set(outcome.warnings)
        return bool(said & set(self.first)) and bool(said & set(self.second))


PAIRS: list[Stacked] = []


def stack(
    name: str, first: tuple[str, ...], second: tuple[str, ...], cases: str = "section 9"
) -> Callable[..., object]:
    def wrap(make: Callable[[Source], Pair | None]) -> object:
        PAIRS.append(Stacked(name, first, second, make, cases))
        return make

    return wrap


SHIFT = ("layer-shift", "layer-set")
PARTIAL = ("partial-sum",)


def _late(source: Source) -> tuple[int, ...]:
    return tuple(k - 1 for k in source.usual)


@stack("one layer late + partial sums", SHIFT, PARTIAL)
def late_and_partial(source: Source) -> Pair | None:
    if not source.parts or source.tp < 2:
        return None
    _, serving = replaced(source, lambda state, k, r: source.residuals[k] + source.parts[k][r])
    return server.training(source, _late(source)), serving


@stack("one layer late + partial sums with residual", SHIFT, PARTIAL)
def late_and_rebuilt(source: Source) -> Pair | None:
    if not source.parts or source.tp < 2:
        return None
    _, serving = replaced(source, lambda state, k, r: source.residuals[k] + source.parts[k][r])
    for rank in serving.ranks:
        rank |= {f"residual.{k}": source.residuals[k].to(source.dtype) for k in source.usual}
    return server.training(source, _late(source)), serving


@stack("one layer late + rows lost", SHIFT, ("rows-lost",))
def late_and_lost(source: Source) -> Pair | None:
    if source.rows < 60:
        return None

    def make(state: torch.Tensor, k: int, r: int) -> torch.Tensor:
        state = state.clone()
        for b, _ in source.spans:
            state[b : b + 8] = 0
        return state

    return server.training(source, _late(source)), replaced(source, make)[1]


@stack("one layer late + some rows exchanged", SHIFT, ("rows-swapped",))
def late_and_swapped(source: Source) -> Pair | None:
    if source.rows < 60:
        return None
    order = torch.arange(source.rows)
    order[4:12] = torch.arange(source.rows - 9, source.rows - 1)
    return server.training(source, _late(source)), replaced(source, lambda state, k, r: state[order])[1]


@stack("one layer late + scaled", SHIFT, ("scale-mismatch",))
def late_and_scaled(source: Source) -> Pair | None:
    return server.training(source, _late(source)), replaced(source, lambda state, k, r: 1.4 * state)[1]


@stack("one layer late + one token late", SHIFT, ("token-shift",))
def late_and_token(source: Source) -> Pair | None:
    return (
        server.training(source, _late(source)),
        replaced(source, lambda state, k, r: per_prompt(source, state, 1))[1],
    )


@stack("slots permuted + draft norm", ("concat-order",), ("draft-norm", "final-norm"))
def permuted_and_normed(source: Source) -> Pair | None:
    g = source.generator(30)
    weights = [1 + 0.4 * torch.randn(source.hidden, generator=g) for _ in range(3)]
    a, b, c = source.usual
    made = replaced(source, lambda state, k, r: normed(state, weights[source.usual.index(k)]))
    return server.training(source, (c, a, b)), made[1]


@stack("partial sum in one slot + another slot one layer late", PARTIAL, SHIFT)
def partial_here_late_there(source: Source) -> Pair | None:
    if not source.parts or source.tp < 2:
        return None
    a, b, c = source.usual
    _, serving = replaced(source, lambda state, k, r: source.residuals[k] + source.parts[k][r], (0,))
    return server.training(source, (a, b, c - 1)), serving


@stack("non-finite in one slot + another slot one layer late", ("non-finite",), SHIFT)
def nan_here_late_there(source: Source) -> Pair | None:
    a, b, c = source.usual

    def make(state: torch.Tensor, k: int, r: int) -> torch.Tensor:
        state = state.clone()
        state[3] = torch.nan
        return state

    return server.training(source, (a, b - 1, c)), replaced(source, make, (0,))[1]


@stack("residual missing in one slot + final norm on the last", ("residual-missing",), ("final-norm",))
def residual_and_norm(source: Source) -> Pair | None:
    n = source.layers
    if not source.parts or n not in source.serving:
        return None
    a, b, _ = source.usual
    spec = server.serving(source, (a, b, "final.norm"))
    server.change(spec, lambda j, r: sum(source.parts[b], torch.zeros(())), (1,))
    return server.training(source, (a, b, n)), spec


@stack("hidden shards + one layer late", ("hidden-shard",), SHIFT)
def shards_and_late(source: Source) -> Pair | None:
    if source.tp < 2 or source.hidden % source.tp:
        return None
    width = source.hidden // source.tp
    made = replaced(source, lambda state, k, r: state[:, r * width : (r + 1) * width])
    return server.training(source, _late(source)), made[1]


@stack("token shards + scaled", ("token-shard",), ("scale-mismatch",))
def tokens_and_scale(source: Source) -> Pair | None:
    from tests.lab.injections import scattered

    if source.tp < 2:
        return None
    _, serving = scattered(source, torch.arange(source.rows) % source.tp)
    for rank in serving.ranks:
        for name in [n for n in rank if n.startswith("slot.")]:
            rank[name] = (1.4 * rank[name].float()).to(source.dtype)
    return server.training(source), serving


@stack("template suffix + one layer late", ("template-mismatch",), SHIFT)
def template_and_late(source: Source) -> Pair | None:
    from tests.lab.injections import template_suffix

    made = template_suffix(source)
    return None if made is None else (server.training(source, _late(source)), made[1])


@stack("stale rank + one layer late", ("graph-stale",), SHIFT)
def stale_and_late(source: Source) -> Pair | None:
    if source.tp < 2:
        return None
    made = replaced(source, lambda state, k, r: state.roll(9, dims=0) if r == source.tp - 1 else state)
    return server.training(source, _late(source)), made[1]


@stack("graph replay of default layers + rows lost in prefill", ("graph-stale",), ("rows-lost",))
def graph_and_lost(source: Source) -> Pair | None:
    from tests.lab.injections import with_verify

    if any(k - 1 not in source.serving for k in source.usual):
        return None
    made = with_verify(source, lambda state, k: source.serving[k - 1])
    if made is None:
        return None
    for rank in made[1].ranks:
        for name in list(rank):
            rank[name] = rank[name].clone()
            for b, _ in source.spans:
                rank[name][b : b + 4] = 0
    return made


@stack("one slot garbage + another permuted", ("undetermined",), ("layer-shift", "layer-set", "concat-order"))
def garbage_and_late(source: Source) -> Pair | None:
    a, b, c = source.usual
    junk = noise(source.serving[a], source.generator(31))
    return server.training(source, (a, b, c - 1)), replaced(source, lambda state, k, r: junk, (0,))[1]
