"""What a draft borrows from its target: embedding, head and final norm, found in the target's directory by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_parity.draft.products import rms_norm
from eagle_parity.draft.table import Table, open_table
from eagle_parity.draft.weights import INDEX, SINGLE, DraftTensor
from eagle_parity.errors import InputError
from eagle_parity.tensorfile import open_tensorfile

# model.embed_tokens.weight; Kimi-K2.5: language_model.model.embed_tokens.weight, language_model.lm_head.weight
PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
NESTED = ("text_config", "language_config", "llm_config")


@dataclass(frozen=True)
class Target:
    """`embed` and `head` are [vocab, H] (one and the same where the target ties them); `norm` is [H]."""

    path: Path
    embed: Table
    head: Table
    norm: torch.Tensor
    eps: float

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """The final norm of boundary n [.., H], as `final.norm` holds it, float32."""
        return rms_norm(states.float(), self.norm, self.eps)


def open_target(path: Path | str, device: torch.device | str = "cpu") -> Target:
    """Open a target's directory; only the shards that hold its embedding, head and final norm are looked at.

    Raises InputError for a directory that lacks them.
    """
    path, device = Path(path), torch.device(device)
    config = _config(path)
    where = _files(path)
    embed = open_table(_find(path, where, "embed_tokens.weight"), device)
    tied = config.get("tie_word_embeddings") is True
    head = _find(path, where, "lm_head.weight", required=not tied)
    norm = _find(path, where, "norm.weight").load().float().to(device)
    eps = config.get("rms_norm_eps")
    return Target(
        path,
        embed,
        embed if head is None else open_table(head, device),
        norm,
        float(eps) if isinstance(eps, int | float) else 1e-6,
    )


def _config(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: its config.json cannot be read: {error}", fix="give the target model's directory"
        ) from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: config.json is no object", fix="give the target model's directory")
    return next((document[key] for key in NESTED if isinstance(document.get(key), dict)), document)


def _files(path: Path) -> Mapping[str, Path]:
    """The file of every tensor, by its stored name."""
    if (path / INDEX).is_file():
        try:
            named = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return {str(name): path / Path(str(shard)).name for name, shard in named.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path / INDEX} is no shard index: {error}", fix="download the target again") from None
    if (path / SINGLE).is_file():
        return dict.fromkeys(open_tensorfile(path / SINGLE).entries, path / SINGLE)
    raise InputError(
        f"{path} holds neither {INDEX} nor {SINGLE}", fix="give the target's directory, with safetensors weights"
    )


def _find(path: Path, where: Mapping[str, Path], name: str, *, required: bool = True) -> Any:
    for stored in (prefix + name for prefix in PREFIXES):
        file = where.get(stored)
        if file is None:
            continue
        if not file.is_file():
            raise InputError(
                f"{path}: {file.name}, which holds {stored}, is not there", fix="copy that shard of the target too"
            )
        entry = open_tensorfile(file).entries[stored]
        return DraftTensor(name, stored, file, entry.dtype, entry.shape)
    if required:
        raise InputError(
            f"{path} holds no {name}", fix="give the target model's directory: language model, safetensors weights"
        )
    return None
