"""compare with a training side of three states and a map of the served target: what a slot holds instead is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_parity.cli.main import main
from tests.synthetic import DumpSpec, Net, codes, noisy, serving_spec, training_spec

Compare = Callable[..., tuple[int, dict[str, Any]]]
USUAL = (2, 3, 5)


def served(net: Net, held: tuple[int | str, ...], *, tp: int = 2) -> DumpSpec:
    """A server that shows all its boundaries, with its own noise; its slots are bitwise some of these."""
    spec = serving_spec(net, held, tp=tp)
    tensors = {f"boundary.{k}": noisy(net.streams[k], seed=300 + k).bfloat16() for k in range(1, net.layers + 1)}
    tensors |= {"boundary.0": net.streams[0].bfloat16(), "final.norm": noisy(net.final, seed=400).bfloat16()}
    for rank in spec.ranks:
        rank |= tensors
        for j, k in enumerate(held):
            rank[f"slot.{j}"] = tensors["final.norm" if k == "final.norm" else f"boundary.{k}"]
    return spec


def alone(spec: DumpSpec) -> DumpSpec:
    """The same server's map without its slots: a target without a draft."""
    ranks = [{name: tensor for name, tensor in rank.items() if not name.startswith("slot.")} for rank in spec.ranks]
    return DumpSpec(spec.side, spec.ids, spec.positions, spec.requests, ranks, spec.manifest)


@pytest.mark.parametrize(
    ("held", "code"),
    [
        ((3, 4, 6), "layer-shift"),
        ((1, 2, 4), "layer-shift"),
        ((0, 2, 4), "layer-set"),
        ((2, 3, "final.norm"), "final-norm"),
    ],
)
def test_a_slot_is_named_against_the_server_s_own_map(
    held: tuple[int | str, ...], code: str, net: Net, compare: Compare
) -> None:
    status, report = compare(training_spec(net, boundaries=USUAL), served(net, held))
    assert (status, codes(report)) == (1, {code})
    slots = [row for row in report["rows"] if row["slot"] is not None]
    assert [row["best_boundary"] for row in slots] == list(held)
    assert report["layers"]["served"] == list(held)
    assert report["layers"]["stored"] == list(USUAL)


def test_without_a_map_it_cannot_be_named(net: Net, compare: Compare) -> None:
    """The control of the test above: the same fault, three states, no map."""
    status, report = compare(training_spec(net, boundaries=USUAL), serving_spec(net, (1, 4, 6)))
    assert status == 1
    assert report["layers"]["served"] == [None, None, None]


def test_a_healthy_server_passes_and_every_boundary_of_both_sides_is_compared(net: Net, compare: Compare) -> None:
    status, report = compare(training_spec(net, boundaries=USUAL), served(net, USUAL))
    assert (status, codes(report)) == (0, set())
    assert [(row["slot"], row["boundary"]) for row in report["rows"]] == [
        *((j, k) for j, k in enumerate(USUAL)),
        *((None, k) for k in USUAL),
    ]


def test_the_server_cannot_vouch_for_what_training_does_not_store(net: Net, compare: Compare) -> None:
    status, report = compare(training_spec(net, USUAL, boundaries=(2, 3)), served(net, USUAL))
    assert (status, report["verdict"]) == (3, "inconclusive")
    row = report["rows"][2]
    assert (row["best_boundary"], row["status"]) == (5, "inconclusive")
    assert "boundary-missing" in codes(report, "warning")
    assert "features-match-check-draft" not in codes(report, "info")


def test_it_can_refute_what_training_does_not_store(net: Net, compare: Compare) -> None:
    status, report = compare(training_spec(net, USUAL, boundaries=(2, 3)), served(net, (2, 3, 4)))
    assert (status, report["rows"][2]["status"], report["rows"][2]["best_boundary"]) == (1, "fail", 4)


class TestReference:
    def run(self, tmp_path: Path, training: DumpSpec, serving: DumpSpec, reference: DumpSpec) -> int:
        paths = [spec.write(tmp_path / str(i)) for i, spec in enumerate((training, serving, reference))]
        self.json = tmp_path / "report.json"
        report = ("--report", f"json={self.json}")
        return main(["compare", str(paths[0]), str(paths[1]), "--reference", str(paths[2]), *report])

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.json.read_text())
        return found

    def test_a_map_of_the_target_alone(self, net: Net, tmp_path: Path) -> None:
        training, serving = training_spec(net, boundaries=USUAL), serving_spec(net, (3, 4, 6))
        assert self.run(tmp_path, training, serving, alone(served(net, USUAL))) == 1
        report = self.report()
        assert report["layers"]["served"] == [3, 4, 6]
        first = next(f for f in report["findings"] if f["slot"] == 1)
        assert first["evidence"]["boundary_from"] == str(tmp_path / "2")

    def test_a_map_with_other_rows_is_not_used_and_that_is_said(self, net: Net, tmp_path: Path) -> None:
        part = alone(served(net, USUAL))
        end = part.requests[0]["rows"][1]
        ranks = [{name: tensor[:end] for name, tensor in rank.items()} for rank in part.ranks]
        part = DumpSpec(part.side, part.ids[:end], part.positions[:end], part.requests[:1], ranks, part.manifest)
        assert self.run(tmp_path, training_spec(net, boundaries=USUAL), serving_spec(net, USUAL), part) == 0
        (said,) = (item for item in self.report()["coverage"]["not_seen"] if "in the reference" in item)
        lacking = f"{len(net.ids) - end} of {len(net.ids)} rows"
        assert said == f"{lacking} in the reference {tmp_path / '2'}, so its boundaries were not used"

    def test_a_boundary_whose_ranks_differ_is_not_used(self, net: Net, tmp_path: Path) -> None:
        broken = alone(served(net, USUAL))
        broken.ranks[1]["boundary.4"] = noisy(net.streams[4], seed=9, rel=0.3).bfloat16()
        assert self.run(tmp_path, training_spec(net, boundaries=USUAL), serving_spec(net, USUAL), broken) == 0
        assert any("boundary.4 of the reference" in item for item in self.report()["coverage"]["not_seen"])
