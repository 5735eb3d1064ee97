"""What rules tell apart by geometry: between two boundaries, norms over several slots, groups of ranks, images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.synthetic import DumpSpec, Net, codes, each_rank, make_net, serving_spec, slots_from, training_spec

Compare = Callable[..., tuple[int, dict[str, Any]]]
USUAL = (2, 3, 5)


def served(net: Net, make: Callable[[int, int], torch.Tensor | None], tp: int = 2) -> DumpSpec:
    """make(boundary, rank) instead of each slot's state."""

    def slot(j: int, r: int) -> torch.Tensor | None:
        tensor = make(USUAL[j], r)
        return None if tensor is None else tensor.bfloat16()

    return slots_from(serving_spec(net, tp=tp), slot)


def total(net: Net, k: int) -> torch.Tensor:
    return sum(net.parts[k], torch.zeros(()))


def slow(net: Net, factor: float) -> Net:
    """The same network with layers that change the stream less: neighbouring boundaries below any estimated floor."""
    streams, residuals = [net.streams[0]], [net.residuals[0]]
    for k in range(1, net.layers + 1):
        residuals.append(streams[-1] + factor * (net.residuals[k] - net.streams[k - 1]))
        streams.append(residuals[-1] + factor * total(net, k))
    parts = [[factor * part for part in shares] for shares in net.parts]
    return Net(net.hidden, net.layers, net.prompts, streams, residuals, parts, net.final, net.final_weight)


@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_between_this_boundary_and_the_next(factor: float, net: Net, compare: Compare) -> None:
    net = slow(net, factor)
    code, report = compare(training_spec(net), served(net, lambda k, r: net.residuals[k + 1]))
    assert (code, codes(report)) == (1, {"aliased-buffer"})
    shares = [f["evidence"]["step_share"] for f in report["findings"] if f["severity"] == "error"]
    assert all(0.03 < share < 0.97 for share in shares)


@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_short_of_this_boundary_on_every_rank(factor: float, net: Net, compare: Compare) -> None:
    net = slow(net, factor)
    code, report = compare(training_spec(net), served(net, lambda k, r: net.residuals[k]))
    assert (code, codes(report)) == (1, {"undetermined"})
    errors = [f for f in report["findings"] if f["severity"] == "error"]
    assert all(f["evidence"]["hypotheses"] == ["captured before the MLP's output was added"] for f in errors)
    assert all("hidden_states + residual" in f["fix"] for f in errors)  # equal ranks are no partial sum


def test_with_one_rank_a_partial_sum_is_a_hypothesis(net: Net, compare: Compare) -> None:
    spec = served(net, lambda k, r: net.residuals[k] + net.parts[k][r])
    del spec.ranks[1]
    code, report = compare(training_spec(net), spec)
    assert (code, codes(report)) == (1, {"undetermined"})
    assert all("partial-sum" in f["evidence"]["hypotheses"] for f in report["findings"] if f["severity"] == "error")


@pytest.mark.parametrize("factor", [1.0, 0.1])
@pytest.mark.parametrize("tp", [2, 8])
def test_output_counted_twice(tp: int, factor: float, compare: Compare) -> None:
    net = slow(make_net(tp=tp), factor)
    code, report = compare(training_spec(net), served(net, lambda k, r: net.residuals[k] + tp * total(net, k), tp))
    assert (code, codes(report)) == (1, {"double-sum"})


def test_a_healthy_server_of_slow_layers_passes(net: Net, compare: Compare) -> None:
    net = slow(net, 0.1)
    code, report = compare(training_spec(net), serving_spec(net))
    assert (code, codes(report)) == (0, set())


def test_groups_of_ranks(compare: Compare) -> None:
    net = make_net(tp=4)

    def half(k: int, r: int) -> torch.Tensor:
        return net.residuals[k] + sum(net.parts[k][:2] if r < 2 else net.parts[k][2:], torch.zeros(()))

    code, report = compare(training_spec(net), served(net, half, 4))
    assert (code, codes(report)) == (1, {"partial-sum"})
    assert report["findings"][0]["evidence"]["groups"] == [[0, 1], [2, 3]]


def test_a_partial_sum_of_another_layer_is_both(compare: Compare) -> None:
    net = make_net(tp=4)
    code, report = compare(
        training_spec(net, (1, 2, 4)), served(net, lambda k, r: net.residuals[k] + net.parts[k][r], 4)
    )
    assert (code, codes(report)) == (1, {"partial-sum", "layer-shift"})


def test_a_scaled_state_of_another_layer_is_both(net: Net, compare: Compare) -> None:
    code, report = compare(training_spec(net, (1, 2, 4)), served(net, lambda k, r: 1.4 * net.streams[k]))
    assert (code, codes(report)) == (1, {"scale-mismatch", "layer-shift"})


def test_one_norm_over_all_slots(net: Net, compare: Compare) -> None:
    whole = torch.cat([net.streams[k] for k in USUAL], dim=-1)
    normed = whole / whole.square().mean(-1, keepdim=True).sqrt()
    blocks = dict(zip(USUAL, normed.split(net.hidden, dim=-1), strict=True))
    weights = torch.rand(net.hidden, generator=torch.Generator().manual_seed(3)) + 0.5
    code, report = compare(training_spec(net), served(net, lambda k, r: blocks[k] * weights))
    assert (code, codes(report)) == (1, {"draft-norm"})


def test_trained_after_the_final_norm_and_served_before_it(net: Net, compare: Compare) -> None:
    code, report = compare(training_spec(net, (2, 3, "final.norm")), serving_spec(net, (2, 3, 6)))
    assert (code, codes(report)) == (1, {"final-norm"})


def test_massive_channels_hide_nothing(compare: Compare) -> None:
    net = make_net(hidden=160)
    for k in range(2, net.layers + 1):
        net.streams[k][:, [5, 90]] += 60.0
        net.residuals[k][:, [5, 90]] += 60.0
    code, report = compare(training_spec(net), serving_spec(net, rel=0.0005))
    assert (code, codes(report)) == (0, set())
    code, report = compare(training_spec(net), serving_spec(net, (3, 4, 6), rel=0.0005))
    assert (code, codes(report)) == (1, {"layer-shift"})
    code, report = compare(training_spec(net), served(net, lambda k, r: net.streams[k].roll(1, dims=0)))
    assert (code, codes(report)) == (1, {"token-shift"})


def test_images_that_training_did_not_see(compare: Compare) -> None:
    net = make_net(prompts=(40, 40))
    training = training_spec(net)
    g = torch.Generator().manual_seed(5)
    for begin in (0, 40):
        training.ids[begin + 10 : begin + 18] = [199] * 8
    spec = serving_spec(net)
    spec.ids = training.ids

    def blind(rank: dict[str, torch.Tensor]) -> None:
        for name, state in list(rank.items()):
            changed = state.float().clone()
            noise = torch.randn(changed.shape, generator=g) * changed.std()
            for begin in (0, 40):
                changed[begin + 10 : begin + 18] = noise[begin + 10 : begin + 18]
                changed[begin + 18 : begin + 40] += 0.4 * noise[begin + 18 : begin + 40]
            rank[name] = changed.bfloat16()

    spec.ranks = spec.ranks[:1]
    each_rank(spec, blind)
    spec.ranks = [spec.ranks[0], dict(spec.ranks[0])]
    code, report = compare(training, spec)
    assert (code, codes(report)) == (1, {"multimodal-missing"})


def test_without_neighbours_on_the_training_side_nothing_is_guessed(net: Net, compare: Compare) -> None:
    code, report = compare(training_spec(net, boundaries=USUAL), serving_spec(net, (3, 4, 6)))
    assert code == 1
    assert "precision" not in codes(report)
    assert all("--boundaries all" in f["fix"] for f in report["findings"] if f["code"] == "undetermined")
