"""Layouts over ranks, from tensors alone and through compare, at TP 2, 4 and 8; corrupt ranks; two faults at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from eagle_parity.alignment.ranks import NonFinite, RankStudy, study_ranks
from eagle_parity.records import Engine, Facts, IntArray, Model, Request, Source, TensorSpec, Tokens
from eagle_parity.tensorfile import NAMES
from tests.synthetic import codes, make_net, noisy, serving_spec, slots_from, training_spec

HIDDEN, COUNT = 64, 40
ALL_TP = pytest.mark.parametrize("tp", [2, 4, 8])


@dataclasses.dataclass(frozen=True)
class Memory:
    """A capture of one tensor, slot.0, in memory: what each rank holds, and of which rows."""

    held: dict[int, torch.Tensor | None]
    index: dict[int, IntArray] = dataclasses.field(default_factory=dict)
    tp: int | None = None
    path: str = "memory"

    @property
    def facts(self) -> Facts:
        engine = Engine("sglang", None, self.tp or len(self.held))
        return Facts("serving", Source("test"), Model(hidden_size=HIDDEN), engine, slots=1)

    @property
    def tokens(self) -> Tokens:
        ids = np.arange(COUNT, dtype=np.int64)
        return Tokens(ids, ids, (Request("r", 0, COUNT),))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.held)

    def names(self, rank: int) -> tuple[str, ...]:
        return () if self.held[rank] is None else ("slot.0",)

    def tensor(self, rank: int) -> torch.Tensor:
        tensor = self.held[rank]
        assert tensor is not None
        return tensor

    def spec(self, rank: int, name: str) -> TensorSpec:
        return TensorSpec(name, self.tensor(rank).shape[1], NAMES[self.tensor(rank).dtype])

    def length(self, rank: int, name: str) -> int:
        return len(self.tensor(rank))

    def rows(self, rank: int, name: str) -> IntArray | None:
        return self.index.get(rank)

    def read(self, rank: int, name: str, begin: int, end: int) -> torch.Tensor:
        return self.tensor(rank)[begin:end].clone()


def state(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(COUNT, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def study(capture: Memory) -> RankStudy:
    return study_ranks(capture, "slot.0", np.arange(COUNT, dtype=np.int64), HIDDEN)


def read_whole(found: RankStudy, rows: IntArray | None = None) -> torch.Tensor:
    assert found.whole is not None
    return found.whole.read(np.arange(COUNT, dtype=np.int64) if rows is None else rows)


@ALL_TP
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_replicated(tp: int, dtype: torch.dtype) -> None:
    found = study(Memory({rank: state(dtype) for rank in range(tp)}))
    assert (found.shape, found.equal, len(found.groups()), found.missing) == ("equal", True, 1, ())
    assert torch.equal(read_whole(found).float(), state(dtype).float())


@ALL_TP
def test_nan_in_the_same_place_is_still_replicated(tp: int) -> None:
    tensor = state()
    tensor[7, 3] = math.nan
    tensor[9, 1] = math.inf
    found = study(Memory({rank: tensor.clone() for rank in range(tp)}))
    assert found.shape == "equal"
    assert found.non_finite == tuple(NonFinite(rank, 7, 3) for rank in range(tp))


@ALL_TP
def test_nan_on_one_rank(tp: int) -> None:
    held = {rank: state() for rank in range(tp)}
    held[tp - 1][30, 5] = -math.inf
    found = study(Memory(dict(held)))
    assert found.shape == "differ"
    assert found.non_finite == (NonFinite(tp - 1, 30, 5),)
    assert found.groups()[0] == tuple(range(tp - 1))


def test_values_whose_sum_overflows_are_finite() -> None:
    big = torch.full((COUNT, HIDDEN), 3e38)
    assert study(Memory({0: big, 1: big.clone()})).non_finite == ()


@ALL_TP
def test_hidden_shards(tp: int) -> None:
    width = HIDDEN // tp
    held = {rank: state()[:, rank * width : (rank + 1) * width] for rank in range(tp)}
    found = study(Memory(dict(held)))
    assert (found.shape, found.equal) == ("hidden-shard", False)
    assert torch.equal(read_whole(found), state())
    del held[tp - 1]
    found = study(Memory(dict(held), tp=tp))
    assert (found.shape, found.whole) == ("hidden-shard", None)


@ALL_TP
def test_uneven_hidden_shards(tp: int) -> None:
    cuts = [0, *(3 * rank for rank in range(1, tp)), HIDDEN]
    found = study(Memory({r: state()[:, cuts[r] : cuts[r + 1]] for r in range(tp)}))
    assert found.shape == "hidden-shard"
    assert torch.equal(read_whole(found), state())


@ALL_TP
def test_a_width_that_is_no_shard_of_the_config(tp: int) -> None:
    assert study(Memory({rank: state()[:, :50] for rank in range(tp)})).shape == "width"


@ALL_TP
def test_uneven_token_shards(tp: int) -> None:
    shuffled = np.random.default_rng(0).permutation(COUNT)
    index = {rank: np.sort(part) for rank, part in enumerate(np.split(shuffled, np.arange(1, tp) * 3))}
    held = {rank: state()[torch.from_numpy(rows)] for rank, rows in index.items()}
    found = study(Memory(dict(held), index))
    assert (found.shape, found.equal) == ("token-shard", False)
    assert torch.equal(read_whole(found), state())
    some = np.array([39, 0, 17, 3], dtype=np.int64)
    assert torch.equal(read_whole(found, some), state()[torch.from_numpy(some)])


@ALL_TP
def test_a_bad_value_in_a_shard_is_named_by_its_token_row(tp: int) -> None:
    rows = {rank: np.arange(rank, COUNT, tp) for rank in range(tp)}
    held = {rank: state()[torch.from_numpy(index)] for rank, index in rows.items()}
    held[1][2, 9] = math.nan
    assert study(Memory(dict(held), rows)).non_finite == (NonFinite(1, 1 + 2 * tp, 9),)


@ALL_TP
def test_missing(tp: int) -> None:
    found = study(Memory({rank: None if rank == 1 else state() for rank in range(tp)}))
    assert found.missing == (1,)
    assert found.shape == ("one-rank" if tp == 2 else "equal")


@ALL_TP
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_last_bits(tp: int, dtype: torch.dtype) -> None:
    held = {rank: state(dtype) for rank in range(tp)}
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    held[tp - 1].view(bits)[::3] ^= 1
    found = study(Memory(dict(held)))
    assert (found.shape, found.equal) == ("rounding", False)
    assert len(found.groups()[0]) == tp - 1


@ALL_TP
@pytest.mark.parametrize("which", ["first", "last"])
def test_one_odd_rank(tp: int, which: str) -> None:
    odd = 0 if which == "first" else tp - 1
    found = study(Memory({rank: state(seed=int(rank == odd)) for rank in range(tp)}))
    assert found.shape == "differ"
    assert (odd,) in found.groups()
    assert sorted(map(len, found.groups())) == [1, tp - 1] or tp == 2


@ALL_TP
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_a_massive_channel_does_not_make_a_share_of_a_sum_a_rounding_error(tp: int, share: float) -> None:
    held = {}
    for rank in range(tp):
        tensor = state(torch.float32) + share * state(torch.float32, seed=rank + 1)
        tensor[:, 5] = 3000.0
        held[rank] = tensor.bfloat16()
    assert study(Memory(dict(held))).shape == "differ"


@ALL_TP
def test_last_bits_beside_a_massive_channel(tp: int) -> None:
    held = {rank: state() for rank in range(tp)}
    for tensor in held.values():
        tensor[:, 5] = 3000.0
    held[tp - 1].view(torch.int16)[::3] ^= 1
    assert study(Memory(dict(held))).shape == "rounding"


def test_ranks_as_far_from_the_first_as_each_other_are_no_copies() -> None:
    """x + e and x - e are equally far from x."""
    x, e = state(torch.float32), 0.25 * torch.ones(COUNT, HIDDEN)
    found = study(Memory({0: x, 1: x + e, 2: x - e, 3: x + e}))
    assert sorted(found.groups()) == [(0,), (1, 3), (2,)]


# -------------------------------------------------------------------------------------- through the command line

Compare = Callable[..., tuple[int, dict[str, Any]]]
USUAL = (2, 3, 5)


def bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16()


def layouts(report: dict[str, Any]) -> list[str]:
    return [row["layout"] for row in report["rows"]]


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("odd", ["first", "last"])
@pytest.mark.parametrize("kind", ["stale", "corrupt"])
def test_one_broken_rank_is_the_one_named(tp: int, odd: str, kind: str, compare: Compare) -> None:
    net = make_net(tp=tp)
    spec = serving_spec(net, tp=tp)
    rank = 0 if odd == "first" else tp - 1
    slot = spec.ranks[rank]["slot.1"]
    noise = torch.randn(slot.shape, generator=torch.Generator().manual_seed(3))
    spec.ranks[rank]["slot.1"] = slot.roll(9, dims=0) if kind == "stale" else bf16(slot + noise * slot.std())
    code, report = compare(training_spec(net), spec)
    errors = [f for f in report["findings"] if f["severity"] == "error"]
    assert code == 1
    assert [(f["slot"], f["ranks"]) for f in errors] == [(1, [rank])]
    assert "partial-sum" not in codes(report)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_two_faults_at_once(tp: int, compare: Compare) -> None:
    """Slot 0 is a partial sum, slot 1 sharded, slot 2 sound."""
    net = make_net(tp=tp)
    width = net.hidden // tp

    def held(j: int, r: int) -> torch.Tensor | None:
        if j == 0:
            return bf16(net.residuals[2] + net.parts[2][r])
        return bf16(noisy(net.streams[3], seed=1))[:, r * width : (r + 1) * width] if j == 1 else None

    code, report = compare(training_spec(net), slots_from(serving_spec(net, tp=tp), held))
    assert code == 1
    assert layouts(report) == ["partial-sum", "hidden-shard", "replicated"]
    assert [row["status"] for row in report["rows"]] == ["fail", "fail", "ok"]
    assert {(f["code"], f["slot"]) for f in report["findings"] if f["severity"] == "error"} == {
        ("partial-sum", 0),
        ("hidden-shard", 1),
    }


@pytest.mark.parametrize("tp", [4, 8])
def test_a_sharded_slot_of_the_wrong_layer_names_both(tp: int, compare: Compare) -> None:
    net = make_net(tp=tp)
    width = net.hidden // tp

    def held(j: int, r: int) -> torch.Tensor | None:
        return bf16(noisy(net.streams[4], seed=1))[:, r * width : (r + 1) * width] if j == 1 else None

    code, report = compare(training_spec(net), slots_from(serving_spec(net, tp=tp), held))
    assert code == 1
    assert report["rows"][1]["best_boundary"] == 4
    assert {f["code"] for f in report["findings"] if f["severity"] == "error"} == {"hidden-shard", "layer-shift"}


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("residual", [False, True])
def test_partial_sums_in_float32(tp: int, residual: bool, compare: Compare) -> None:
    net = make_net(tp=tp)
    spec = slots_from(serving_spec(net, tp=tp), lambda j, r: net.residuals[USUAL[j]] + net.parts[USUAL[j]][r])
    for rank in spec.ranks if residual else ():
        rank |= {f"residual.{k}": net.residuals[k] for k in USUAL}
    code, report = compare(training_spec(net), spec)
    assert (code, codes(report)) == (1, {"partial-sum"})
    assert layouts(report) == ["partial-sum"] * 3


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_uneven_token_shards_are_put_together(tp: int, compare: Compare) -> None:
    net = make_net(tp=tp)
    spec = serving_spec(net, tp=tp)
    cuts = np.array_split(np.arange(len(net.ids)), [5 * r + 1 for r in range(1, tp)])
    for rank, rows in zip(spec.ranks, cuts, strict=True):
        for name in list(rank):
            rank[name] = rank[name][torch.from_numpy(rows)]
        rank["rows"] = torch.from_numpy(rows)
    _, report = compare(training_spec(net), spec)
    assert layouts(report) == ["token-shard"] * 3
    assert all(row["rel_l2"]["median"] < 0.02 for row in report["rows"])
    assert codes(report) == {"token-shard"}
