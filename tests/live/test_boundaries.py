"""`dump serving --boundaries all` on the real SGLang, on CPU cores: every boundary is what transformers computes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_parity.captures.launch import launched
from eagle_parity.captures.server import Server
from eagle_parity.captures.spool import BOUNDARIES
from eagle_parity.cli.main import main
from eagle_parity.dump import Dump, open_dump
from eagle_parity.records import FINAL_NORM
from tests.live.conftest import needs_sglang

pytestmark = [
    pytest.mark.live,
    needs_sglang,
]

ROOT = Path(__file__).parents[2]
LAYERS = 6
LONG = list(range(100, 161))  # two forwards, chunks of 32
SHORT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
TOLERANCE = 1e-5  # relative, float32, two implementations
TRAINED = (2, 3, 5)
SERVED = (2, 4, 5)  # what the ids of the drafts mean: 1, 3, 4 for DeepSeek and Llama alike


def make_models(out: Path, arch: str) -> Path:
    command = [sys.executable, ROOT / "demo" / "models.py", "--out", out, "--arch", arch]
    subprocess.run([*command, "--draft", "draft=1,3,4", "--dtype", "float32"], check=True, capture_output=True)
    return out


@contextmanager
def served(models: Path, draft: str, *arguments: str, tp: int = 2) -> Iterator[tuple[Server, Path]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = ["bash", str(ROOT / "demo" / "serve.sh"), str(models / "target"), draft, "--chunked-prefill-size", "32"]
    environ = {BOUNDARIES: "all", "TP": str(tp), "PYTHON": sys.executable}
    with launched([*command, *arguments, "--port", port], timeout=400, environ=environ) as started:
        yield started


def dump_serving(site: tuple[Server, Path], scratch: Path, *options: str) -> Dump:
    lines = [{"id": "long", "token_ids": LONG}, {"id": "short", "token_ids": SHORT}]
    (scratch / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    where = ["--server", site[0].url, "--capture-dir", str(site[1]), "--max-new-tokens", "6"]
    args = ["-o", str(scratch / "out"), "--prompts", str(scratch / "prompts.jsonl"), *where, *options]
    assert main(["dump", "serving", *args]) == 0
    return open_dump(scratch / "out")


def truth(target: Path, token_ids: list[int]) -> dict[str, torch.Tensor]:
    """transformers' residual stream at every boundary, and after the final norm: [T, H] each, float32."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(target, dtype=torch.float32).eval()
    last: list[torch.Tensor] = []
    model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0][0].clone()))
    with torch.no_grad():
        found = model(input_ids=torch.tensor([token_ids]), output_hidden_states=True)
    states = {f"boundary.{k}": found.hidden_states[k][0] for k in range(LAYERS)}
    return states | {f"boundary.{LAYERS}": last[0], FINAL_NORM: found.last_hidden_state[0]}


def check_every_boundary(dump: Dump, target: Path) -> None:
    """All ranks are bitwise equal, and are transformers' states within the tolerance."""
    assert dump.facts.boundaries == tuple(range(LAYERS + 1))
    for label, prompt in (("long", LONG), ("short", SHORT)):
        chunks = [r for r in dump.tokens.requests if (r.id, r.phase) == (label, "prefill")]
        assert [int(i) for c in chunks for i in dump.tokens.token_ids[c.begin : c.end]] == prompt
        for name, want in truth(target, prompt).items():
            ranks = [torch.cat([dump.read(rank, name, c.begin, c.end) for c in chunks]) for rank in dump.ranks]
            assert all(torch.equal(ranks[0], other) for other in ranks[1:]), name
            assert float(((ranks[0] - want).norm(dim=-1) / want.norm(dim=-1)).max()) < TOLERANCE, name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("deepseek"), "deepseek")


@pytest.fixture(scope="module")
def dump(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dump]:
    with served(models, str(models / "draft")) as site:
        yield dump_serving(site, tmp_path_factory.mktemp("dump"), "--boundaries", "all")


def test_every_boundary(models: Path, dump: Dump) -> None:
    assert dump.ranks == (0, 1)
    check_every_boundary(dump, models / "target")


def test_slots_are_bitwise_boundaries_in_prefill_and_verify(dump: Dump) -> None:
    assert {request.phase for request in dump.tokens.requests} == {"prefill", "verify"}
    end = len(dump.tokens.token_ids)
    for rank in dump.ranks:
        for slot, boundary in enumerate(SERVED):
            ours, theirs = (dump.read(rank, name, 0, end) for name in (f"slot.{slot}", f"boundary.{boundary}"))
            assert torch.equal(ours, theirs)


def test_three_training_states_and_the_map_name_what_a_slot_holds(
    models: Path, dump: Dump, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = str(tmp_path / "training")
    options = ["--tokens-from", dump.path, "--boundaries", "2,3,5", "--slots", "2,3,5", "--device", "cpu"]
    assert main(["dump", "training", "-o", training, "--model", str(models / "target"), *options]) == 0
    capsys.readouterr()
    assert main(["compare", training, dump.path, "--format", "json"]) == 1
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (report["layers"]["stored"], report["layers"]["served"]) == (list(TRAINED), list(SERVED))
    (finding,) = (f for f in report["findings"] if f["severity"] == "error")
    assert (finding["code"], finding["slot"], finding["boundary"]) == ("layer-shift", 1, 4)
    assert finding["evidence"]["boundary_from"] == dump.path


def test_training_files_are_recognised_by_the_server_s_map(
    models: Path, dump: Dump, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that number nothing: SpecForge's layout, three states side by side."""
    states = truth(models / "target", LONG)
    sample = {
        "input_ids": torch.tensor(LONG),
        "loss_mask": torch.ones(len(LONG), dtype=torch.long),
        "hidden_state": states[FINAL_NORM][None],
        "aux_hidden_state": torch.cat([states[f"boundary.{k}"] for k in TRAINED], dim=-1)[None],
    }
    (tmp_path / "files").mkdir()
    torch.save(sample, tmp_path / "files" / "data_0.ckpt")
    assert main(["compare", str(tmp_path / "files"), dump.path, "--reference", dump.path, "--format", "json"]) == 1
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(TRAINED) <= set(report["layers"]["stored"])
    assert report["layers"]["served"] == list(SERVED)


def test_a_llama_without_a_draft(tmp_path: Path) -> None:
    models = make_models(tmp_path / "models", "llama")
    with served(models, "none") as site:
        dump = dump_serving(site, tmp_path, "--boundaries", "all")
    assert (dump.facts.slots, dump.facts.draft) == (0, None)
    assert {request.phase for request in dump.tokens.requests} == {"prefill", "decode"}
    check_every_boundary(dump, models / "target")


def test_kimi_s_own_class(tmp_path: Path) -> None:
    """Layers nested under `language_model.`, served as text; the truth is the same weights as a DeepSeek-V3."""
    inner, models = make_models(tmp_path / "inner", "deepseek"), make_models(tmp_path / "models", "kimi")
    with served(models, str(models / "draft"), "--trust-remote-code") as site:
        dump = dump_serving(site, tmp_path, "--boundaries", "all")
    assert dump.facts.model.architecture == "KimiK25ForConditionalGeneration"
    assert (dump.facts.model.hidden_size, dump.facts.model.num_layers, dump.facts.slots) == (128, LAYERS, 3)
    check_every_boundary(dump, inner / "target")


def test_attention_that_is_data_parallel(tmp_path: Path) -> None:
    """Each group of ranks has requests of its own: the dump is group 0's, and whole."""
    models = make_models(tmp_path / "models", "deepseek")
    with served(models, str(models / "draft"), "--attn-dp-size", "2") as site:
        dump = dump_serving(site, tmp_path, "--boundaries", "all")
    assert dump.ranks == (0,)
    assert dump.facts.engine is not None
    assert (dump.facts.engine.tp_size, dump.facts.engine.flags["attn_dp_size"]) == (2, 2)
    check_every_boundary(dump, models / "target")


@pytest.mark.slow
@pytest.mark.parametrize("tp", [4, 8])
@pytest.mark.parametrize("arch", ["deepseek", "llama"])
def test_more_ranks(arch: str, tp: int, tmp_path: Path) -> None:
    models = make_models(tmp_path / "models", arch)
    with served(models, str(models / "draft"), tp=tp) as site:
        dump = dump_serving(site, tmp_path, "--boundaries", "all")
    assert dump.ranks == tuple(range(tp))
    assert {dump.spec(rank, f"slot.{slot}").width for rank in dump.ranks for slot in range(3)} == {128}
    check_every_boundary(dump, models / "target")
    end = len(dump.tokens.token_ids)
    for slot, boundary in enumerate(SERVED):
        held = [
            dump.read(rank, name, 0, end) for rank in dump.ranks for name in (f"slot.{slot}", f"boundary.{boundary}")
        ]
        assert all(torch.equal(held[0], other) for other in held[1:])
