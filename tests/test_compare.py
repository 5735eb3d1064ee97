"""compare on faults injected into synthetic dumps: the right name, the right exit code, and no false alarm."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.synthetic import (
    DumpSpec,
    Net,
    codes,
    each_rank,
    make_net,
    noisy,
    requests_of,
    serving_spec,
    slots_from,
    training_spec,
)

Compare = Callable[..., tuple[int, dict[str, Any]]]
USUAL = (2, 3, 5)


def bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16()


def test_healthy_passes(net: Net, compare: Compare) -> None:
    code, report = compare(training_spec(net), serving_spec(net))
    assert (code, report["verdict"]) == (0, "pass")
    assert [row["best_boundary"] for row in report["rows"]] == list(USUAL)
    assert [row["expected_boundary"] for row in report["rows"]] == list(USUAL)
    assert all(row["layout"] == "replicated" and row["rank_equal"] is True for row in report["rows"])
    assert all(control["failed_as_expected"] is True for control in report["controls"])
    assert codes(report) == set()
    assert codes(report, "info") == {"features-match-check-draft"}
    assert report["layers"]["served"] == list(USUAL)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_healthy_has_no_error_on_any_seed(seed: int, tp: int, compare: Compare) -> None:
    net = make_net(seed=seed, tp=tp)
    code, report = compare(training_spec(net), serving_spec(net, tp=tp))
    assert (code, codes(report)) == (0, set())


@pytest.mark.parametrize(
    ("held", "expected_codes"),
    [
        ((3, 4, 6), {"layer-shift"}),
        ((1, 2, 4), {"layer-shift"}),
        ((2, 4, 5), {"layer-shift"}),
        ((0, 2, 4), {"layer-set"}),
        ((3, 2, 5), {"concat-order"}),
        ((5, 2, 3), {"concat-order"}),
        ((2, 3, "final.norm"), {"final-norm"}),
    ],
)
def test_wrong_boundaries_are_named(
    held: tuple[int | str, ...], expected_codes: set[str], net: Net, compare: Compare
) -> None:
    code, report = compare(training_spec(net), serving_spec(net, held))
    assert (code, report["verdict"]) == (1, "fail")
    assert [row["best_boundary"] for row in report["rows"]] == list(held)
    assert codes(report) == expected_codes
    wrong = [row["slot"] for row, k in zip(report["rows"], USUAL, strict=True) if row["best_boundary"] != k]
    assert [row["slot"] for row in report["rows"] if row["status"] == "fail"] == wrong
    assert [finding["slot"] for finding in report["findings"] if finding["severity"] == "error"] == wrong


def test_the_storys_two_orders(compare: Compare) -> None:
    """[embed, l3, l31] against [l3, l31, l59], scaled down: trained on [1, 3, 5], served [0, 1, 3]."""
    net = make_net()
    code, report = compare(training_spec(net, (1, 3, 5)), serving_spec(net, (0, 1, 3)))
    assert code == 1
    assert report["layers"]["served"] == [0, 1, 3]
    code, report = compare(training_spec(net, (0, 1, 3)), serving_spec(net, (1, 3, 5)))
    assert code == 1
    assert report["layers"]["served"] == [1, 3, 5]
    assert "embedding-missing" in codes(report)


def test_fix_names_the_ids_to_write(net: Net, compare: Compare) -> None:
    _, report = compare(training_spec(net), serving_spec(net, (0, 2, 4)))
    assert all('"eagle_aux_hidden_state_layer_ids": [2, 3, 5]' in f["fix"] for f in report["findings"])


def test_a_permuted_order_has_no_id_list(net: Net, compare: Compare) -> None:
    _, report = compare(training_spec(net, (5, 2, 3)), serving_spec(net, (2, 3, 5)))
    assert codes(report) == {"concat-order"}
    assert all("no id list" in f["fix"] for f in report["findings"])


# ------------------------------------------------------------------------------------------------------- ranks


def partial(net: Net, *, residual: bool = False) -> DumpSpec:
    """Captured before the all-reduce: every rank holds the residual and its own share of the MLP's output."""
    tp = len(net.parts[1])
    spec = slots_from(serving_spec(net, tp=tp), lambda j, r: bf16(net.residuals[USUAL[j]] + net.parts[USUAL[j]][r]))
    for rank in spec.ranks if residual else ():
        rank |= {f"residual.{k}": bf16(net.residuals[k]) for k in USUAL}
    return spec


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("residual", [False, True])
def test_partial_sum(tp: int, residual: bool, compare: Compare) -> None:
    net = make_net(tp=tp)
    code, report = compare(training_spec(net), partial(net, residual=residual))
    assert code == 1
    assert codes(report) == {"partial-sum"}
    for row in report["rows"]:
        assert (row["layout"], row["rank_equal"], row["width"]) == ("partial-sum", False, net.hidden)
    how = {finding["evidence"]["how"] for finding in report["findings"] if finding["severity"] == "error"}
    assert how == {"residual" if residual else "residual-estimate"}
    if residual:  # rebuilt, so the row's metrics are those of the truth
        assert all(row["rel_l2"]["median"] < 0.02 for row in report["rows"])


def test_partial_sum_of_another_layer_names_both_faults(compare: Compare) -> None:
    net = make_net(tp=2)
    held = (3, 4, 6)
    spec = slots_from(serving_spec(net), lambda j, r: bf16(net.residuals[held[j]] + net.parts[held[j]][r]))
    for rank in spec.ranks:
        rank |= {f"residual.{k}": bf16(net.residuals[k]) for k in held}
    code, report = compare(training_spec(net), spec)
    assert code == 1
    assert {"partial-sum"} <= codes(report)
    assert {f["boundary"] for f in report["findings"] if f["code"] == "partial-sum"} == set(held)


def test_plain_partial_sum_is_rebuilt(net: Net, compare: Compare) -> None:
    def share(j: int, r: int) -> torch.Tensor:
        noise = torch.randn(net.streams[0].shape, generator=torch.Generator().manual_seed(j))
        return net.streams[USUAL[j]] / 2 + (noise if r == 0 else -noise)

    code, report = compare(training_spec(net), slots_from(serving_spec(net), share))
    assert code == 1
    assert codes(report) == {"partial-sum"}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", ["corrupt", "stale", "other-layer", "few-rows"])
def test_one_broken_rank_is_no_partial_sum(tp: int, kind: str, compare: Compare) -> None:
    net = make_net(tp=tp)
    spec = serving_spec(net, tp=tp)
    slot = spec.ranks[1]["slot.1"]
    noise = torch.randn(slot.shape, generator=torch.Generator().manual_seed(9))
    spec.ranks[1]["slot.1"] = {
        "corrupt": bf16(slot.float() + noise * slot.float().std()),
        "stale": slot.roll(7, dims=0),
        "other-layer": bf16(net.streams[2]),
        "few-rows": torch.cat([slot[:-9], bf16(noise)[-9:]]),
    }[kind]
    code, report = compare(training_spec(net), spec)
    assert code == 1
    assert "partial-sum" not in codes(report)
    errors = [finding for finding in report["findings"] if finding["severity"] == "error"]
    assert [(finding["slot"], finding["ranks"]) for finding in errors] == [(1, [1])]
    assert [row["status"] for row in report["rows"]] == ["ok", "fail", "ok"]
    assert report["rows"][1]["rank_equal"] is False


def test_ranks_that_differ_in_the_last_bit_are_a_warning(net: Net, compare: Compare) -> None:
    spec = serving_spec(net)
    spec.ranks[1]["slot.0"] = spec.ranks[1]["slot.0"].clone()
    spec.ranks[1]["slot.0"].view(torch.int16)[::3] ^= 1
    code, report = compare(training_spec(net), spec)
    assert code == 0
    assert codes(report) == set()
    assert codes(report, "warning") == {"precision"}
    assert report["rows"][0]["layout"] == "replicated"


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_hidden_shard(tp: int, compare: Compare) -> None:
    net = make_net(tp=tp)
    width = net.hidden // tp
    whole = serving_spec(net, tp=tp)
    spec = slots_from(whole, lambda j, r: whole.ranks[r][f"slot.{j}"][:, r * width : (r + 1) * width])
    code, report = compare(training_spec(net), spec)
    assert code == 1
    assert codes(report) == {"hidden-shard"}
    for row in report["rows"]:
        assert (row["layout"], row["width"], row["expected_width"]) == ("hidden-shard", width, net.hidden)
        assert row["rel_l2"]["median"] < 0.02
        assert all(rank["rel_l2"] < 0.02 for rank in row["per_rank"])


def test_a_narrow_model_is_no_shard(compare: Compare) -> None:
    """A width of 96 is a shard of 768 only if the config says 768."""
    net = make_net(hidden=96, tp=8)
    code, report = compare(training_spec(net), serving_spec(net, tp=8))
    assert (code, codes(report)) == (0, set())


@pytest.mark.parametrize("dp", [1, 2])
def test_token_shard(dp: int, net: Net, compare: Compare) -> None:
    spec = serving_spec(net)
    count = len(net.ids)
    cut = count // 2 + 3  # uneven
    for rank, rows in zip(spec.ranks, (range(cut), range(cut, count)), strict=True):
        index = torch.tensor(list(rows))
        for name in list(rank):
            rank[name] = rank[name][index]
        rank["rows"] = index
    spec.manifest["engine"] |= {"dp_size": dp}
    code, report = compare(training_spec(net), spec)
    assert {row["layout"] for row in report["rows"]} == {"token-shard"}
    assert all(row["rel_l2"]["median"] < 0.02 for row in report["rows"])
    assert code == (1 if dp == 1 else 0)
    assert codes(report, "error" if dp == 1 else "info") >= {"token-shard"}


def test_double_sum(net: Net, compare: Compare) -> None:
    twice = slots_from(serving_spec(net), lambda j, r: bf16(2 * net.streams[USUAL[j]]))
    code, report = compare(training_spec(net), twice)
    assert (code, codes(report)) == (1, {"double-sum"})
    output = slots_from(
        serving_spec(net), lambda j, r: bf16(net.residuals[USUAL[j]] + 2 * sum(net.parts[USUAL[j]], torch.zeros(())))
    )
    code, report = compare(training_spec(net), output)
    assert (code, codes(report)) == (1, {"double-sum"})


def test_missing_slot_on_a_rank(net: Net, compare: Compare) -> None:
    spec = serving_spec(net)
    del spec.ranks[1]["slot.2"]
    code, report = compare(training_spec(net), spec)
    assert (code, codes(report)) == (1, {"capture-lost"})


def test_fewer_slots_than_the_draft_takes(net: Net, compare: Compare) -> None:
    code, report = compare(training_spec(net), serving_spec(net, (2, 3)))
    assert (code, codes(report)) == (1, {"capture-lost"})


def test_one_rank_of_two_is_said_not_to_be_judged(net: Net, compare: Compare) -> None:
    spec = serving_spec(net)
    del spec.ranks[1]
    code, report = compare(training_spec(net), spec)
    assert code == 0
    assert report["rows"][0]["rank_equal"] is None
    assert any("rank equality was not judged" in text for text in report["coverage"]["not_seen"])


def test_wrong_width(net: Net, compare: Compare) -> None:
    spec = slots_from(serving_spec(net), lambda j, r: bf16(net.streams[2][:, :40]) if j == 1 else None)
    code, report = compare(training_spec(net), spec)
    assert (code, codes(report)) == (1, {"width-mismatch"})


# ----------------------------------------------------------------------------------------------------- content


def rotation(size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(8))).Q


def one_slot(net: Net, make: Callable[[torch.Tensor], torch.Tensor], slot: int = 1) -> DumpSpec:
    return slots_from(serving_spec(net), lambda j, r: bf16(make(net.streams[USUAL[j]])) if j == slot else None)


@pytest.mark.parametrize(
    ("code", "make"),
    [
        ("scale-mismatch", lambda net, x: 1.7 * x),
        ("scale-mismatch", lambda net, x: x / 8),
        ("token-shift", lambda net, x: x.roll(1, dims=0)),
        ("token-shift", lambda net, x: x.roll(-2, dims=0)),
        ("residual-missing", lambda net, x: sum(net.parts[3], torch.zeros(()))),
        ("final-norm", lambda net, x: x / x.square().mean(-1, keepdim=True).sqrt() * net.final_weight),
        ("draft-norm", lambda net, x: x / x.square().mean(-1, keepdim=True).sqrt()),
        ("rotated-basis", lambda net, x: x @ rotation(x.shape[1])),
        ("non-finite", lambda net, x: torch.where(torch.arange(len(x)).unsqueeze(-1) == 4, torch.nan, x)),
        ("undetermined", lambda net, x: noisy(0 * x, seed=4) + rotation(96)[: len(x)] * x.std() * 96**0.5),
        ("precision", lambda net, x: noisy(x, seed=3, rel=0.25)),
    ],
)
def test_content_faults(code: str, make: Callable[..., torch.Tensor], net: Net, compare: Compare) -> None:
    exit_code, report = compare(training_spec(net), one_slot(net, lambda x: make(net, x)))
    assert exit_code == 1
    assert codes(report) == {code}
    assert [row["status"] for row in report["rows"]] == ["ok", "fail", "ok"]


def test_embedding_scale(net: Net, compare: Compare) -> None:
    spec = slots_from(serving_spec(net, (0, 3, 5)), lambda j, r: bf16(net.streams[0] * 9.8) if j == 0 else None)
    code, report = compare(training_spec(net, (0, 3, 5)), spec)
    assert (code, codes(report)) == (1, {"embedding-scale"})


def test_rows_swapped_and_rows_lost(net: Net, compare: Compare) -> None:
    code, report = compare(training_spec(net), one_slot(net, _swapped))
    assert (code, codes(report)) == (1, {"rows-swapped"})

    def lose(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros(6, x.shape[1]), x[6:]])

    code, report = compare(training_spec(net), one_slot(net, lose))
    assert (code, codes(report)) == (1, {"rows-lost"})


def _swapped(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[5:12], y[30:37] = x[30:37], x[5:12]
    return y


def test_aliased_buffer(net: Net, compare: Compare) -> None:
    spec = serving_spec(net, (5, 5, 5))
    for rank in spec.ranks:
        rank["slot.0"] = rank["slot.1"] = rank["slot.2"]
    code, report = compare(training_spec(net), spec)
    assert (code, codes(report)) == (1, {"aliased-buffer"})
    assert [row["status"] for row in report["rows"]] == ["fail", "fail", "ok"]


def test_routing_flips_are_no_error(compare: Compare) -> None:
    """A healthy MoE: a quarter of the rows takes another expert, the median stays at the floor."""
    net = make_net(prompts=(40, 40, 40))

    def flips(j: int, r: int) -> torch.Tensor:
        clean = noisy(net.streams[USUAL[j]], seed=j)
        flipped = noisy(net.streams[USUAL[j]], seed=50 + j, rel=0.45)
        rows = torch.rand(len(clean), generator=torch.Generator().manual_seed(j)) < 0.25
        return bf16(torch.where(rows.unsqueeze(-1), flipped, clean))

    code, report = compare(training_spec(net), slots_from(serving_spec(net), flips))
    assert (code, codes(report)) == (0, set())
    assert report["rows"][0]["cosine"]["mean"] < 0.985


def test_one_layer_shift_at_high_cosine(compare: Compare) -> None:
    """Layers that hardly change the stream: the neighbour scores 0.99 and more, and is still the wrong layer."""
    net = make_net()
    for k in range(1, net.layers + 1):
        net.streams[k] = net.streams[0] + 0.04 * (net.streams[k] - net.streams[0])
    code, report = compare(training_spec(net), serving_spec(net, (3, 4, 6)))
    assert code == 1
    assert codes(report) == {"layer-shift"}
    assert all(row["cosine"]["median"] > 0.998 for row in report["rows"])


# ------------------------------------------------------------------------------------------- expectation, exits


def test_declared_ids_are_expected_when_training_does_not_say(net: Net, compare: Compare) -> None:
    spec = serving_spec(net)
    spec.manifest["draft"] = {"name": None, "declared_ids": [1, 2, 4], "num_slots": 3, "spec_accept_length": 2.5}
    code, report = compare(training_spec(net, None), spec)
    assert code == 0
    assert [row["expected_boundary"] for row in report["rows"]] == [2, 3, 5]
    notes = [finding for finding in report["findings"] if "trained order is unknown" in finding["message"]]
    assert [note["severity"] for note in notes] == ["info"]


def test_no_source_for_the_order_is_inconclusive(net: Net, compare: Compare) -> None:
    code, report = compare(training_spec(net, None), serving_spec(net))
    assert (code, report["verdict"]) == (3, "inconclusive")
    assert [row["best_boundary"] for row in report["rows"]] == [2, 3, 5]


def test_expected_boundary_not_stored(net: Net, compare: Compare) -> None:
    code, report = compare(training_spec(net, boundaries=[2, 3]), serving_spec(net))
    assert code == 3
    assert codes(report, "warning") == {"boundary-missing"}
    code, report = compare(training_spec(net, boundaries=[2, 3, 4]), serving_spec(net, (2, 3, 4)))
    assert code == 1  # slot 2 is proven to be boundary 4, whatever 5 would be


def test_two_equal_boundaries_cannot_be_told_apart(net: Net, compare: Compare) -> None:
    training = training_spec(net)
    training.ranks[0]["boundary.4"] = training.ranks[0]["boundary.3"]
    code, report = compare(training, serving_spec(net))
    assert (code, report["verdict"]) == (3, "inconclusive")
    assert [row["status"] for row in report["rows"]] == ["ok", "inconclusive", "ok"]


def test_too_few_rows_are_inconclusive(compare: Compare) -> None:
    net = make_net(prompts=(7,))
    code, report = compare(training_spec(net), serving_spec(net))
    assert (code, report["verdict"]) == (3, "inconclusive")
    net = make_net(prompts=(8,))
    assert compare(training_spec(net), serving_spec(net))[0] == 0


def test_no_common_tokens_is_inconclusive(net: Net, compare: Compare) -> None:
    other = make_net(seed=77)
    code, report = compare(training_spec(net), serving_spec(other))
    assert (code, report["verdict"]) == (3, "inconclusive")
    assert report["inputs"]["aligned_rows"] == 0


def test_common_boundaries_get_rows_of_their_own(net: Net, compare: Compare) -> None:
    spec = serving_spec(net)
    for rank in spec.ranks:
        rank["boundary.0"] = bf16(net.streams[0])
        rank["boundary.4"] = bf16(noisy(net.streams[4], seed=4))
    code, report = compare(training_spec(net), spec)
    assert code == 0
    assert [(row["slot"], row["boundary"]) for row in report["rows"]] == [(0, 2), (1, 3), (2, 5), (None, 0), (None, 4)]


def test_verify_rows_of_the_default_layers(compare: Compare) -> None:
    """SGLang <= 0.5.10: prefill right, graph replay from other layers."""
    net = make_net(prompts=(60, 20))
    spec = serving_spec(net)
    spec.requests = [
        {"id": "a", "rows": [0, 60], "phase": "prefill", "batch": 1, "graph": False},
        {"id": "b", "rows": [60, 70], "phase": "prefill", "batch": 1, "graph": False},
        {"id": "b", "rows": [70, 80], "phase": "verify", "batch": 1, "graph": True},
    ]
    for rank in spec.ranks:
        for j, k in enumerate((1, 2, 4)):
            rank[f"slot.{j}"][70:] = bf16(net.streams[k][70:])
    code, report = compare(training_spec(net), spec)
    assert (code, codes(report)) == (1, {"graph-stale"})
    assert report["coverage"]["graph"] == [False, True]
    assert "verify rows" not in report["coverage"]["not_seen"]


# ------------------------------------------------------------------------------------------------------- floor


def test_floor_dump(net: Net, compare: Compare, tmp_path: Any) -> None:
    again = serving_spec(net)
    slots_from(again, lambda j, r: bf16(noisy(net.streams[USUAL[j]], seed=900 + j)))
    floor = str(again.write(tmp_path / "floor"))
    code, report = compare(training_spec(net), serving_spec(net), "--floor", floor)
    assert code == 0
    assert all(floor in row["floor"]["source"] for row in report["rows"])
    code, report = compare(training_spec(net), serving_spec(net, (3, 4, 6)), "--floor", floor)
    assert (code, codes(report)) == (1, {"layer-shift"})
    other = str(serving_spec(make_net(seed=5)).write(tmp_path / "other"))
    code, report = compare(training_spec(net), serving_spec(net), "--floor", other)
    assert code == 2
    assert "--floor" in report["error"]["message"]


def test_a_floor_with_nan_in_a_row_is_the_floor_of_the_others(net: Net, compare: Compare, tmp_path: Any) -> None:
    again = serving_spec(net)
    slots_from(again, lambda j, r: bf16(noisy(net.streams[USUAL[j]], seed=900 + j)))
    for rank in again.ranks:
        for tensor in rank.values():
            tensor[4, 2] = float("nan")
    floor = str(again.write(tmp_path / "floor"))
    code, report = compare(training_spec(net), serving_spec(net, rel=0.2), "--floor", floor)
    assert (code, codes(report)) == (1, {"precision"})
    assert all(0 < row["floor"]["rel_l2"]["median"] < 1 for row in report["rows"])


def test_requests_may_share_a_label_and_come_in_any_order(net: Net, compare: Compare) -> None:
    training = training_spec(net)
    training.requests = [request | {"id": "same"} for request in requests_of(net)][::-1]
    code, report = compare(training, serving_spec(net))
    assert code == 0
    assert report["inputs"]["aligned_rows"] == len(net.ids)


def test_ranks_with_one_fault_are_named_together(compare: Compare) -> None:
    """One line with all of them: of eight ranks, four are no news one by one."""
    net = make_net(tp=8)
    odd = (2, 3, 5)
    spec = serving_spec(net, tp=8)
    for rank in odd:
        spec.ranks[rank]["slot.0"] = torch.zeros_like(spec.ranks[rank]["slot.0"])
    code, report = compare(training_spec(net), spec)
    [finding] = [f for f in report["findings"] if f["severity"] == "error"]
    assert (code, finding["code"], finding["slot"], finding["ranks"]) == (1, "capture-lost", 0, list(odd))
    assert finding["message"].startswith("slot 0: ranks 2, 3, 5 differ from the others: each holds zeros")

    spec = serving_spec(net, tp=8)
    for rank in odd:
        del spec.ranks[rank]["slot.0"]
    code, report = compare(training_spec(net), spec)
    [finding] = [f for f in report["findings"] if f["severity"] == "error"]
    assert finding["message"] == "slot 0 is not stored on ranks 2, 3, 5 but is on ranks 0, 1, 4, 6, 7"


@pytest.mark.parametrize("wide", ["training", "serving", "both"])
def test_float64_on_either_side(wide: str, net: Net, compare: Compare) -> None:
    training, serving = training_spec(net), serving_spec(net)
    for side in ("training", "serving") if wide == "both" else (wide,):
        for rank in (training if side == "training" else serving).ranks:
            rank.update({name: tensor.double() for name, tensor in rank.items()})
    code, report = compare(training, serving)
    assert (code, codes(report)) == (0, set())


def test_a_difference_that_leaves_float32_where_the_states_do_not(net: Net, compare: Compare) -> None:
    signs = torch.randn(net.streams[3].shape, generator=torch.Generator().manual_seed(1)).sign()
    training, state = training_spec(net), bf16(1.2e18 * signs)  # |a|^2 is 1.4e38, |a - b|^2 four times as much
    training.ranks[0]["boundary.3"] = state
    _, report = compare(training, slots_from(serving_spec(net), lambda j, _: -state if j == 1 else None))
    assert report["rows"][1]["rel_l2"]["median"] == pytest.approx(2)
    assert report["rows"][1]["rel_l2"]["max"] == pytest.approx(2)


def test_a_dead_channel_after_the_final_norm(net: Net, compare: Compare) -> None:
    state = bf16(noisy(net.final, 5))
    state[:, 7] = 0
    serving = each_rank(serving_spec(net), lambda rank: rank.update({"final.norm": state}))
    code, report = compare(training_spec(net), serving)
    assert code == 1
    assert "capture-lost" in codes(report)


@pytest.mark.parametrize("bad", [(0, 1), (1, 2), (2, 3)])
def test_which_ranks_are_sound_does_not_depend_on_their_order(bad: tuple[int, int], compare: Compare) -> None:
    net = make_net(tp=4)
    state = bf16(noisy(net.streams[3], 101))
    broken = state.clone()
    broken[5, 9] = float("nan")
    serving = slots_from(serving_spec(net, tp=4), lambda j, r: (broken if r in bad else state) if j == 1 else None)
    code, report = compare(training_spec(net), serving)
    assert (code, codes(report)) == (1, {"non-finite"})
    assert report["rows"][1]["layout"] == "replicated"
    assert report["rows"][1]["rel_l2"]["median"] < 0.01


@pytest.mark.parametrize("massive", [1.0, 300.0, 3000.0, 30000.0])
def test_a_corrupt_rank_beside_a_massive_channel(massive: float, net: Net, compare: Compare) -> None:
    g = torch.Generator().manual_seed(3)
    training, serving = training_spec(net), serving_spec(net)
    for name, tensor in training.ranks[0].items():
        training.ranks[0][name] = tensor.index_fill(1, torch.tensor([11]), massive)
    noise = 1 + 0.004 * torch.randn(net.streams[3].shape, generator=g)
    for rank in serving.ranks:
        rank.update({n: bf16(training.ranks[0][f"boundary.{k}"] * noise) for n, k in zip(rank, USUAL, strict=True)})
    corrupt = bf16(torch.randn(net.streams[3].shape, generator=g))
    corrupt[:, 11] = serving.ranks[0]["slot.1"][:, 11]
    serving.ranks[0]["slot.1"] = corrupt
    code, report = compare(training, serving)
    (finding,) = (f for f in report["findings"] if f["severity"] == "error")
    assert (code, finding["slot"], finding["ranks"]) == (1, 1, [0])
    assert report["rows"][1]["rel_l2"]["median"] < 0.02


def test_one_fault_of_two_ranks_in_one_slot_is_named_for_each(compare: Compare) -> None:
    net = make_net(tp=4)
    serving = serving_spec(net, tp=4)
    serving.ranks[0]["slot.1"].zero_()
    serving.ranks[0]["slot.1"] = serving.ranks[0]["slot.1"].clone()
    serving.ranks[1]["slot.1"] = serving.ranks[2]["slot.1"] = bf16(noisy(net.streams[3], 101))
    del serving.ranks[3]["slot.1"]
    code, report = compare(training_spec(net), serving)
    assert code == 1
    ranks = [finding["ranks"] for finding in report["findings"] if finding["slot"] == 1]
    assert sorted(ranks) == [[0], [3]]


def test_ranks_of_different_dtype_are_refused(net: Net, compare: Compare) -> None:
    serving = serving_spec(net)
    serving.ranks[1]["slot.1"] = serving.ranks[1]["slot.1"].float()
    code, report = compare(training_spec(net), serving)
    assert code == 2
    assert "slot.1 is BF16 on rank 0 and F32 on rank 1" in json.dumps(report)
