"""Which sources the lab runs on. Seeds and sizes were chosen once; rules must not know them."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.lab.sources import Source, random_net, recording, tiny_model


def fast() -> list[Source]:
    """Two small networks: what `make test` runs."""
    return [random_net(101, tp=2, layers=7), random_net(102, tp=4, layers=7, hidden=64, tail=0.03)]


def everything(work: Path) -> list[Source]:
    """All sources; real models are written below `work`."""
    nets = [
        random_net(201, tp=2),
        random_net(202, tp=4, hidden=192, layers=12, prompts=(64, 50, 71)),
        random_net(203, tp=8, hidden=256, layers=16),
        random_net(204, tp=2, dtype=torch.float32),
        random_net(205, tp=8, dtype=torch.float32, hidden=128, layers=10),
        random_net(206, tp=4, dtype=torch.float16, hidden=112),
        random_net(207, tp=2, slow=0.3, layers=14),
        random_net(208, tp=4, slow=0.15, layers=10, hidden=320),
        random_net(209, tp=4, massive=15, hidden=256),
        random_net(210, tp=2, massive=25, hidden=384, layers=10),
        random_net(211, tp=8, tail=0.02, hidden=160, layers=12),
        random_net(212, tp=2, tail=0.05, hidden=224),
        random_net(213, tp=2, noise=3.0, hidden=144),
        random_net(214, tp=4, hidden=72, layers=7, prompts=(22, 19, 31)),
        random_net(215, tp=1, hidden=96),
        random_net(216, tp=8, hidden=512, layers=9, prompts=(90, 70)),
    ]
    models = [
        tiny_model(work / "llama-a", "llama", seed=11, tp=2),
        tiny_model(work / "llama-b", "llama", seed=12, tp=4, layers=8, hidden=128),
        tiny_model(work / "llama-c", "llama", seed=13, tp=8, dtype="float32", hidden=64),
        tiny_model(work / "moe-a", "deepseek", seed=14, tp=2),
        tiny_model(work / "moe-b", "deepseek", seed=15, tp=4, layers=8, hidden=96),
        tiny_model(work / "moe-c", "deepseek", seed=16, tp=8, dtype="float32"),
    ]
    runs = [recording("nofus513"), recording("moe517", "runA"), recording("moe517", "runB")]
    return nets + models + runs
