"""Time and memory of the ordering search and of one forward, for a draft of Kimi's size with random weights.

python benchmarks/ordering.py [--hidden 7168] [--boundaries 62] [--rows 2000] [--vocabulary 32000] [--device auto]

The states are a random walk over the layers, stored as a dump stores them (bf16, one file). The right answers are
planted: the draft's own distribution under one ordering, so that there is something to find. Weights of an expert-free
Kimi draft in Llama style: 64 heads of 128, 12,288 wide in between. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle_parity.draft.forward import Draft, open_reference
from eagle_parity.draft.ordering import rank_orderings
from eagle_parity.draft.passages import Passage
from eagle_parity.draft.teacher import Lesson, Teacher
from eagle_parity.records import Boundary, IntArray, boundary_name
from eagle_parity.tensorfile import TensorFileWriter, open_tensorfile

PASSAGE = 250
VOCABULARY = 163840


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--boundaries", type=int, default=62, help="stored states, the embedding among them")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--vocabulary", type=int, default=32000, help="of the draft")
    parser.add_argument("--truth", default="3,31,59")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--forward-only", action="store_true", help="one exact forward of 4,000 tokens, nothing else")
    parser.add_argument("--exact", action="store_true", help="float32 products in place of bf16 ones")
    parser.add_argument("--work", type=Path, help="where the weights and states go (some GB; default: a temporary one)")
    args = parser.parse_args()
    truth: tuple[Boundary, ...] = tuple(int(k) for k in args.truth.split(","))
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        folder = Path(work)
        write_draft(folder, args.hidden, args.vocabulary)
        if args.forward_only:
            print(json.dumps(one_forward(folder, args.hidden)))
            return
        write_states(folder / "states.safetensors", args.hidden, args.boundaries, args.rows)
        print(json.dumps(search(folder, args, truth)))


def write_draft(folder: Path, hidden: int, vocabulary: int) -> None:
    heads, between = max(1, hidden // 112), hidden * 12 // 7
    width = 128 if hidden >= 1024 else 32
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        **{f"midlayer.self_attn.{name}_proj.weight": (heads * width, 2 * hidden) for name in "qkv"},
        "midlayer.self_attn.o_proj.weight": (hidden, heads * width),
        "midlayer.mlp.gate_proj.weight": (between, hidden),
        "midlayer.mlp.up_proj.weight": (between, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, between),
        "lm_head.weight": (vocabulary, hidden),
        "embed_tokens.weight": (VOCABULARY, hidden),
        **{f"midlayer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")},
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    generator = torch.Generator().manual_seed(0)
    writer = TensorFileWriter(
        folder / "model.safetensors",
        {name: ("BF16", shape) for name, shape in shapes.items()} | {"d2t": ("I64", (vocabulary,))},
    )
    for name, shape in shapes.items():
        step = max(1, 2**26 // math.prod(shape[1:]))
        for at in range(0, shape[0], step):
            size = (min(step, shape[0] - at), *shape[1:])
            block = torch.ones(size) if len(shape) == 1 else torch.randn(size, generator=generator) / shape[1] ** 0.5
            writer.write(name, at, block.to(torch.bfloat16))
    writer.write("d2t", 0, torch.arange(vocabulary) * (VOCABULARY // vocabulary - 1))
    writer.close()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "intermediate_size": between,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": vocabulary,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_states(path: Path, hidden: int, boundaries: int, rows: int) -> None:
    names = [boundary_name(k) for k in range(boundaries)]
    writer = TensorFileWriter(path, dict.fromkeys(names, ("BF16", (rows, hidden))))
    generator = torch.Generator().manual_seed(1)
    stream = torch.randn(rows, hidden, generator=generator)
    for name in names:
        writer.write(name, 0, stream.to(torch.bfloat16))
        stream = stream + 0.25 * stream.std() * torch.randn(rows, hidden, generator=generator)
    writer.close()


def planted(draft: Draft, rows: int, truth: tuple[Boundary, ...], read: Any) -> Teacher:
    """Lessons whose right answers are the draft's own under `truth`, sharpened and with noise."""
    generator = torch.Generator().manual_seed(2)
    lessons = []
    for begin in range(0, rows, PASSAGE):
        index: IntArray = np.arange(begin, min(begin + PASSAGE, rows), dtype=np.int64)
        ids = torch.randint(0, VOCABULARY, (len(index),), generator=generator)
        passage = Passage(index, ids.numpy(), np.ones(len(index), dtype=bool))
        fed = torch.cat([read(k, index).float() for k in truth], dim=-1)[:-1].to(draft.device)
        positions = torch.arange(len(index) - 1, device=draft.device).unsqueeze(0)
        tokens = draft.embedded(ids[1:].unsqueeze(0).to(draft.device))
        hidden = draft.begin(draft.fuse(fed).unsqueeze(0), tokens, positions).hidden[0]
        logits = 1.5 * draft.logits(hidden)
        logits += torch.randn(logits.shape, generator=generator).to(draft.device)
        logs = logits.log_softmax(-1)
        shares = logs.exp()
        means = torch.cat([shares @ block.float() for _, block in draft.head.blocks(draft.device)])
        wanted = draft.target_ids[logits.argmax(-1)]
        counted = torch.ones(len(wanted), dtype=torch.bool, device=draft.device)
        lessons.append(Lesson(passage, means, -(shares * logs).sum(-1), wanted, counted))
    return Teacher(tuple(lessons), "planted", None)


def search(folder: Path, args: argparse.Namespace, truth: tuple[Boundary, ...]) -> dict[str, Any]:
    began = time.monotonic()
    draft = open_reference(folder, device=args.device, fast=not args.exact)
    states = open_tensorfile(folder / "states.safetensors")

    def read(boundary: Boundary, rows: IntArray) -> torch.Tensor:
        return states.read(boundary_name(boundary), int(rows[0]), int(rows[-1]) + 1)

    teacher = planted(draft, args.rows, truth, read)
    loaded = time.monotonic()
    cpu = time.process_time()
    done = 0

    def step(rows: int) -> None:
        nonlocal done
        done += rows

    found = rank_orderings(
        draft, teacher, range(args.boundaries), read, num_layers=args.boundaries - 1, staged=True, step=step
    )
    if draft.device.type == "cuda":
        torch.cuda.synchronize()
    return {
        "device": str(draft.device),
        "threads": torch.get_num_threads(),
        "hidden": args.hidden,
        "boundaries": args.boundaries,
        "rows": found.rows,
        "load_and_plant_s": round(loaded - began, 1),
        "search_s": round(time.monotonic() - loaded, 1),
        "search_cpu_s": round(time.process_time() - cpu, 1),
        "candidate_rows": done,
        "tried": found.tried,
        "of": found.total,
        "found": list(found.ranking[0].order),
        "right": found.best == truth,
        "z": round(found.z, 1),
        "how": found.how,
        **memory(),
    }


def one_forward(folder: Path, hidden: int) -> dict[str, Any]:
    """4,000 tokens through the exact forward, two prompts of 2,000."""
    draft = open_reference(folder, device="cpu")
    began = time.monotonic()
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        fed = torch.randn(2000, 3 * hidden, generator=generator).bfloat16()
        ids = torch.randint(0, VOCABULARY, (1, 2000), generator=generator)
        step = draft.begin(draft.fuse(fed).unsqueeze(0), draft.embedded(ids), torch.arange(2000).unsqueeze(0))
        best = [draft.logits(step.hidden[0, at : at + 256]).argmax(-1) for at in range(0, 2000, 256)]
        assert len(torch.cat(best)) == 2000
    return {"tokens": 4000, "forward_s": round(time.monotonic() - began, 1), **memory()}


def memory() -> dict[str, float]:
    peak = {"peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)}
    if torch.cuda.is_available():
        peak["peak_gpu_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return peak


if __name__ == "__main__":
    with torch.inference_mode():
        main()
