"""What the ranks wrote -> a dump: boundaries beside or without slots, and ranks that hold a part of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle_parity.alignment.ranks import study_ranks
from eagle_parity.captures.prompts import Prompt
from eagle_parity.captures.recording import Recording
from eagle_parity.captures.sglang import capture, estimate
from eagle_parity.captures.site import check
from eagle_parity.captures.spool import Header
from eagle_parity.dump import DumpWriter, open_dump
from eagle_parity.errors import EnvironmentFailure, UsageError
from eagle_parity.records import FINAL_NORM, Boundary, Phase
from tests.test_server import HIDDEN, INFO, PROMPT, TREE, Engine

NAMES = (*(f"boundary.{k}" for k in range(7)), FINAL_NORM)
ALONE = INFO | {"speculative_algorithm": None, "speculative_draft_model_path": None}


@dataclass
class Showing(Engine):
    """An engine whose ranks show boundaries, in the forwards that `eager` says, and may hold parts of the rows."""

    names: tuple[str, ...] | None = NAMES
    drafted: bool = True
    eager: Callable[[Phase], bool] = lambda phase: True
    unseen: str | None = None
    part: Callable[[int, int], range] = lambda rank, tokens: range(tokens)

    def hello(self, **changes: Any) -> None:
        super().hello(
            **{"boundaries": self.names, "draft": {"declared_ids": [1, 2]} if self.drafted else None} | changes
        )

    def forward(
        self, rid: str, phase: Phase, ids: Sequence[int], positions: Sequence[int], following: Sequence[int]
    ) -> None:
        if not self.drafted and phase == "verify":
            phase, ids, positions = "decode", ids[:1], positions[:1]
        for rank, writer in self.writers.items():
            rows = self.part(rank, len(ids))
            header = Header(rid, "target", phase, batch=1, forward_tokens=len(ids), graph=not self.eager(phase))
            whole = rows == range(len(ids))
            header = replace(header, rows=None if whole else (rows.start, rows.stop))
            tensors = {"token_ids": torch.tensor(ids), "positions": torch.tensor(positions)}
            if self.drafted:
                tensors["hidden"] = states(ids, positions, 2 * HIDDEN)[rows.start : rows.stop]
            if self.eager(phase):
                shown = NAMES if self.unseen is None else NAMES[:3]
                header = replace(header, unseen=dict.fromkeys(NAMES[len(shown) :], self.unseen or ""))
                tensors |= {
                    name: states(ids, positions, HIDDEN, offset=k)[rows.start : rows.stop]
                    for k, name in enumerate(shown)
                }
            if phase == "verify":
                tensors |= {name: torch.tensor(links) for name, links in TREE.items()}
            writer.submit(header, tensors)
            if self.drafted and self.draft_seen and phase == "prefill":
                given = {"hidden": tensors["hidden"].clone(), "token_ids": torch.tensor(list(following))}
                writer.submit(replace(header, kind="draft"), given)


def states(ids: Sequence[int], positions: Sequence[int], width: int, offset: int = 0) -> torch.Tensor:
    """States that name their token, position, boundary and channel."""
    rows = zip(ids, positions, strict=True)
    return torch.tensor([[1000 * offset + t + p / 10 + j / 100 for j in range(width)] for t, p in rows])


def record(engine: Engine, *prompts: Prompt, boundaries: Sequence[Boundary] | None = None) -> Recording:
    site = check(engine.server, engine.directory, boundaries=boundaries)
    return capture(site, prompts or (PROMPT,), max_new_tokens=4)


def written(recording: Recording, path: Path) -> Any:
    with DumpWriter(path, recording.stream.plan) as writer:
        for sample in recording.stream.samples:
            writer.add(sample)
        writer.revise(recording.facts())
    recording.discard()
    return open_dump(path)


class TestBoundaries:
    def test_beside_the_slots(self, tmp_path: Path) -> None:
        recording = record(Showing(tmp_path))
        dump = written(recording, tmp_path / "out")
        assert (dump.facts.boundaries, dump.facts.slots) == (tuple(range(7)), 2)
        assert set(dump.names(1)) == {*NAMES, "slot.0", "slot.1"}
        assert [request.phase for request in dump.tokens.requests] == ["prefill", "verify", "verify"]
        assert torch.equal(dump.read(1, "boundary.3", 0, 5), states(PROMPT.token_ids or (), range(5), HIDDEN, offset=3))
        assert recording.messages == ()

    def test_some_of_them(self, tmp_path: Path) -> None:
        dump = written(record(Showing(tmp_path), boundaries=(3, FINAL_NORM)), tmp_path / "out")
        assert set(dump.names(0)) == {"boundary.3", FINAL_NORM, "slot.0", "slot.1"}

    def test_a_server_that_shows_them_is_not_asked(self, tmp_path: Path) -> None:
        dump = written(record(Showing(tmp_path), boundaries=()), tmp_path / "out")
        assert set(dump.names(0)) == {"slot.0", "slot.1"}

    def test_of_a_target_without_a_draft(self, tmp_path: Path) -> None:
        recording = record(Showing(tmp_path, info=dict(ALONE), drafted=False))
        dump = written(recording, tmp_path / "out")
        assert (dump.facts.slots, dump.facts.draft, set(dump.names(0))) == (0, None, set(NAMES))
        assert [request.phase for request in dump.tokens.requests] == ["prefill", "decode", "decode"]
        assert dump.facts.source.detail == "boundaries of the target alone: there is no draft"
        assert recording.messages == ()

    def test_graph_replays_have_no_rows_and_that_is_said(self, tmp_path: Path) -> None:
        recording = record(Showing(tmp_path, eager=lambda phase: phase == "prefill"))
        dump = written(recording, tmp_path / "out")
        assert [request.phase for request in dump.tokens.requests] == ["prefill"]
        assert any(message.startswith("warning: 2 verify forwards have no rows") for message in recording.messages)

    def test_nothing_but_graph_replays(self, tmp_path: Path) -> None:
        with pytest.raises(EnvironmentFailure, match=r"no boundary was recorded in 3 forwards: every forward was") as e:
            record(Showing(tmp_path, eager=lambda phase: False))
        assert "--disable-cuda-graph" in e.value.fix

    def test_a_boundary_that_was_not_complete_is_left_out_and_that_is_said(self, tmp_path: Path) -> None:
        recording = record(Showing(tmp_path, unseen="its sum over the ranks was still owed"))
        assert recording.stream.plan.facts.boundaries == (0, 1, 2)
        assert recording.messages == (
            "warning: boundary.3, boundary.4, boundary.5, boundary.6, final.norm is not recorded: its sum over the "
            "ranks was still owed",
        )

    def test_a_rank_that_did_not_show_one(self, tmp_path: Path) -> None:
        engine = Showing(tmp_path)
        engine.writers[1].submit = _without(engine.writers[1].submit, "boundary.4")  # type: ignore[method-assign]
        recording = record(engine)
        assert recording.stream.plan.facts.boundaries == (0, 1, 2, 3, 5, 6)
        assert recording.messages == ("warning: boundary.4 is not recorded: its layer's hook did not run",)


def _without(submit: Callable[..., None], name: str) -> Callable[..., None]:
    return lambda header, tensors: submit(header, {key: value for key, value in tensors.items() if key != name})


class TestAsking:
    def test_a_server_started_without(self, tmp_path: Path) -> None:
        engine = Showing(tmp_path, names=None)
        with pytest.raises(EnvironmentFailure, match=r"http://server was started without boundaries") as caught:
            check(engine.server, tmp_path, boundaries=None)
        assert "EAGLE_PARITY_CAPTURE_BOUNDARIES=all in its environment" in caught.value.fix
        assert "a running server is not changed" in caught.value.fix

    def test_a_server_started_for_others(self, tmp_path: Path) -> None:
        engine = Showing(tmp_path, names=("boundary.2", "boundary.3"))
        with pytest.raises(
            EnvironmentFailure, match=r"does not show boundary\.5: rank 0 was started for boundary\.2, b"
        ):
            check(engine.server, tmp_path, boundaries=(3, 5))

    def test_a_model_that_could_not_be_hooked(self, tmp_path: Path) -> None:
        engine = Showing(tmp_path, names=None)
        engine.hello(gaps=("no boundaries: ValueError: X has 0 modules",))
        with pytest.raises(
            EnvironmentFailure, match=r"cannot show its boundaries: rank 0: no boundaries: ValueError: X"
        ):
            check(engine.server, tmp_path, boundaries=None)

    def test_a_target_alone_may_be_asked_for_nothing_else(self, tmp_path: Path) -> None:
        engine = Showing(tmp_path, info=dict(ALONE), drafted=False)
        with pytest.raises(EnvironmentFailure, match=r"without a draft") as caught:
            check(engine.server, tmp_path)
        assert "--boundaries all" in caught.value.fix

    def test_estimate_counts_them(self, tmp_path: Path) -> None:
        site = check(Showing(tmp_path).server, tmp_path, boundaries=None)
        plan = estimate(site, [PROMPT], 8)
        assert [spec.name for spec in plan.tensors[0]] == ["slot.0", "slot.1", *NAMES]

    def test_more_than_a_rank_keeps_in_memory_is_refused_beforehand(self, tmp_path: Path) -> None:
        engine = Showing(tmp_path)
        engine.hello(model={"hidden_size": 7168, "num_layers": 61, "vocab_size": 100, "dtype": "bfloat16"})
        site = check(engine.server, tmp_path, boundaries=None)
        long = Prompt("long", token_ids=(1,) * 9000)
        with pytest.raises(
            UsageError, match=r"prompt long: 8 boundaries of a forward of 9000 tokens take 1290240000 bytes"
        ):
            estimate(site, [long], 1)
        chunked = replace(site, info=site.info | {"chunked_prefill_size": 2048})
        assert estimate(chunked, [long], 1).tokens == 9000 + 1


class TestShards:
    """A rank that holds a part of the tokens: collected as it is, judged later."""

    def halves(self, rank: int, tokens: int) -> range:
        middle = (tokens + 1) // 2
        return range(middle) if rank == 0 else range(middle, tokens)

    def test_a_token_shard_is_collected_with_its_rows(self, tmp_path: Path) -> None:
        recording = record(Showing(tmp_path, part=self.halves), boundaries=())
        dump = written(recording, tmp_path / "out")
        ids, positions = dump.tokens.token_ids, dump.tokens.positions
        for rank in (0, 1):
            rows = dump.rows(rank, "slot.1")
            assert rows is not None
            want = states(ids[rows].tolist(), positions[rows].tolist(), 2 * HIDDEN)[:, HIDDEN:]
            assert torch.equal(dump.read(rank, "slot.1", 0, len(rows)), want)
        assert np.concatenate([dump.rows(rank, "slot.0") for rank in (0, 1)]).tolist() != list(range(len(ids)))
        found = study_ranks(dump, "slot.0", np.arange(len(ids), dtype=np.int64), HIDDEN)
        assert found.shape == "token-shard"
        assert found.whole is not None
        whole = states(ids.tolist(), positions.tolist(), 2 * HIDDEN)[:, :HIDDEN]
        assert torch.equal(found.whole.read(np.arange(len(ids))), whole)

    def test_what_the_draft_was_given_is_compared_on_the_rows_of_a_rank(self, tmp_path: Path) -> None:
        recording = record(Showing(tmp_path, part=self.halves), boundaries=())
        assert len(list(recording.stream.samples)) == 3
        assert (recording.notes.compared, recording.notes.unequal) == (5, 0)

    def test_boundaries_of_a_token_shard(self, tmp_path: Path) -> None:
        dump = written(record(Showing(tmp_path, part=self.halves)), tmp_path / "out")
        found = study_ranks(dump, "boundary.2", np.arange(13, dtype=np.int64), HIDDEN)
        assert found.shape == "token-shard"

    def test_a_rank_without_any_row_of_a_request(self, tmp_path: Path) -> None:
        engine = Showing(tmp_path, part=lambda rank, tokens: range(tokens if rank == 0 else 0))
        dump = written(record(engine, boundaries=()), tmp_path / "out")
        assert dump.length(1, "slot.0") == 0
        assert dump.length(0, "slot.0") == 13

    def test_a_row_that_no_rank_holds(self, tmp_path: Path) -> None:
        with pytest.raises(EnvironmentFailure, match=r"no rank recorded rows 3\.\.4 of a forward of 5 tokens"):
            record(Showing(tmp_path, part=lambda rank, tokens: range(tokens - 2)), boundaries=())

    def test_states_that_are_not_the_rows_they_claim(self, tmp_path: Path) -> None:
        engine = Showing(tmp_path)
        submit = engine.writers[1].submit
        engine.writers[1].submit = lambda header, tensors: submit(  # type: ignore[method-assign]
            replace(header, rows=(0, 2)) if header.kind == "target" else header, tensors
        )
        with pytest.raises(EnvironmentFailure, match=r"rank 1 recorded .*, with states that are not its 2 rows"):
            record(engine, boundaries=())
