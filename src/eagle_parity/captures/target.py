"""The target as Hugging Face transformers sees it: its config and its tokenizer.

transformers is imported inside functions only. Hub names are downloaded, directories never are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_parity.errors import EagleParityError, EnvironmentFailure, InputError, UsageError
from eagle_parity.records import Model

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
# Kimi-K2 is DeepSeek-V3 under another name; transformers knows it as the language model of Kimi-K2.5 only.
SAME_ARCHITECTURE = {"kimi_k2": "deepseek_v3"}

TOKENIZER_FILES = ("*token*", "vocab*", "*.model")
_COMPLETE = "check that the directory is a complete model and that transformers is new enough for it"
_GIVE_IDS = 'repair the tokenizer, or give token ids ({"token_ids": […]} lines)'


@dataclass(frozen=True)
class Target:
    """A target whose config was read and whose weights were not. `facts` has no unknown dtype, size or layer count."""

    name: str
    config: Any
    dtype: torch.dtype
    facts: Model
    max_positions: int | None
    local: bool
    """A directory, so nothing may be downloaded."""
    trust_remote_code: bool

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        assert self.facts.hidden_size is not None
        return self.facts.hidden_size

    @property
    def num_layers(self) -> int:
        """Decoder layers, n: the last boundary."""
        assert self.facts.num_layers is not None
        return self.facts.num_layers


def read_target(name: str, *, dtype: str | None = None, trust_remote_code: bool = False) -> Target:
    """Read a target's config: a directory, or a hub name `owner/name`.

    `dtype` overrides the config's. Raises InputError for a directory that is missing or no model, UsageError when no
    dtype is known or the config needs --trust-remote-code, EnvironmentFailure without transformers or the network.
    """
    import torch

    transformers = require_transformers()
    local = _is_local(name)
    with loading(name, "config", local):
        config = _config(transformers, name, local, trust_remote_code)
        text = config.get_text_config(decoder=True)
    size, layers = getattr(text, "hidden_size", None), getattr(text, "num_hidden_layers", None)
    if not size or not layers:
        raise InputError(
            f"{name}: config.json has hidden_size {size} and num_hidden_layers {layers}, both should be given",
            fix="give the directory of the target model",
        )
    own = next((d for c in (config, text) for d in (_config_dtype(c),) if d is not None), None)
    chosen = getattr(torch, dtype) if dtype else own
    if not isinstance(chosen, torch.dtype):
        raise UsageError(f"{name}: config.json names no dtype", fix=f"choose one of {', '.join(DTYPES)} with --dtype")
    quantization = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    facts = Model(
        # A directory's own name: a path would tell about the machine and nothing about the model.
        name=Path(name).resolve().name if local else name,
        architecture=(getattr(config, "architectures", None) or [None])[0],
        hidden_size=size,
        num_layers=layers,
        vocab_size=getattr(text, "vocab_size", None),
        dtype=str(chosen).removeprefix("torch."),
        quantization=_quantization(quantization),
    )
    return Target(name, config, chosen, facts, getattr(text, "max_position_embeddings", None), local, trust_remote_code)


def read_tokenizer(target: Target) -> Any:
    """The target's tokenizer, or None when its directory holds none."""
    transformers = require_transformers()
    directory = Path(target.name)
    if target.local and not any(file for pattern in TOKENIZER_FILES for file in directory.glob(pattern)):
        return None  # transformers would try to make one up, or raise one of a dozen errors
    with loading(target.name, "tokenizer", target.local, _GIVE_IDS), quiet(transformers):
        return transformers.AutoTokenizer.from_pretrained(
            target.name, trust_remote_code=target.trust_remote_code, local_files_only=target.local
        )


def require_transformers() -> Any:
    """The transformers module, imported now. Raises EnvironmentFailure where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentFailure(
            f"the training side needs Hugging Face transformers, which cannot be imported: {error}",
            fix="pip install eagle-parity[hf]",
        ) from error
    return transformers


def _is_local(name: str) -> bool:
    """Whether a model's name is a directory; if it can only be meant as one and is missing, InputError."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{name} is no model: it has no config.json", fix="give the directory of the target model")
        return True
    owner, _, rest = name.partition("/")
    hub = rest and "/" not in rest and owner not in ("", ".", "..", "~") and not Path(owner).exists()
    if path.exists() or not hub:
        raise InputError(
            f"model {name} is not a directory", fix="check --model: a directory, or a hub name of the form owner/name"
        )
    return False


def _config(transformers: Any, name: str, local: bool, trust_remote_code: bool) -> Any:
    if local:
        document = json.loads((Path(name) / "config.json").read_text())
        same = SAME_ARCHITECTURE.get(document.get("model_type"))
        if same is not None and not trust_remote_code:
            document = {key: value for key, value in document.items() if key not in ("model_type", "auto_map")}
            return transformers.AutoConfig.for_model(same, **document)
    return transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, local_files_only=local)


def _config_dtype(config: Any) -> torch.dtype | None:
    import torch

    value = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)  # the latter until 4.55
    if isinstance(value, str):
        value = getattr(torch, value.removeprefix("torch."), None)
    return value if isinstance(value, torch.dtype) else None


def _quantization(config: Any) -> str | None:
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers' bars and reports off the terminal; what matters of them is checked and told by us."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def loading(name: str, what: str, local: bool, fix: str = _COMPLETE) -> Iterator[None]:
    """Turn whatever transformers raises while it loads something into an error with a remedy."""
    import torch

    try:
        yield
    except EagleParityError:
        raise
    except ImportError as error:
        raise EnvironmentFailure(
            f"{name}: the {what} cannot be loaded, because a package is missing or broken: {_root(error)}",
            fix="install the package that is named; if that is torchvision, remove it or match it with torch",
        ) from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise EnvironmentFailure(
            f"{name}: not enough memory for the {what}: {_root(error)}", fix="use a larger machine, or --device cpu"
        ) from error
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"{name}: its {what} needs code that comes with the model",
                fix="read that code, and give --trust-remote-code if you trust it",
            ) from error
        if isinstance(error, OSError) and not local:
            raise EnvironmentFailure(
                f"{name}: the {what} cannot be fetched from the hub: {_root(error)}",
                fix="check the name and the network, or give a local directory",
            ) from error
        raise InputError(
            f"{name}: the {what} cannot be loaded: {type(error).__name__}: {_root(error)}",
            fix=fix,
        ) from error


def _root(error: BaseException) -> str:
    """The first line of the error that started it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
