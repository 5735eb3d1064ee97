"""NeMo Automodel: manifest.json and `shard-NNNNNN.safetensors`, many samples a file.

precompute_eagle3 stacks fields [n, S, …]: aux_hidden_states [n, S, K*H], attention_mask, and input_ids and loss_mask
SHIFTED LEFT by one (target.py, _shift_left_with_zero), right-padded to S. So stored id j belongs to row j+1, the
first token of every sample is lost, and with it the first row.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle_parity.errors import InputError
from eagle_parity.readers.contents import Contents
from eagle_parity.readers.format import SAFETENSORS, Batch, Format, Recorded
from eagle_parity.readers.stored import Rows, Stored, assemble, broken, integers, states, tensor
from eagle_parity.readers.torchspec import prefix
from eagle_parity.records import Model

MANIFEST = "manifest.json"
SHIFTED = "ids and loss mask are stored shifted by one: moved back, and the first row, whose token is lost, is left out"


FIELDS = ("input_ids", "attention_mask", "aux_hidden_states")


def _recognises(contents: Contents) -> bool:
    dims = {name: contents.tensors[name].dim() for name in FIELDS if name in contents.tensors}
    return (
        dims == {"input_ids": 2, "attention_mask": 2, "aux_hidden_states": 3} and "hidden_states" not in contents.keys
    )


def _count(contents: Contents) -> int:
    shapes = {name: tuple(tensor(contents, name).shape) for name in FIELDS}
    if len({shape[:2] for shape in shapes.values()}) != 1 or [len(shape) for shape in shapes.values()] != [2, 2, 3]:
        raise broken(contents.path, f"the fields have the shapes {shapes}, expected [n, S], [n, S] and [n, S, W]")
    return shapes["input_ids"][0]


def _pick(contents: Contents, index: int) -> Contents:
    count = _count(contents)
    held = {name: value[index] for name, value in contents.tensors.items() if value.dim() and value.shape[0] == count}
    return Contents(contents.path, held, {})


def _read(contents: Contents, target: Model) -> Stored:
    path = contents.path
    joined = states(path, "aux_hidden_states", tensor(contents, "aux_hidden_states"))
    slots, width = _blocks(path, joined, target)
    end = prefix(path, tensor(contents, "attention_mask"))
    if end < 2:
        raise broken(path, f"a sample has {end} token, and the first one is not stored")
    ids = integers(path, "input_ids", tensor(contents, "input_ids"))[: end - 1]
    rows = [Rows(joined[1:end, at : at + width]) for at in range(0, slots * width, width)]
    sample = assemble(path, ids, contents.tensors.get("loss_mask"), rows, None, (SHIFTED,))
    return replace(sample, positions=sample.positions + 1)


def _blocks(path: Path, joined: torch.Tensor, target: Model) -> tuple[int, int]:
    """How many slots the joined state has, and how wide each is: the manifest knows, or the target."""
    total = joined.shape[1]
    recorded = _recorded(path.parent)
    slots = len(recorded.slots) if recorded else total // target.hidden_size if target.hidden_size else 0
    if slots == 0 or total % slots:
        raise broken(
            path,
            f"aux_hidden_states is {total} wide and {MANIFEST} does not say how many layers that is"
            if slots == 0
            else f"aux_hidden_states is {total} wide, no multiple of the {slots} layers that {MANIFEST} names",
            fix=f"put the cache's {MANIFEST} beside its shards, or name the target with --model",
        )
    return slots, total // slots


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{folder / MANIFEST} cannot be read: {error}", fix="copy the cache again") from None
    return document if isinstance(document, dict) else {}


def _recorded(folder: Path) -> Recorded | None:
    """aux_layer_ids, outputs of layers, in the order in which the states are joined."""
    ids = _manifest(folder).get("aux_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        return None
    return Recorded(tuple(i + 1 for i in ids), None, MANIFEST)


def _longest(folder: Path) -> int | None:
    length = _manifest(folder).get("seq_length")
    return length - 1 if type(length) is int else None


FORMAT = Format(
    name="nemo",
    title="NeMo Automodel cache",
    suffixes=SAFETENSORS,
    recognises=_recognises,
    read=_read,
    default_source="NeMo Automodel: ids 1, n//2-1, n-4 are outputs of layers",
    last=None,
    batch=Batch(_count, _pick),
    recorded=_recorded,
    longest=_longest,
)
