"""What the real SGLang leaves behind and gives over HTTP, TP=2 on CPU cores, against transformers."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from eagle_parity.captures.spool import CAPTURE_DIR
from eagle_parity.cli.main import main
from eagle_parity.dump import Dump, open_dump
from tests.live.conftest import needs_sglang
from tests.truth import distance, load
from tests.truth import states as transformers_states

pytestmark = [pytest.mark.live, pytest.mark.slow, needs_sglang]

ROOT = Path(__file__).parents[2]
BOUNDARIES = (2, 3, 5)  # what the ids 1, 2, 4 mean
TOLERANCE = 1e-5
Truth = Callable[[str, list[int]], dict[str, torch.Tensor]]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_serving", ROOT / "fixtures" / "serving" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make = _load()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("served")
    make.make_models(out / "models")
    return out


@pytest.fixture(scope="module")
def with_draft(work: Path) -> Iterator[str]:
    """DeepSeek-V3 with its draft and the dumper."""
    with make.dumper(work / "models", work / "dumper", "deepseek") as url:
        yield url


@pytest.fixture(scope="module")
def without_draft(work: Path) -> Iterator[str]:
    """llama without a draft, with the tensor dump."""
    with make.tensor_dump(work / "models", work / "tensor-dump") as url:
        yield url


@pytest.fixture(scope="module")
def truth(work: Path) -> Truth:
    """(architecture, token ids) -> transformers' states of the target, by name, each [T, H]."""
    loaded: dict[str, Any] = {}

    def states(arch: str, token_ids: list[int]) -> dict[str, torch.Tensor]:
        if arch not in loaded:
            loaded[arch] = load(work / "models" / arch / "target")
        named = transformers_states(loaded[arch], token_ids)
        return named | {f"slot.{j}": named[f"boundary.{k}"] for j, k in enumerate(BOUNDARIES)}

    return states


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Dump]:
    monkeypatch.delenv(CAPTURE_DIR, raising=False)

    def run(*arguments: object) -> Dump:
        assert main(["dump", "serving", "-o", str(tmp_path / "out"), *map(str, arguments)]) == 0
        return open_dump(tmp_path / "out")

    return run


def sequences(dump: Dump) -> dict[str, list[int]]:
    """The rows of each label; each label is one sequence here."""
    rows: dict[str, list[int]] = {}
    for request in dump.tokens.requests:
        rows.setdefault(request.id, []).extend(range(request.begin, request.end))
    return rows


def check(dump: Dump, rank: int, rows: list[int], context: list[int], want: dict[str, torch.Tensor]) -> None:
    """Every row of a sequence is what transformers computes at its position."""
    for row in rows:
        position = int(dump.tokens.positions[row])
        assert int(dump.tokens.token_ids[row]) == context[position]
        for name in dump.names(rank):
            got = dump.read(rank, name, row, row + 1)
            assert distance(got, want[name][position : position + 1]) < TOLERANCE, (name, position)


def test_the_dumper(with_draft: str, work: Path, record: Callable[..., Dump], truth: Truth) -> None:
    answers = make.ask(with_draft)
    dump = record("--from", work / "dumper")
    assert dump.ranks == (0, 1)
    assert (dump.facts.slots, dump.facts.boundaries, dump.facts.model.num_layers) == (3, tuple(range(7)), 6)
    found = sequences(dump)
    assert {"long", "short"} <= set(found)
    for label, prompt in make.PROMPTS.items():
        context = [*prompt, *answers[label]["output_ids"]]
        positions = [int(dump.tokens.positions[row]) for row in found[label]]
        assert positions[: len(prompt)] == [*range(len(prompt))]  # the long one in two chunks
        assert len(positions) > len(prompt)  # and the roots of some trees
        want = truth("deepseek", context)
        for rank in dump.ranks:
            check(dump, rank, found[label], context, want)
    phases = {request.phase for request in dump.tokens.requests}
    assert phases == {"prefill", "verify"}


def test_the_tensor_dump(without_draft: str, work: Path, record: Callable[..., Dump], truth: Truth) -> None:
    answers = make.ask(without_draft)
    dump = record("--from", work / "tensor-dump")
    assert dump.ranks == (0, 1)
    assert (dump.facts.slots, dump.facts.boundaries) == (0, tuple(range(6)))
    by_prompt = {tuple(int(dump.tokens.token_ids[row]) for row in rows[:5]): rows for rows in sequences(dump).values()}
    for label, prompt in make.PROMPTS.items():
        context = [*prompt, *answers[label]["output_ids"]]
        rows = by_prompt[tuple(prompt[:5])]
        assert len(rows) == len(context) - 1
        for rank in dump.ranks:
            check(dump, rank, rows, context, truth("llama", context))


def test_what_comes_back_with_a_draft(
    with_draft: str, tmp_path: Path, record: Callable[..., Dump], truth: Truth, capsys: pytest.CaptureFixture[str]
) -> None:
    """[rows, K*H] of the prompt's last chunk, then a row for every token but the last, rejected branches left out."""
    lines = [{"id": label, "token_ids": ids} for label, ids in make.PROMPTS.items()]
    lines.append({"id": "chat", "messages": [{"role": "user", "content": "w3"}]})
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dump = record("--server", with_draft, "--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 12)
    out, err = capsys.readouterr()
    assert "1 rank, 3 slots of 64 F32" in out
    assert "one rank of 2" in err
    assert f"{make.CHUNK} rows at the beginning of 1 prompts did not come back" in err
    facts = dump.facts
    assert facts.draft is not None
    assert facts.draft.spec_accept_length is not None
    assert facts.draft.spec_accept_length > 1.2  # so that accepted tokens are among the rows
    assert (dump.ranks, facts.draft.declared_ids, facts.slot_boundaries) == ((0,), make.IDS, None)
    found = sequences(dump)
    for label, rows in found.items():
        positions = [int(dump.tokens.positions[row]) for row in rows]
        ids = [int(dump.tokens.token_ids[row]) for row in rows]
        prompt = make.PROMPTS.get(label, [])
        first = make.CHUNK if label == "long" else 0
        assert positions == [*range(first, first + len(rows))]
        context = [*prompt[:first], *ids]
        assert context[: len(prompt)] == prompt
        assert len(rows) + first >= len(prompt) + 11
        check(dump, 0, rows, context, truth("deepseek", context))


def test_what_comes_back_without_a_draft(
    without_draft: str, tmp_path: Path, record: Callable[..., Dump], truth: Truth
) -> None:
    """[rows, H] after the final norm."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "short", "token_ids": make.PROMPTS["short"]}) + "\n")
    dump = record("--server", without_draft, "--prompts", tmp_path / "p.jsonl")
    assert (dump.names(0), dump.facts.slots) == (("final.norm",), 0)
    context = dump.tokens.token_ids.tolist()
    assert len(context) == len(make.PROMPTS["short"]) + 7
    check(dump, 0, list(range(len(context))), context, truth("llama", context))
    assert {request.phase for request in dump.tokens.requests} == {"prefill", "decode"}
