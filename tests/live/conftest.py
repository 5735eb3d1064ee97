"""One real server for all tests that leave it as they find it, and servers of their own for those that do not.

Package scope, because an idle server takes cores from the tests that follow.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_parity.captures.launch import launched, stop
from eagle_parity.captures.server import Server, connect
from eagle_parity.captures.spool import CAPTURE_DIR
from eagle_parity.cli.main import main
from eagle_parity.dump import Dump, open_dump
from eagle_parity.records import Request

ROOT = Path(__file__).parents[2]
CHUNK = 32  # so that a prompt of 61 tokens takes two forwards
LONG = list(range(100, 161))
SHORT = [5, 6, 7, 8, 9]
TEXTS = (("long", LONG), ("short", SHORT))
NEW_TOKENS = 12  # in each of a dump's answers
ANSWER = {10, 20}  # all that the target ever says
BOUNDARIES = (2, 3, 5)  # what the draft's declared ids 1, 2, 4 mean for this target on this version
TOLERANCE = 1e-5  # relative, float32, two implementations
START_SECONDS = 300.0

needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")


def serve(models: Path, *options: str) -> list[str]:
    """The command of demo/serve.sh."""
    return ["bash", str(ROOT / "demo" / "serve.sh"), str(models / "target"), str(models / "draft"), *options]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Host:
    """A server process that a test may start, stop and start again, with a capture directory of the test's choice."""

    command: list[str]
    capture_dir: Path
    log: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def server(self) -> Server:
        return connect(f"127.0.0.1:{self.port}", timeout=60.0)

    def start(self) -> None:
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                [*self.command, "--port", str(self.port)],
                env={**os.environ, CAPTURE_DIR: str(self.capture_dir)},
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while not self.server.healthy():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def stop(self) -> None:
        if self.process is not None:
            stop(self.process)
            self.process = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


@pytest.fixture(scope="package")
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


@pytest.fixture(scope="package")
def site(models: Path) -> Iterator[tuple[Server, Path]]:
    """The server that the tests share, and its capture directory."""
    command = serve(models, "--chunked-prefill-size", str(CHUNK), "--port", str(free_port()))
    with launched(command, timeout=START_SECONDS) as started:
        yield started


def write_prompts(path: Path, *lines: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def dumper(site: tuple[Server, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Dump]:
    """Takes the lines of a prompt file and options, and gives the dump that `dump serving` makes with them."""
    server, capture_dir = site

    def run(*lines: dict[str, Any], options: tuple[str, ...] = ()) -> Dump:
        scratch = tmp_path_factory.mktemp("dump")
        prompts = write_prompts(scratch / "prompts.jsonl", *lines)
        args = ["--prompts", str(prompts), "--server", server.url, "--capture-dir", str(capture_dir)]
        assert main(["dump", "serving", "-o", str(scratch / "out"), *args, *options]) == 0
        return open_dump(scratch / "out")

    return run


@pytest.fixture(scope="package")
def dump_serving(site: tuple[Server, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Dump]:
    return dumper(site, tmp_path_factory)


@pytest.fixture(scope="package")
def quiet(dump_serving: Callable[..., Dump]) -> Dump:
    """A dump made while nobody else uses the server."""
    return quiet_dump(dump_serving)


def quiet_dump(dump_serving: Callable[..., Dump]) -> Dump:
    """A dump of TEXTS."""
    lines = [{"id": label, "token_ids": token_ids} for label, token_ids in TEXTS]
    return dump_serving(*lines, options=("--max-new-tokens", str(NEW_TOKENS)))


States = Callable[[list[int]], list[torch.Tensor]]


@pytest.fixture(scope="package")
def reference(models: Path) -> States:
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


def check_prefill(dump: Dump, label: str, token_ids: list[int], reference: States) -> list[Request]:
    """The prompt's rows are there, each once and in order, and are what transformers computes. Its forwards."""
    chunks = list(rows(dump, label, "prefill"))
    got_ids = [int(i) for chunk in chunks for i in dump.tokens.token_ids[chunk.begin : chunk.end]]
    positions = [int(i) for chunk in chunks for i in dump.tokens.positions[chunk.begin : chunk.end]]
    assert (got_ids, positions) == (token_ids, list(range(len(token_ids))))
    for slot, want in enumerate(reference(token_ids)):
        ranks = [torch.cat([read(dump, rank, slot, chunk) for chunk in chunks]) for rank in dump.ranks]
        for own in ranks:
            assert torch.equal(own, ranks[0])
        assert distance(ranks[0], want) < TOLERANCE
    return chunks


def check_trees(dump: Dump, label: str, prompt: list[int], reference: States) -> tuple[int, int, int]:
    """Every row of the draft trees is what transformers computes on its path: accepted rows, trees, tokens said."""
    assert dump.tokens.parents is not None
    assert dump.tokens.accepted is not None
    ids, positions, parents = dump.tokens.token_ids, dump.tokens.positions, dump.tokens.parents
    context, accepted = list(prompt), 0
    trees = list(rows(dump, label, "verify"))
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
                for rank in dump.ranks:
                    got = dump.read(rank, f"slot.{slot}", row, row + 1)
                    assert distance(got[0], want[slot][-1]) < TOLERANCE
            if dump.tokens.accepted[row]:
                path = [int(ids[i]) for i in ancestors]
        context, accepted = context + path, accepted + len(path)
    return accepted, len(trees), len(context) - len(prompt)
