"""`dump serving --from`: samples that the real SGLang and vLLM wrote, and directories written by hand like theirs."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle_parity.cli.main import main
from eagle_parity.dump import Dump, open_dump
from eagle_parity.errors import InputError
from eagle_parity.readers import Known, open_served
from tests.truth import distance, load
from tests.truth import states as transformers_states

ROOT = Path(__file__).parent.parent
SERVING = ROOT / "fixtures" / "serving"
SHORT = [5, 6, 7, 8, 9]
TOLERANCE = 1e-5  # relative, float32, two implementations
HIDDEN = 8


def unpacked(name: str, into: Path) -> Path:
    with tarfile.open(SERVING / f"{name}.tar.xz") as archive:
        # Python before 3.11.4 knows no filter, from 3.12 on it warns without one; the archive is our own.
        archive.extractall(into, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return into


def dumped(path: Path, out: Path, *options: str) -> Dump:
    assert main(["dump", "serving", "-o", str(out), "--from", str(path), *options]) == 0
    return open_dump(out)


# --------------------------------------------------------------------------------- what the real engines wrote


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Sequence[int]], dict[str, torch.Tensor]]:
    """(architecture, token ids) -> transformers' states of the sample's target, by name, each [T, H]."""
    pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("targets")
    models: dict[str, Any] = {}

    def states(arch: str, token_ids: Sequence[int]) -> dict[str, torch.Tensor]:
        if arch not in models:
            command = [sys.executable, ROOT / "demo" / "models.py", "--out", out / arch, "--arch", arch]
            command += ["--hidden", "64", "--dtype", "float32"]
            subprocess.run(list(map(str, command)), check=True, capture_output=True)
            models[arch] = load(out / arch / "target")
        return transformers_states(models[arch], token_ids)

    return states


@pytest.mark.parametrize("arch", ["deepseek", "llama"])
def test_the_dumper_s_steps(
    arch: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    truth: Callable[[str, Sequence[int]], dict[str, torch.Tensor]],
) -> None:
    """The target's prefill and the root of a tree, on both ranks; the draft's prefill beside them is none of it."""
    dump = dumped(unpacked(f"dumper-{arch}", tmp_path / "in"), tmp_path / "out")
    out, err = capsys.readouterr()
    assert "SGLang dumper directory" in out
    assert "1 of 3 forwards are a draft's" in err
    assert "5 rows of draft trees below the root" in err
    facts = dump.facts
    assert facts.engine is not None
    deepseek = arch == "deepseek"
    slots, layers = (3, 6) if deepseek else (2, None)  # the llama sample holds nothing that proves the number
    assert (facts.side, facts.engine.tp_size, facts.slots, facts.model.num_layers) == ("serving", 2, slots, layers)
    assert "not recorded: version, flags, model, draft" in str(facts.source.detail)
    prefill, tree = dump.tokens.requests
    assert (prefill.id, prefill.phase, prefill.begin, prefill.end, tree.id) == ("short", "prefill", 0, 5, "short")
    assert (tree.phase, tree.end - tree.begin) == ("verify", 1)
    assert dump.tokens.positions.tolist() == [*range(5), 5]
    ids = dump.tokens.token_ids.tolist()
    assert ids[:5] == SHORT
    want = truth(arch, ids)
    want |= {f"slot.{j}": want[f"boundary.{k}"] for j, k in enumerate((2, 3, 5))}  # what the ids 1, 2, 4 mean
    own = {"boundary.6"} if deepseek else {"boundary.2", "boundary.4", "residual.4"}
    for rank in dump.ranks:
        assert set(dump.names(rank)) == own | {f"slot.{j}" for j in range(slots)}
        for name in set(dump.names(rank)) - {"boundary.4"}:
            assert distance(dump.read(rank, name, 0, 6), want[name]) < TOLERANCE, name
    if arch == "llama":
        # Layer 3's own part, which 0.5.23 gives before its all-reduce, plus the stream: a partial sum, and what is
        # needed to complete it.
        first, second = (dump.read(rank, "boundary.4", 0, 6) for rank in dump.ranks)
        assert distance(first, want["boundary.4"]) > 0.05
        assert distance(first + second - dump.read(0, "residual.4", 0, 6), want["boundary.4"]) < TOLERANCE


def test_the_tensor_dump_s_passes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    truth: Callable[[str, Sequence[int]], dict[str, torch.Tensor]],
) -> None:
    dump = dumped(unpacked("tensor-dump", tmp_path / "in"), tmp_path / "out")
    out, err = capsys.readouterr()
    assert "SGLang tensor dump" in out
    assert "what the target hands to a draft is not among the tensors" in err
    assert dump.ranks == (0, 1)
    assert [(r.phase, r.end - r.begin, r.graph) for r in dump.tokens.requests] == [
        ("prefill", 5, False),
        ("decode", 1, False),
    ]
    assert len({request.id for request in dump.tokens.requests}) == 1
    want = truth("llama", dump.tokens.token_ids.tolist())
    for rank in dump.ranks:
        assert set(dump.names(rank)) == {"boundary.0", "boundary.5", "final.norm"}
        for name in dump.names(rank):
            assert distance(dump.read(rank, name, 0, 6), want[name]) < TOLERANCE, name


def test_vllm_connector_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ROOT / "fixtures" / "training" / "speculators" / "vllm_connector_raw"
    stored = load_file(source / "cmpl-0123456789abcdef-0.safetensors")
    dump = dumped(source, tmp_path / "out")
    err = capsys.readouterr().err
    assert "rank 0 only" in err
    assert "which layers the 4 states are was not recorded: the last is taken for the state after the last layer" in err
    assert (dump.ranks, dump.names(0), dump.facts.slots) == ((0,), ("slot.0", "slot.1", "slot.2"), 3)
    assert dump.facts.slot_boundaries is None
    assert dump.tokens.token_ids.tolist() == stored["token_ids"].tolist()
    for j in range(3):
        assert torch.equal(dump.read(0, f"slot.{j}", 0, len(stored["token_ids"])), stored["hidden_states"][:, j])


@pytest.mark.parametrize(
    ("slots", "want"),
    [(4, ["slot.0", "slot.1", "slot.2", "slot.3"]), (3, ["slot.0", "slot.1", "slot.2", "boundary.8"])],
)
def test_what_the_user_knows_settles_vllm_s_last_state(slots: int, want: list[str]) -> None:
    source = ROOT / "fixtures" / "training" / "speculators" / "vllm_connector_raw"
    served = open_served(source, Known("training", (), num_layers=8, slots=slots))
    assert [spec.name for spec in served.stream.plan.tensors[0]] == want
    assert len(served.notes) == 1


# -------------------------------------------------------------------------------- directories written by hand


def states(seed: int, rows: int, width: int = HIDDEN) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def write_step(
    directory: Path, step: int, rank: int, tensors: Mapping[str, Any], *, tp_size: int = 2, experiment: str = "run"
) -> None:
    """As SGLang's dumper does."""
    for index, (name, value) in enumerate(tensors.items()):
        tags = {
            "step": step,
            "rank": rank,
            "dump_index": step * 1000 + index,
            "name": name,
            "recompute_status": "disabled",
        }
        file = directory / experiment / ("___".join(f"{key}={value}" for key, value in tags.items()) + ".pt")
        file.parent.mkdir(parents=True, exist_ok=True)
        info = {"tp_rank": rank, "tp_size": tp_size, "pp_rank": 0, "pp_size": 1}
        torch.save({"value": value, "meta": {**tags, "sglang_parallel_info": info}}, file)


def inputs(ids: Sequence[int], positions: Sequence[int], lengths: Sequence[int], *rids: str) -> dict[str, Any]:
    found: dict[str, Any] = {"input_ids": torch.tensor(ids), "positions": torch.tensor(positions)}
    found["seq_lens"] = torch.tensor(lengths)
    return found | ({"rids": list(rids)} if rids else {})


def write_pass(directory: Path, number: int, rank: int, tensors: Mapping[str, Any], *, pid: int = 7) -> None:
    """As --debug-tensor-dump-output-folder does."""
    file = directory / f"TP{rank}_PP0_Rank{rank}_pid{pid}" / f"Pass{number:05d}.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(tensors), file)


def embedding(seed: int, rows: int) -> dict[str, torch.Tensor]:
    return {"non_intrusive__model.embed_tokens.output": states(seed, rows)}


def rows_of(path: Path, known: Known | None = None) -> list[tuple[str, str, list[int], list[int]]]:
    return [
        (sample.id, sample.phase, list(sample.token_ids), list(sample.positions))
        for sample in open_served(path, known).stream.samples
    ]


class TestSequences:
    def test_a_batch_is_taken_apart_by_its_lengths(self, tmp_path: Path) -> None:
        ids, positions = [10, 11, 12, 20, 21, 33], [0, 1, 2, 3, 4, 9]
        for rank in (0, 1):
            write_step(tmp_path, 0, rank, inputs(ids, positions, [3, 5, 10], "a", "b", "c") | embedding(1, 6))
        # b goes on at position 3, right where a ends: only the lengths tell them apart.
        assert rows_of(tmp_path) == [
            ("a", "prefill", [10, 11, 12], [0, 1, 2]),
            ("b", "prefill", [20, 21], [3, 4]),
            ("c", "decode", [33], [9]),
        ]
        samples = list(open_served(tmp_path).stream.samples)
        assert torch.equal(samples[1].tensors[1]["boundary.0"], states(1, 6)[3:5])
        assert [(sample.batch, sample.forward_tokens) for sample in samples] == [(3, 6)] * 3

    def test_of_a_draft_tree_the_root_is_kept(self, tmp_path: Path) -> None:
        tree = inputs([40, 41, 42, 50, 51, 52], [7, 8, 8, 4, 5, 5], [7, 4], "a", "b")
        write_step(tmp_path, 0, 0, tree | embedding(1, 6), tp_size=1)
        served = open_served(tmp_path)
        samples = list(served.stream.samples)
        assert [(s.id, s.phase, s.token_ids, s.positions, s.accepted) for s in samples] == [
            ("a", "verify", (40,), (7,), (1,)),
            ("b", "verify", (50,), (4,), (1,)),
        ]
        assert torch.equal(samples[1].tensors[0]["boundary.0"], states(1, 6)[3:4])
        assert any(note.startswith("4 rows of draft trees below the root") for note in served.notes)

    def test_health_checks_are_left_out(self, tmp_path: Path) -> None:
        write_step(tmp_path, 0, 0, inputs([0], [0], [1], "HEALTH_CHECK_12") | embedding(1, 1), tp_size=1)
        write_step(tmp_path, 1, 0, inputs([5], [0], [1], "a") | embedding(1, 1), tp_size=1)
        assert [row[0] for row in rows_of(tmp_path)] == ["a"]

    def test_rows_of_nobody_knows_whom_are_left_out(self, tmp_path: Path) -> None:
        """A tensor dump names no requests: a lone sequence that goes on is one, two at a time are not told apart."""

        def fields(ids: list[int], positions: list[int], lengths: list[int]) -> dict[str, Any]:
            found = inputs(ids, positions, lengths)
            return {f"model.forward_batch_info.{name}": value for name, value in found.items()} | {
                "model.embed_tokens": states(1, len(ids))
            }

        write_pass(tmp_path, 0, 0, fields([1, 2, 3], [0, 1, 2], [3]))
        write_pass(tmp_path, 1, 0, fields([4, 5], [3, 4], [5]))  # a chunk: goes on
        write_pass(tmp_path, 2, 0, fields([9, 8], [0, 1], [2]))
        write_pass(tmp_path, 3, 0, fields([6, 7], [5, 2], [6, 3]))  # both go on: whose rows?
        assert rows_of(tmp_path) == [
            ("sequence 1", "prefill", [1, 2, 3], [0, 1, 2]),
            ("sequence 1", "prefill", [4, 5], [3, 4]),
            ("sequence 2", "prefill", [9, 8], [0, 1]),
        ]

    def test_limit_takes_the_first_sequences(self, tmp_path: Path) -> None:
        for step, label in enumerate("abc"):
            write_step(tmp_path / "in", step, 0, inputs([step, 1], [0, 1], [2], label) | embedding(step, 2), tp_size=1)
        dump = dumped(tmp_path / "in", tmp_path / "out", "--limit", "2")
        assert [request.id for request in dump.tokens.requests] == ["a", "b"]


class TestTensors:
    ROWS = inputs([1, 2, 3], [0, 1, 2], [3], "a")

    def made(self, path: Path, *ranks: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        for rank, tensors in enumerate(ranks):
            named = {f"non_intrusive__model.{name}": value for name, value in tensors.items()}
            write_step(path, 0, rank, self.ROWS | named, tp_size=len(ranks))
        (sample,) = open_served(path).stream.samples
        return [dict(sample.tensors[rank]) for rank in range(len(ranks))]

    def test_a_layer_of_older_versions_gives_its_part_and_the_stream(self, tmp_path: Path) -> None:
        stream, parts = states(1, 3), (states(2, 3), states(3, 3))
        ranks = self.made(tmp_path, *({"layers.4.output.0": part, "layers.4.output.1": stream} for part in parts))
        for made, part in zip(ranks, parts, strict=True):
            assert set(made) == {"boundary.5", "residual.5"}
            assert torch.equal(made["boundary.5"], part + stream)
            assert torch.equal(made["residual.5"], stream)

    def test_the_next_layer_s_norm_has_the_whole_of_it(self, tmp_path: Path) -> None:
        stream, whole = states(1, 3), states(4, 3)
        tensors = {"layers.4.output.0": states(2, 3), "layers.4.output.1": stream}
        (made,) = self.made(tmp_path, tensors | {"layers.5.input_layernorm.output.1": whole})
        assert torch.equal(made["boundary.5"], whole)
        assert "residual.5" not in made

    def test_the_stream_alone_is_no_boundary(self, tmp_path: Path) -> None:
        (made,) = self.made(tmp_path, {"layers.4.post_attention_layernorm.output.1": states(1, 3)})
        assert set(made) == {"residual.5"}

    def test_a_layer_s_part_alone_is_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="without a tensor that is a boundary or a slot") as caught:
            self.made(tmp_path, {"layers.4.output": states(1, 3)})
        assert "DUMPER_NON_INTRUSIVE_MODE=all" in caught.value.fix

    def test_router_indices_are_no_stream(self, tmp_path: Path) -> None:
        tensors = {"layers.4.output.0": states(1, 3), "layers.4.output.1": torch.ones(3, 2, dtype=torch.int32)}
        (made,) = self.made(tmp_path, tensors | {"embed_tokens.output": states(2, 3)})
        assert set(made) == {"boundary.0"}

    def test_the_last_boundary_has_no_number_unless_it_is_proven(self, tmp_path: Path) -> None:
        stream = states(1, 3)
        norm = {"norm.inputs.1": stream, "norm.output.0": states(2, 3), "norm.output.1": states(3, 3)}
        layer = "layers.4.post_attention_layernorm.output.1"
        (made,) = self.made(tmp_path / "proven", norm | {layer: stream})
        assert set(made) == {"boundary.5", "final.norm"}
        assert torch.equal(made["boundary.5"], states(3, 3))
        # As a filter leaves it that lets some of the layers pass: layer 4 is not the last.
        (made,) = self.made(tmp_path / "filtered", norm | {layer: states(9, 3)})
        assert set(made) == {"residual.5", "final.norm"}

    def test_packed_slots_are_taken_apart_by_the_width_of_a_state(self, tmp_path: Path) -> None:
        packed = states(1, 3, 2 * HIDDEN)
        write_step(
            tmp_path,
            0,
            0,
            self.ROWS | embedding(2, 3) | {"non_intrusive__language_model.logits_processor.inputs.4": packed},
            tp_size=1,
        )
        (sample,) = open_served(tmp_path).stream.samples
        assert set(sample.tensors[0]) == {"boundary.0", "slot.0", "slot.1"}
        assert torch.equal(sample.tensors[0]["slot.1"], packed[:, HIDDEN:])

    def test_a_draft_s_steps_are_not_the_target_s(self, tmp_path: Path) -> None:
        """The dumper gives both the same names; a draft has an fc, and one layer where the target has many."""
        names = ("embed_tokens.output", "layers.0.input_layernorm.inputs.0")
        target = {f"non_intrusive__model.{name}": states(1, 3) for name in names}
        target["non_intrusive__model.layers.1.input_layernorm.output.1"] = states(2, 3)
        prefill = {f"non_intrusive__model.{name}": states(5, 3) for name in (*names, "fc.inputs.0")}
        step = {f"non_intrusive__model.{name}": states(6, 3) for name in names}  # no fc: it goes on from its own state
        for number, tensors in enumerate((target, prefill, step)):
            write_step(tmp_path, number, 0, self.ROWS | tensors, tp_size=1)
        served = open_served(tmp_path)
        (sample,) = served.stream.samples
        assert torch.equal(sample.tensors[0]["boundary.0"], states(1, 3))
        assert "2 of 3 forwards are a draft's, or hold fewer tensors" in served.notes

    def test_a_name_of_the_user_s_own(self, tmp_path: Path) -> None:
        write_step(tmp_path, 0, 0, self.ROWS | {"layer_start__hidden_states": states(1, 3)})
        with pytest.raises(InputError, match=r"It holds input_ids, positions, seq_lens, layer_start__hidden_states"):
            open_served(tmp_path)


class TestTokensFromElsewhere:
    """A tensor dump of a model that gets its forward batch by keyword (Kimi-K2.5) has no token ids."""

    def directory(self, path: Path, *rows: int) -> Path:
        for rank in (0, 1):
            for number, count in enumerate(rows):
                write_pass(path, number, rank, {"language_model.model.embed_tokens": states(number, count)})
        return path

    def test_they_are_asked_for(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert (
            main(["dump", "serving", "-o", str(tmp_path / "out"), "--from", str(self.directory(tmp_path / "in", 3))])
            == 2
        )
        err = capsys.readouterr().err
        assert "the forwards do not say their token ids" in err
        assert "--tokens-from" in err
        assert not (tmp_path / "out").exists()

    def test_the_same_counts_in_the_same_order(self, tmp_path: Path) -> None:
        known = Known("training", (("p", (7, 8, 9)), ("q", (4, 5))))
        assert rows_of(self.directory(tmp_path, 1, 3, 1, 2, 1), known) == [
            ("p", "prefill", [7, 8, 9], [0, 1, 2]),
            ("q", "prefill", [4, 5], [0, 1]),
        ]

    def test_another_order(self, tmp_path: Path) -> None:
        known = Known("training", (("q", (4, 5)), ("p", (7, 8, 9))))
        message = r"forwards of more than one row have 3, 2 rows, the sequences of training have 2, 3"
        with pytest.raises(InputError, match=message):
            rows_of(self.directory(tmp_path, 3, 2), known)

    def test_recorded_ids_must_be_those_given(self, tmp_path: Path) -> None:
        write_step(tmp_path, 0, 0, {"input_ids": torch.tensor([1, 2, 3])} | embedding(1, 3), tp_size=1)
        assert rows_of(tmp_path, Known("t", (("p", (1, 2, 3)),)))[0][2] == [1, 2, 3]
        with pytest.raises(InputError, match="step 0 of rank 0 computed other tokens than those of p in t"):
            rows_of(tmp_path, Known("t", (("p", (1, 2, 4)),)))

    def test_through_the_command_line(self, tmp_path: Path) -> None:
        source = tmp_path / "first"
        write_step(source, 0, 0, inputs([1, 2, 3], [0, 1, 2], [3], "a") | embedding(1, 3), tp_size=1)
        dumped(source, tmp_path / "tokens")
        dump = dumped(self.directory(tmp_path / "in", 3), tmp_path / "out", "--tokens-from", str(tmp_path / "tokens"))
        assert dump.tokens.token_ids.tolist() == [1, 2, 3]


class TestRefused:
    def test_a_pickle_that_wants_to_run_something(self, tmp_path: Path) -> None:
        class Trap:
            def __reduce__(self) -> Any:
                return Path.touch, (tmp_path / "ran",)

        write_step(tmp_path / "in", 0, 0, inputs([1], [0], [1], "a") | {"non_intrusive__model.norm.output.0": Trap()})
        with pytest.raises(InputError, match="refused: the pickle asks for"):
            open_served(tmp_path / "in")
        assert not (tmp_path / "ran").exists()

    def test_ranks_with_other_tokens(self, tmp_path: Path) -> None:
        for rank in (0, 1):
            write_step(tmp_path, 0, rank, inputs([1, 2 + rank], [0, 1], [2], "a") | embedding(1, 2))
        with pytest.raises(InputError, match="forward 0: rank 1 computed other tokens than rank 0"):
            open_served(tmp_path)

    def test_two_experiments(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            write_step(tmp_path, 0, 0, inputs([1], [0], [1], "a") | embedding(1, 1), experiment=name)
        with pytest.raises(InputError, match="holds 2 experiments of the dumper: one, two"):
            open_served(tmp_path)
        assert rows_of(tmp_path / "one")

    def test_two_runs(self, tmp_path: Path) -> None:
        for pid in (7, 8):
            write_pass(tmp_path, 0, 0, {"model.embed_tokens": states(1, 2)}, pid=pid)
        with pytest.raises(InputError, match="holds two runs of rank 0: TP0_PP0_Rank0_pid7 and TP0_PP0_Rank0_pid8"):
            open_served(tmp_path)

    def test_a_forward_that_does_not_fit_its_tokens(self, tmp_path: Path) -> None:
        write_step(tmp_path, 0, 0, inputs([1, 2, 3], [0, 1, 2], [3], "a") | embedding(1, 2), tp_size=1)
        with pytest.raises(InputError, match=r"step 0 of rank 0: boundary.0 is \[2, 8\]"):
            rows_of(tmp_path)

    def test_training_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source = ROOT / "fixtures" / "training" / "modelopt"
        assert main(["dump", "serving", "-o", str(tmp_path / "out"), "--from", str(source)]) == 2
        err = capsys.readouterr().err
        assert "is nothing that a server's debugging aid wrote" in err
        assert "dump training --from" in err

    @pytest.mark.parametrize(
        "options", [("--server", "h:1"), ("--prompts", "p.txt"), ("--launch", "--", "serve"), ("--boundaries", "all")]
    )
    def test_options_for_a_live_server(
        self, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["dump", "serving", "-o", str(tmp_path / "out"), "--from", str(tmp_path), *options]) == 2
        assert "--from takes all states that were recorded before" in capsys.readouterr().err


def test_a_missing_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_step(tmp_path / "in", 0, 1, inputs([1, 2], [0, 1], [2], "a") | embedding(1, 2), tp_size=4)
    dump = dumped(tmp_path / "in", tmp_path / "out")
    assert dump.ranks == (1,)
    assert "no files of rank 0, 2, 3 of 4" in capsys.readouterr().err
    assert (
        "no files of rank 0, 2, 3 of 4"
        in json.loads((tmp_path / "out" / "manifest.json").read_text())["source"]["detail"]
    )
