"""`dump merge`: dumps and capture directories of one run become one dump, or are refused with a reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_parity.captures import recording, site
from eagle_parity.captures import server as server_module
from eagle_parity.captures.spool import Header
from eagle_parity.captures.writer import SpoolWriter
from eagle_parity.cli.main import main
from eagle_parity.dump import merge, open_dump
from tests.synthetic import Net, serving_spec, training_spec
from tests.test_server import HIDDEN, Engine

RUN = "0123456789abcdef"


@pytest.fixture
def whole(net: Net, tmp_path: Path) -> Path:
    """A dump of two ranks that differ."""
    spec = serving_spec(net)
    spec.ranks[1]["slot.0"][3] += 1
    engine = {"name": "sglang", "version": "0.5.23", "tp_size": 2, "flags": {"nnodes": 2}}
    spec.manifest |= {"run": RUN, "engine": engine}
    return spec.write(tmp_path / "whole")


@pytest.fixture
def part(whole: Path, tmp_path: Path) -> Callable[..., Path]:
    """The dump with some of its ranks only, under another name, with changes to its manifest."""

    def make(name: str, *ranks: int, **changes: Any) -> Path:
        path = shutil.copytree(whole, tmp_path / name)
        for rank in {0, 1} - set(ranks):
            (path / f"rank-{rank:04d}.safetensors").unlink()
        document = json.loads((path / "manifest.json").read_text()) | {"missing_ranks": sorted({0, 1} - set(ranks))}
        (path / "manifest.json").write_text(json.dumps(document | changes))
        return path

    return make


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Merge into tmp_path/out: exit code, and what was said on stderr (stdout where that is empty)."""

    def merge_into(*args: object) -> tuple[int, str]:
        code = main(["dump", "merge", "-o", str(tmp_path / "out"), *map(str, args)])
        said = capsys.readouterr()
        assert (tmp_path / "out").exists() == (code == 0)
        assert not [path for path in tmp_path.iterdir() if path.name.startswith("out.")]  # nothing half written
        return code, said.err or said.out

    return merge_into


def test_ranks_of_two_directories(whole: Path, part: Callable[..., Path], run: Any, tmp_path: Path) -> None:
    code, said = run(part("a", 0), part("b", 1))
    assert (code, said) == (0, f"{tmp_path}/out: 2 ranks (0, 1) of 2 directories\n")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in whole.iterdir()}
    for path in whole.glob("*.safetensors"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    merged, original = open_dump(tmp_path / "out"), open_dump(whole)
    assert merged.facts == original.facts
    assert merged.tokens.requests == original.tokens.requests


def test_a_rank_in_several_files_is_copied_whole(part: Callable[..., Path], run: Any, tmp_path: Path) -> None:
    second = part("b", 1)
    tensors = load_file(second / "rank-0001.safetensors")
    save_file({name: tensor[:20].clone() for name, tensor in tensors.items()}, second / "rank-0001.safetensors")
    save_file({name: tensor[20:].clone() for name, tensor in tensors.items()}, second / "rank-0001-00001.safetensors")
    assert run(part("a", 0), second)[0] == 0
    assert torch.equal(open_dump(tmp_path / "out").read(1, "slot.0", 0, len(tensors["slot.0"])), tensors["slot.0"])


def test_the_same_rank_twice_when_it_is_bitwise_the_same(part: Callable[..., Path], run: Any) -> None:
    assert run(part("a", 0), part("b", 0, 1))[0] == 0


@pytest.mark.parametrize("value", [7.0, float("nan"), -0.0])
def test_the_same_rank_twice_with_another_value(part: Callable[..., Path], run: Any, value: float) -> None:
    one, two = part("a", 0, 1), part("b", 0)
    tensors = load_file(two / "rank-0000.safetensors")
    for path, cell in ((one, 0.0), (two, value)):
        tensors["slot.1"][17, 5] = cell
        save_file(tensors, path / "rank-0000.safetensors")
    code, said = run(one, two)
    assert code == 2
    assert said.startswith(f"error: rank 0 is in {one} and in {two}, with different slot.1, first in row 17\n")


def test_missing_ranks_are_named(part: Callable[..., Path], run: Any, tmp_path: Path) -> None:
    one, two = part("a", 0, missing_ranks=[1, 2, 3]), part("b", 1, missing_ranks=[0, 2, 3])
    code, said = run(one, two)
    assert code == 2
    assert said == (
        "error: ranks 2, 3 of the run are in none of the directories\n  fix: copy the capture directory of their host "
        "here and name it too, or write the dump without them: --allow-missing-ranks\n"
    )
    code, said = run(one, two, "--allow-missing-ranks")
    assert (code, said) == (0, "warning: ranks 2, 3 of the run are in none of the directories\n")
    assert open_dump(tmp_path / "out").facts.missing_ranks == (2, 3)


def test_inspect_names_them_too(part: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = part("a", 0, missing_ranks=[1, 2])
    assert main(["inspect", str(path)]) == 0
    assert "0 (missing: 1, 2; dump merge adds them)" in capsys.readouterr().out
    assert main(["inspect", str(path), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["run"], document["ranks"], document["missing_ranks"]) == (RUN, [0], [1, 2])


def test_dumps_that_name_no_run(part: Callable[..., Path], run: Any) -> None:
    """A dump that somebody else wrote: the tensor-parallel size tells which ranks there should be."""
    one, two = part("a", 0, run=None, missing_ranks=[]), part("b", 1, run=None, missing_ranks=[])
    code, said = run(one, two)
    assert code == 0
    assert said.startswith("warning: the dumps do not say which run they are of")
    engine = {"name": "sglang", "tp_size": 3}
    more = [part(name, rank, run=None, missing_ranks=[], engine=engine) for rank, name in enumerate("cd")]
    shutil.rmtree(one.parent / "out")
    assert "rank 2 of the run is in none" in run(*more)[1]


def test_one_is_not_enough(part: Callable[..., Path], run: Any) -> None:
    code, said = run(part("a", 0))
    assert code == 2
    assert said.startswith("error: there is 1 dump to merge, at least two are needed")


def test_different_runs(part: Callable[..., Path], run: Any) -> None:
    for name, other in (("b", "f" * 16), ("c", None)):
        code, said = run(part(f"a{name}", 0), part(name, 1, run=other))
        assert code == 2
        assert f"the dumps are of different runs: {'/'}" in said
        assert f" of {RUN}, " in said
        assert said.splitlines()[0].endswith(other or "an unnamed one")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": {"name": "sglang", "version": "0.5.23", "tp_size": 4, "flags": {"nnodes": 2}}}, "engine.tp_size"),
        ({"engine": {"name": "sglang", "version": "0.5.14", "tp_size": 2, "flags": {"nnodes": 2}}}, "engine.version"),
        ({"engine": {"name": "sglang", "version": "0.5.23", "tp_size": 2}}, "engine.flags.nnodes"),
        ({"model": {"hidden_size": 7168}}, "model.architecture"),
    ],
)
def test_different_servers(part: Callable[..., Path], run: Any, changes: dict[str, Any], said: str) -> None:
    code, text = run(part("a", 0), part("b", 1, **changes))
    assert code == 2
    assert text.startswith(f"error: {said} is ")


@pytest.mark.parametrize("column", ["token_ids", "positions"])
def test_different_tokens(part: Callable[..., Path], run: Any, column: str) -> None:
    other = part("b", 1)
    tensors = load_file(other / "tokens.safetensors")
    before = int(tensors[column][21])
    tensors[column][21] += 1
    save_file(tensors, other / "tokens.safetensors")
    code, said = run(part("a", 0), other)
    assert code == 2
    assert said.startswith(f"error: {column} of row 21 is {before} in ")
    assert f"and {before + 1} in {other}\n" in said


def test_a_column_on_one_side_only(part: Callable[..., Path], run: Any) -> None:
    other = part("b", 1)
    tensors = load_file(other / "tokens.safetensors")
    tensors["accepted"] = torch.ones(len(tensors["token_ids"]), dtype=torch.uint8)
    save_file(tensors, other / "tokens.safetensors")
    assert "error: accepted of row 0 is absent in " in run(part("a", 0), other)[1]


def test_other_requests(part: Callable[..., Path], run: Any, whole: Path) -> None:
    requests = json.loads((whole / "manifest.json").read_text())["requests"]
    requests[0]["phase"] = "decode"
    code, said = run(part("a", 0), part("b", 1, requests=requests))
    assert code == 2
    assert "divide the same tokens into other requests" in said


def test_other_tensors(part: Callable[..., Path], run: Any) -> None:
    other = part("b", 1)
    tensors = load_file(other / "rank-0001.safetensors")
    save_file(tensors | {"slot.2": tensors["slot.2"].float()}, other / "rank-0001.safetensors")
    assert "error: slot.2 is BF16 in " in run(part("a", 0), other)[1]
    save_file(tensors | {"residual.2": tensors["slot.2"].clone()}, other / "rank-0001.safetensors")
    assert "error: residual.2 is absent in " in run(part("a2", 0), other)[1]


def test_a_training_dump(part: Callable[..., Path], run: Any, net: Net, tmp_path: Path) -> None:
    code, said = run(part("a", 0), training_spec(net).write(tmp_path / "training"))
    assert code == 2
    assert f"error: {tmp_path}/training is a training dump\n" in said


def test_the_target_is_checked_first_and_kept(
    part: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    assert main(["dump", "merge", "-o", str(tmp_path / "out"), str(tmp_path / "nowhere")]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine").read_text() == "x"


def test_onto_one_of_its_parts_with_overwrite(part: Callable[..., Path], tmp_path: Path) -> None:
    one, two = part("a", 0), part("b", 1)
    assert main(["dump", "merge", "-o", str(one), str(one), str(two), "--overwrite"]) == 0
    assert open_dump(one).ranks == (0, 1)


def test_a_full_disk_and_an_interruption_leave_nothing(
    part: Callable[..., Path], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = part("a", 0), part("b", 1)

    def fails(_: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise errors.pop()

    errors = [OSError(28, "No space left on device"), KeyboardInterrupt()]
    monkeypatch.setattr(merge.shutil, "copyfile", fails)
    assert run(one, two)[0] == 130
    code, said = run(one, two)
    assert code == 4
    assert "No space left on device" in said


def test_the_cap(part: Callable[..., Path], run: Any) -> None:
    code, said = run(part("a", 0), part("b", 1), "--max-bytes", 1000)
    assert code == 2
    assert "the cap is 1000 B" in said


class ShowsBoundaries(SpoolWriter):
    """A rank that also shows boundaries, in prefill and not in the replay of a graph."""

    def submit(self, header: Header, tensors: Mapping[str, torch.Tensor]) -> None:
        if header.kind == "target" and header.phase == "prefill":
            states = tensors["hidden"][:, :HIDDEN]
            tensors = {**tensors, "boundary.2": states + 2, "final.norm": states / 3}
        super().submit(header, tensors)


class HoldsHalf(SpoolWriter):
    """A rank of two that holds one half of each forward's rows."""

    def submit(self, header: Header, tensors: Mapping[str, torch.Tensor]) -> None:
        if "hidden" in tensors:
            count = len(tensors["hidden"])
            begin, end = (0, count // 2) if self._rank == 0 else (count // 2, count)
            header = replace(header, rows=(begin, end))
            tensors = {**tensors, "hidden": tensors["hidden"][begin:end].clone()}
        super().submit(header, tensors)


class TestTwoHosts:
    """A server over two hosts without a shared disk: rank 1 writes into a capture directory of its own."""

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(site, "_HELLO_SECONDS", 0.2)
        monkeypatch.setattr(recording, "_RECORD_SECONDS", 2.0)

    def engine(
        self,
        base: Path,
        writer: type[SpoolWriter] = SpoolWriter,
        *,
        hosts: Sequence[str] = ("head", "other"),
        **options: Any,
    ) -> Engine:
        for host in dict.fromkeys(hosts):
            (base / host).mkdir(parents=True)
        engine = Engine(base / hosts[0], **options)
        if writer is ShowsBoundaries:
            engine.hello(boundaries=("boundary.2", "final.norm"))
        engine.writers = {rank: writer(base / host, f"abc{rank}", rank) for rank, host in enumerate(hosts)}
        for rank, host in enumerate(hosts):
            path = base / hosts[0] / f"hello-p{rank}.json"
            hello = json.loads(path.read_text()) | {"process": f"abc{rank}"}
            path.unlink()
            (base / host / f"hello-abc{rank}.json").write_text(json.dumps(hello))
        return engine

    def capture(self, engine: Engine, output: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
        prompts = output.parent / "prompts.jsonl"
        prompts.write_text('{"id": "a", "token_ids": [10, 11, 12, 13, 14]}\n{"id": "a", "token_ids": [20, 21, 22]}\n')
        monkeypatch.setattr(
            server_module.HttpTransport,
            "send",
            lambda _, method, url, body, *__: engine.answer(
                method, url.removeprefix("http://h:1"), body and json.loads(body)
            ),
        )
        where = ["--server", "h:1", "--capture-dir", str(engine.directory), "--prompts", str(prompts)]
        return main(["dump", "serving", "-o", str(output), *where, *options])

    def test_refused_with_the_remedy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.capture(self.engine(tmp_path), tmp_path / "part", monkeypatch) == 4
        said = capsys.readouterr().err
        assert "the capture plugin runs on rank 0 and not on rank 1 of 2" in said
        assert "capture with --allow-missing-ranks and add the other hosts' capture directories" in said

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"chunk": 2},
            {"draft_differs": True},
            {"draft_seen": False},
            {"writer": ShowsBoundaries},
            {"writer": HoldsHalf},
        ],
    )
    def test_the_other_host_s_directory_is_merged_in(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        options: dict[str, Any],
    ) -> None:
        more = ["--boundaries", "all"] if options.get("writer") is ShowsBoundaries else []
        shared = self.engine(tmp_path, hosts=("shared", "shared"), **options)
        assert self.capture(shared, tmp_path / "want", monkeypatch, *more) == 0
        engine = self.engine(tmp_path, **options)
        assert self.capture(engine, tmp_path / "part", monkeypatch, "--allow-missing-ranks", *more) == 0
        assert engine.writers[1].flush()
        said = " ".join(capsys.readouterr().err.split())
        assert f"rank 1 wrote on another host and is not in {tmp_path}/part" in said
        assert open_dump(tmp_path / "part").facts.missing_ranks == (1,)
        shutil.copytree(tmp_path / "other", tmp_path / "copy")
        assert main(["dump", "merge", "-o", str(tmp_path / "out"), str(tmp_path / "part"), str(tmp_path / "copy")]) == 0
        for path in (tmp_path / "want").glob("*.safetensors"):
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
        out, want = open_dump(tmp_path / "out"), open_dump(tmp_path / "want")
        assert out.tokens.requests == want.tokens.requests
        assert out.facts.boundaries == want.facts.boundaries == ((2,) if more else ())
        assert (out.facts.engine, out.facts.draft, out.facts.missing_ranks) == (want.facts.engine, want.facts.draft, ())
        assert str(out.facts.source.detail).startswith("rank 0: ")
        assert "; rank 1: " in str(out.facts.source.detail)
        assert list((tmp_path / "copy").glob("*.safetensors"))  # a copy is read and left alone

    def parts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        engine = self.engine(tmp_path)
        assert self.capture(engine, tmp_path / "part", monkeypatch, "--allow-missing-ranks") == 0
        assert engine.writers[1].flush()
        return tmp_path / "other"

    def test_a_directory_without_that_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str]]
    ) -> None:
        spool = self.parts(tmp_path, monkeypatch)
        for path in spool.glob("*.safetensors"):
            path.unlink()
        code, said = run(tmp_path / "part", spool)
        assert code == 2
        assert f"error: {spool} holds no record of the run " in said

    def test_a_copy_made_too_early(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str]]
    ) -> None:
        spool = self.parts(tmp_path, monkeypatch)
        max(spool.glob("*.safetensors")).unlink()
        code, said = run(tmp_path / "part", spool)
        assert code == 2
        assert f"error: {spool} holds no end of the run " in said
        assert "for rank 1\n" in said

    def test_a_copy_that_lacks_a_forward(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str]]
    ) -> None:
        spool = self.parts(tmp_path, monkeypatch)
        names = sorted(path.name for path in spool.glob("*.safetensors"))
        for name in names[2:4]:  # the first draft tree, and what the draft was given of it
            (spool / name).unlink()
        code, said = run(tmp_path / "part", spool)
        assert code == 2
        assert f"{tmp_path}/part has 24 tokens, {spool} has 20\n" in said

    def test_capture_directories_alone(self, tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
        self.engine(tmp_path)
        code, said = run(tmp_path / "head", tmp_path / "other")
        assert code == 2
        assert "no dump is named that says which run to take from it" in said
