"""The target's config.json, for what training files do not record: the number of layers and the vocabulary.

Read as plain JSON: no transformers, no weights, nothing downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle_parity.errors import InputError
from eagle_parity.records import Model

# Models that see hold their language model's config under one of these (Kimi-K2.5: text_config).
NESTED = ("text_config", "language_config", "llm_config")


def read_model(path: Path | str) -> Model:
    """What a model directory's config.json says of the target.

    Raises InputError when it is missing, damaged, or names no number of layers.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        document: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{file}: {error.strerror or error}", fix="give the target's directory, the one with its config.json"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}", fix="copy the target's config.json again") from None
    if not isinstance(document, dict):
        raise InputError(f"{file} is not a JSON object", fix="copy the target's config.json again")
    text = next((document[key] for key in NESTED if isinstance(document.get(key), dict)), document)
    layers = _integer(text, "num_hidden_layers")
    if not layers:
        raise InputError(f"{file} names no num_hidden_layers", fix="give the target model, not another one")
    names = document.get("architectures")
    quantization = document.get("quantization_config") or text.get("quantization_config")
    return Model(
        # The directory's own name: its path would tell about the machine and nothing about the model.
        name=file.absolute().parent.name,
        architecture=str(names[0]) if isinstance(names, list) and names else None,
        hidden_size=_integer(text, "hidden_size"),
        num_layers=layers,
        vocab_size=_integer(text, "vocab_size"),
        quantization=str(quantization.get("quant_method")) if isinstance(quantization, dict) else None,
    )


def _integer(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if type(value) is int and value > 0 else None
