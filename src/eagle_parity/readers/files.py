"""Which files of a path are samples, in which order, and which of them are looked at."""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from eagle_parity.errors import InputError
from eagle_parity.readers.format import SAFETENSORS, TORCH

# Written beside samples by the same pipelines (vocabulary maps, token counts, the target's embedding, weights).
SIDE_FILES = frozenset(
    {
        "vocab_mapping.pt",
        "token_freq.pt",
        "cache.pt",
        "t2d.safetensors",
        "d2t.safetensors",
        "target_embeddings.safetensors",
        "training_state.pt",
        "model.safetensors",
    }
)
_DIGITS = re.compile(r"\d+")
_NUMBERED = re.compile(r"^(.*?)(\d+)$")
_OWN = "tokens.safetensors"


def find_files(path: Path) -> list[Path]:
    """The candidate files of a file or directory, in natural order (data_2 before data_10). Opens none.

    Raises InputError where the path is missing, empty, or an eagle-parity dump.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"{path} does not exist", fix="check the path of the training files")
    if is_own_dump(path):
        raise InputError(f"{path} is an eagle-parity dump, no training files", fix="open it as a dump")
    found: list[str] = []
    for folder, inside, names in os.walk(path):
        inside[:] = [name for name in inside if not name.startswith(".")]
        found += [
            os.path.join(folder, name)
            for name in names
            if name.endswith((*TORCH, *SAFETENSORS)) and name not in SIDE_FILES and not name.startswith(".")
        ]
    if not found:
        raise InputError(
            f"{path} holds no training files (looked for {', '.join((*TORCH, *SAFETENSORS))} in it and below)",
            fix="give the directory into which the training pipeline wrote its hidden states",
        )
    found.sort(key=_natural)
    return [Path(name) for name in found]


def is_own_dump(path: Path) -> bool:
    """Whether a directory is an eagle-parity dump, finished or not. A manifest.json alone may be NeMo Automodel's."""
    if (path / _OWN).is_file() or path.name.endswith(".partial"):
        return True
    try:
        document = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == "eagle-parity-dump"


def _natural(name: str) -> str:
    return _DIGITS.sub(lambda digits: digits[0].zfill(20), name)


def spread(total: int, count: int) -> list[int]:
    """Up to `count` of the numbers 0..total-1, evenly spread."""
    return list(range(total)) if count >= total else [i * total // count for i in range(count)]


def stratified(total: int, limit: int | None, seed: int) -> list[int]:
    """Up to `limit` of 0..total-1, ascending: one at random from each of `limit` equal stretches."""
    if limit is None or limit >= total:
        return list(range(total))
    draw = random.Random(seed)
    return [draw.randrange(i * total // limit, (i + 1) * total // limit) for i in range(limit)]


def being_written(file: Path) -> bool:
    """Whether a running writer holds the `.lock` beside a file.

    vLLM's connectors flock it while they write and may leave it behind (vllm ExampleHiddenStatesConnector), so its
    existence alone means nothing.
    """
    lock = file.with_name(file.name + ".lock")
    if not lock.exists():
        return False
    try:
        import fcntl

        with lock.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ImportError):
        return False  # no flock here (another system, some network disks): the header checks must do
    return False


def numbering_notes(files: Sequence[Path]) -> tuple[str, ...]:
    """What file numbers tell: holes, where a writer skipped samples without a word, and numbers that occur twice."""
    numbers = Counter(int(match[2]) for match in map(_NUMBERED.match, (_stem(file) for file in files)) if match)
    if not numbers:
        return ()
    low, high = min(numbers), max(numbers)
    notes = []
    holes = high - low + 1 - len(numbers)
    if holes:
        first = next(i for i in range(low, high) if i not in numbers)
        notes.append(
            f"{holes} of the numbers {low} to {high} have no file, the first is {first} (skipped by the writer?)"
        )
    twice = sum(count > 1 for count in numbers.values())
    if twice:
        notes.append(
            f"{twice} file numbers occur more than once (one count per rank?); samples are told by their tokens"
        )
    return tuple(notes)


def _stem(file: Path) -> str:
    return file.name.split(".")[0]
