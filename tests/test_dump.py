"""The dump format: the safetensors library reads what is written; what is damaged is refused with a reason."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eagle_parity.cli.main import main
from eagle_parity.dump import DumpWriter, open_dump
from eagle_parity.errors import EagleParityError, EnvironmentFailure, InputError, NotADumpError, UsageError
from eagle_parity.records import Facts, Model, Plan, Sample, Source, TensorSpec
from tests.synthetic import Net, serving_spec, training_spec


def plan(tokens: int = 6, **more: Any) -> Plan:
    specs = [TensorSpec("slot.0", 8, "BF16"), TensorSpec("boundary.3", 8, "F32")]
    facts = Facts("serving", Source("test"), Model(hidden_size=8), slots=1)
    return Plan(facts, tokens, {0: specs, 1: specs}, **more)


def sample(number: int, rows: int = 3, **more: Any) -> Sample:
    g = torch.Generator().manual_seed(number)
    tensors = {
        "slot.0": torch.randn(rows, 8, generator=g).bfloat16(),
        "boundary.3": torch.randn(rows, 8, generator=g),
    }
    return Sample(f"r{number}", range(rows), range(rows), {0: tensors, 1: tensors}, **more)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    samples = [sample(0, loss_mask=[1, 0, 1], graph=True), sample(1, loss_mask=[0, 0, 1], cached_tokens=4)]
    with DumpWriter(path, plan(columns=("loss_mask",))) as writer:
        for one in samples:
            writer.add(one)
    dump = open_dump(path)
    assert dump.ranks == (0, 1)
    assert dump.facts.boundaries == (3,)
    assert [(r.id, r.begin, r.end, r.graph, r.cached_tokens) for r in dump.tokens.requests] == [
        ("r0", 0, 3, True, None),
        ("r1", 3, 6, None, 4),
    ]
    assert dump.tokens.loss_mask is not None
    assert dump.tokens.loss_mask.tolist() == [1, 0, 1, 0, 0, 1]
    whole = torch.cat([one.tensors[1]["slot.0"] for one in samples])
    assert torch.equal(dump.read(1, "slot.0", 0, 6), whole)
    assert torch.equal(dump.read(1, "slot.0", 2, 5), whole[2:5])
    # Anyone can read it with the library alone.
    assert torch.equal(load_file(path / "rank-0001.safetensors")["slot.0"], whole)
    assert load_file(path / "tokens.safetensors")["loss_mask"].dtype == torch.uint8
    assert not (tmp_path / "dump.partial").exists()


def test_token_shards_and_parents_round_trip(tmp_path: Path) -> None:
    specs = [TensorSpec("slot.0", 8, "BF16")]
    facts = Facts("serving", Source("test"), Model(hidden_size=8), slots=1)
    path = tmp_path / "dump"
    with DumpWriter(path, Plan(facts, 8, {0: specs, 1: specs}, {0: 2, 1: 6}, ("parents", "accepted"))) as writer:
        for number in range(2):
            state = sample(number, 4).tensors[0]["slot.0"]
            writer.add(
                Sample(
                    "r",
                    range(4),
                    [4, 5, 5, 6],
                    {0: {"slot.0": state[:1]}, 1: {"slot.0": state[1:]}},
                    phase="verify",
                    parents=[-1, 0, 0, 1],
                    accepted=[1, 0, 1, 0],
                    rows={0: [0], 1: [1, 2, 3]},
                )
            )
    dump = open_dump(path)
    assert dump.rows(0, "slot.0").tolist() == [0, 4]  # type: ignore[union-attr]
    assert dump.rows(1, "slot.0").tolist() == [1, 2, 3, 5, 6, 7]  # type: ignore[union-attr]
    assert dump.tokens.parents.tolist() == [-1, 0, 0, 1, -1, 4, 4, 5]  # type: ignore[union-attr]


def test_a_big_rank_goes_on_in_a_second_file(net: Net, tmp_path: Path) -> None:
    path = serving_spec(net).write(tmp_path / "dump")
    whole = load_file(path / "rank-0001.safetensors")
    save_file({k: v[:20].clone() for k, v in whole.items()}, path / "rank-0001.safetensors")
    save_file({k: v[20:].clone() for k, v in whole.items()}, path / "rank-0001-00001.safetensors")
    dump = open_dump(path)
    assert torch.equal(dump.read(1, "slot.1", 15, 30), whole["slot.1"][15:30])
    # or tensor by tensor
    save_file({"slot.0": whole["slot.0"]}, path / "rank-0001.safetensors")
    save_file({"slot.1": whole["slot.1"], "slot.2": whole["slot.2"]}, path / "rank-0001-00001.safetensors")
    dump = open_dump(path)
    assert torch.equal(dump.read(1, "slot.2", 0, 61), whole["slot.2"])


def test_an_error_or_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    for error in (KeyboardInterrupt, RuntimeError):

        def broken_off(error: type[BaseException] = error) -> None:
            with DumpWriter(tmp_path / "dump", plan()) as writer:
                writer.add(sample(0))
                raise error

        with pytest.raises(error):
            broken_off()
        assert list(tmp_path.iterdir()) == []


def test_too_few_samples_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3 of 6 tokens"), DumpWriter(tmp_path / "dump", plan()) as writer:
        writer.add(sample(0))
    assert list(tmp_path.iterdir()) == []


def test_a_sample_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=r"slot.0 should be \[2, 8\], got \[3, 8\]"),
        DumpWriter(tmp_path / "dump", plan()) as writer,
    ):
        writer.add(Sample("r", [1, 2], [0, 1], sample(0).tensors))
    with pytest.raises(InputError, match="the plan has 3"), DumpWriter(tmp_path / "dump", plan(3)) as writer:
        writer.add(sample(0, 4))


def test_existing_targets_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    path.mkdir()
    (path / "mine").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        DumpWriter(path, plan())
    (path / "mine").unlink()
    with DumpWriter(path, plan(3)) as writer:
        writer.add(sample(0))
    with DumpWriter(path, plan(6), overwrite=True) as writer:
        writer.add(sample(0))
        writer.add(sample(1))
    assert len(open_dump(path).tokens.token_ids) == 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dump"]


def test_size_is_capped_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the cap is 100 B"):
        DumpWriter(tmp_path / "dump", plan(), cap=100)
    with pytest.raises(EnvironmentFailure, match="free"):
        DumpWriter(tmp_path / "dump", plan(10**15), cap=10**20)
    assert list(tmp_path.iterdir()) == []


def test_a_partial_dump_is_refused_and_taken_over(tmp_path: Path) -> None:
    partial = tmp_path / "dump.partial"
    partial.mkdir()
    (partial / "tokens.safetensors").write_bytes(b"")
    (partial / "writer.pid").write_text(str(os.getpid()))
    with pytest.raises(NotADumpError, match="unfinished"):
        open_dump(partial)
    with (
        pytest.raises(UsageError, match=f"process {os.getpid()} is writing it"),
        DumpWriter(tmp_path / "dump", plan(3)),
    ):
        pass
    (partial / "writer.pid").write_text("999999999")  # no such process: its writer died
    with DumpWriter(tmp_path / "dump", plan(3)) as writer:
        writer.add(sample(0))
    assert open_dump(tmp_path / "dump").ranks == (0, 1)
    assert not partial.exists()


# ---------------------------------------------------------------------------------------------------- bad input


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def remove(path: Path, name: str) -> None:
    (path / name).unlink()


def truncate(path: Path, name: str) -> None:
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[: len(data) * 2 // 3])


def header(path: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    data = (path / name).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    change(entries)
    raw = json.dumps(entries).encode()
    (path / name).write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


BAD: list[tuple[Callable[[Path], None], str]] = [
    (lambda p: remove(p, "manifest.json"), "unfinished"),
    (lambda p: (p / "manifest.json").write_text("{"), "is not JSON"),
    (lambda p: (p / "manifest.json").write_text("[]"), "a JSON object"),
    (lambda p: edit(p, lambda m: m.update(format="x")), 'format must be "eagle-parity-dump"'),
    (lambda p: edit(p, lambda m: m.update(schema_version=2)), "this tool reads 1"),
    (lambda p: edit(p, lambda m: m.update(side="left")), 'side must be "training" or "serving"'),
    (lambda p: edit(p, lambda m: m.pop("requests")), "requests must be given"),
    (lambda p: edit(p, lambda m: m["requests"][0].update(rows=[5, 3])), "overlap another request or lie outside"),
    (lambda p: edit(p, lambda m: m["requests"][0].update(rows=[0, 999])), "lie outside the 61 rows"),
    (lambda p: edit(p, lambda m: m["requests"][0].update(phase="x")), "prefill, verify or decode"),
    (lambda p: edit(p, lambda m: m["model"].update(hidden_size="7168")), "model.hidden_size must be of type int"),
    (lambda p: edit(p, lambda m: m["model"].update(hidden_size=0)), "model.hidden_size must be at least 1"),
    (lambda p: edit(p, lambda m: m.update(slots=4)), "the manifest says 4 slots"),
    (lambda p: edit(p, lambda m: m.update(slot_boundaries=[2, "x", 5])), "slot_boundaries must be"),
    (lambda p: edit(p, lambda m: m.update(run=7)), "run must be of type str"),
    (lambda p: edit(p, lambda m: m.update(missing_ranks=[-1])), "missing_ranks must be a list of ranks"),
    (lambda p: remove(p, "tokens.safetensors"), "tokens.safetensors is missing"),
    (lambda p: truncate(p, "tokens.safetensors"), "truncated"),
    (lambda p: truncate(p, "rank-0001.safetensors"), "truncated"),
    (lambda p: [remove(p, f"rank-000{r}.safetensors") for r in (0, 1)] and None, "no rank-NNNN.safetensors"),
    (lambda p: (p / "rank-0000.safetensors").write_bytes(b"\xff" * 100), "the header claims"),
    (lambda p: (p / "rank-0000.safetensors").write_bytes(b""), "too few for a header"),
    (lambda p: header(p, "rank-0000.safetensors", lambda h: h["slot.1"].update(shape=[61, 95])), "needs 11590 bytes"),
    (lambda p: header(p, "rank-0000.safetensors", lambda h: h["slot.1"].update(dtype="Q4")), "unknown dtype 'Q4'"),
    (lambda p: header(p, "rank-0000.safetensors", lambda h: h.update(slot=h.pop("slot.1"))), "unknown tensor 'slot'"),
    (lambda p: header(p, "rank-0000.safetensors", lambda h: h.update(x=3)), "is malformed"),
    (
        lambda p: save_file({"slot.0": torch.zeros(9, 96)}, p / "rank-0001.safetensors"),
        "slot.0 has 9 rows, there are 61 tokens",
    ),
    (
        lambda p: save_file({"slot.0": torch.zeros(2, 96), "rows": torch.tensor([3, 3])}, p / "rank-0001.safetensors"),
        "names one twice",
    ),
]


@pytest.mark.parametrize(("damage", "says"), BAD, ids=[says for _, says in BAD])
def test_damaged_dumps_are_refused(
    damage: Callable[[Path], None], says: str, net: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = training_spec(net).write(tmp_path / "training")
    serving = serving_spec(net).write(tmp_path / "serving")
    damage(serving)
    assert main(["compare", str(training), str(serving)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "fix: " in err
    assert str(serving) in err
    assert "Traceback" not in err


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**9))
def test_random_damage_gives_clean_errors_only(seed: int, net: Net, tmp_path: Path) -> None:
    base = tmp_path / "base"
    if not base.exists():
        serving_spec(net).write(base)
    rng = random.Random(seed)
    target = base / rng.choice(["manifest.json", "tokens.safetensors", "rank-0000.safetensors"])
    good = target.read_bytes()
    data = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(data), 700))
        data[at : at + rng.choice([0, 1, 1, 5])] = bytes(rng.randrange(256) for _ in range(rng.choice([0, 1, 1, 3])))
    target.write_bytes(data)
    try:
        dump = open_dump(base)
        for rank in dump.ranks:
            for name in dump.names(rank):
                dump.read(rank, name, 0, dump.length(rank, name))
    except EagleParityError:
        pass
    finally:
        target.write_bytes(good)
