from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_parity.captures import plugin as module
from eagle_parity.captures import versions
from eagle_parity.captures.adapter import SGLANG, Adapter, Place, missing
from eagle_parity.captures.boundaries import Boundaries
from eagle_parity.captures.plugin import Plugin, activate
from eagle_parity.captures.spool import (
    BOUNDARIES,
    CAPTURE_DIR,
    Header,
    Record,
    Spool,
    end_id,
    new_hello,
    probe_id,
    read_hellos,
)
from eagle_parity.captures.writer import SpoolWriter

REPOSITORY = Path(__file__).parents[1]
KEY = "0123456789abcdef"
PROBE = probe_id(KEY, 0)
WIDTH = 6


def mode(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name)


def runner(*, draft: bool = False) -> SimpleNamespace:
    hf = SimpleNamespace(
        architectures=["LlamaForCausalLM"],
        hidden_size=2,
        num_hidden_layers=4,
        vocab_size=50,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    )
    config = SimpleNamespace(hf_config=hf, hf_text_config=hf, dtype=torch.bfloat16, quantization=None)
    return SimpleNamespace(is_draft_worker=draft, model_config=config)


def batch(rids: list[str], lengths: list[int], phase: str = "EXTEND", **extra: Any) -> SimpleNamespace:
    total = sum(lengths)
    return SimpleNamespace(
        forward_mode=mode(phase),
        rids=rids,
        extend_seq_lens_cpu=lengths,
        input_ids=torch.arange(total) + 100,
        positions=torch.arange(total),
        spec_info=None,
        **extra,
    )


def result(rows: int, *, graph: bool = False) -> SimpleNamespace:
    states = torch.arange(rows * WIDTH, dtype=torch.float32).reshape(rows, WIDTH)
    return SimpleNamespace(logits_output=SimpleNamespace(hidden_states=states), can_run_graph=graph)


class Rig:
    """A plugin whose records can be read back."""

    def __init__(
        self,
        directory: Path,
        adapter: Adapter = SGLANG,
        *,
        boundaries: Boundaries | None = None,
        group: tuple[int, int] = (0, 1),
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.writer = SpoolWriter(directory, "aaaa", 0)
        adapter = replace(adapter, place=lambda: Place(0, 2), splits_rows=lambda: group)
        self.plugin = Plugin(adapter, directory, new_hello({}), writer=self.writer, boundaries=boundaries)

    def records(self) -> list[Record]:
        assert self.writer.flush()
        return sorted(Spool(self.directory, KEY).poll(), key=lambda record: record.header.order)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


class TestForward:
    def test_only_the_probe_s_rows_of_a_mixed_batch(self, rig: Rig) -> None:
        answer = result(9)
        assert rig.plugin.after_forward(answer, runner(), batch(["alice", PROBE, "bob"], [3, 4, 2])) is None
        (record,) = rig.records()
        assert record.header == Header(
            PROBE, "target", "prefill", batch=3, forward_tokens=9, graph=False, process="aaaa", order=1, rank=0
        )
        assert torch.equal(record.read(), answer.logits_output.hidden_states[3:7])
        assert record.integers("token_ids") == [103, 104, 105, 106]
        assert record.integers("positions") == [3, 4, 5, 6]

    def test_two_probes_of_one_batch(self, rig: Rig) -> None:
        rig.plugin.after_forward(result(5), runner(), batch([PROBE, probe_id(KEY, 1)], [2, 3]))
        assert [(r.header.probe, r.tokens) for r in rig.records()] == [(PROBE, 2), (probe_id(KEY, 1), 3)]

    def test_rows_are_copied_before_the_next_replay_overwrites_them(self, rig: Rig) -> None:
        answer = result(2)
        before = answer.logits_output.hidden_states.clone()
        rig.plugin.after_forward(answer, runner(), batch([PROBE], [2]))
        answer.logits_output.hidden_states.zero_()
        assert torch.equal(rig.records()[0].read(), before)

    def test_padded_rows_are_left_out(self, rig: Rig) -> None:
        rig.plugin.after_forward(result(16), runner(), batch([PROBE], [5]))
        assert rig.records()[0].tokens == 5

    def test_verify_rows_with_their_tree_and_graph_flag(self, rig: Rig) -> None:
        verify = batch(["alice", PROBE], [3, 3], "TARGET_VERIFY")
        verify.spec_info = SimpleNamespace(
            draft_token_num=3,
            retrieve_next_token=torch.tensor([[9, 9, 9], [1, -1, -1]]),
            retrieve_next_sibling=torch.tensor([[9, 9, 9], [-1, 2, -1]]),
        )
        rig.plugin.after_forward(result(6, graph=True), runner(), verify)
        (record,) = rig.records()
        assert (record.header.phase, record.header.graph, record.tokens) == ("verify", True, 3)
        assert record.integers("child") == [1, -1, -1]
        assert record.integers("sibling") == [-1, 2, -1]

    def test_decode_rows_of_a_server_without_verify(self, rig: Rig) -> None:
        rig.plugin.after_forward(result(2), runner(), batch(["alice", PROBE], [1, 1], "DECODE"))
        (record,) = rig.records()
        assert (record.header.phase, record.integers("token_ids")) == ("decode", [101])

    def test_the_batch_may_come_by_keyword(self, rig: Rig) -> None:
        rig.plugin.after_forward(result(2), runner(), forward_batch=batch([PROBE], [2]))
        assert len(rig.records()) == 1

    def test_of_the_last_request_that_it_came_is_all_that_is_recorded(self, rig: Rig) -> None:
        last = batch([end_id(KEY)], [1])
        rig.plugin.after_forward(result(1), runner(), last)
        last.spec_info = SimpleNamespace(hidden_states=torch.zeros(1, WIDTH))
        rig.plugin.after_forward(result(1), runner(draft=True), last)
        rig.plugin.after_forward(result(1), runner(), batch([end_id(KEY)], [1], "DECODE"))
        (record,) = rig.records()
        assert (record.header.kind, dict(record.file.entries)) == ("end", {})

    def test_draft_prefill_is_what_the_draft_was_given(self, rig: Rig) -> None:
        prefill = batch([PROBE], [3])
        prefill.spec_info = SimpleNamespace(hidden_states=torch.full((3, WIDTH), 7.0))
        rig.plugin.after_forward(result(1), runner(draft=True), prefill)
        (record,) = rig.records()
        assert record.header.kind == "draft"
        assert record.read().unique().tolist() == [7.0]

    @pytest.mark.parametrize("phase", ["DECODE", "DRAFT_EXTEND_V2", "IDLE"])
    def test_the_draft_s_own_steps_are_not_captured(self, rig: Rig, phase: str) -> None:
        rig.plugin.after_forward(result(1), runner(draft=True), batch([PROBE], [1], phase))
        assert rig.records() == []

    def test_a_draft_that_reads_no_states_is_not_captured(self, rig: Rig) -> None:
        rig.plugin.after_forward(result(1), runner(draft=True), batch([PROBE], [1]))
        assert rig.records() == []


class TestShards:
    def test_a_rank_that_holds_a_part_of_the_tokens_says_which(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path, group=(1, 2))  # tokens 4..7 of 8
        answer = result(4)
        two = [probe_id(KEY, number) for number in range(3)]
        rig.plugin.after_forward(answer, runner(), batch(two, [2, 4, 2]))
        outside, across, inside = rig.records()
        assert [record.tokens for record in (outside, across, inside)] == [2, 4, 2]
        assert (list(outside.rows), list(across.rows), list(inside.rows)) == ([], [2, 3], [0, 1])
        states = answer.logits_output.hidden_states
        assert torch.equal(across.read(), states[:2])
        assert torch.equal(inside.read(), states[2:])
        assert outside.read().shape == (0, WIDTH)
        assert across.integers("token_ids") == [102, 103, 104, 105]

    def test_what_the_draft_of_such_a_rank_was_given(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path, group=(0, 2))
        prefill = batch([PROBE], [4])
        prefill.spec_info = SimpleNamespace(hidden_states=torch.ones(2, WIDTH))
        rig.plugin.after_forward(result(1), runner(draft=True), prefill)
        assert list(rig.records()[0].rows) == [0, 1]


class Layers(torch.nn.Module):
    """A target whose layers add one to what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(4))
        self.norm = torch.nn.RMSNorm(2)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            states = layer(states)
        normed: torch.Tensor = self.norm(states)
        return normed


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + 1


class TestBoundaries:
    @pytest.fixture
    def watched(self, tmp_path: Path) -> tuple[Rig, SimpleNamespace]:
        rig, target = Rig(tmp_path, boundaries=Boundaries()), runner()
        target.model = Layers()
        rig.plugin.after_init(None, target)
        return rig, target

    def forward(self, rig: Rig, target: SimpleNamespace, answer: Any, given: SimpleNamespace) -> None:
        assert rig.plugin.before_forward(target, given) is None
        with torch.no_grad():
            target.model(torch.arange(2.0 * len(given.input_ids)).reshape(-1, 2))
        rig.plugin.after_forward(answer, target, given)

    def test_the_hello_names_them(self, watched: tuple[Rig, SimpleNamespace]) -> None:
        (hello,) = read_hellos(watched[0].directory)
        assert hello.boundaries == (*(f"boundary.{k}" for k in range(5)), "final.norm")

    def test_beside_the_slots(self, watched: tuple[Rig, SimpleNamespace]) -> None:
        self.forward(*watched, result(5), batch(["alice", PROBE], [2, 3]))
        (record,) = watched[0].records()
        assert set(record.states) == {"hidden", *(f"boundary.{k}" for k in range(5)), "final.norm"}
        assert record.read("boundary.0").tolist() == [[4, 5], [6, 7], [8, 9]]
        assert record.read("boundary.4").tolist() == [[8, 9], [10, 11], [12, 13]]

    def test_of_a_target_without_a_draft(self, watched: tuple[Rig, SimpleNamespace]) -> None:
        nothing = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=None), can_run_graph=False)
        self.forward(*watched, nothing, batch([PROBE], [2], "DECODE"))
        self.forward(*watched, nothing, batch([PROBE], [2]))
        records = watched[0].records()
        assert [(record.header.phase, "hidden" in record.states) for record in records] == [
            ("decode", False),
            ("prefill", False),
        ]
        assert records[1].read("boundary.1").tolist() == [[1, 2], [3, 4]]

    def test_the_replay_of_a_graph_shows_none(self, watched: tuple[Rig, SimpleNamespace]) -> None:
        rig, target = watched
        given = batch([PROBE], [2])
        rig.plugin.before_forward(target, given)
        rig.plugin.after_forward(result(2, graph=True), target, given)
        (record,) = rig.records()
        assert (record.states, record.header.unseen) == (("hidden",), {})

    def test_a_forward_that_failed_leaves_nothing_for_the_next(self, watched: tuple[Rig, SimpleNamespace]) -> None:
        rig, target = watched
        rig.plugin.before_forward(target, batch([PROBE], [2]))
        self.forward(rig, target, result(2), batch(["alice"], [2]))
        assert rig.records() == []
        assert rig.plugin._boundaries is not None
        assert rig.plugin._boundaries.end() == []

    def test_a_target_that_cannot_be_hooked_is_a_gap(self, tmp_path: Path) -> None:
        rig, target = Rig(tmp_path, boundaries=Boundaries()), runner()
        target.model = torch.nn.Linear(2, 2)
        rig.plugin.after_init(None, target)
        (hello,) = read_hellos(tmp_path)
        assert hello.boundaries is None
        assert hello.gaps == ("no boundaries: ValueError: Linear has 0 modules with 4 layers and a norm of 2",)
        rig.plugin.after_forward(result(2), target, batch([PROBE], [2]))
        assert rig.records()[0].states == ("hidden",)

    def test_hooks_survive_nonsense(self, watched: tuple[Rig, SimpleNamespace]) -> None:
        assert watched[0].plugin.before_forward(None) is None
        assert watched[0].plugin.before_forward(None, object()) is None


class TestDraftExtend:
    def test_accepted_rows_in_front(self, rig: Rig) -> None:
        verified = SimpleNamespace(
            logits_output=SimpleNamespace(hidden_states=torch.arange(12.0).reshape(6, 2)),
            next_token_ids=torch.tensor([1, 2, 3, 4, 5, 6]),
            accept_lens=torch.tensor([1, 2]),
        )
        requests = SimpleNamespace(reqs=[SimpleNamespace(rid="alice"), SimpleNamespace(rid=PROBE)])
        assert rig.plugin.before_draft_extend(None, requests, verified, kv_loc_plan=None) is None
        (record,) = rig.records()
        assert (record.header.kind, record.header.phase) == ("draft", "verify")
        assert record.read().tolist() == [[6.0, 7.0], [8.0, 9.0], [10.0, 11.0]]
        assert (record.integers("token_ids"), record.integers("accepted")) == ([4, 5, 6], [2])

    def test_the_first_design_gives_accepted_rows_of_requests_that_go_on(self, tmp_path: Path) -> None:
        """SGLang 0.5.10 to 0.5.12 without the overlapped scheduler: `bob` ended and gets none of the rows."""
        for adapter, names in (
            (versions.SGLANG_0_5_12, ("input_ids", "num_accept_tokens_cpu", [1, 3])),
            (versions.SGLANG_0_5_11, ("verified_id", "num_accepted_tokens_cpu", [1, 3])),
            (versions.SGLANG_0_5_10, ("verified_id", "accept_length_cpu", [0, 2])),
        ):
            tokens, counts, given = names
            rig = Rig(tmp_path / counts / tokens, adapter)
            states = {
                "hidden_states": torch.arange(8.0).reshape(4, 2),
                tokens: torch.tensor([1, 2, 3, 4]),
                counts: given,
            }
            ended = {"alice": False, "bob": True, PROBE: False}
            reqs = [SimpleNamespace(rid=rid, finished=lambda end=end: end) for rid, end in ended.items()]
            rig.plugin.before_draft_extend(None, SimpleNamespace(reqs=reqs, spec_info=SimpleNamespace(**states)))
            (record,) = rig.records()
            assert (record.header.batch, record.header.forward_tokens) == (2, 4)
            assert record.read().tolist() == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
            assert (record.integers("token_ids"), record.integers("accepted")) == ([2, 3, 4], [3])

    def test_rows_that_do_not_add_up_are_lost_and_not_guessed(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path, versions.SGLANG_0_5_11)
        given = SimpleNamespace(hidden_states=torch.zeros(4, 2), num_accepted_tokens_cpu=[1, 2], verified_id=None)
        reqs = [SimpleNamespace(rid=PROBE, finished=lambda: False)]
        rig.plugin.before_draft_extend(None, SimpleNamespace(reqs=reqs, spec_info=given))
        assert "the draft is given 4 rows, [1, 2] of 1 requests" in str(rig.records()[0].header.reason)


class TestSafety:
    def test_a_batch_without_probes_costs_a_prefix_test(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        def never(*_: object) -> bool:
            raise AssertionError("the prefix test must come first")

        monkeypatch.setattr(module, "is_probe", never)
        rig.plugin.after_forward(None, None, SimpleNamespace(rids=["alice", "HEALTH_CHECK_1", "eagle-parity"]))
        rig.plugin.after_forward(None, None, SimpleNamespace(rids=None))
        assert not rig.plugin._failed

    @pytest.mark.parametrize("rid", ["eagle-parity-x", f"eagle-parity-{KEY}-1/../../etc", f"eagle-parity-{KEY}-1\n"])
    def test_ids_that_only_look_like_probes_are_foreign(self, rig: Rig, rid: str) -> None:
        rig.plugin.after_forward(result(2), runner(), batch([rid], [2]))
        assert rig.records() == []

    def test_a_hook_never_raises_and_the_client_is_told(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        broken = batch([PROBE], [2])
        del broken.positions
        for _ in range(2):
            assert rig.plugin.after_forward(result(2), runner(), broken) is None
        reasons = [record.header.reason for record in rig.records()]
        assert len(reasons) == 2
        assert "the capture hook failed: AttributeError" in str(reasons[0])
        assert caplog.text.count("a capture hook failed; the server is not affected") == 1

    def test_hooks_survive_nonsense(self, rig: Rig) -> None:
        assert rig.plugin.after_forward(None, None) is None
        assert rig.plugin.after_forward(None, None, object()) is None
        assert rig.plugin.before_draft_extend(None) is None
        assert rig.plugin.after_init(None, None) is None

    def test_no_states_is_a_lost_record(self, rig: Rig) -> None:
        empty = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=None), can_run_graph=False)
        rig.plugin.after_forward(empty, runner(), batch([PROBE], [2]))
        (record,) = rig.records()
        assert record.header.kind == "lost"
        assert record.header.reason == "the prefill forward of 2 tokens returned none"

    def test_too_few_rows_is_a_lost_record(self, rig: Rig) -> None:
        rig.plugin.after_forward(result(4), runner(), batch([PROBE], [8]))
        assert rig.records()[0].header.reason == (
            "the prefill forward of 8 tokens returned hidden states of shape [4, 6]"
        )


class TestHello:
    def test_target_then_draft(self, rig: Rig) -> None:
        rig.plugin.after_init(None, runner())
        (hello,) = read_hellos(rig.directory)
        assert (hello.rank, hello.tp_size, hello.draft, hello.error) == (0, 2, None, None)
        assert hello.model == {
            "architecture": "LlamaForCausalLM",
            "hidden_size": 2,
            "num_layers": 4,
            "vocab_size": 50,
            "dtype": "bfloat16",
            "quantization": None,
        }
        rig.plugin.after_init(None, runner(draft=True))
        (hello,) = read_hellos(rig.directory)
        assert hello.draft == {"architecture": "LlamaForCausalLM", "declared_ids": [1, 2, 3]}
        assert hello.model["hidden_size"] == 2

    def test_a_failure_is_in_the_hello(self, rig: Rig) -> None:
        rig.plugin.after_init(None, SimpleNamespace(is_draft_worker=False))
        (hello,) = read_hellos(rig.directory)
        assert "AttributeError" in str(hello.error)


class Registry:
    """SGLang's hook registry, as far as it is used."""

    def __init__(self) -> None:
        self.targets: list[str] = []

    def register(self, target: str, hook: object, kind: str) -> None:
        self.targets.append(target)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    registry_module = types.ModuleType("sglang.srt.plugins.hook_registry")
    registry_module.__dict__.update(HookRegistry=made, HookType=SimpleNamespace(AFTER="after", BEFORE="before"))
    root = types.ModuleType("sglang")
    root.__dict__["__version__"] = "9.9"
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, root)
    monkeypatch.setitem(sys.modules, registry_module.__name__, registry_module)
    return made


def fits(monkeypatch: pytest.MonkeyPatch, adapter: Adapter) -> None:
    """Let the running version propose this adapter and no other."""
    monkeypatch.setattr(versions, "FAMILIES", (((0,), adapter),))


class TestActivation:
    def test_nothing_without_the_variable(self, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        for value in (None, ""):
            if value is None:
                monkeypatch.delenv(CAPTURE_DIR, raising=False)
            else:
                monkeypatch.setenv(CAPTURE_DIR, value)
            activate()
        assert registry.targets == []

    def test_hooks_are_registered_in_a_private_directory(
        self, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = tmp_path / "new"
        fits(monkeypatch, replace(SGLANG, needs={}, needs_for_tree={}, needs_for_draft={}))
        module._activate(directory)
        assert registry.targets == [SGLANG.init, SGLANG.forward, *SGLANG.draft_extends]
        assert directory.stat().st_mode & 0o777 == 0o700
        assert read_hellos(directory) == []  # the rank is not known yet

    def test_boundaries_are_hooked_where_the_server_was_started_for_them(
        self, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fits(monkeypatch, replace(SGLANG, needs={}, needs_for_tree={}, needs_for_draft={}))
        monkeypatch.setenv(BOUNDARIES, "all")
        module._activate(tmp_path)
        assert registry.targets == [SGLANG.init, SGLANG.forward, SGLANG.forward, *SGLANG.draft_extends]

    def test_boundaries_that_are_none_are_a_gap(
        self, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[Any] = []
        monkeypatch.setenv(BOUNDARIES, "l3")
        monkeypatch.setattr(module, "Plugin", lambda *args, **_: made.append(args[2]) or Plugin(*args))
        fits(monkeypatch, replace(SGLANG, needs={}, needs_for_tree={}, needs_for_draft={}))
        module._activate(tmp_path)
        assert registry.targets == [SGLANG.init, SGLANG.forward, *SGLANG.draft_extends]
        assert made[0].gaps == (
            f"no boundaries: {BOUNDARIES}: expected all, or numbers and final.norm separated by commas, got 'l3'",
        )

    def test_a_broken_contract_hooks_nothing_and_says_so(
        self, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fits(monkeypatch, replace(SGLANG, needs={"json:JSONDecoder": ("decode", "hidden_states")}))
        module._activate(tmp_path)
        assert registry.targets == []
        (hello,) = read_hellos(tmp_path)
        assert hello.error == "it lacks 'hidden_states' in json:JSONDecoder"
        assert hello.versions["sglang"] == "9.9"

    def test_a_version_without_the_draft_s_hook_captures_without(
        self, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        absent = {"json:Nothing": ("x",)}
        fits(monkeypatch, replace(SGLANG, needs={}, needs_for_tree=absent, needs_for_draft=absent))
        module._activate(tmp_path)
        assert registry.targets == [SGLANG.init, SGLANG.forward]

    def test_activation_never_raises(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(CAPTURE_DIR, str(tmp_path / "file"))
        monkeypatch.setattr(module, "_activate", lambda *_: (_ for _ in ()).throw(OSError("no")))
        activate()


class Engine:
    """Something of SGLang's that is hooked."""

    def forward(self, batch: list[int]) -> int:
        return sum(batch)


class TestWithoutPlugins:
    """SGLang 0.5.10: no plugins, no registry; --forward-hooks calls a factory for the target and for the draft."""

    def test_a_patch_runs_before_and_after_and_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[Any, ...]] = []
        monkeypatch.setattr(Engine, "forward", Engine.forward)  # put back at the end
        target = f"{__name__}.Engine.forward"
        versions.patch(target, lambda *args: calls.append(("before", *args)), "BEFORE")
        versions.patch(target, lambda *args: calls.append(("after", *args)), "AFTER")
        engine = Engine()
        assert engine.forward([1, 2]) == 3
        assert calls == [("before", engine, [1, 2]), ("after", 3, engine, [1, 2])]

    def test_the_factory_activates_once_and_only_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        activated: list[int] = []
        monkeypatch.setattr(module, "activate", lambda: activated.append(1))
        module._activate_once.cache_clear()
        for found, want in ((object(), 0), (None, 1), (None, 1)):
            monkeypatch.setattr(module, "find_spec", lambda _, found=found: found)
            assert module.hook_factory({}) is None
            assert len(activated) == want
        module._activate_once.cache_clear()

    def test_the_runner_is_found_behind_the_worker(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path, versions.SGLANG_0_5_10)
        rig.plugin.after_init(None, SimpleNamespace(model_runner=runner()))
        (hello,) = read_hellos(tmp_path)
        assert (hello.error, hello.rank, hello.model["hidden_size"]) == (None, 0, 2)


class TestContract:
    def test_what_is_missing_is_named(self) -> None:
        needs = {
            "no.such.module:Thing": ("x",),
            "json:JSONDecoder.decode": ("self", "absent"),
            "http:HTTPStatus": ("OK", "NOT_THERE"),
        }
        assert missing(needs) == [
            "no.such.module:Thing (ModuleNotFoundError: No module named 'no')",
            "'absent' in json:JSONDecoder.decode",
            "'NOT_THERE' in http:HTTPStatus",
        ]

    def test_importing_the_plugin_loads_neither_torch_nor_sglang(self) -> None:
        code = (
            "import sys, eagle_parity.captures.plugin as p; p.activate();"
            "assert not {'torch', 'sglang', 'safetensors', 'numpy'} & set(sys.modules)"
        )
        environ = {key: value for key, value in os.environ.items() if key != CAPTURE_DIR}
        subprocess.run([sys.executable, "-c", code], check=True, env=environ)

    @pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
    def test_the_installed_sglang_keeps_it_and_takes_the_hooks(self, tmp_path: Path) -> None:
        code = (
            "from sglang.srt.plugins import load_plugins; load_plugins()\n"
            "from sglang.srt.model_executor.model_runner import ModelRunner\n"
            "from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker\n"
            "for f in (ModelRunner.forward, ModelRunner.__init__, EagleDraftWorker._draft_extend_for_decode):\n"
            "    assert f.__wrapped__, f\n"
        )
        environ = os.environ | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": str(REPOSITORY / "demo" / "sglang_cpu" / "shim"),
            CAPTURE_DIR: str(tmp_path),
        }
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert read_hellos(tmp_path) == [], "a hello at this point means a broken contract"
