"""What makes compare fast must not change what it says: threads, one pass for all tensors, fixed memory, progress."""

from __future__ import annotations

import io
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from eagle_parity.cli import output
from eagle_parity.diagnosis.diagnose import diagnose
from eagle_parity.diagnosis.rules.channels import WRONG, some_may_be
from eagle_parity.diagnosis.rules.geometry import fitted
from eagle_parity.diagnosis.steps import row_factors, step_sums
from eagle_parity.diagnosis.study import study
from eagle_parity.dump import open_dump
from eagle_parity.errors import InputError
from eagle_parity.metrics.distances import padded
from eagle_parity.metrics.paired import CENTRED, NO_MASSIVE, PLAIN, add_tile, paired_sums, pairing, run_sums
from eagle_parity.metrics.threads import one_thread, scratch, spread, workers
from eagle_parity.records import Report
from eagle_parity.report import to_json
from eagle_parity.tensorfile import open_tensorfile
from tests.synthetic import make_net, serving_spec, slots_from, training_spec
from tests.test_metrics import ABSOLUTE, BOUND, CASES, DTYPES, Make, stored


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    """A server with one rank that is off by noise, so that every path is taken."""
    net = make_net(tp=4)
    spec = serving_spec(net, (2, 4, 5), tp=4)
    noise = torch.randn(net.streams[3].shape, generator=torch.Generator().manual_seed(9))
    spec = slots_from(spec, lambda j, r: (net.streams[3] + noise).bfloat16() if (j, r) == (1, 2) else None)
    return training_spec(net).write(tmp_path / "training"), spec.write(tmp_path / "serving")


def report(sides: tuple[Path, Path], step: Callable[[float], None] | None = None) -> Report:
    return diagnose(study(open_dump(sides[0]), open_dump(sides[1]), step=step))


@pytest.mark.parametrize("threads", ["2", "3"])
def test_threads_change_nothing(threads: str, sides: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alone = to_json(report(sides))
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr("eagle_parity.metrics.threads.os.sched_getaffinity", lambda _: range(8), raising=False)
    assert workers() == int(threads)
    assert to_json(report(sides)) == alone


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_values_that_no_sum_can_hold_are_no_error_of_the_tool(bad: float, tmp_path: Path) -> None:
    net = make_net()
    state = net.streams[3].clone()
    state[:, 5], state[1:, 6] = bad, -bad
    spec = slots_from(serving_spec(net), lambda j, r: state.bfloat16() if j == 1 else None)
    found = report((training_spec(net).write(tmp_path / "training"), spec.write(tmp_path / "serving")))
    assert found.verdict == "fail"
    codes = {finding.code for finding in found.findings if finding.slot == 1 and finding.severity == "error"}
    assert codes == {"undetermined" if bad == 3e38 else "non-finite"}


def test_progress_adds_up_to_all_of_the_work(sides: tuple[Path, Path]) -> None:
    done: list[float] = []
    report(sides, done.append)
    assert sum(done) == pytest.approx(1)


def test_progress_of_shards_is_no_less(tmp_path: Path) -> None:
    net, done = make_net(), list[float]()
    spec = serving_spec(net)
    for number, rank in enumerate(spec.ranks):
        rank.update({name: tensor[:, 48 * number : 48 * (number + 1)] for name, tensor in rank.items()})
    report((training_spec(net).write(tmp_path / "training"), spec.write(tmp_path / "serving")), done.append)
    assert sum(done) == pytest.approx(1)
    assert done[-1] < 0.5


@pytest.mark.parametrize(
    ("patience", "terminal", "shown"), [(0.0, True, True), (60.0, True, False), (0.0, False, False)]
)
def test_a_bar_comes_late_and_to_terminals_only(
    patience: float, terminal: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = io.StringIO()
    monkeypatch.setattr(output, "stderr", lambda: Console(file=text, force_terminal=terminal))
    monkeypatch.setattr(output, "PATIENCE", patience)
    with output.measuring() as step:
        step(0.5)
    assert ("comparing" in text.getvalue()) is shown
    assert shown or not text.getvalue()


# -------------------------------------------------------------------------------------------------------- threads


def test_spread_keeps_the_order_and_ends_with_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr("eagle_parity.metrics.threads.os.sched_getaffinity", lambda _: range(2), raising=False)
    begun = []

    def work(number: int) -> int:
        begun.append(number)
        assert torch.get_num_threads() == 1
        if number == 3:
            raise ValueError
        time.sleep(1e-4)
        return number * number

    with one_thread():
        assert list(spread(work, range(3))) == [0, 1, 4]
        with pytest.raises(ValueError):
            list(spread(work, range(3, 10_000)))
    assert len(begun) < 10_000


@pytest.mark.parametrize("threads", ["1", "2"])
def test_scratch_memory_is_a_threads_own_and_given_again(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr("eagle_parity.metrics.threads.os.sched_getaffinity", lambda _: range(2), raising=False)
    together = threading.Barrier(int(threads))

    def work(number: int) -> bool:
        first, other = scratch("a", (2, 3), torch.float32), scratch("b", (2, 3), torch.float32)
        first.fill_(number)
        other.fill_(-1)
        if number < int(threads):
            together.wait()  # each thread has one now
        return bool((first == number).all()) and scratch("a", (3,), torch.float64).data_ptr() == first.data_ptr()

    with one_thread():
        assert all(spread(work, range(20)))
    apart = [scratch("a", (3,), torch.float32) for _ in range(2)]
    assert apart[0].data_ptr() != apart[1].data_ptr()


# ---------------------------------------------------------------------------------------------------------- files


def test_a_file_that_became_shorter_is_an_error_and_not_another_rows_bytes(sides: tuple[Path, Path]) -> None:
    path = sides[1] / "rank-0000.safetensors"
    file = open_tensorfile(path)
    whole = file.read("slot.2")
    with path.open("r+b") as handle:
        handle.truncate(file.entries["slot.2"].offset + file.entries["slot.2"].nbytes - 1)
    with pytest.raises(InputError, match=r"slot\.2 ends early"):
        file.read("slot.2")
    assert torch.equal(file.read("slot.2", 0, len(whole) - 1), whole[:-1])


# ---------------------------------------------------------------------------------------------------------- pairs


@pytest.mark.parametrize("width", [7, 600, 7168])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", CASES, ids=lambda f: f.__name__)
def test_sums_of_pairs_are_as_accurate_as_stated(make: Make, dtype: torch.dtype, width: int) -> None:
    """Plainly, centred, and without channels: against float64, also where one channel makes up all of the norm."""
    a, b = stored(make, dtype, 5, width)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    left_out = torch.tensor(sorted({0, width // 2}))
    means = torch.stack([a.double().mean(0), b.double().mean(0)]).to(wide).unsqueeze(1)
    pairs = pairing(means, [left_out[:1]], left_out, wide)
    states = torch.zeros(3, 5, padded(width), dtype=wide)
    for place, tensor in zip(states, (a, b, a.roll(1, 0)), strict=True):
        place[:, :width] = tensor
    runs = run_sums(1, 2, 5, pairs)
    for part in (slice(0, 2), slice(2, 5)):
        add_tile(states[:, part].contiguous(), 1, pairs, runs, part)
    _, sums = paired_sums(runs, pairs, (a, b, a.roll(1, 0)).__getitem__)
    keep = torch.arange(width) != 0
    x, y = a.double(), b.double()
    variants = {
        PLAIN: (x, y),
        CENTRED: (x - means[0, 0].double(), y - means[1, 0].double()),
        NO_MASSIVE: (x * keep, y * keep),
    }
    # A difference from the mean is rounded once more, relative to the larger of the two.
    slack = 2.0**-22 * max(float(x.abs().max()), float(y.abs().max())) * math.sqrt(width)
    for kind, (p, q) in variants.items():
        norms = p.norm(dim=-1), q.norm(dim=-1)
        extra = slack if kind == CENTRED else 1e-18
        for found, norm in zip(sums[kind, :2, 0].sqrt(), norms, strict=True):
            np.testing.assert_allclose(found, norm, rtol=BOUND, atol=extra)
        scale = float((norms[0] * norms[1]).max())
        error = (sums[kind, 2, 0] - (p * q).sum(-1)).abs().max()
        assert float(error) <= 2 * BOUND * scale + 4 * extra * (math.sqrt(scale) + extra)
    distance = (x - y).norm(dim=-1)
    np.testing.assert_allclose(
        sums[PLAIN, 3, 0].sqrt(), distance, rtol=BOUND, atol=ABSOLUTE * float(y.norm(dim=-1).max())
    )


# ---------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("held", ["expected", "short", "between"])
def test_the_pass_places_a_tensor_where_least_squares_does(held: str, tmp_path: Path) -> None:
    net = make_net()
    states = {
        "expected": net.streams[3],
        "short": net.residuals[3],
        "between": 0.4 * net.streams[3] + 0.6 * net.streams[4],
    }
    spec = slots_from(serving_spec(net), lambda j, r: states[held].bfloat16() if j == 1 else None)
    training = open_dump(training_spec(net).write(tmp_path / "training"))
    case = study(training, open_dump(spec.write(tmp_path / "serving")))
    sums = step_sums(case)
    assert {(2, 3), (3, 4)} <= {key[1:] for key in sums if key[0] == "slot.1"}
    x = states[held].bfloat16().double().numpy()
    for begin, end in ((2, 3), (3, 4)):
        before, after = (net.streams[k].bfloat16().double().numpy() for k in (begin, end))
        keep = np.ones(net.hidden, dtype=bool)
        keep[case.massive] = False
        fits = []
        for row in case.alignment.training[case.probe]:
            basis = np.stack([before[row], after[row] - before[row]], 1)[keep]
            shares, *_ = np.linalg.lstsq(basis, x[row][keep], rcond=None)
            across = x[row][keep] - basis @ shares
            fits.append([*shares, np.linalg.norm(across) / np.linalg.norm(basis[:, 1])])
        found = fitted(sums["slot.1", begin, end])
        stream, step, rest = np.median(fits, 0)  # the share of the step is over that of the stream
        np.testing.assert_allclose(
            [found.stream, found.step, found.rest], [stream, step / stream, rest], rtol=1e-3, atol=1e-4
        )


def test_row_factors_are_those_of_least_squares(tmp_path: Path) -> None:
    net = make_net()
    spec = slots_from(serving_spec(net), lambda j, r: (1.02 * net.streams[3]).bfloat16() if j == 1 else None)
    training = open_dump(training_spec(net).write(tmp_path / "training"))
    case = study(training, open_dump(spec.write(tmp_path / "serving")))
    keep = np.ones(net.hidden, dtype=bool)
    keep[case.massive] = False
    rows = case.alignment.training[case.probe]
    x, t = ((state.bfloat16().double().numpy()[rows])[:, keep] for state in (1.02 * net.streams[3], net.streams[3]))
    np.testing.assert_allclose(row_factors(case)["slot.1"], (x * t).sum(1) / (t * t).sum(1), rtol=1e-5)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1), st.sampled_from([8, 9, 30, 128]), st.floats(-3, 1), st.booleans(), st.booleans())
def test_no_wrong_channel_is_passed_over(seed: int, rows: int, size: float, sparse: bool, stuck: bool) -> None:
    """What is asked before the medians must let every channel through that they would call wrong."""
    g = torch.Generator().manual_seed(seed)
    truth = torch.randn(rows, 40, generator=g) * torch.randn(40, generator=g).exp()
    if sparse:
        truth *= torch.rand(truth.shape, generator=g) < 0.45
    error = torch.randn(truth.shape, generator=g) ** 3 * 10**size
    serving = truth + error * (torch.rand(40, generator=g) < 0.1)
    if stuck:
        serving[:, 3] = serving[0, 3]
    median_error, median_size = ((t.abs().median(0).values) for t in (serving - truth, truth))
    constant = (serving == serving[0]).all(0)
    wrong = ((median_error >= WRONG * median_size) | constant) & (median_error > 0)
    assert some_may_be(serving, truth) or not bool(wrong.any())
