"""A real SGLang server to break: models, the server with the faults' plugin in it, probes and comparisons.

Everything goes through the command line's own entry point, as a user's shell would.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle_parity.captures.launch import launched
from eagle_parity.captures.server import Server
from eagle_parity.cli.main import main
from tests.lab.engine.engine_faults import CHUNK, HEALTHY, SWITCH
from tests.lab.run import Outcome

ROOT = Path(__file__).parents[2]
ENGINE = Path(__file__).parent / "engine"
LAYERS = 8
DECLARED = (1, 3, 5)  # the config's ids
USUAL = (2, 4, 6)  # the boundaries that they mean, for both architectures on this version
LENGTHS = (21, 30, 47, 70)  # those over CHUNK take two or three forwards
SEED = 20
MANY = 8  # tokens a prompt
Order = Sequence[Any]


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    text: str


def run(*words: object) -> Said:
    """One command line of eagle-parity."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main([str(word) for word in words])
    return Said(code, out.getvalue())


# ----------------------------------------------------------------------------------------------------------- models


def make_models(out: Path, arch: str, expert_width: int) -> None:
    """A target whose norms have weights of their own, and a draft that declares DECLARED: out/target, out/draft."""
    script = ROOT / "demo" / "models.py"
    ids = ",".join(map(str, DECLARED))
    command = [sys.executable, script, "--out", out, "--arch", arch, "--layers", str(LAYERS), "--dtype", "float32"]
    command += ["--expert-width", str(expert_width), "--draft", f"draft={ids}"]
    subprocess.run(command, check=True, capture_output=True)
    g = torch.Generator().manual_seed(SEED)

    def grow(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("norm.weight"):
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=g)).abs_()

    edit_weights(out / "target", grow)


def edit_weights(model: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})


def edit_config(model: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    file = model / "config.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config, indent=2))


def prompts(path: Path, vocabulary: int = 512) -> Path:
    """Prompts of LENGTHS tokens, as ids."""
    draw = random.Random(SEED)
    lines = [
        {"id": f"p{i}", "token_ids": [draw.randrange(4, vocabulary) for _ in range(n)]} for i, n in enumerate(LENGTHS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# ----------------------------------------------------------------------------------------------------------- server


def command(models: Path, switch: Path, tp: int, flags: Sequence[str] = ()) -> list[str]:
    """The words that start a server of models/target and models/draft with the faults' plugin in it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(ENGINE), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"TP": tp, "PYTHONPATH": path, "PYTHON": sys.executable, SWITCH: switch, "PREFIX_CACHE": 1}
    return [
        "env",
        *(f"{name}={value}" for name, value in settings.items()),
        "bash",
        str(ROOT / "demo" / "serve.sh"),
        str(models / "target"),
        str(models / "draft"),
        *("--chunked-prefill-size", str(CHUNK), "--port", str(port), *flags),
    ]


@dataclass
class Bench:
    """A running server, its models, and a folder for what comes out."""

    work: Path
    models: Path
    tp: int
    server: Server
    capture_dir: Path
    switch: Path
    dtype: str = "float32"
    count: int = 0
    states: Path | None = None
    """The training dump, with every boundary."""

    def place(self, kind: str) -> Path:
        self.count += 1
        return self.work / f"{kind}-{self.count}"

    def probe(self, fault: str = HEALTHY, *options: object, of: Path | None = None) -> tuple[Said, Path]:
        """A serving dump of the server while it has this fault."""
        fresh = self.switch.with_suffix(".new")
        fresh.write_text(fault)
        fresh.replace(self.switch)
        out = self.place("serving")
        where = ("--server", self.server.url, "--capture-dir", self.capture_dir)
        what = of or self.work / "prompts.jsonl"
        said = run("dump", "serving", "-o", out, "--prompts", what, *where, "--max-new-tokens", MANY, *options)
        return said, out

    def training(self, order: Order = USUAL) -> Path:
        """What the draft was trained on: transformers' forward of the tokens that the healthy server saw."""
        if self.states is None:
            said, healthy = self.probe()
            assert said.code == 0, said.text
            self.states = self.compute(healthy)
        out = self.place("training")
        shutil.copytree(self.states, out)
        manifest = json.loads((out / "manifest.json").read_text())
        manifest["slot_boundaries"] = list(order)
        (out / "manifest.json").write_text(json.dumps(manifest))
        return out

    def compute(self, tokens: Path | None = None, of: Path | None = None, model: Path | None = None) -> Path:
        """transformers' forward of a dump's tokens, or of prompts."""
        out = self.place("states")
        source = ("--tokens-from", tokens) if of is None else ("--prompts", of)
        slots = ",".join(map(str, USUAL))
        model = model or self.models / "target"
        said = run("dump", "training", "-o", out, "--model", model, *source, "--slots", slots, "--dtype", self.dtype)
        assert said.code == 0, said.text
        return out

    def compare(self, training: Path, serving: Path, *options: object) -> tuple[Outcome, Path]:
        """What `compare` says, and its JSON report."""
        report = self.place("report").with_suffix(".json")
        said = run("compare", training, serving, "--report", f"json={report}", *options)
        return outcome(report, said), report


def outcome(report: Path, said: Said) -> Outcome:
    """The findings of a JSON report of compare or check."""
    assert report.exists(), said.text
    document = json.loads(report.read_text())
    found = document["findings"]
    errors = [f for f in found if f["severity"] == "error"]
    return Outcome(
        document["verdict"],
        tuple(f["code"] for f in errors),
        tuple(f["code"] for f in found if f["severity"] == "warning"),
        tuple(f["slot"] for f in errors),
    )


def models(
    work: Path, arch: str = "deepseek", edit: Callable[[Path], None] | None = None, expert_width: int = 64
) -> Path:
    """work/models, changed by `edit`."""
    out = work / "models"
    if not out.exists():
        make_models(out, arch, expert_width)
        if edit is not None:
            edit(out)
    return out


@contextlib.contextmanager
def bench(
    work: Path,
    *,
    arch: str = "deepseek",
    tp: int = 2,
    edit: Callable[[Path], None] | None = None,
    flags: Sequence[str] = (),
    dtype: str = "float32",
    expert_width: int = 64,
) -> Iterator[Bench]:
    """Start a server; stop it at the end."""
    work.mkdir(parents=True, exist_ok=True)
    own = models(work, arch, edit, expert_width)
    prompts(work / "prompts.jsonl", json.loads((own / "target" / "config.json").read_text())["vocab_size"])
    switch = work / "fault"
    switch.write_text(HEALTHY)
    with launched(command(own, switch, tp, flags), timeout=400) as (server, capture_dir):
        yield Bench(work, own, tp, server, capture_dir, switch, dtype)
