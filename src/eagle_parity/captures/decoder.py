"""The decoder of a target: its weights loaded through transformers, its layers and final norm found by structure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle_parity.captures.target import Target, loading, quiet, require_transformers
from eagle_parity.errors import EnvironmentFailure, InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Decoder:
    """The part of a loaded model that turns token ids into states: embedding, layers, final norm; no LM head."""

    module: torch.nn.Module
    embedding: torch.nn.Embedding
    layers: tuple[torch.nn.Module, ...]
    norm: torch.nn.Module


def load_decoder(target: Target, device: str, say: Callable[[str], None]) -> Decoder:
    """Load the weights and find the decoder; `say` receives warnings.

    Raises InputError for weights that are damaged, incomplete or of an architecture without the usual structure,
    EnvironmentFailure for a device or an optional package that is not there, or too little memory.
    """
    transformers = require_transformers()
    place = pick_device(device)
    # `device_map` spreads a model over all GPUs and needs accelerate; without it one GPU has to hold the model.
    spread = place == "cuda" and transformers.utils.is_accelerate_available()
    auto = transformers.AutoModel
    remote = getattr(target.config, "auto_map", None) or {}
    if target.trust_remote_code and "AutoModel" not in remote and "AutoModelForCausalLM" in remote:
        auto = transformers.AutoModelForCausalLM
    with loading(target.name, "weights", target.local), quiet(transformers):
        model, info = auto.from_pretrained(
            target.name,
            config=target.config,
            trust_remote_code=target.trust_remote_code,
            local_files_only=target.local,
            output_loading_info=True,
            **{_dtype_argument(transformers): target.dtype},
            **({"device_map": "auto"} if spread else {}),
        )
        if not spread:
            model = model.to(place)
    prefix, decoder = find_decoder(model.eval(), target)
    _check_complete(target, prefix, info, say)
    return decoder


def pick_device(device: str) -> str:
    """`auto` becomes cuda where there is one. Raises EnvironmentFailure for cuda where there is none."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFailure("--device cuda: torch finds no CUDA device", fix="use --device cpu, or a CUDA torch")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def find_decoder(model: torch.nn.Module, target: Target) -> tuple[str, Decoder]:
    """The decoder inside a model, and its path there ("" for the model itself).

    Found by structure, because names differ and multimodal wrappers nest it: the module that owns a list of
    num_layers layers, a token embedding of the hidden size, and after them a norm over the hidden size.
    """
    import torch

    found: list[tuple[str, Decoder]] = []
    for path, module in model.named_modules():
        children = list(module.children())
        layers = [c for c in children if isinstance(c, torch.nn.ModuleList) and len(c) == target.num_layers]
        embeddings = [
            c for c in children if isinstance(c, torch.nn.Embedding) and c.embedding_dim == target.hidden_size
        ]
        norms = [c for c in children if [tuple(p.shape) for p in c.parameters()][:1] == [(target.hidden_size,)]]
        if len(layers) == 1 and embeddings and norms:
            # The token embedding is made first (positions follow), the final norm last.
            found.append((path, Decoder(module, embeddings[0], tuple(layers[0]), norms[-1])))
    if len(found) != 1:
        places = ", ".join(path or "the model itself" for path, _ in found) or "nowhere"
        raise InputError(
            f"{target.name} ({type(model).__name__}): expected one decoder with {target.num_layers} layers, an "
            f"embedding and a final norm of {target.hidden_size}; found {places}",
            fix="this architecture is not known yet: report it, with the model as torch prints it",
        )
    return found[0]


def _check_complete(target: Target, prefix: str, info: Any, say: Callable[[str], None]) -> None:
    """Refuse weights that transformers filled with random numbers, and tell of those that it dropped."""
    inside = f"{prefix}." if prefix else ""
    missing = sorted(key for key in info.get("missing_keys", ()) if key.startswith(inside))
    if missing:
        raise InputError(
            f"{target.name}: {len(missing)} weights of the decoder are not in the checkpoint and would be random: "
            + _some(missing),
            fix="complete the checkpoint; check that config.json belongs to it",
        )
    layers = {f"layers.{k}." for k in range(target.num_layers)}
    dropped = sorted(key for key in info.get("unexpected_keys", ()) if any(f".{k}" in f".{key}" for k in layers))
    if dropped:
        say(f"warning: transformers ignored {len(dropped)} tensors of the checkpoint's layers: {_some(dropped)}")


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")


def _dtype_argument(transformers: Any) -> str:
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"
