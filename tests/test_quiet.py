"""Faults that a median over rows and channels does not show, and healthy servers that are near to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.synthetic import DumpSpec, Net, codes, make_net, noisy, serving_spec, slots_from, training_spec

Compare = Callable[..., tuple[int, dict[str, Any]]]
USUAL = (2, 3, 5)


def served(
    net: Net, make: Callable[[int], torch.Tensor], *, rel: float = 0.004, slots: tuple[int, ...] = (1,)
) -> DumpSpec:
    """make(boundary) with engine noise in these slots."""

    def slot(j: int, r: int) -> torch.Tensor | None:
        return noisy(make(USUAL[j]), seed=200 + j, rel=rel).bfloat16() if j in slots else None

    return slots_from(serving_spec(net, rel=rel), slot)


def slowed(net: Net, factor: float) -> Net:
    """The same network with layers that change the stream less."""
    streams, residuals = [net.streams[0]], [net.residuals[0]]
    for k in range(1, net.layers + 1):
        residuals.append(streams[-1] + factor * (net.residuals[k] - net.streams[k - 1]))
        streams.append(residuals[-1] + factor * sum(net.parts[k], torch.zeros(())))
    parts = [[factor * part for part in shares] for shares in net.parts]
    return Net(net.hidden, net.layers, net.prompts, streams, residuals, parts, net.final, net.final_weight)


def errors(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in report["findings"] if finding["severity"] == "error"]


# ---------------------------------------------------------------------------------------- rows of another boundary


def some_rows(net: Net, share: float) -> torch.Tensor:
    order = torch.randperm(len(net.ids), generator=torch.Generator().manual_seed(17))
    mask = torch.zeros(len(net.ids), 1, dtype=torch.bool)
    mask[order[: round(share * len(net.ids))]] = True
    return mask


@pytest.mark.parametrize("other", [-1, 1, -2])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.4])
def test_rows_of_another_boundary_are_named(share: float, other: int, net: Net, compare: Compare) -> None:
    mask = some_rows(net, share)
    spec = served(net, lambda k: torch.where(mask, net.streams[k + other], net.streams[k]))
    code, report = compare(training_spec(net), spec)
    assert (code, codes(report)) == (1, {"layer-shift" if abs(other) == 1 else "layer-set"})
    assert [row["status"] for row in report["rows"]] == ["ok", "fail", "ok"]
    (finding,) = errors(report)
    wrong = mask.flatten().nonzero().flatten().tolist()
    evidence = finding["evidence"]
    assert (finding["slot"], finding["boundary"], evidence["rows"]) == (1, 3 + other, len(wrong))
    assert evidence["share"] == pytest.approx(len(wrong) / len(net.ids))
    for example in evidence["examples"]:
        assert example["row"] in wrong
        assert example["token_id"] == net.ids[example["row"]]
        assert example["position"] == net.positions[example["row"]]
    assert sum(evidence["requests"].values()) == len(wrong)


def test_where_noise_is_as_long_as_a_step_many_rows_prove_it_together(compare: Compare) -> None:
    """Steps of 3 %, noise of 4 %: no single row can be told, a fifth of them can."""
    net = slowed(make_net(hidden=2048, layers=5, prompts=(40, 50)), 0.03)
    steps = [
        float(((b - a).norm(dim=-1) / b.norm(dim=-1)).median())
        for a, b in zip(net.streams[1:], net.streams[2:], strict=False)
    ]
    assert max(steps) < 0.04
    mask = some_rows(net, 0.2)
    spec = served(net, lambda k: torch.where(mask, net.streams[k - 1], net.streams[k]), rel=0.04)
    code, report = compare(training_spec(net), spec)
    assert (code, codes(report)) == (1, {"layer-shift"})
    (finding,) = errors(report)
    assert finding["evidence"]["p_value"] < 0.001
    assert finding["evidence"]["rows"] == pytest.approx(18, abs=2)
    code, report = compare(training_spec(net), served(net, lambda k: net.streams[k], rel=0.04))
    assert (code, codes(report)) == (0, set())


@pytest.mark.parametrize("seed", range(4))
def test_another_expert_in_the_last_layer_is_no_other_boundary(seed: int, compare: Compare) -> None:
    """A quarter of the rows lost all of the layer's MLP and got that of another token: part of the way to K-1."""
    net = make_net(seed=seed, prompts=(40, 40, 40))
    mask = some_rows(net, 0.25)

    def flipped(k: int) -> torch.Tensor:
        output = sum(net.parts[k], torch.zeros(()))
        return torch.where(mask, net.streams[k] - output + output.roll(7, dims=0), net.streams[k])

    code, report = compare(training_spec(net), served(net, flipped, slots=(0, 1, 2)))
    assert (code, codes(report)) == (0, set())


# ------------------------------------------------------------------------------------------------------- one factor


@pytest.mark.parametrize("factor", [0.9, 0.95, 0.98, 1.01, 1.02, 1.05, 1.1])
@pytest.mark.parametrize("slow", [1.0, 0.1])
def test_one_factor_on_a_slot(slow: float, factor: float, net: Net, compare: Compare) -> None:
    net = slowed(net, slow)
    code, report = compare(training_spec(net), served(net, lambda k: factor * net.streams[k]))
    assert (code, codes(report)) == (1, {"scale-mismatch"})
    (finding,) = errors(report)
    assert (finding["slot"], finding["boundary"]) == (1, 3)
    assert finding["evidence"]["factor"] == pytest.approx(factor, abs=0.002)
    assert finding["evidence"]["spread_of_row_factors"] < 0.003


@pytest.mark.parametrize("rel", [0.02, 0.05])
def test_noise_has_no_factor(rel: float, net: Net, compare: Compare) -> None:
    code, report = compare(training_spec(net), served(net, lambda k: net.streams[k], rel=rel, slots=(0, 1, 2)))
    assert (code, codes(report)) == (0, set())


def test_states_that_lost_a_part_and_got_another_are_shorter_by_its_square(compare: Compare) -> None:
    """What a coarser engine does: a part of the state is replaced by another as long, on every row."""
    net = make_net(hidden=256)

    def replaced(k: int) -> torch.Tensor:
        state = net.streams[k]
        angle = torch.tensor(0.07)
        across = noisy(0 * state, seed=k) + torch.randn(state.shape, generator=torch.Generator().manual_seed(k))
        across = across / across.norm(dim=-1, keepdim=True) * state.norm(dim=-1, keepdim=True)
        return torch.cos(angle) * state + torch.sin(angle) * across

    code, report = compare(training_spec(net), served(net, replaced, slots=(0, 1, 2)))
    assert (code, codes(report)) == (0, set())


# --------------------------------------------------------------------------------------------------- single rows


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("back", [True, False])
def test_one_or_two_swapped_rows(back: bool, seed: int, compare: Compare) -> None:
    net = make_net(seed=seed, prompts=(50, 50, 50))
    order = torch.arange(150)
    order[20] = 101
    if back:
        order[101] = 20
    assert net.ids[20] != net.ids[101]
    code, report = compare(training_spec(net), served(net, lambda k: net.streams[k][order]))
    assert (code, codes(report)) == (1, {"rows-swapped"})
    assert errors(report)[0]["evidence"]["rows"] == ([20, 101] if back else [20])


# -------------------------------------------------------------------------------------------------- single channels


@pytest.mark.parametrize(
    ("code", "make"),
    [
        ("capture-lost", lambda column: torch.zeros_like(column)),
        ("capture-lost", lambda column: torch.full_like(column, 0.75)),
        ("undetermined", lambda column: -column),
        ("undetermined", lambda column: 3 * column),
        ("undetermined", lambda column: column.roll(5)),
    ],
)
@pytest.mark.parametrize("hidden", [96, 768])
def test_one_wrong_channel(
    code: str, make: Callable[[torch.Tensor], torch.Tensor], hidden: int, compare: Compare
) -> None:
    net = make_net(hidden=hidden)

    def wrong(k: int) -> torch.Tensor:
        state = net.streams[k].clone()
        state[:, 41] = make(net.streams[k][:, 41])
        return state

    spec = slots_from(serving_spec(net), lambda j, r: _exactly(noisy(wrong(3), seed=1), wrong(3)) if j == 1 else None)
    exit_code, report = compare(training_spec(net), spec)
    assert (exit_code, codes(report)) == (1, {code})
    (finding,) = errors(report)
    assert (finding["slot"], finding["boundary"], finding["evidence"]["channels"]) == (1, 3, [41])


def _exactly(state: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
    """Noise everywhere but in the channel that is wrong: what is not computed has none."""
    state[:, 41] = wrong[:, 41]
    return state.bfloat16()


def test_small_channels_under_noise_are_not_broken(compare: Compare) -> None:
    """Channels with hardly any signal of their own, under noise that is alike everywhere."""
    net = make_net(hidden=256)
    for k in range(net.layers + 1):
        net.streams[k][:, ::9] *= 0.01
    code, report = compare(training_spec(net), served(net, lambda k: net.streams[k], rel=0.02, slots=(0, 1, 2)))
    assert (code, codes(report)) == (0, set())


# ------------------------------------------------------------------------- little stored, and noise that a floor knows


@pytest.mark.parametrize("by", [-1, 1])
def test_a_shift_lies_on_the_way_to_the_next_stored_boundary(by: int, compare: Compare) -> None:
    """Slow layers, and only what the draft takes is stored: the floor passes the shift, its direction does not."""
    net = slowed(make_net(hidden=512, layers=9), 0.1)
    trained = (2, 5, 8)
    healthy = serving_spec(net, trained)
    code, report = compare(training_spec(net, trained, boundaries=trained), healthy)
    assert (code, codes(report)) == (0, set())
    assert any("boundaries next to those of slot 0, 1, 2" in text for text in report["coverage"]["not_seen"])
    shifted = serving_spec(net, tuple(k + by for k in trained))
    code, report = compare(training_spec(net, trained, boundaries=trained), shifted)
    assert (code, codes(report)) == (1, {"undetermined"})
    found = errors(report)
    # The first slot has nothing stored before it, the last one nothing after it.
    assert [finding["slot"] for finding in found] == ([1, 2] if by < 0 else [0, 1])
    assert all("layer-shift" in finding["evidence"]["hypotheses"] for finding in found)
    assert all("--boundaries all" in finding["fix"] for finding in found)


@pytest.mark.parametrize("by", [0, -1, 1])
def test_the_servers_own_boundaries_decide_where_training_stores_too_little(by: int, compare: Compare) -> None:
    """Layers below every floor, and nothing stored between: the slot is bit by bit another boundary of the server."""
    net = slowed(make_net(hidden=128, layers=9), 0.01)
    trained = (2, 5, 8)
    spec = serving_spec(net, trained)
    states = {k: noisy(net.streams[k], seed=40 + k).bfloat16() for k in range(1, 10)}
    for rank in spec.ranks:
        rank |= {f"slot.{j}": states[k + by] for j, k in enumerate(trained)}
        rank |= {f"boundary.{k}": state for k, state in states.items()}
    code, report = compare(training_spec(net, trained, boundaries=trained), spec)
    assert (code, codes(report)) == ((1, {"layer-shift"}) if by else (0, set()))
    if by:
        assert [finding["boundary"] for finding in errors(report)] == [k + by for k in trained]
    else:
        assert report["layers"]["served"] == [2, 5, 8]


def test_a_servers_own_map_shares_its_noise_and_refutes_no_healthy_slot(compare: Compare) -> None:
    """Noise longer than the steps, and one for all boundaries, as noise that travels down the layers is."""
    net = slowed(make_net(hidden=128, layers=9), 0.01)
    trained = (2, 5, 8)
    spec = serving_spec(net, trained)
    noise = noisy(net.streams[5], seed=60, rel=0.03) - net.streams[5]
    states = {k: (net.streams[k] + noise).bfloat16() for k in range(1, 10)}
    for rank in spec.ranks:
        rank |= {f"slot.{j}": states[k] for j, k in enumerate(trained)}
        rank |= {f"boundary.{k}": state for k, state in states.items()}
    code, report = compare(training_spec(net, trained, boundaries=trained), spec)
    assert (code, codes(report)) == (0, set())


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("rel", [0.1, 0.2])
def test_a_shift_under_a_measured_floor_is_a_shift(rel: float, by: int, compare: Compare, tmp_path: Path) -> None:
    net = make_net(hidden=512)
    spec = serving_spec(net, USUAL, rel=rel)
    for name in spec.ranks[0]:  # another run has other noise
        again = noisy(net.streams[USUAL[int(name[-1])]], seed=70, rel=rel).bfloat16()
        for rank in spec.ranks:
            rank[name] = again
    floor = str(spec.write(tmp_path / "floor"))
    code, report = compare(training_spec(net), serving_spec(net, rel=rel), "--floor", floor)
    assert (code, codes(report)) == (0, set())
    moved = serving_spec(net, tuple(k + by for k in USUAL), rel=rel)
    code, report = compare(training_spec(net), moved, "--floor", floor)
    assert (code, codes(report)) == (1, {"layer-shift"})


# ---------------------------------------------------------------------------------------- few rows of a situation


def test_two_rerouted_rows_of_ten_graph_rows_are_no_stale_graph(compare: Compare) -> None:
    """A row whose experts differ can be nearer to the layer before: ten rows with two of them prove nothing."""
    net = make_net(prompts=(60, 20))

    def rerouted(k: int) -> torch.Tensor:
        step = net.streams[k] - net.streams[k - 1]
        other = torch.randn(step.shape, generator=torch.Generator().manual_seed(29))
        other *= step.norm(dim=-1, keepdim=True) / other.norm(dim=-1, keepdim=True)
        states = net.streams[k].clone()
        states[-3:-1] = (net.streams[k - 1] + 0.45 * step + 0.45 * other)[-3:-1]
        return states

    spec = served(net, rerouted)
    spec.requests = [
        {"id": "a", "rows": [0, 60], "phase": "prefill", "batch": 1, "graph": False},
        {"id": "b", "rows": [60, 70], "phase": "prefill", "batch": 1, "graph": False},
        {"id": "b", "rows": [70, 80], "phase": "verify", "batch": 1, "graph": True},
    ]
    code, report = compare(training_spec(net), spec)
    assert (code, codes(report)) == (0, set())


@pytest.mark.parametrize(("factor", "channel", "code"), [(1.05, None, "scale-mismatch"), (1.0, 7, "capture-lost")])
def test_a_factor_or_a_dead_channel_in_verify_rows_only(
    factor: float, channel: int | None, code: str, compare: Compare
) -> None:
    """One server can be right in prefill and wrong in verify: what no median shows has to be looked for there."""
    net = make_net(prompts=(60, 30))

    def state(k: int) -> torch.Tensor:
        states = net.streams[k].clone()
        states[70:] *= factor
        return states

    spec = served(net, state)
    spec.requests = [
        {"id": "a", "rows": [0, 60], "phase": "prefill", "batch": 1},
        {"id": "b", "rows": [60, 70], "phase": "prefill", "batch": 1},
        {"id": "b", "rows": [70, 90], "phase": "verify", "batch": 1},
    ]
    if channel is not None:
        for rank in spec.ranks:
            rank["slot.1"][70:, channel] = 0
    exit_code, report = compare(training_spec(net), spec)
    assert (exit_code, codes(report)) == (1, {code})
    assert [row["status"] for row in report["rows"]] == ["ok", "fail", "ok"]
    assert errors(report)[0]["evidence"]["rows"] == "verify"
