from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle_parity.cli.main import main
from eagle_parity.dump import DumpWriter, open_dump
from eagle_parity.errors import NotADumpError
from eagle_parity.records import Facts, Model, Plan, Sample, Source, TensorSpec
from tests.tiny_models import HIDDEN, LAYERS, edit_config, make_model, make_tokenizer

ALL_BYTES = 6 * HIDDEN * 2 + 16  # a token: boundaries 0..4 and final.norm in bf16, its id and position


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "target", "deepseek")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"text": "w1 w2 w3"},
        {"id": "chat", "messages": [{"role": "user", "content": "w7"}]},
        {"token_ids": [8, 9, 10, 11, 12]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture(autouse=True)
def nothing_left_over(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob("*.partial"))


def run(out: Path, model: Path, *args: object) -> int:
    return main(["dump", "training", "-o", str(out), "--model", str(model), "--device", "cpu", *map(str, args)])


def fails(capsys: pytest.CaptureFixture[str], *said: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    for text in said:
        assert text in captured.err


def test_prompts_to_dump(tmp_path: Path, model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "dump"
    assert run(out, model, "--prompts", prompts, "--slots", "2,3,final.norm") == 0
    dump = open_dump(out)
    assert dump.facts.side == "training"
    assert dump.facts.source.pipeline == "hf"
    assert dump.facts.boundaries == tuple(range(LAYERS + 1))
    assert dump.facts.slot_boundaries == (2, 3, "final.norm")
    assert (dump.facts.slots, dump.ranks) == (0, (0,))
    assert dump.names(0) == (*(f"boundary.{k}" for k in range(LAYERS + 1)), "final.norm")
    assert {dump.spec(0, name).dtype for name in dump.names(0)} == {"BF16"}
    assert [(r.id, r.begin, r.end, r.phase) for r in dump.tokens.requests] == [
        ("prompt-0", 0, 4, "prefill"),
        ("chat", 4, 7, "prefill"),
        ("prompt-2", 7, 12, "prefill"),
    ]
    assert dump.tokens.token_ids.tolist() == [1, 5, 6, 7, 4, 11, 5, 8, 9, 10, 11, 12]
    assert dump.tokens.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]
    embedding = weights(model)["model.embed_tokens.weight"]
    assert torch.equal(dump.read(0, "boundary.0", 0, 12), embedding[torch.from_numpy(dump.tokens.token_ids)])
    captured = capsys.readouterr()
    assert captured.out == (
        f"{out}: 3 requests, 12 tokens, 4.7 KiB\nboundaries 0..4, final.norm; slots 2, 3, final.norm\n"
    )
    assert "3 prompts, 12 tokens, 6 boundaries: 4.7 KiB" in captured.err


def weights(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def test_chosen_boundaries_dtype_and_prompts(tmp_path: Path, model: Path, prompts: Path) -> None:
    common = ("--prompts", prompts, "--boundaries", "0", "--slots", "3", "--dtype", "float32")
    assert run(tmp_path / "first", model, *common, "--limit", 2, "--max-tokens-per-prompt", 3) == 0
    dump = open_dump(tmp_path / "first")
    assert dump.names(0) == ("boundary.0", "boundary.3")
    assert dump.spec(0, "boundary.0").dtype == "F32"
    assert dump.facts.model.dtype == "float32"
    assert dump.tokens.token_ids.tolist() == [1, 5, 6, 4, 11, 5]

    drawn = []
    for seed in range(4):
        assert run(tmp_path / "drawn", model, *common, "--limit", 1, "--sample", seed, "--overwrite") == 0
        drawn.append(open_dump(tmp_path / "drawn").tokens.requests[0].id)
    assert len(set(drawn)) > 1
    assert run(tmp_path / "drawn", model, *common, "--limit", 1, "--sample", 0, "--overwrite") == 0
    assert open_dump(tmp_path / "drawn").tokens.requests[0].id == drawn[0]


def test_settings_from_the_environment(
    tmp_path: Path, model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_PARITY_PROMPTS", str(prompts))
    monkeypatch.setenv("EAGLE_PARITY_BOUNDARIES", "1")
    monkeypatch.setenv("EAGLE_PARITY_SLOTS", "2")
    assert run(tmp_path / "dump", model, "--slots", "3") == 0
    assert open_dump(tmp_path / "dump").names(0) == ("boundary.1", "boundary.3")


def served(path: Path, *, first: int = 0, hidden: int = HIDDEN, vocabulary: int = 64) -> Path:
    """A serving dump: a prompt in two chunks, and a draft tree of which two rows are accepted."""
    facts = Facts("serving", Source("sglang"), Model(hidden_size=hidden, num_layers=LAYERS), boundaries=(0,))
    rows = {"a": [10, 11, 12], "a2": [13], "verify": [14, 50, 15]}
    plan = Plan(facts, 7, {0: [TensorSpec("boundary.0", hidden, "F32")]}, columns=("parents", "accepted"))
    with DumpWriter(path, plan) as writer:
        for name, ids in rows.items():
            verify = name == "verify"
            count = len(ids)
            writer.add(
                Sample(
                    "a",
                    ids,
                    [4, 5, 5] if verify else range(3, 4) if name == "a2" else range(first, first + 3),
                    {0: {"boundary.0": torch.zeros(count, hidden)}},
                    phase="verify" if verify else "prefill",
                    parents=[-1, 0, 0] if verify else [-1] * count,
                    accepted=[1, 0, 1] if verify else [0] * count,
                )
            )
    return path


def test_tokens_that_a_server_saw(tmp_path: Path, model: Path) -> None:
    serving = served(tmp_path / "serving")
    assert run(tmp_path / "dump", model, "--tokens-from", serving, "--slots", "2,3,4") == 0
    tokens = open_dump(tmp_path / "dump").tokens
    assert tokens.token_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert [(r.id, r.begin, r.end) for r in tokens.requests] == [("a", 0, 6)]
    # and once more from the dump just made: a training dump holds whole sequences too
    assert run(tmp_path / "again", model, "--tokens-from", tmp_path / "dump") == 0
    assert np.array_equal(open_dump(tmp_path / "again").tokens.token_ids, tokens.token_ids)


def test_no_tokenizer_is_needed_for_ids(tmp_path: Path, model: Path, prompts: Path) -> None:
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    prompts.write_text('{"token_ids": [1, 2]}')
    assert run(tmp_path / "dump", bare, "--prompts", prompts) == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "expected one of --prompts and --tokens-from, got none"),
        (("--prompts", "x", "--tokens-from", "y"), "got both"),
        (("--prompts", "x", "--sample", "1"), "give --limit N too"),
        (("--prompts", "x", "--boundaries", "1;2"), "--boundaries: expected numbers and final.norm"),
        (("--prompts", "x", "--boundaries", ""), "--boundaries: expected numbers"),
        (("--prompts", "x", "--slots", "2,,3"), "--slots: expected numbers"),
        (("--prompts", "x", "--slots", "2,3,5"), "--slots: 5 is no boundary of"),
        (("--prompts", "x", "--slots", "-1,2"), "numbers from 0 (embedding) to 4 (after the last layer)"),
        (("--prompts", "x", "--boundaries", "0,9"), "--boundaries: 9 is no boundary of"),
        (("--prompts", "x"), "prompts cannot be read from x: No such file or directory"),
        (("--tokens-from", "x"), "x does not exist"),
    ],
)
def test_bad_flags(
    tmp_path: Path, model: Path, args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "dump", model, *args) == 2
    fails(capsys, said, "fix: ")
    assert list(tmp_path.iterdir()) == []


def test_bad_prompts(tmp_path: Path, model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts.write_text("")
    assert run(tmp_path / "dump", model, "--prompts", prompts) == 2
    fails(capsys, "holds no prompts")
    prompts.write_text('{"token_ids": [1]}\n{"token_ids": [999]}')
    assert run(tmp_path / "dump", model, "--prompts", prompts) == 2
    fails(capsys, "prompt prompt-1: token 0 has id 999", "knows 0 to 63")
    assert not (tmp_path / "dump").exists()


def test_bad_models(tmp_path: Path, model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "dump", tmp_path / "none", "--prompts", prompts) == 2
    fails(capsys, "none is not a directory", "check --model")
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    assert run(tmp_path / "dump", bare, "--prompts", prompts) == 2
    fails(capsys, "the model has no tokenizer", "give token ids")
    make_tokenizer(bare, chat=False)
    assert run(tmp_path / "dump", bare, "--prompts", prompts) == 2
    fails(capsys, "prompt chat holds messages, and the model's tokenizer has no chat template")
    edit_config(bare, num_hidden_layers=LAYERS + 1)
    prompts.write_text('{"token_ids": [1]}')
    assert run(tmp_path / "dump", bare, "--prompts", prompts) == 2
    fails(capsys, "not in the checkpoint and would be random: layers.4.")
    assert not (tmp_path / "dump").exists()


def test_dumps_that_cannot_be_replayed(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = served(tmp_path / "other", hidden=2 * HIDDEN)
    assert run(tmp_path / "dump", model, "--tokens-from", other) == 2
    fails(capsys, "is a dump of another model: hidden_size 64, ")
    warm = served(tmp_path / "warm", first=1)
    assert run(tmp_path / "dump", model, "--tokens-from", warm) == 2
    fails(capsys, "none of its 3 requests can be replayed: request a: its first row is at position 1", "cold")
    assert not (tmp_path / "dump").exists()


def test_a_target_that_exists(tmp_path: Path, model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "dump"
    out.mkdir()
    (out / "precious").touch()
    # Seen before anything else is looked at.
    assert run(out, tmp_path / "no-model", "--prompts", prompts) == 2
    fails(capsys, "exists and is not empty", "--overwrite")
    # Somebody's own files are not overwritten, a dump is.
    assert run(out, model, "--prompts", prompts, "--overwrite") == 2
    fails(capsys, "no dump")
    (out / "precious").unlink()
    assert run(out, model, "--prompts", prompts) == 0
    assert run(out, model, "--prompts", prompts, "--overwrite") == 0


def test_the_cap(tmp_path: Path, model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"")  # would be noticed, were the weights loaded first
    assert run(tmp_path / "dump", broken, "--prompts", prompts, "--max-bytes", 12 * ALL_BYTES - 1) == 2
    fails(capsys, "the dump would take 4.7 KiB, the cap is 4.7 KiB", "--max-bytes")
    assert not (tmp_path / "dump").exists()
    assert run(tmp_path / "dump", model, "--prompts", prompts, "--max-bytes", 12 * ALL_BYTES) == 0


def test_ctrl_c_leaves_nothing(
    tmp_path: Path, model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add = DumpWriter.add

    def interrupted(self: DumpWriter, sample: Sample) -> None:
        add(self, sample)
        if sample.id == "chat":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(DumpWriter, "add", interrupted)
    assert run(tmp_path / "dump", model, "--prompts", prompts) == 130
    fails(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def started(out: Path, model: Path, prompts: Path) -> subprocess.Popen[bytes]:
    """A dump in a process of its own, of so many prompts that it is not done when `out` begins to exist."""
    prompts.write_text('{"token_ids": [5, 6, 7]}\n' * 20_000)
    command = [sys.executable, "-m", "eagle_parity", "dump", "training", "-o", str(out), "--model", str(model)]
    process = subprocess.Popen([*command, "--prompts", str(prompts)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (out.with_name("dump.partial") / "rank-0000.safetensors").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def test_a_real_ctrl_c(tmp_path: Path, model: Path, prompts: Path) -> None:
    process = started(tmp_path / "dump", model, prompts)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    # A shell says 130 to both: Python dies of the signal, whatever exit code it was given, when the interrupt came in
    # the middle of an exec() somewhere in an import.
    assert process.returncode in (130, -signal.SIGINT)
    assert out == b""
    assert b"Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_a_killed_dump_is_refused_and_taken_over(
    tmp_path: Path, model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, partial = tmp_path / "dump", tmp_path / "dump.partial"
    process = started(out, model, prompts)
    prompts.write_text('{"token_ids": [5, 6, 7]}')
    assert run(out, model, "--prompts", prompts) == 2
    fails(capsys, f"process {process.pid} is writing it")
    process.kill()
    process.communicate(timeout=60)
    with pytest.raises(NotADumpError, match="unfinished dump"):
        open_dump(partial)
    assert not out.exists()
    assert run(out, model, "--prompts", prompts) == 0
    assert open_dump(out).tokens.token_ids.tolist() == [5, 6, 7]


def test_the_command_line_loads_no_torch() -> None:
    code = (
        "import sys, eagle_parity.cli.main as m; m.main(['dump', 'training', '--help']); "
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
