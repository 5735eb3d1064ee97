"""config.json of a draft: the two dialects (native SGLang/vLLM and speculators) brought to one set of answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from eagle_parity.errors import InputError

NAME = "config.json"
IDS = "eagle_aux_hidden_state_layer_ids"
Dialect: TypeAlias = Literal["native", "speculators", "none"]
DeclaredIn: TypeAlias = Literal["eagle_config", "top-level", "absent"]


@dataclass(frozen=True)
class DraftConfig:
    """What a draft's config.json says, nothing added. A value that it does not name is None.

    `layer` holds what describes the transformer layer (heads, RoPE, eps): the document itself in the native dialect,
    its `transformer_layer_config` in the speculators one.
    """

    dialect: Dialect
    document: Mapping[str, Any]
    layer: Mapping[str, Any]
    nested: Mapping[str, Any]

    @property
    def architecture(self) -> str | None:
        """The first of `architectures`."""
        names = self.document.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else None

    def declared_ids(self) -> tuple[tuple[int, ...] | None, DeclaredIn]:
        """The layer ids as they stand in the file, untranslated, and where they stand.

        Nested first: SGLang reads nothing else (sglang spec_aux_hidden_state.py), vLLM asks the top level first
        (vllm gpu_model_runner.py); a file that holds both with different values is reported by `conflicting_ids`.
        """
        for place, holder in (("eagle_config", self.nested), ("top-level", self.document)):
            ids = _ids(holder.get(IDS))
            if ids is not None:
                return ids, "eagle_config" if place == "eagle_config" else "top-level"
        return None, "absent"

    def conflicting_ids(self) -> tuple[int, ...] | None:
        """The top-level ids where the nested ones differ from them, else None."""
        nested, top = _ids(self.nested.get(IDS)), _ids(self.document.get(IDS))
        return top if nested is not None and top is not None and nested != top else None

    def integer(self, *names: str) -> int | None:
        """The first of these keys that holds an integer: top level, then the layer, then eagle_config."""
        value = self._first(names)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def flag(self, *names: str) -> bool | None:
        """The first of these keys that holds a boolean, looked up as `integer` does."""
        value = self._first(names)
        return value if isinstance(value, bool) else None

    def _first(self, names: tuple[str, ...]) -> Any:
        for name in names:
            for holder in (self.document, self.layer, self.nested):
                if holder.get(name) is not None:
                    return holder[name]
        return None


NO_CONFIG = DraftConfig("none", {}, {}, {})
"""A SpecForge training_state.pt lies alone: everything must come from its shapes."""


def _ids(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return tuple(value)
    return None


def read_config(path: Path) -> DraftConfig:
    """Read a draft's config.json.

    Dialects: speculators writes `speculators_model_type` and `transformer_layer_config` (speculators,
    config.py), everything else is flat with an optional `eagle_config` (SpecForge, Model-Optimizer, TorchSpec).
    Raises InputError when it is missing or not a JSON object.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or error}", fix="give the directory that holds the draft's config.json"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}", fix="export the draft again; its config is damaged") from None
    if not isinstance(document, dict):
        raise InputError(f"{path} is not a JSON object", fix="export the draft again; its config is damaged")
    nested = document.get("eagle_config")
    layer = document.get("transformer_layer_config")
    return DraftConfig(
        "speculators" if "speculators_model_type" in document or isinstance(layer, dict) else "native",
        document,
        layer if isinstance(layer, dict) else document,
        nested if isinstance(nested, dict) else {},
    )
