"""The faults: each makes both dumps of a deployment that has it, from what such a server would compute.

Written from the physics of the fault and from public reports, without a look at the rules. `expected` are the codes
that name it; more than one only where the dumps cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.lab import server
from tests.lab.sources import Source
from tests.synthetic import DumpSpec

Pair = tuple[DumpSpec, DumpSpec]


@dataclass(frozen=True)
class Injection:
    """One way to be wrong."""

    name: str
    expected: tuple[str, ...]
    make: Callable[[Source], Pair | None]
    cases: str
    """The public cases that it stands for."""
    severity: str = "error"


INJECTIONS: list[Injection] = []


def inject(name: str, *expected: str, cases: str, severity: str = "error") -> Callable[..., Any]:
    def wrap(make: Callable[[Source], Pair | None]) -> Callable[[Source], Pair | None]:
        INJECTIONS.append(Injection(name, expected, make, cases, severity))
        return make

    return wrap


def noise(like: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Rows with the norm of `like` and a random direction."""
    random = torch.randn(like.shape, generator=g)
    return random * like.norm(dim=-1, keepdim=True) / random.norm(dim=-1, keepdim=True)


def replaced(
    source: Source, make: Callable[[torch.Tensor, int, int], torch.Tensor], slots: Sequence[int] = (0, 1, 2)
) -> Pair:
    """A healthy pair whose slots j are make(state, boundary, rank)."""
    spec = server.serving(source)
    return server.training(source), server.change(
        spec, lambda j, r: make(source.serving[source.usual[j]], source.usual[j], r), slots
    )


# ------------------------------------------------------------------------------------------- layers and their order


def trained_on(source: Source, *boundaries: Any) -> Pair | None:
    """The server feeds the usual three; the draft was trained on these."""
    known = source.training
    if any(b not in known for b in boundaries):
        return None
    return server.training(source, boundaries), server.serving(source)


@inject("one layer late", "layer-shift", cases="C001 C003 C004 C005")
def one_late(source: Source) -> Pair | None:
    return trained_on(source, *(k - 1 for k in source.usual))


@inject("one layer early", "layer-shift", cases="C002 C007")
def one_early(source: Source) -> Pair | None:
    return trained_on(source, *(k + 1 for k in source.usual))


@inject("two layers late", "layer-shift", cases="C003")
def two_late(source: Source) -> Pair | None:
    return trained_on(source, *(k - 2 for k in source.usual))


@inject("only the middle slot one layer late", "layer-shift", cases="C006")
def middle_late(source: Source) -> Pair | None:
    a, b, c = source.usual
    return trained_on(source, a, b - 1, c)


@inject("default layers instead of the trained", "layer-set", cases="C009 C010 C011 C016")
def default_layers(source: Source) -> Pair | None:
    a, b, c = source.usual
    trained = (a - 1, b + 1, c + 1)
    return trained_on(source, *trained)


@inject("dump and export chose different layers", "layer-set", cases="C013")
def other_preset(source: Source) -> Pair | None:
    a, b, c = source.usual
    return trained_on(source, a + 1, b - 1, c - 1) if len({a + 1, b - 1, c - 1}) == 3 and a + 1 < b - 1 else None


@inject("stock hidden_states[0..2]", "layer-set", "layer-shift", "embedding-missing", cases="C008")
def first_three(source: Source) -> Pair | None:
    return trained_on(source, 0, 1, 2)


@inject("embedding first in training, not served", "embedding-missing", cases="story, verl-SpeCo#20")
def embedding_first(source: Source) -> Pair | None:
    a, b, _ = source.usual
    return trained_on(source, 0, a, b + 1)


@inject("one layer late, only the trained boundaries stored", "layer-shift", "undetermined", cases="C001 C003")
def late_and_bare(source: Source) -> Pair | None:
    held = [k - 1 for k in source.usual]
    if any(k not in source.serving for k in held):
        return None
    return server.training(source, keep=source.usual), server.serving(source, held)


@inject("slots permuted", "concat-order", cases="C008 trained drafts")
def permuted(source: Source) -> Pair | None:
    a, b, c = source.usual
    return trained_on(source, c, a, b)


@inject("two slots exchanged", "concat-order", cases="trained drafts")
def exchanged(source: Source) -> Pair | None:
    a, b, c = source.usual
    return trained_on(source, b, a, c)


@inject(
    "an id given twice: a slot too few", "capture-lost", "layer-set", "boundary-missing", cases="C014 C015 C017 C020"
)
def too_few(source: Source) -> Pair | None:
    return server.training(source), server.serving(source, source.usual[:2])


@inject(
    "the last layer's output not captured, later slots moved up", "capture-lost", "boundary-missing", cases="C017 C019"
)
def deepest_lost(source: Source) -> Pair | None:
    return server.training(source), server.serving(source, source.usual[1:])


@inject("the expected boundary is not in the training dump", "boundary-missing", cases="C018", severity="warning")
def not_stored(source: Source) -> Pair | None:
    keep = [k for k in source.training if k != source.usual[1]]
    return server.training(source, keep=keep), server.serving(source)


# -------------------------------------------------------------------------------------------------- aliased buffers


@inject("all slots are the last captured buffer", "aliased-buffer", cases="C053 C054")
def one_buffer(source: Source) -> Pair | None:
    last = source.usual[-1]
    return replaced(source, lambda state, k, r: source.serving[last])


@inject("buffer written by the next layer's attention", "aliased-buffer", cases="C053")
def written_later(source: Source) -> Pair | None:
    if source.usual[1] + 1 not in source.residuals:
        return None
    return replaced(source, lambda state, k, r: source.residuals[k + 1])


@inject("one slot written by the next layer's attention", "aliased-buffer", cases="C053 C054")
def one_written_later(source: Source) -> Pair | None:
    if source.usual[1] + 1 not in source.residuals:
        return None
    return replaced(source, lambda state, k, r: source.residuals[k + 1], (1,))


# ------------------------------------------------------------------------------------------------------------ norms


def normed(state: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    unit = state / state.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    return unit if weight is None else unit * weight


@inject("the last slot after the final norm", "final-norm", cases="C022 C023 C024")
def served_final(source: Source) -> Pair | None:
    n = source.layers
    if n not in source.serving or n not in source.training:
        return None
    a, b, _ = source.usual
    return server.training(source, (a, b, n)), server.serving(source, (a, b, "final.norm"))


@inject("trained on the state after the final norm, served before it", "final-norm", cases="C022 C026 C028")
def trained_final(source: Source) -> Pair | None:
    n = source.layers
    if n not in source.serving:
        return None
    a, b, _ = source.usual
    return server.training(source, (a, b, "final.norm")), server.serving(source, (a, b, n))


@inject("the final norm on a slot in the middle", "final-norm", cases="C025 C027")
def final_norm_everywhere(source: Source) -> Pair | None:
    weight = source.final_weight
    if weight is None or float(weight.std()) < 0.05:
        return None  # a plain weight of ones cannot be told from any other norm
    return replaced(source, lambda state, k, r: normed(state, weight))


@inject("RMS norm a slot (fc_norm) before the capture", "draft-norm", cases="C029 C031 C033")
def fc_norm(source: Source) -> Pair | None:
    g = source.generator(11)
    weights = [1 + 0.4 * torch.randn(source.hidden, generator=g) for _ in range(3)]
    return replaced(source, lambda state, k, r: normed(state, weights[source.usual.index(k)]))


@inject("one RMS norm over all slots (norm_before_fc) before the capture", "draft-norm", cases="C029 C030 C032")
def norm_before_fc(source: Source) -> Pair | None:
    g = source.generator(12)
    whole = torch.cat([source.serving[k] for k in source.usual], dim=-1)
    weight = 0.5 + torch.rand(whole.shape[1], generator=g)
    blocks = normed(whole, weight).split(source.hidden, dim=-1)
    return replaced(source, lambda state, k, r: blocks[source.usual.index(k)])


# --------------------------------------------------------------------------------------------------- sums and ranks


@inject("captured before the all-reduce", "partial-sum", cases="C040")
def before_all_reduce(source: Source) -> Pair | None:
    if not source.parts or source.tp < 2:
        return None
    return replaced(source, lambda state, k, r: source.residuals[k] + source.parts[k][r])


@inject("captured before the all-reduce, one slot", "partial-sum", cases="C040")
def one_before_all_reduce(source: Source) -> Pair | None:
    if not source.parts or source.tp < 2:
        return None
    return replaced(source, lambda state, k, r: source.residuals[k] + source.parts[k][r], (2,))


@inject("captured before the all-reduce, residual stored beside", "partial-sum", cases="C040")
def with_residual(source: Source) -> Pair | None:
    if not source.parts or source.tp < 2:
        return None
    pair = replaced(source, lambda state, k, r: source.residuals[k] + source.parts[k][r])
    for rank in pair[1].ranks:
        rank |= {f"residual.{k}": source.residuals[k].to(source.dtype) for k in source.usual}
    return pair


@inject("captured before the all-reduce in short forwards only", "partial-sum", cases="C040")
def short_forwards(source: Source) -> Pair | None:
    if not source.parts or source.tp < 2 or len(source.spans) < 2:
        return None
    short = torch.zeros(source.rows, 1, dtype=torch.bool)
    short[source.spans[0][0] : source.spans[0][1]] = True

    def make(state: torch.Tensor, k: int, r: int) -> torch.Tensor:
        return torch.where(short, source.residuals[k] + source.parts[k][r], state)

    pair = replaced(source, make)
    for number, request in enumerate(pair[1].requests):
        request["forward_tokens"] = 40 if number == 0 else 2305
    return pair


@inject("half of the ranks reduced together", "partial-sum", cases="C043")
def half_reduced(source: Source) -> Pair | None:
    if not source.parts or source.tp < 4:
        return None
    half = source.tp // 2

    def make(state: torch.Tensor, k: int, r: int) -> torch.Tensor:
        mine = source.parts[k][:half] if r < half else source.parts[k][half:]
        return source.residuals[k] + sum(mine, torch.zeros(()))

    return replaced(source, make)


@inject("partial sum of the layer's output, no residual", "partial-sum", "residual-missing", cases="C039 C040")
def partial_output(source: Source) -> Pair | None:
    if not source.parts or source.tp < 2:
        return None
    return replaced(source, lambda state, k, r: source.parts[k][r])


@inject("layer output reduced twice", "double-sum", cases="C041 C042")
def reduced_twice(source: Source) -> Pair | None:
    if not source.parts or source.tp < 2:
        return None
    return replaced(source, lambda state, k, r: source.residuals[k] + source.tp * sum(source.parts[k], torch.zeros(())))


@inject("whole state reduced again", "double-sum", cases="C041")
def state_reduced(source: Source) -> Pair | None:
    if source.tp < 2:
        return None
    return replaced(source, lambda state, k, r: source.tp * state)


@inject("layer output without the residual", "residual-missing", cases="C039")
def no_residual(source: Source) -> Pair | None:
    if not source.parts:
        return None
    return replaced(source, lambda state, k, r: sum(source.parts[k], torch.zeros(())))


@inject("attention and MLP output without the residual", "residual-missing", cases="C039")
def delta_only(source: Source) -> Pair | None:
    if not source.parts:
        return None
    return replaced(source, lambda state, k, r: state - source.serving[k - 1])


@inject("channels split over the ranks", "hidden-shard", cases="896 = 7168/8")
def channels_split(source: Source) -> Pair | None:
    if source.tp < 2 or source.hidden % source.tp:
        return None
    width = source.hidden // source.tp
    return replaced(source, lambda state, k, r: state[:, r * width : (r + 1) * width])


def scattered(source: Source, owner: torch.Tensor) -> Pair:
    training, serving = server.training(source), server.serving(source)
    for r, rank in enumerate(serving.ranks):
        index = (owner == r).nonzero().flatten()
        for name in list(rank):
            rank[name] = rank[name][index]
        rank["rows"] = index
    return training, serving


@inject("tokens split over the ranks in blocks", "token-shard", cases="C044 C045 C046")
def token_blocks(source: Source) -> Pair | None:
    if source.tp < 2 or source.rows < 2 * source.tp:
        return None
    return scattered(source, torch.arange(source.rows) * source.tp // source.rows)


@inject("tokens dealt to the ranks in turn", "token-shard", cases="C044 C045")
def tokens_in_turn(source: Source) -> Pair | None:
    if source.tp < 2:
        return None
    return scattered(source, torch.arange(source.rows) % source.tp)


@inject("rank 1 holds zeros", "capture-lost", "graph-stale", "undetermined", "rows-lost", cases="C047")
def zero_rank(source: Source) -> Pair | None:
    if source.tp < 2:
        return None
    return replaced(source, lambda state, k, r: torch.zeros_like(state) if r == 1 else state)


@inject("the last rank holds the rows of an earlier step", "graph-stale", cases="C074 C077")
def stale_rank(source: Source) -> Pair | None:
    if source.tp < 2:
        return None
    return replaced(source, lambda state, k, r: state.roll(9, dims=0) if r == source.tp - 1 else state)


@inject("a slot is missing on one rank", "capture-lost", cases="C012 C048 C049 C050")
def slot_missing(source: Source) -> Pair | None:
    if source.tp < 2:
        return None
    pair = replaced(source, lambda state, k, r: state)
    del pair[1].ranks[1]["slot.1"]
    return pair


@inject("embedding joined to every slot", "width-mismatch", cases="C087 C088 C092")
def too_wide(source: Source) -> Pair | None:
    return replaced(source, lambda state, k, r: torch.cat([state, source.training[0].float()], dim=-1))


# ---------------------------------------------------------------------------------------------------------- content


@inject("scaled by 1.25", "scale-mismatch", cases="F23")
def scaled_up(source: Source) -> Pair | None:
    return replaced(source, lambda state, k, r: 1.25 * state)


@inject("scaled by 1.03", "scale-mismatch", cases="F23")
def scaled_little(source: Source) -> Pair | None:
    return replaced(source, lambda state, k, r: 1.03 * state)


@inject("one slot scaled by 0.95", "scale-mismatch", cases="F23")
def scaled_down(source: Source) -> Pair | None:
    return replaced(source, lambda state, k, r: 0.95 * state, (2,))


def usual_channel(source: Source, salt: int) -> int:
    """Some channel of middling size in every slot."""
    sizes = torch.stack([source.serving[k].abs().median(0).values for k in source.usual])
    middling = ((sizes > 0.7 * sizes.median(1, keepdim=True).values) & (sizes < 3 * sizes.median())).all(0).nonzero()
    return int(middling[torch.randint(len(middling), (1,), generator=source.generator(salt))])


@inject("one channel is zero", "capture-lost", cases="C130")
def dead_channel(source: Source) -> Pair | None:
    channel = usual_channel(source, 25)

    def make(state: torch.Tensor, k: int, r: int) -> torch.Tensor:
        state = state.clone()
        state[:, channel] = 0
        return state

    return replaced(source, make)


@inject("one channel of one slot is constant", "capture-lost", cases="C130")
def stuck_channel(source: Source) -> Pair | None:
    channel = usual_channel(source, 26)

    def make(state: torch.Tensor, k: int, r: int) -> torch.Tensor:
        state = state.clone()
        state[:, channel] = state[0, channel].clone()
        return state

    return replaced(source, make, (1,))


@inject("two channels exchanged", "undetermined", cases="C130")
def channels_exchanged(source: Source) -> Pair | None:
    a, b = usual_channel(source, 27), usual_channel(source, 28)
    if a == b:
        return None
    order = torch.arange(source.hidden)
    order[a], order[b] = b, a
    return replaced(source, lambda state, k, r: state[:, order], (0,))


@inject("captured before the MLP's output was added, on every rank", "undetermined", cases="C040 C053")
def before_mlp(source: Source) -> Pair | None:
    if not source.parts:
        return None
    return replaced(source, lambda state, k, r: source.residuals[k])


@inject("mean over ranks instead of sum", "scale-mismatch", cases="F23")
def mean_over_ranks(source: Source) -> Pair | None:
    return replaced(source, lambda state, k, r: state / 8, (1,))


@inject("embedding scaled by sqrt(hidden)", "embedding-scale", cases="C113")
def embedding_scaled(source: Source) -> Pair | None:
    if 0 not in source.serving:
        return None
    held = (0, *source.usual[1:])
    spec = server.serving(source, held)
    server.change(spec, lambda j, r: source.serving[0] * source.hidden**0.5, (0,))
    return server.training(source, held), spec


@inject("target in a rotated basis", "rotated-basis", cases="C103 C104 C105")
def rotated(source: Source) -> Pair | None:
    if source.hidden > 2048:
        size, g = 64, source.generator(13)  # a block-diagonal rotation of the same kind, cheap at full width
        blocks = torch.linalg.qr(torch.randn(source.hidden // size, size, size, generator=g)).Q
        order = torch.randperm(source.hidden, generator=g)

        def turn(state: torch.Tensor) -> torch.Tensor:
            mixed = state[:, order].unflatten(-1, (-1, size))
            return torch.einsum("tbi,bij->tbj", mixed, blocks).flatten(1)

        return replaced(source, lambda state, k, r: turn(state))
    q = torch.linalg.qr(torch.randn(source.hidden, source.hidden, generator=source.generator(13))).Q
    return replaced(source, lambda state, k, r: state @ q)


@inject("noise far over the floor", "precision", cases="C106 C107")
def noisy(source: Source) -> Pair | None:
    g = source.generator(14)
    steps = [
        float((b - a).norm(dim=-1).div(b.norm(dim=-1)).median())
        for a, b in ((source.training[k - 1].float(), source.training[k].float()) for k in source.usual)
    ]
    if min(steps) < 0.4:
        return None  # noise as large as a layer's step: no boundary is the nearest any more
    changed = {k: source.serving[k] + 0.36 * noise(source.serving[k], g) for k in source.usual}
    return replaced(source, lambda state, k, r: changed[k], (1,))


@inject("NaN in one row", "non-finite", cases="C075 C111")
def nan_row(source: Source) -> Pair | None:
    def make(state: torch.Tensor, k: int, r: int) -> torch.Tensor:
        state = state.clone()
        state[min(7, len(state) - 1)] = torch.nan
        return state

    return replaced(source, make, (1,))


@inject("float16 overflow of a massive channel", "non-finite", cases="C109 C110")
def overflow(source: Source) -> Pair | None:
    def make(state: torch.Tensor, k: int, r: int) -> torch.Tensor:
        state = state.clone()
        state[::5, 3] = torch.inf
        return state

    return replaced(source, make, (2,))


@inject("tensors of nothing known", "undetermined", cases="C130 C131")
def garbage(source: Source) -> Pair | None:
    g = source.generator(15)
    changed = {k: noise(source.serving[k], g) for k in source.usual}
    return replaced(source, lambda state, k, r: changed[k], (0,))


# ------------------------------------------------------------------------------------------------------------- rows


@inject("states one token late", "token-shift", cases="C063 C064 C067 C068")
def one_token_late(source: Source) -> Pair | None:
    return replaced(source, lambda state, k, r: per_prompt(source, state, 1))


@inject("states one token early", "token-shift", cases="C066")
def one_token_early(source: Source) -> Pair | None:
    return replaced(source, lambda state, k, r: per_prompt(source, state, -1))


@inject("states two tokens late, over request borders", "token-shift", cases="C062")
def two_tokens_late(source: Source) -> Pair | None:
    return replaced(source, lambda state, k, r: state.roll(2, dims=0))


def per_prompt(source: Source, state: torch.Tensor, by: int) -> torch.Tensor:
    return torch.cat([state[b:e].roll(by, dims=0) for b, e in source.spans])


@inject("two requests' rows exchanged", "rows-swapped", cases="C056 C059 C060")
def requests_swapped(source: Source) -> Pair | None:
    if len(source.spans) < 2:
        return None
    (a, b), (c, d) = source.spans[:2]
    n = min(b - a, d - c)
    order = torch.arange(source.rows)
    order[a : a + n], order[c : c + n] = torch.arange(c, c + n), torch.arange(a, a + n)
    return replaced(source, lambda state, k, r: state[order])


@inject("some rows of a batch exchanged", "rows-swapped", cases="C059 C060 C062")
def some_rows_swapped(source: Source) -> Pair | None:
    if source.rows < 40:
        return None
    order = torch.arange(source.rows)
    order[4:12] = torch.arange(source.rows - 9, source.rows - 1)
    return replaced(source, lambda state, k, r: state[order])


def some_rows(source: Source, share: float, salt: int) -> torch.Tensor:
    """A random share of all rows, as a mask [T, 1]."""
    chosen = torch.randperm(source.rows, generator=source.generator(salt))[: round(share * source.rows)]
    mask = torch.zeros(source.rows, 1, dtype=torch.bool)
    mask[chosen] = True
    return mask


@inject("a fifth of the rows of one slot from a layer before", "layer-shift", cases="C073 C077")
def fifth_late(source: Source) -> Pair | None:
    if source.rows < 40 or source.usual[1] - 1 not in source.serving:
        return None
    late = some_rows(source, 0.2, 23)
    return replaced(source, lambda state, k, r: torch.where(late, source.serving[k - 1], state), (1,))


@inject("two fifths of the rows from a layer before", "layer-shift", cases="C073 C077")
def two_fifths_late(source: Source) -> Pair | None:
    if source.rows < 40 or any(k - 1 not in source.serving for k in source.usual):
        return None
    late = some_rows(source, 0.4, 24)
    return replaced(source, lambda state, k, r: torch.where(late, source.serving[k - 1], state))


@inject("the last rows of every request from a layer after", "layer-shift", cases="C073 C077")
def ends_early(source: Source) -> Pair | None:
    if source.rows < 40 or source.usual[2] + 1 not in source.serving:
        return None
    ends = torch.zeros(source.rows, 1, dtype=torch.bool)
    for _, e in source.spans:
        ends[e - 6 : e] = True
    return replaced(source, lambda state, k, r: torch.where(ends, source.serving[k + 1], state), (2,))


@inject("two rows exchanged", "rows-swapped", cases="C059 C060")
def two_rows_swapped(source: Source) -> Pair | None:
    if source.rows < 40:
        return None
    order = torch.arange(source.rows)
    a, b = source.spans[0][0] + 5, source.rows - 4
    if source.ids[a] == source.ids[b]:
        return None  # one token may have much the same state twice
    order[a], order[b] = b, a
    return replaced(source, lambda state, k, r: state[order])


@inject("one row overwritten by another", "rows-swapped", cases="C059 C060")
def one_row_overwritten(source: Source) -> Pair | None:
    if source.rows < 40:
        return None
    order = torch.arange(source.rows)
    a, b = source.rows - 7, source.spans[0][0] + 9
    if source.ids[a] == source.ids[b]:
        return None
    order[a] = b
    return replaced(source, lambda state, k, r: state[order], (0,))


@inject("a strided buffer read as packed", "rows-swapped", cases="C060")
def strided(source: Source) -> Pair | None:
    if source.rows < 40:
        return None
    order = (torch.arange(source.rows) * 4) % source.rows
    return replaced(source, lambda state, k, r: state[order])


@inject("the cached prefix of a prompt is zero", "rows-lost", cases="C057 C058 C061")
def zero_prefix(source: Source) -> Pair | None:
    if source.rows < 40:
        return None

    def make(state: torch.Tensor, k: int, r: int) -> torch.Tensor:
        state = state.clone()
        for b, _ in source.spans:
            state[b : b + 8] = 0
        return state

    return replaced(source, make)


@inject("padded rows hold old contents", "rows-lost", cases="C073 C074")
def padded_rows(source: Source) -> Pair | None:
    if source.rows < 40:
        return None
    g = source.generator(16)
    junk = {k: noise(source.serving[k], g) for k in source.usual}

    def make(state: torch.Tensor, k: int, r: int) -> torch.Tensor:
        state = state.clone()
        state[-7:] = junk[k][-7:]
        return state

    return replaced(source, make)


@inject("the training dump lacks a cached prefix", "rows-lost", cases="C057 C061", severity="warning")
def prefix_absent(source: Source) -> Pair | None:
    if source.rows < 60 or len(source.prompts[0]) < 32:
        return None  # what is left of the prompt must be long enough to be recognised
    training, serving = server.training(source), server.serving(source)
    b, e = source.spans[0]
    keep = torch.cat([torch.arange(b + 16, e), torch.arange(e, source.rows)])
    training.ids = [training.ids[i] for i in keep]
    training.positions = [training.positions[i] for i in keep]
    training.requests = [
        {**request, "rows": [max(0, request["rows"][0] - 16), request["rows"][1] - 16]} for request in training.requests
    ]
    training.ranks = [{name: rows[keep] for name, rows in rank.items()} for rank in training.ranks]
    return training, serving


# ------------------------------------------------------------------------------------------------------- situations


def with_verify(source: Source, make: Callable[[torch.Tensor, int], torch.Tensor], graph: bool = True) -> Pair | None:
    """Prefill rows, then the last third of each prompt as verify rows under graph replay, whose states `make` gives."""
    if source.rows < 60:
        return None
    training, serving = server.training(source), server.serving(source)
    requests, mask = [], torch.zeros(source.rows, 1, dtype=torch.bool)
    for number, (b, e) in enumerate(source.spans):
        cut = b + 2 * (e - b) // 3
        shared = {"id": f"p{number}", "batch": 1}
        requests.append({**shared, "rows": [b, cut], "phase": "prefill", "graph": False})
        requests.append({**shared, "rows": [cut, e], "phase": "verify", "graph": graph})
        mask[cut:e] = True
    serving.requests = requests
    server.change(
        serving,
        lambda j, r: torch.where(
            mask, make(source.serving[source.usual[j]], source.usual[j]), source.serving[source.usual[j]]
        ),
    )
    return training, serving


@inject("graph replay captures the default layers", "graph-stale", cases="C011")
def graph_default(source: Source) -> Pair | None:
    if any(k - 1 not in source.serving for k in source.usual):
        return None
    return with_verify(source, lambda state, k: source.serving[k - 1])


@inject("graph replay reads the buffer of an earlier step", "graph-stale", cases="C073 C074 C077")
def graph_buffer(source: Source) -> Pair | None:
    return with_verify(source, lambda state, k: state.roll(17, dims=0))


@inject("graph replay skips the embedding", "graph-stale", cases="C076")
def graph_zero(source: Source) -> Pair | None:
    return with_verify(source, lambda state, k: torch.zeros_like(state))


# ----------------------------------------------------------------------------------------------------------- prompts


@inject("another chat template in front", "template-mismatch", cases="C119 C121 C122", severity="warning")
def template_front(source: Source) -> Pair | None:
    if source.rows < 40:
        return None
    training, serving = server.training(source), server.serving(source)
    g = source.generator(17)
    ids, requests, rows = [], [], []
    for number, (b, e) in enumerate(source.spans):
        head = torch.randint(5, source.vocabulary, (6,), generator=g).tolist()
        begin = len(ids)
        ids += head + source.ids[b:e]
        rows += [b] * 6 + list(range(b, e))
        requests.append({"id": f"p{number}", "rows": [begin, len(ids)], "phase": "prefill", "batch": 1})
    serving.ids, serving.requests = ids, requests
    serving.positions = [i for request in requests for i in range(request["rows"][1] - request["rows"][0])]
    # Another context: other states, the same on every rank.
    junk = {name: noise(state[rows].float(), g).to(source.dtype) for name, state in serving.ranks[0].items()}
    serving.ranks = [dict(junk) for _ in serving.ranks]
    return training, serving


@inject("a suffix of the template differs", "template-mismatch", cases="C119 C120", severity="warning")
def template_suffix(source: Source) -> Pair | None:
    if source.rows < 40:
        return None
    training, serving = server.training(source), server.serving(source)
    g = source.generator(18)
    ids = list(serving.ids)
    for _, e in source.spans:
        ids[e - 5 : e] = [(token + 7) % source.vocabulary for token in ids[e - 5 : e]]
    serving.ids = ids
    changed = {}
    for name, state in serving.ranks[0].items():
        value = state.float().clone()
        for _, e in source.spans:
            value[e - 5 : e] = noise(value[e - 5 : e], g)
        changed[name] = value.to(source.dtype)
    serving.ranks = [dict(changed) for _ in serving.ranks]
    return training, serving


@inject("an image's tokens embedded as placeholders", "multimodal-missing", cases="C124 C125")
def placeholders(source: Source) -> Pair | None:
    if source.rows < 60:
        return None
    g = source.generator(19)
    ids = list(source.ids)
    wrong = torch.zeros(source.rows, dtype=torch.bool)
    later = torch.zeros(source.rows, dtype=torch.bool)
    for b, e in source.spans:
        ids[b + 8 : b + 16] = [source.vocabulary - 1] * 8
        wrong[b + 8 : b + 16] = True
        later[b + 16 : e] = True
    training, serving = server.training(source), server.serving(source)
    training.ids = serving.ids = ids

    def make(j: int, r: int) -> torch.Tensor:
        state = source.serving[source.usual[j]].clone()
        state[wrong] = junk[j][wrong]
        state[later] = state[later] + 0.4 * junk[j][later]  # they attend to the image
        return state

    junk = [noise(source.serving[k], g) for k in source.usual]
    return training, server.change(serving, make)
