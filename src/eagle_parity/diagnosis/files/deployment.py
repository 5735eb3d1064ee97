"""What is going to be deployed, as far as files and flags tell: draft, target, engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_parity.conventions import vllm
from eagle_parity.conventions.sglang import Served, Version, find_rule, parse_version, served
from eagle_parity.draft.checkpoint import DraftCheckpoint
from eagle_parity.draft.config import NAME
from eagle_parity.draft.weights import INDEX, SINGLE
from eagle_parity.errors import InputError, UsageError
from eagle_parity.records import Engine
from eagle_parity.tensorheader import read_header

LANGUAGE = ("text_config", "language_config", "llm_config")
"""Where multimodal wrappers keep the language model's config (Kimi-K2.5: text_config)."""
_ALIASES = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "model": "model_path",
    "attention_context_parallel_size": "attn_cp_size",
    "speculative_draft_model": "speculative_draft_model_path",
}
_GIVE_TARGET = "give the directory of the target model"


@dataclass(frozen=True)
class Target:
    """A target's config and the rows of its embedding, where its shards' headers are there."""

    path: Path
    """The config file itself."""
    document: Mapping[str, Any]
    text: Mapping[str, Any]
    """The language model's part of the document: the document itself for a plain model."""
    embed_rows: int | None

    @property
    def architecture(self) -> str | None:
        """The first of `architectures`: the class that the engine loads."""
        names = self.document.get("architectures") or self.text.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else None

    def integer(self, name: str) -> int | None:
        """An integer of the language model's config."""
        value = self.text.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def rows(self) -> int | None:
        """Rows of the embedding: by the header, else by the config."""
        return self.embed_rows if self.embed_rows is not None else self.integer("vocab_size")


@dataclass(frozen=True)
class Deployment:
    """Draft, target and engine of one deploy; target and engine may be unknown."""

    draft: DraftCheckpoint
    target: Target | None = None
    engine: Engine | None = None

    @property
    def sglang(self) -> Version | None:
        """The version of SGLang, where that is the engine."""
        if self.engine is None or self.engine.name != "sglang" or self.engine.version is None:
            return None
        return parse_version(self.engine.version)

    @property
    def vllm(self) -> bool:
        """Whether vLLM is the engine."""
        return self.engine is not None and self.engine.name == "vllm"

    @property
    def config_path(self) -> Path | None:
        """The draft's config.json; None where the checkpoint lies without one."""
        if self.draft.dialect == "none":
            return None
        return (self.draft.path if self.draft.path.is_dir() else self.draft.path.parent) / NAME

    @property
    def name(self) -> str:
        """The engine as messages say it."""
        return "this engine" if self.engine is None else f"{_SPELLED[self.engine.name]} {self.engine.version}"

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The declared ids that the engine reads: SGLang those nested in eagle_config, vLLM the top level first."""
        if self.engine is not None and self.engine.name == "sglang" and self.draft.declared_in != "eagle_config":
            return None
        if self.vllm:
            return self.draft.config.conflicting_ids() or self.draft.declared_ids
        return self.draft.declared_ids

    @property
    def architecture(self) -> str | None:
        """The target's model class."""
        return None if self.target is None else self.target.architecture

    @property
    def layers(self) -> int | None:
        """The target's number of layers, n."""
        return None if self.target is None else self.target.integer("num_hidden_layers")

    def served(self, ids: Sequence[int] | None) -> Served | None:
        """What the engine captures for an id list (None: its default); None where its rule is not known."""
        if self.engine is None:
            return None
        rule = served if self.engine.name == "sglang" else vllm.served
        return rule(ids, architecture=self.architecture, version=self.engine.version, num_layers=self.layers)

    @property
    def family(self) -> str | None:
        """`deepseek` for the classes whose capture is that of deepseek_v2.py, else the model class."""
        from eagle_parity.conventions.sglang import DEEPSEEK

        return "deepseek" if self.architecture in DEEPSEEK else self.architecture

    @property
    def rule_known(self) -> bool:
        """Whether the meaning of ids is known for this engine, version and model class."""
        version = None if self.engine is None else self.engine.version
        if self.vllm:
            return True
        return find_rule(self.architecture, version) is not None

    def flag(self, *names: str) -> Any:
        """The first of these server arguments that is known; None when none is."""
        flags = {} if self.engine is None else self.engine.flags
        return next((flags[name] for name in names if flags.get(name) is not None), None)


_SPELLED = {"sglang": "SGLang", "vllm": "vLLM"}


def read_target(path: Path) -> Target:
    """Read a target's config.json (a directory, or the file), and its embedding's shape where the shard is there.

    Raises InputError when there is no config, or none of a language model.
    """
    file = path / NAME if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}", fix=_GIVE_TARGET) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}", fix="download the target again") from None
    if not isinstance(document, dict):
        raise InputError(f"{file} is not a JSON object", fix=_GIVE_TARGET)
    text = next((document[key] for key in LANGUAGE if isinstance(document.get(key), dict)), document)
    target = Target(file, document, text, _embed_rows(file.parent) if path.is_dir() else None)
    for name in ("hidden_size", "num_hidden_layers"):
        if target.integer(name) is None:
            raise InputError(f"{file} has no {name}: it is not the config of a language model", fix=_GIVE_TARGET)
    return target


def _embed_rows(directory: Path) -> int | None:
    """Rows of the language model's embed_tokens; None where no readable shard holds it."""
    try:
        if (directory / INDEX).is_file():
            names = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
            places = {str(name): directory / Path(str(shard)).name for name, shard in names.items()}
        else:
            places = dict.fromkeys(read_header(directory / SINGLE).entries, directory / SINGLE)
        stored = min((name for name in places if name.endswith("embed_tokens.weight")), key=len)
        return read_header(places[stored]).entries[stored].shape[0]
    except (InputError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None  # weights need not be here, and a broken target is not what is being checked


def command_flags(words: Sequence[str]) -> dict[str, Any]:
    """A server's command line as server arguments: `--tp 8 --enable-x` -> {"tp_size": 8, "enable_x": True}.

    Values are read as JSON where they are (numbers, true, objects), else kept as text; several values make a list.
    """
    flags: dict[str, Any] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            stem, equals, value = word[2:].partition("=")
            name = stem.replace("-", "_")
            name = _ALIASES.get(name, name)
            flags[name] = _value(value) if equals else True
        elif name is not None:
            held = flags[name]
            flags[name] = (
                _value(word) if held is True else [*(held if isinstance(held, list) else [held]), _value(word)]
            )
    return flags


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | bool | dict) else text


def engine_of(name: str, version: str, flags: Mapping[str, Any], tp: int | None = None) -> Engine:
    """An engine record from a version and server arguments. UsageError where --tp contradicts them."""
    known = {key: flags.get(f"{key}_size") for key in ("tp", "pp", "dp", "ep")}
    sizes = {key: value for key, value in known.items() if isinstance(value, int) and not isinstance(value, bool)}
    if tp is not None and sizes.get("tp", tp) != tp:
        raise UsageError(f"--tp {tp}, but the server has tp_size {sizes['tp']}", fix="leave --tp out")
    return Engine(
        name=name,
        version=version,
        tp_size=tp if tp is not None else sizes.get("tp"),
        pp_size=sizes.get("pp"),
        dp_size=sizes.get("dp"),
        ep_size=sizes.get("ep"),
        flags=dict(flags),
    )
