"""speculators, in three generations: v0 and v1 torch files, and safetensors beside a data set.

v0 (before 0.3): input_ids, loss_mask [T], hidden_state [T, 3H], target [T, H].
v1 (0.3.0 to 0.4.0.1, scripts/data_generation_offline.py): `data_I.pt` with hidden_states a list of K tensors [T, H], in
    layer order, the last of which the trainer takes as the verifier's last state, before the final norm;
    data_config.json records the layer ids, which are outputs of layers.
hs (0.5.0 and later): `hs_I.safetensors` with hidden_states [T, K, H] and token_ids [T], or float8 with
    hidden_states_scales; I is the row of an arrow data set that holds the loss mask. Nothing records the layers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from eagle_parity.readers import arrow
from eagle_parity.readers.contents import Contents
from eagle_parity.readers.format import SAFETENSORS, TORCH, Format, Mask, Recorded
from eagle_parity.readers.stored import Rows, Stored, assemble, broken, integers, split, states, tensor
from eagle_parity.records import Model

CONFIG = "data_config.json"
_PRE = "speculators train/data.py takes the last of the K states, which is before the final norm"
_FILE_NUMBER = re.compile(r"(\d+)$")

# ------------------------------------------------------------------------------------------------------------- v0


def _recognises_v0(contents: Contents) -> bool:
    return contents.keys >= {"input_ids", "hidden_state", "target"} and "aux_hidden_state" not in contents.keys


def _read_v0(contents: Contents, target: Model) -> Stored:
    path = contents.path
    ids = integers(path, "input_ids", tensor(contents, "input_ids"))
    joined = states(path, "hidden_state", tensor(contents, "hidden_state"))
    last = states(path, "target", tensor(contents, "target"))
    slots = split(path, joined, last, names=("hidden_state", "target"), vocab_size=target.vocab_size)
    return assemble(path, ids, contents.tensors.get("loss_mask"), slots, Rows(last))


# ------------------------------------------------------------------------------------------------------------- v1


def _recognises_v1(contents: Contents) -> bool:
    return contents.keys >= {"input_ids", "hidden_states"} and isinstance(contents.others.get("hidden_states"), list)


def _read_v1(contents: Contents, _target: Model) -> Stored:
    path = contents.path
    ids = integers(path, "input_ids", tensor(contents, "input_ids"))
    found = contents.others.get("hidden_states")
    if not isinstance(found, list) or len(found) < 2 or not all(isinstance(item, torch.Tensor) for item in found):
        raise broken(path, f"hidden_states is {_kinds(found)}, expected a list of 2 or more tensors [T, H]")
    blocks = [Rows(states(path, f"hidden_states[{i}]", block.detach())) for i, block in enumerate(found)]
    widths = {block.width for block in blocks}
    if len(widths) > 1:
        raise broken(path, f"hidden_states holds tensors of the widths {sorted(widths)}, expected one width")
    return assemble(path, ids, contents.tensors.get("loss_mask"), blocks[:-1], blocks[-1])


def _kinds(found: object) -> str:
    return f"a list of {[type(i).__name__ for i in found][:6]}" if isinstance(found, list) else type(found).__name__


def _side_file(folder: Path) -> dict[str, Any]:
    """data_config.json of a directory, or {} when there is none or it is damaged: then nothing is recorded."""
    try:
        document = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _recorded(folder: Path) -> Recorded | None:
    """The boundaries that data_config.json records: id + 1, ascending, because the capture follows the forward.

    speculators v0.3.0, custom_worker.py: the ids are a frozenset, and the states are appended layer by layer.
    """
    states_part = _side_file(folder).get("hidden_states")
    ids = states_part.get("layer_ids") if isinstance(states_part, dict) else None
    if not isinstance(ids, list) or len(ids) < 2 or not all(type(i) is int and i >= 0 for i in ids):
        return None
    boundaries = sorted(i + 1 for i in ids)
    return Recorded(tuple(boundaries[:-1]), boundaries[-1], CONFIG)


def _longest(folder: Path) -> int | None:
    """seq_length - 1: vLLM needs room for one token, so the generator cuts there (speculators v0.4)."""
    part = _side_file(folder).get("data")
    length = part.get("seq_length") if isinstance(part, dict) else None
    return length - 1 if type(length) is int else None


def _v1_layers(num_layers: int) -> tuple[int, ...]:
    return (3, num_layers // 2 + 1, num_layers - 2)


# ------------------------------------------------------------------------------------------------------------- hs


def is_stack(contents: Contents) -> bool:
    """Whether a file holds one tensor [T, K, H] and its token ids, as vLLM's connectors write it."""
    stacked = contents.tensors.get("hidden_states")
    return stacked is not None and stacked.dim() == 3 and "token_ids" in contents.tensors


def _recognises_hs(contents: Contents) -> bool:
    return is_stack(contents) and ("hidden_states_scales" in contents.keys or arrow.find(contents.path) is not None)


def read_stack(contents: Contents, _target: Model) -> Stored:
    """A sample from hidden_states [T, K, H] and token_ids [T]: K - 1 slots and the last state."""
    path = contents.path
    ids = integers(path, "token_ids", tensor(contents, "token_ids"))
    stacked = tensor(contents, "hidden_states")
    if stacked.dim() != 3 or 0 in stacked.shape or not stacked.dtype.is_floating_point:
        raise broken(path, f"hidden_states is {stacked.dtype} {list(stacked.shape)}, expected floats [T, K, H]")
    scales = _scales(contents, stacked)
    blocks = [Rows(stacked[:, k], scales) for k in range(stacked.shape[1])]
    if len(blocks) == 1:
        return assemble(path, ids, None, blocks, None)
    return assemble(path, ids, None, blocks[:-1], blocks[-1])


def _scales(contents: Contents, stacked: torch.Tensor) -> torch.Tensor | None:
    path, found = contents.path, contents.tensors.get("hidden_states_scales")
    if stacked.dtype.itemsize > 1:
        if found is not None:
            raise broken(path, f"hidden_states_scales stands beside hidden_states of {stacked.dtype}, not float8")
        return None
    if found is None:
        raise broken(path, f"hidden_states is {stacked.dtype} and hidden_states_scales is missing")
    if found.numel() != stacked.shape[0] or not found.dtype.is_floating_point:
        raise broken(
            path,
            f"hidden_states_scales is {found.dtype} {list(found.shape)}, expected one float a token: "
            f"[{stacked.shape[0]}, 1, 1]",
        )
    return found.reshape(-1)


def _loss_mask(file: Path, sample: Stored) -> Mask:
    directory = arrow.find(file)
    if directory is None:
        return Mask(None, "no arrow data set lies beside the files, so the loss mask is unknown")
    number = _FILE_NUMBER.search(file.stem)
    if number is None:
        return Mask(None, "the file name holds no row number, so the loss mask is unknown")
    return arrow.loss_mask(directory, int(number[1]), sample.token_ids)


V0 = Format(
    name="speculators-v0",
    title="speculators v0 .pt",
    suffixes=TORCH,
    recognises=_recognises_v0,
    read=_read_v0,
    default_slots=_v1_layers,
    default_source="speculators v0.3.0: ids 2, n//2, n-3 are outputs of layers; v0 itself is not documented",
    last="pre",
    last_source=_PRE,
    numbered=True,
)
V1 = Format(
    name="speculators-v1",
    title="speculators v1 .pt",
    suffixes=TORCH,
    recognises=_recognises_v1,
    read=_read_v1,
    default_slots=_v1_layers,
    default_source="speculators v0.3.0 to v0.4.0.1: ids 2, n//2, n-3, n-1 are outputs of layers",
    last="pre",
    last_source=_PRE,
    one_tensor=True,
    recorded=_recorded,
    longest=_longest,
    numbered=True,
)
HS = Format(
    name="speculators",
    title="speculators hs .safetensors",
    suffixes=SAFETENSORS,
    recognises=_recognises_hs,
    read=read_stack,
    default_source="speculators launch_vllm.py: ids 2, n//2, n-3, n, stored in ascending order",
    last="pre",
    last_source=_PRE,
    one_tensor=True,
    loss_mask=_loss_mask,
    numbered=True,
)
