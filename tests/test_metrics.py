"""Metrics against float64 on hard data: the accuracy that `metrics.distances` and `metrics.pairs` state."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_parity.metrics.channels import ChannelSums
from eagle_parity.metrics.distances import (
    RUN,
    FloatArray,
    cosine,
    numpy64,
    padded,
    products,
    rel_l2,
    root_ratio,
    row_sums,
    runs_of,
    squares,
)
from eagle_parity.metrics.distribution import median, sign_test, summarise
from eagle_parity.metrics.pairs import NEAR, pair_sums, run_dots
from eagle_parity.metrics.threads import one_thread

BOUND = (RUN + 4) * 2.0**-24  # of a sum of squares, relative
FAR_BOUND = 2e-3  # of a far pair's distance
ABSOLUTE = 1e-7
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64)
WIDTHS = (1, 7, 96, 255, 256, 257, 600, 7168)
Make = Callable[[torch.Generator, int, int], tuple[torch.Tensor, torch.Tensor]]


def random(g: torch.Generator, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, width, generator=g), torch.randn(rows, width, generator=g)


def near(g: torch.Generator, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(rows, width, generator=g)
    return a, a * (1 + 0.004 * torch.randn(rows, width, generator=g))


def one_bit(g: torch.Generator, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(rows, width, generator=g)
    b = a.clone()
    b[:, width // 2] *= 1.5
    return a, b


def outliers(g: torch.Generator, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A massive channel with one sign and one with the other: what is left in the sum is small."""
    a, b = near(g, rows, width)
    for channel, size in ((0, 1e4), (width // 2, -1e4)):
        a[:, channel] = size
        b[:, channel] = size * 1.004
    return a, b


def cancelling(g: torch.Generator, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A dot product of large terms that add up to almost nothing."""
    half = width // 2
    a, b = torch.randn(rows, width, generator=g) * 100, torch.zeros(rows, width)
    b[:, :half] = a[:, half : 2 * half]
    b[:, half : 2 * half] = -a[:, :half]
    return a, b


def denormal(g: torch.Generator, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = near(g, rows, width)
    return a * 1e-39, b * 1e-39


def tiny(g: torch.Generator, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = near(g, rows, width)
    return a * 2e-18, b * 2e-18


def huge(g: torch.Generator, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = near(g, rows, width)
    return a * 1e25, b * 1e25


def zeros(g: torch.Generator, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = near(g, rows, width)
    a[0], b[1] = 0, 0
    a[2] = b[2] = 0
    return a, b


CASES: tuple[Make, ...] = (random, near, one_bit, outliers, cancelling, denormal, tiny, huge, zeros)


def stored(make: Make, dtype: torch.dtype, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = make(torch.Generator().manual_seed(width), rows, width)
    top = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    a, b = a.clamp(-top, top), b.clamp(-top, top)
    return a.to(dtype), b.to(dtype)


def exact(a: torch.Tensor, b: torch.Tensor) -> dict[str, np.ndarray]:
    """In float64 (scaled, so that the squares of denormals survive), from the values as stored."""
    x, y = a.double(), b.double()
    scale = torch.stack([x.abs().amax(-1), y.abs().amax(-1)]).amax(0).clamp_min(1e-300).unsqueeze(-1)
    x, y = x / scale, y / scale
    nx, ny, d = (t.square().sum(-1).sqrt() for t in (x, y, x - y))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            "rel_l2": (d / ny).numpy(),
            "norm_ratio": (nx / ny).numpy(),
            "cosine": ((x * y).sum(-1) / (nx * ny)).numpy(),
        }
    both, one = (nx == 0) & (ny == 0), (nx == 0) ^ (ny == 0)
    found["rel_l2"][both], found["norm_ratio"][both], found["cosine"][both] = 0, 1, 1
    found["cosine"][one] = 0
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", CASES, ids=lambda f: f.__name__)
def test_row_sums_are_as_accurate_as_stated(make: Make, dtype: torch.dtype, width: int) -> None:
    a, b = stored(make, dtype, 5, width)
    truth, sums = exact(a, b), row_sums(a, b)
    np.testing.assert_allclose(sums.rel_l2().numpy(), truth["rel_l2"], rtol=BOUND, atol=ABSOLUTE)
    np.testing.assert_allclose(sums.norm_ratio().numpy(), truth["norm_ratio"], rtol=BOUND, atol=ABSOLUTE)
    np.testing.assert_allclose(sums.cosine().numpy(), truth["cosine"], rtol=0, atol=2 * BOUND)
    np.testing.assert_array_equal(rel_l2(a, b), sums.rel_l2().numpy())
    np.testing.assert_array_equal(cosine(a, b), sums.cosine().numpy())
    assert (rel_l2(a, a) == 0).all()
    assert ((rel_l2(a, b) == 0) == (a.double() == b.double()).all(-1).numpy()).all() or make is tiny


def test_typical_accuracy_is_a_hundred_times_better_than_the_bound() -> None:
    for make in (random, near, outliers):
        a, b = stored(make, torch.bfloat16, 64, 7168)
        error = np.abs(row_sums(a, b).rel_l2().numpy() / exact(a, b)["rel_l2"] - 1)
        assert error.max() < BOUND / 50


def pair_rel_l2(ours: torch.Tensor, theirs: torch.Tensor, known: int) -> tuple[FloatArray, FloatArray]:
    """Relative L2 of each row of [n, R, W] to the same row of [m, R, W], and the latter's norms, by `pair_sums`."""
    states = torch.cat([ours, theirs])
    differences = squares(ours[2 - known :] - theirs[:known]) if known else squares(ours[:0])
    dots = ours.new_empty(ours.shape[1], runs_of(ours.shape[2])[0], len(ours), len(theirs))
    run_dots(ours, theirs, dots)
    total = dots.sum(1, dtype=torch.float64).permute(1, 2, 0)
    sums = pair_sums(squares(states), total, differences, states.__getitem__)
    theirs_sq = sums.theirs_sq.unsqueeze(0).expand_as(sums.difference_sq)
    return numpy64(root_ratio(sums.difference_sq, theirs_sq)), numpy64(sums.theirs_sq.sqrt())


@pytest.mark.parametrize("known", [0, 1, 2])
@pytest.mark.parametrize("width", [7, 96, 256, 600, 7168])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", CASES, ids=lambda f: f.__name__)
def test_pairs_are_as_accurate_as_stated(make: Make, dtype: torch.dtype, width: int, known: int) -> None:
    a, b = stored(make, dtype, 5, width)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ours = torch.zeros(2, 5, padded(width), dtype=wide)
    theirs = torch.zeros(3, 5, padded(width), dtype=wide)
    for side, tensors in ((ours, (a, b)), (theirs, (b, a, a.roll(1, 0)))):
        for i, tensor in enumerate(tensors):
            side[i, :, :width] = tensor
    found, norms = pair_rel_l2(ours, theirs, known)
    assert found.shape == (2, 3, 5)
    np.testing.assert_allclose(norms, theirs.double().norm(dim=-1), rtol=BOUND)
    for i in range(2):
        for j in range(3):
            x, y = ours[i].double(), theirs[j].double()
            truth = exact(x, y)["rel_l2"]
            ratio = exact(x, y)["norm_ratio"]
            with np.errstate(invalid="ignore"):
                close = truth < 0.9 * NEAR * np.sqrt(1 + ratio**2)
            np.testing.assert_allclose(found[i, j][close], truth[close], rtol=BOUND, atol=ABSOLUTE)
            np.testing.assert_allclose(found[i, j][~close], truth[~close], rtol=FAR_BOUND, atol=ABSOLUTE)


def test_equal_tensors_have_no_distance_and_one_changed_bit_has_some() -> None:
    a = torch.randn(4, 512)
    b = a.clone()
    b.view(torch.int32)[2, 99] ^= 1
    found, _ = pair_rel_l2(a.unsqueeze(0), torch.stack([a, b]), known=0)
    assert (found[0, 0] == 0).all()
    assert (found[0, 1] != 0).tolist() == [False, False, True, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_no_number_spoils_its_own_row_only(bad: float) -> None:
    a, b = stored(near, torch.bfloat16, 6, 300)
    a[3, 100] = bad
    sums, clean = row_sums(a, b), row_sums(b, b)
    assert (~sums.difference_sq.isfinite()).tolist() == [i == 3 for i in range(6)]
    np.testing.assert_allclose(sums.training_sq, clean.training_sq, rtol=BOUND)
    wide = torch.zeros(2, 6, padded(300))
    wide[0, :, :300], wide[1, :, :300] = a, b
    found, _ = pair_rel_l2(wide[:1], wide[1:], known=0)
    assert (~np.isfinite(found[0, 0])).tolist() == [i == 3 for i in range(6)]


def test_sides_of_two_dtypes() -> None:
    a, b = stored(near, torch.float64, 5, 300)
    assert rel_l2(a.bfloat16(), b) == pytest.approx(exact(a.bfloat16(), b)["rel_l2"], rel=BOUND)
    assert rel_l2(b, a.to(torch.float8_e4m3fn)) == pytest.approx(
        exact(b, a.to(torch.float8_e4m3fn))["rel_l2"], rel=BOUND
    )


def test_sums_of_nothing() -> None:
    none = torch.empty(0, 300)
    assert rel_l2(none, none).shape == (0,)
    assert squares(torch.empty(3, 0)).tolist() == products(torch.empty(3, 0), torch.empty(3, 0)).tolist() == [0, 0, 0]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 900), st.integers(0, 2**32 - 1), st.floats(-12, 12), st.floats(-6, 0))
def test_any_width_scale_and_closeness(width: int, seed: int, size: float, closeness: float) -> None:
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(3, width, generator=g) * 10**size
    b = a * (1 + 10**closeness * torch.randn(3, width, generator=g))
    truth, sums = exact(a, b), row_sums(a, b)
    np.testing.assert_allclose(sums.rel_l2().numpy(), truth["rel_l2"], rtol=BOUND, atol=ABSOLUTE)
    np.testing.assert_allclose(sums.cosine().numpy(), truth["cosine"], rtol=0, atol=2 * BOUND)


# -------------------------------------------------------------------------------------------------------- channels


def test_channel_sums_of_blocks_are_those_of_the_whole() -> None:
    rows = torch.randn(100, 40) + torch.arange(40)
    sums = ChannelSums(40)
    for block in rows.split(18):
        sums.add(block)
    np.testing.assert_allclose(sums.mean(), rows.double().mean(0), rtol=1e-5, atol=1e-6)


def test_massive_channels() -> None:
    rows = torch.randn(100, 40)
    rows[:, 7] *= 100
    rows[:, 9] += 50
    rows[:, 11] *= 5
    sums = ChannelSums(40)
    sums.add(rows)
    assert sums.massive().tolist() == [7, 9]


def test_where_most_channels_are_zero_none_is_massive() -> None:
    rows = torch.zeros(10, 40)
    rows[:, 3] = 1
    sums = ChannelSums(40)
    sums.add(rows)
    assert sums.massive().tolist() in ([], [3])
    sums = ChannelSums(40)
    sums.add(torch.ones(10, 40))
    assert sums.massive().tolist() == []


# --------------------------------------------------------------------------------------------------- distributions


def test_summarise() -> None:
    values = np.arange(101, dtype=np.float64)
    found = summarise(values)
    assert found is not None
    assert (found.median, found.mean, found.p01, found.p99, found.min, found.max) == (50, 50, 1, 99, 0, 100)
    assert summarise(np.empty(0)) is None
    one = summarise(np.array([3.0]))
    assert one is not None
    assert {one.median, one.mean, one.p01, one.p99, one.min, one.max} == {3.0}


def test_summarise_hides_no_nan() -> None:
    found = summarise(np.array([1.0, math.nan, 2.0]))
    assert found is not None
    assert all(math.isnan(v) for v in (found.median, found.mean, found.p01, found.p99, found.min, found.max))


def test_median_leaves_nan_out() -> None:
    assert median(np.array([1.0, math.nan, 3.0])) == 2.0
    assert math.isnan(median(np.array([math.nan])))
    assert math.isnan(median(np.empty(0)))


# ------------------------------------------------------------------------------------------------------- sign test


def test_sign_test_is_the_binomial_tail() -> None:
    first = np.array([0.0] * 9 + [2.0])
    assert sign_test(first, np.ones(10)) == pytest.approx(11 / 1024)  # 9 or 10 of 10
    assert sign_test(np.zeros(10), np.ones(10)) == pytest.approx(1 / 1024)
    assert sign_test(np.ones(10), np.zeros(10)) == 1.0


def test_sign_test_ties_say_nothing() -> None:
    assert sign_test(np.ones(10), np.ones(10)) > 0.3
    assert sign_test(np.empty(0), np.empty(0)) == 1.0
    assert sign_test(np.array([math.nan] * 20), np.ones(20)) == 1.0


def test_sign_test_needs_seven_rows_for_one_percent() -> None:
    assert sign_test(np.zeros(6), np.ones(6)) > 0.01
    assert sign_test(np.zeros(7), np.ones(7)) < 0.01


@pytest.mark.parametrize("wins", [600, 630, 640, 680])
def test_sign_test_of_many_rows_is_close_to_the_binomial_tail(wins: int) -> None:
    exact_tail = sum(math.comb(1200, k) for k in range(wins, 1201)) / 2**1200
    assert sign_test((np.arange(1200) >= wins).astype(float), np.full(1200, 0.5)) == pytest.approx(exact_tail, rel=0.05)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_sign_test_does_not_cry_wolf(seed: int) -> None:
    """Without a difference the p-value is below 1 % about once in a hundred, never often."""
    g = np.random.default_rng(seed)
    hits = sum(sign_test(g.normal(size=50), g.normal(size=50)) < 0.01 for _ in range(40))
    assert hits <= 5


def test_one_thread_gives_the_threads_back() -> None:
    before = torch.get_num_threads()

    @one_thread()
    def fail() -> None:
        assert torch.get_num_threads() == 1
        raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert torch.get_num_threads() == before


def test_channels_beyond_float32_have_a_mean() -> None:
    rows = torch.full((10, 40), 3e37)
    rows[:, 3] = 1e38
    sums = ChannelSums(40)
    sums.add(rows)
    assert sums.mean().tolist() == pytest.approx([3e37] * 3 + [1e38] + [3e37] * 36)
    rows[:, 3] = 3.3e38
    sums = ChannelSums(40)
    sums.add(rows / 10)
    sums.add(rows)
    assert sums.massive().tolist() == [3]
