"""TorchSpec: debug dumps of training batches, the only thing that it leaves on disk.

utils/train_dump.py writes `batch` (input_ids, attention_mask, loss_mask [B, T], ids not shifted), hidden_states
[B, T, K*H] and last_hidden_states [B, T, H]. The normal path hands raw buffers over in memory (Mooncake).
"""

from __future__ import annotations

from pathlib import Path

import torch

from eagle_parity.readers.contents import Contents
from eagle_parity.readers.format import TORCH, Batch, Format
from eagle_parity.readers.stored import Rows, Stored, assemble, broken, integers, split, states, tensor
from eagle_parity.records import Model

COLUMNS = ("input_ids", "attention_mask", "loss_mask")
STATES = ("hidden_states", "last_hidden_states")


def _recognises(contents: Contents) -> bool:
    return isinstance(contents.others.get("batch"), dict) and "hidden_states" in contents.keys


def _count(contents: Contents) -> int:
    return int(_ids(contents).shape[0])


def _ids(contents: Contents) -> torch.Tensor:
    batch = contents.others.get("batch")
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise broken(contents.path, f"batch holds no input_ids [B, T]; the file holds {contents.describe()}")
    return ids.detach()


def _pick(contents: Contents, index: int) -> Contents:
    """Sample i: the batch's columns [T] and the states [T, W]."""
    size = _ids(contents).shape[0]
    columns = {name: contents.others["batch"].get(name) for name in COLUMNS}
    columns |= {name: tensor(contents, name) for name in STATES}
    for name, value in columns.items():
        if isinstance(value, torch.Tensor) and (value.dim() < 2 or value.shape[0] != size):
            raise broken(contents.path, f"{name} is {list(value.shape)}, expected [{size}, T, …] as batch.input_ids")
    held = {name: value.detach()[index] for name, value in columns.items() if isinstance(value, torch.Tensor)}
    return Contents(contents.path, held, {})


def _read(contents: Contents, target: Model) -> Stored:
    path = contents.path
    ids = integers(path, "batch.input_ids", tensor(contents, "input_ids"))
    joined = states(path, "hidden_states", tensor(contents, "hidden_states"))
    last = states(path, "last_hidden_states", tensor(contents, "last_hidden_states"))
    slots = split(path, joined, last, names=STATES, vocab_size=target.vocab_size)
    sample = assemble(path, ids, contents.tensors.get("loss_mask"), slots, Rows(last))
    if "attention_mask" not in contents.tensors:
        return sample
    end = prefix(path, contents.tensors["attention_mask"])
    return sample if end >= sample.length else sample.cut(0, end, "right padding (attention mask 0) is left out")


def prefix(path: Path, attention: torch.Tensor) -> int:
    """How many leading ones an attention mask [T] has.

    Raises InputError where there is none, or ones follow a zero (left padding).
    """
    ones = integers(path, "attention_mask", attention) != 0
    end = len(ones) if ones.all() else int(ones.argmin())
    if end == 0 or ones[end:].any():
        raise broken(
            path,
            "the attention mask is no run of ones followed by padding, so positions are unknown",
            fix="write the file again with right padding",
        )
    return end


FORMAT = Format(
    name="torchspec",
    title="TorchSpec debug dump .pt",
    suffixes=TORCH,
    recognises=_recognises,
    read=_read,
    default_source="TorchSpec: ids 1, n//2-1, n-4 are outputs of layers",
    last="post",
    last_source="TorchSpec train_config.py: after the final norm with its SGLang and HF engines, before it with vLLM",
    batch=Batch(_count, _pick),
)
