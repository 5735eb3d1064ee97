"""Matching: which boundary is nearest, whatever noise, norms and blocks do; the metrics of a pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from eagle_parity.alignment import measuring
from eagle_parity.alignment.channels import without
from eagle_parity.alignment.matching import Match, compare, match, sample
from eagle_parity.alignment.views import blocks
from eagle_parity.records import IntArray


@dataclass(frozen=True)
class Whole:
    """A tensor in memory as a view."""

    tensor: torch.Tensor

    @property
    def width(self) -> int:
        return self.tensor.shape[1]

    def read(self, rows: IntArray) -> torch.Tensor:
        return self.tensor[torch.from_numpy(rows)]


def stream(
    count: int, width: int, layers: int, *, step: float, growth: float = 0.0, seed: int = 0
) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    found = [torch.randn(count, width, generator=g)]
    for _ in range(layers):
        last = found[-1]
        move = torch.randn(count, width, generator=g) * last.square().mean(-1, keepdim=True).sqrt()
        found.append(last * (1 + growth) + step * move)
    return found


def noisy(tensor: torch.Tensor, rel: float, seed: int = 1) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return tensor + rel * tensor.square().mean(-1, keepdim=True).sqrt() * noise


def matched(serving: torch.Tensor, boundaries: Sequence[torch.Tensor]) -> Match:
    rows = np.arange(len(serving), dtype=np.int64)
    views = {k: Whole(tensor) for k, tensor in enumerate(boundaries)}
    return match({"slot.0": Whole(serving)}, views, rows, rows)["slot.0"]  # type: ignore[arg-type]


@pytest.mark.parametrize("growth", [0.0, 0.02, 0.05, 0.1])
@pytest.mark.parametrize("rel", [0.004, 0.05, 0.2])
@pytest.mark.parametrize("held", [3, 10, 17])
def test_noise_moves_no_state_to_a_later_boundary(growth: float, rel: float, held: int) -> None:
    """Norms grow with depth: relative to its own norm a later boundary seems nearer to a noisy state."""
    states = stream(100, 512, 20, step=0.02, growth=growth)
    found = matched(noisy(states[held], rel), states)
    assert found.best == held
    assert found.runner_up is not None
    assert found.told_apart(held, found.runner_up)
    assert not found.told_apart(found.runner_up, held)


def test_distances_are_relative_to_each_boundarys_norm() -> None:
    states = stream(20, 300, 4, step=0.3, growth=0.5)
    found = matched(states[2], states)
    for k, values in found.rel_l2.items():
        truth = (states[2] - states[int(k)]).norm(dim=-1) / states[int(k)].norm(dim=-1)
        np.testing.assert_allclose(values, truth, rtol=2e-3, atol=1e-7)
    assert (found.rel_l2[2] == 0).all()
    assert found.margin == math.inf


@pytest.mark.parametrize("size", [2**14, 2**20])
def test_blocks_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    states = stream(101, 300, 6, step=0.1)
    whole = matched(noisy(states[3], 0.02), states)
    monkeypatch.setattr(measuring, "WIDE_BYTES", size)
    monkeypatch.setattr(measuring, "STORED_BYTES", 2 * size)
    again = matched(noisy(states[3], 0.02), states)
    for k in whole.rel_l2:
        np.testing.assert_allclose(again.rel_l2[k], whole.rel_l2[k], rtol=1e-4)


def test_rows_are_paired_in_any_order() -> None:
    states = stream(50, 64, 4, step=0.3)
    order = np.random.default_rng(0).permutation(50)
    views = {k: Whole(s) for k, s in enumerate(states)}
    serving = {"a": Whole(states[2][torch.from_numpy(order)]), "b": Whole(states[3])}
    found = match(serving, views, np.arange(50), order)  # type: ignore[arg-type]
    assert (found["a"].rel_l2[2] == 0).all()
    assert found["b"].best != 3


def test_other_widths_and_no_rows_match_nothing() -> None:
    states = {k: Whole(s) for k, s in enumerate(stream(10, 64, 2, step=0.3))}
    rows, none = np.arange(10, dtype=np.int64), np.empty(0, dtype=np.int64)
    odd = match({"a": Whole(torch.ones(10, 32)), "b": states[1]}, states, rows, rows)  # type: ignore[arg-type]
    assert (odd["a"].best, odd["b"].best) == (None, 1)
    assert match({"b": states[1]}, states, none, none)["b"].best is None  # type: ignore[arg-type]
    assert match({"b": states[1]}, {}, rows, rows)["b"].best is None


def test_float64_keeps_its_accuracy() -> None:
    states = [s.double() for s in stream(10, 64, 2, step=0.3)]
    found = matched(states[1] * (1 + 1e-12), states)
    np.testing.assert_allclose(found.rel_l2[1], 1e-12, rtol=1e-3)


def test_float64_is_centred_on_float64() -> None:
    g = torch.Generator().manual_seed(0)
    common = 1e6 * (1 + torch.rand(64, generator=g, dtype=torch.float64))
    x = common + 0.01 * torch.randn(100, 64, generator=g, dtype=torch.float64)
    y = x + 0.003 * torch.randn(100, 64, generator=g, dtype=torch.float64)
    rows = np.arange(100, dtype=np.int64)
    found = compare(Whole(y), Whole(x), rows, rows).cosine_centred
    a, b = y - y.mean(0), x - x.mean(0)
    expected = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


def test_progress_counts_every_row() -> None:
    states = {k: Whole(s) for k, s in enumerate(stream(600, 2048, 3, step=0.3))}
    rows, done = np.arange(600, dtype=np.int64), []
    match({"a": states[1], "b": states[2]}, states, rows, rows, step=done.append)  # type: ignore[arg-type]
    assert sum(done) == 2 * 600
    assert len(done) > 1


# ---------------------------------------------------------------------------------------------------------- strays


def test_rows_of_another_boundary_are_strays_and_flipped_rows_are_not() -> None:
    states = stream(100, 256, 6, step=0.1)
    held = noisy(states[3], 0.005)
    held[60:80] = noisy(states[2], 0.005)[60:80]
    held[80:] = noisy(states[3], 0.5)[80:]  # another expert
    found = matched(held, states)
    assert found.best == 3
    strays = found.strays(3, dict.fromkeys(range(7), 0.06))
    assert list(strays) == [2]
    assert np.flatnonzero(strays[2]).tolist() == list(range(60, 80))
    assert found.where(np.arange(100) < 60).strays(3, dict.fromkeys(range(7), 0.06)) == {}


def test_where_layers_cannot_be_told_apart_there_are_no_strays() -> None:
    states = stream(100, 256, 6, step=0.005)
    assert matched(noisy(states[3], 0.05), states).strays(3, dict.fromkeys(range(7), 0.3)) == {}


# ------------------------------------------------------------------------------------------------ metrics of a pair


@pytest.mark.parametrize("width", [64, 300, 7168])
@pytest.mark.parametrize("massive", [False, True])
def test_compare_is_what_float64_says(width: int, massive: bool) -> None:
    count = 150
    s, t = (x.clone() for x in stream(count, width, 1, step=0.05))
    if massive:
        for side in (s, t):
            side[:, 3] = 1000 + torch.arange(count)
            side[:, 40] = -500
    rows = np.arange(count, dtype=np.int64)
    assert width < 7168 or len(list(blocks(count, width))) > 1
    found = compare(Whole(s.bfloat16()), Whole(t.bfloat16()), rows, rows)
    a, b = s.bfloat16().double(), t.bfloat16().double()

    def cosine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cosine_similarity(x, y, dim=-1, eps=1e-300)

    keep = torch.ones(width, dtype=torch.bool)
    if massive:
        keep[[3, 40]] = False
    np.testing.assert_allclose(found.cosine, cosine(a, b), atol=4e-5)
    np.testing.assert_allclose(found.rel_l2, (a - b).norm(dim=-1) / b.norm(dim=-1), rtol=2e-5)
    np.testing.assert_allclose(found.norm_ratio, a.norm(dim=-1) / b.norm(dim=-1), rtol=2e-5)
    np.testing.assert_allclose(found.cosine_no_massive, cosine(a[:, keep], b[:, keep]), atol=4e-5)
    np.testing.assert_allclose(found.cosine_centred, cosine(a - a.mean(0), b - b.mean(0)), atol=1e-3)


def test_compare_of_nothing() -> None:
    none = np.empty(0, dtype=np.int64)
    view = Whole(torch.ones(3, 8))
    assert len(compare(view, view, none, none).cosine_centred) == 0


@pytest.mark.parametrize("left_out", [[], [0], [63], [0, 1, 5, 62, 63], [30], list(range(64))])
def test_without_is_an_index(left_out: list[int]) -> None:
    rows = torch.randn(5, 64)
    channels = torch.tensor([c for c in range(64) if c not in left_out], dtype=torch.int64)
    assert torch.equal(without(rows, torch.tensor(left_out, dtype=torch.int64)), rows[:, channels])


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 140, 1000, 10**6])
def test_a_sample_reaches_from_the_first_row_to_the_last(count: int) -> None:
    found = sample(count, 128)
    assert len(found) == len(set(found.tolist())) <= 128
    assert len(found) >= min(count, 100)
    assert found.tolist() == sorted(found.tolist())
    if count:
        assert (found[0], found[-1]) == (0, count - 1)
        assert np.diff(found).max(initial=0) <= max(1, count // 14)
