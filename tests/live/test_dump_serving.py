"""The serving capture against the real SGLang: TP=2 on CPU cores, EAGLE-3, a DeepSeek-V3 target."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_parity.captures.server import Server, launched
from eagle_parity.captures.spool import read_hellos
from eagle_parity.cli.main import main
from eagle_parity.dump import Dump, open_dump
from eagle_parity.records import Request

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

ROOT = Path(__file__).parents[2]
CHUNK = 32  # so that a prompt of 61 tokens takes two forwards
LONG = list(range(100, 161))
SHORT = [5, 6, 7, 8, 9]
BOUNDARIES = (2, 3, 5)  # what the draft's declared ids 1, 2, 4 mean for this target on this version
TOLERANCE = 1e-5  # relative, float32, two implementations


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft that agree now and then, so that verify accepts more than its root."""
    out = tmp_path_factory.mktemp("models")
    command = [
        sys.executable,
        ROOT / "demo" / "models.py",
        "--out",
        out,
        "--draft",
        "draft=1,2,4",
        "--dtype",
        "float32",
    ]
    subprocess.run(command, check=True, capture_output=True)
    # The target says one of two tokens, the draft proposes nothing else.
    weights = out / "target" / "model.safetensors"
    tensors = load_file(weights)
    direction = torch.randn(tensors["lm_head.weight"].shape[1], generator=torch.Generator().manual_seed(7))
    tensors["lm_head.weight"].zero_()
    tensors["lm_head.weight"][10], tensors["lm_head.weight"][20] = direction, -direction
    save_file(tensors, weights, {"format": "pt"})
    weights = out / "draft" / "model.safetensors"
    tensors = load_file(weights)
    own = torch.arange(tensors["d2t"].numel())
    tensors["d2t"] = torch.where(own % 2 == 0, 10, 20) - own
    save_file(tensors, weights)
    return out


@pytest.fixture(scope="module")
def site(models: Path) -> Iterator[tuple[Server, Path]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = ["bash", str(ROOT / "demo" / "serve.sh"), str(models / "target"), str(models / "draft")]
    with launched([*serve, "--chunked-prefill-size", str(CHUNK), "--port", str(port)], timeout=300) as started:
        yield started


@pytest.fixture(scope="module")
def dump_serving(site: tuple[Server, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Dump]:
    server, capture_dir = site

    def run(*lines: dict[str, Any], options: tuple[str, ...] = ()) -> Dump:
        scratch = tmp_path_factory.mktemp("dump")
        (scratch / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        args = ["--prompts", str(scratch / "prompts.jsonl"), "--server", server.url, "--capture-dir", str(capture_dir)]
        assert main(["dump", "serving", "-o", str(scratch / "out"), *args, *options]) == 0
        return open_dump(scratch / "out")

    return run


@pytest.fixture(scope="module")
def quiet(dump_serving: Callable[..., Dump]) -> Dump:
    """A dump made while nobody else uses the server."""
    lines = [{"id": "long", "token_ids": LONG}, {"id": "short", "token_ids": SHORT}]
    return dump_serving(*lines, options=("--max-new-tokens", "12"))


@pytest.fixture(scope="module")
def reference(models: Path) -> Callable[[list[int]], list[torch.Tensor]]:
    """Token ids -> transformers' hidden states at BOUNDARIES, each [T, H], float32."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(models / "target", dtype=torch.float32).eval()

    def states(token_ids: list[int]) -> list[torch.Tensor]:
        with torch.no_grad():
            found = model(input_ids=torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        return [found[boundary][0] for boundary in BOUNDARIES]

    return states


def rows(dump: Dump, label: str, phase: str) -> Iterator[Request]:
    return (request for request in dump.tokens.requests if request.id == label and request.phase == phase)


def read(dump: Dump, rank: int, slot: int, request: Request) -> torch.Tensor:
    return dump.read(rank, f"slot.{slot}", request.begin, request.end)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def test_the_manifest(quiet: Dump) -> None:
    facts = quiet.facts
    assert (facts.side, facts.slots, facts.slot_boundaries, quiet.ranks) == ("serving", 3, None, (0, 1))
    assert (facts.model.architecture, facts.model.hidden_size, facts.model.num_layers) == (
        "DeepseekV3ForCausalLM",
        128,
        6,
    )
    assert facts.engine is not None
    assert (facts.engine.name, facts.engine.tp_size) == ("sglang", 2)
    assert facts.engine.flags["speculative_algorithm"] == "EAGLE3"
    assert facts.draft is not None
    assert (facts.draft.name, facts.draft.declared_ids, facts.draft.num_slots) == ("draft", (1, 2, 4), 3)
    assert facts.draft.spec_accept_length is not None
    assert facts.draft.spec_accept_length > 1.2
    assert str(facts.source.detail).startswith(
        "slots are what the draft was given, bitwise what the target gave in all "
    )


def test_prefill_is_stitched_and_is_what_transformers_computes(
    quiet: Dump, reference: Callable[[list[int]], list[torch.Tensor]]
) -> None:
    for label, token_ids, forwards in (("long", LONG, 2), ("short", SHORT, 1)):
        chunks = list(rows(quiet, label, "prefill"))
        assert len(chunks) == forwards
        got_ids = [int(i) for chunk in chunks for i in quiet.tokens.token_ids[chunk.begin : chunk.end]]
        positions = [int(i) for chunk in chunks for i in quiet.tokens.positions[chunk.begin : chunk.end]]
        assert (got_ids, positions) == (token_ids, list(range(len(token_ids))))
        assert {(chunk.cached_tokens, chunk.batch, chunk.graph) for chunk in chunks} == {(0, 1, False)}
        for slot, want in enumerate(reference(token_ids)):
            ranks = [torch.cat([read(quiet, rank, slot, chunk) for chunk in chunks]) for rank in quiet.ranks]
            assert torch.equal(ranks[0], ranks[1])
            assert distance(ranks[0], want) < TOLERANCE


def test_every_row_of_the_draft_trees_is_what_transformers_computes_on_its_path(
    quiet: Dump, reference: Callable[[list[int]], list[torch.Tensor]]
) -> None:
    assert quiet.tokens.parents is not None
    assert quiet.tokens.accepted is not None
    ids, positions, parents = quiet.tokens.token_ids, quiet.tokens.positions, quiet.tokens.parents
    for label, prompt in (("long", LONG), ("short", SHORT)):
        context, accepted = list(prompt), 0
        trees = list(rows(quiet, label, "verify"))
        for tree in trees:
            assert tree.end - tree.begin == 6
            assert int(positions[tree.begin]) == len(context)
            path: list[int] = []
            for row in range(tree.begin, tree.end):
                ancestors = [row]
                while parents[ancestors[0]] >= 0:
                    ancestors.insert(0, int(parents[ancestors[0]]))
                assert ancestors[0] == tree.begin
                want = reference([*context, *(int(ids[i]) for i in ancestors)])
                for slot in range(3):
                    for rank in quiet.ranks:
                        got = quiet.read(rank, f"slot.{slot}", row, row + 1)
                        assert distance(got[0], want[slot][-1]) < TOLERANCE
                if quiet.tokens.accepted[row]:
                    path = [int(ids[i]) for i in ancestors]
            context, accepted = context + path, accepted + len(path)
        assert accepted > len(trees)  # more than the roots
        assert len(context) - len(prompt) >= 11


def test_foreign_requests_are_not_in_the_dump(
    site: tuple[Server, Path], dump_serving: Callable[..., Dump], quiet: Dump
) -> None:
    server, capture_dir = site
    done = threading.Event()
    answered: list[int] = []

    def traffic(number: int) -> None:
        ids = ["eagle-parity-0001", "eagle-parity-0123456789abcdef-1x", "user"]
        for turn in range(1000):
            if done.is_set():
                return
            rid = f"{ids[number % 3]}-{number}-{turn}"
            sampling = {"temperature": 0, "max_new_tokens": 6}
            body = {"input_ids": [400 + number] * 20, "rid": rid, "sampling_params": sampling}
            request = urllib.request.Request(
                f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as reply:
                answered.append(len(json.load(reply)["output_ids"]))

    threads = [threading.Thread(target=traffic, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        lines = [{"id": "long", "token_ids": LONG}, {"id": "short", "token_ids": SHORT}]
        busy = dump_serving(*lines, options=("--max-new-tokens", "12"))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert answered
    assert max(request.batch for request in busy.tokens.requests) > 1
    assert set(busy.tokens.token_ids.tolist()) <= {*LONG, *SHORT, 10, 20}
    assert not list(capture_dir.glob("*.safetensors"))
    for label, prompt in (("long", LONG), ("short", SHORT)):
        for slot in range(3):
            both = [
                torch.cat([read(dump, 1, slot, request) for request in rows(dump, label, "prefill")])
                for dump in (busy, quiet)
            ]
            assert len(both[0]) == len(prompt)
            assert distance(*both) < TOLERANCE


def test_text_and_messages_go_through_the_server_s_tokenizer_and_template(
    models: Path, dump_serving: Callable[..., Dump]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    messages = [{"role": "user", "content": "w3 w4"}]
    dump = dump_serving({"id": "text", "text": "w1 w2"}, {"id": "chat", "messages": messages})
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    for label, want in (("text", tokenizer("w1 w2")["input_ids"]), ("chat", rendered)):
        (prefill,) = rows(dump, label, "prefill")
        assert dump.tokens.token_ids[prefill.begin : prefill.end].tolist() == want
        assert list(rows(dump, label, "verify"))


def test_the_plugin_says_hello_for_every_rank(site: tuple[Server, Path]) -> None:
    hellos = {hello.rank: hello for hello in read_hellos(site[1])}
    assert set(hellos) == {0, 1}
    for hello in hellos.values():
        assert (hello.error, hello.gaps, hello.tp_size) == (None, (), 2)
        assert hello.draft is not None
        assert hello.draft["declared_ids"] == [1, 2, 4]
        os.kill(hello.pid, 0)
