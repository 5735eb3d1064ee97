"""Where a draft's tensors lie and how they are called: headers only, one spelling for all trainers.

torch is imported where a tensor is loaded or a pickle opened, and not for the headers of safetensors: `check` must
answer in less time than torch needs to be imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_parity.errors import InputError
from eagle_parity.tensorheader import read_header

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BIN_INDEX = "pytorch_model.bin.index.json"
BIN = "pytorch_model.bin"
TRAINING_STATE = "training_state.pt"


@dataclass(frozen=True)
class DraftTensor:
    """One tensor, not loaded: name in the one spelling, name in the file, dtype (safetensors spelling) and shape."""

    name: str
    stored_name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    def load(self) -> torch.Tensor:
        """The tensor in its own dtype, [*shape], as a copy. Raises InputError when the file has changed."""
        if self.file.suffix == ".safetensors":
            from eagle_parity.tensorfile import open_tensorfile

            return open_tensorfile(self.file).read(self.stored_name)
        return _state_dict(self.file)[self.stored_name].detach().clone()


_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # NeMo Automodel writes `model.`, SpecForge's trainers wrap the draft as `draft_model.`.
    (re.compile(r"^(?:model|draft_model)\."), ""),
    # SpecForge, TorchSpec, EAGLE and BaldEagle call the only layer `midlayer`.
    (re.compile(r"^midlayer\."), "layers.0."),
    # Old checkpoints, renamed by SGLang on loading (sglang llama_eagle3.py, legacy_name_map).
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
    # The name that vLLM gives d2t when it loads it.
    (re.compile(r"^draft_id_to_target_id$"), "d2t"),
)


def spelled(stored: str) -> str:
    """The one spelling of a tensor's name: `layers.0.…`, `fc.weight`, `fc_norm.J.weight`, `input_norm.weight`, …"""
    for pattern, replacement in _RULES:
        stored = pattern.sub(replacement, stored)
    return stored


def find_tensors(path: Path) -> dict[str, DraftTensor]:
    """All tensors of a checkpoint, by the one spelling; reads headers only.

    `path` is a directory (model.safetensors, sharded safetensors with their index, pytorch_model.bin, or a SpecForge
    run step with training_state.pt) or one such file. Raises InputError naming what is missing or damaged.
    """
    if path.is_file():
        return _spelled(_read(path))
    if (path / INDEX).is_file():
        return _spelled(_sharded(path, path / INDEX))
    if (path / SINGLE).is_file():
        return _spelled(_read(path / SINGLE))
    if (path / BIN_INDEX).is_file():
        return _spelled(_sharded(path, path / BIN_INDEX))
    for name in (BIN, TRAINING_STATE):
        if (path / name).is_file():
            return _spelled(_read(path / name))
    raise InputError(
        f"{path} holds no weights: none of {SINGLE}, {INDEX}, {BIN}, {TRAINING_STATE} is there",
        fix="give the directory of an exported draft, or SpecForge's <run>-step<N> directory",
    )


def _spelled(tensors: list[DraftTensor]) -> dict[str, DraftTensor]:
    named: dict[str, DraftTensor] = {}
    for tensor in tensors:
        other = named.setdefault(tensor.name, tensor)
        if other is not tensor:
            raise InputError(
                f"{tensor.file}: {other.stored_name!r} and {tensor.stored_name!r} are the same tensor {tensor.name!r}",
                fix="export the draft again, with one spelling of its names",
            )
    return named


def _read(file: Path) -> list[DraftTensor]:
    if file.suffix == ".safetensors":
        entries = read_header(file).entries
        return [DraftTensor(spelled(name), name, file, entry.dtype, entry.shape) for name, entry in entries.items()]
    from eagle_parity.tensorfile import dtype_name

    tensors = _state_dict(file)
    return [
        DraftTensor(spelled(name), name, file, dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def _state_dict(file: Path) -> Mapping[str, torch.Tensor]:
    """The name -> tensor mapping of a pickle: bare, or SpecForge's under `draft_state_dict` (SpecForge, training)."""
    import torch

    from eagle_parity.readers import pickled

    content = pickled.load(file)
    held = content.get("draft_state_dict", content) if isinstance(content, dict) else content
    tensors = {k: v for k, v in held.items() if isinstance(v, torch.Tensor)} if isinstance(held, dict) else {}
    if not tensors:
        raise InputError(
            f"{file} holds no tensors by name (expected a state dict, or one under draft_state_dict)",
            fix="give an exported draft, or SpecForge's training_state.pt",
        )
    return {str(name): tensor for name, tensor in tensors.items()}


def _sharded(path: Path, index: Path) -> list[DraftTensor]:
    wanted = _weight_map(index)
    tensors: list[DraftTensor] = []
    for shard in sorted(set(wanted.values())):
        file = path / shard
        if not file.is_file() or file.parent != path:
            raise InputError(
                f"{index} names {shard!r}, which is not there",
                fix="copy all shards of the draft, or download it again",
            )
        tensors += _read(file)
    missing = sorted(set(wanted) - {tensor.stored_name for tensor in tensors})
    if missing:
        raise InputError(
            f"{index} names {len(missing)} tensors that no shard holds, the first is {missing[0]!r}",
            fix="download or export the draft again; index and shards do not belong together",
        )
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    try:
        document: Any = json.loads(index.read_text(encoding="utf-8"))
        named = document["weight_map"]
        return {str(name): str(shard) for name, shard in named.items()}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{index} is not a shard index ({type(error).__name__}: {error})",
            fix="download or export the draft again; its index is damaged",
        ) from None
