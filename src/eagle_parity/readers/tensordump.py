"""SGLang's `--debug-tensor-dump-output-folder`: one torch.save file a forward, in one directory a process.

`[target/]TP0_PP0_Rank0_pid123/Pass00001.pt` maps the names of leaf modules to their outputs, a tensor or a list of them
(sglang 0.5.23, debug_utils/tensor_dump_forward_hook.py). Decoder layers are no leaves, so what a layer adds is not
there; the norms are, and they give the stream. `model` and `logits_processor` in the file of pass N belong to pass N-1:
they are left alone. The flag switches CUDA graphs off; with EAGLE-3 it ends 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from eagle_parity.errors import InputError
from eagle_parity.readers import pickled
from eagle_parity.readers.passes import POSITIONS, SEQ_LENS, TOKEN_IDS, Load, Pass, Passes, canonical
from eagle_parity.records import Engine

TITLE = "SGLang tensor dump"
_PROCESS = re.compile(r"TP(\d+)_PP(\d+)_Rank(\d+)_pid(\d+)")
_PASS = re.compile(r"Pass(\d+)\.pt")
_INPUTS = ".forward_batch_info."
_OPEN = 4  # files kept open: one pass is read tensor by tensor
_LATE = re.compile(r"(?:\w+\.)*(model|logits_processor)")
"""Modules whose output lies in the file of the next pass."""


def recognises(files: Sequence[Path]) -> bool:
    """Whether some of the files are passes, by place and by content of the first such."""
    first = next((file for file in files if _place(file) is not None), None)
    if first is None:
        return False
    content = pickled.load(first)
    return isinstance(content, dict) and all(isinstance(name, str) for name in content)


def open_passes(path: Path, files: Sequence[Path]) -> Passes:
    """The passes of a directory, the target's where it says whose they are. Raises InputError for two runs in one."""
    found = [file for file in files if _place(file) is not None]
    if any(file.parent.parent.name == "target" for file in found):
        found = [file for file in found if file.parent.parent.name == "target"]
    processes: dict[tuple[int, int], Path] = {}
    for file in found:
        tp, pp, _ = _numbers(file)
        known = processes.setdefault((tp, pp), file.parent)
        if known != file.parent:
            raise InputError(
                f"{path} holds two runs of rank {tp}: {known.name} and {file.parent.name}",
                fix="move the directories of one run to a place of their own and give that",
            )
    opened = lru_cache(maxsize=_OPEN)(_content)
    ranks: dict[int, dict[int, Pass]] = {}
    for file in found:
        tp, _, number = _numbers(file)
        merged = ranks.setdefault(tp, {})
        ours = Pass(f"pass {number} of rank {tp}", _tensors(file, opened))
        before = merged.get(number)
        merged[number] = ours if before is None else Pass(before.label, {**before.tensors, **ours.tensors})
    stages = 1 + max(pp for _, pp in processes)
    return Passes(path, TITLE, ranks, Engine("sglang", tp_size=1 + max(ranks), pp_size=stages), graph=False)


def _place(file: Path) -> tuple[re.Match[str], re.Match[str]] | None:
    process, number = _PROCESS.fullmatch(file.parent.name), _PASS.fullmatch(file.name)
    return None if process is None or number is None else (process, number)


def _numbers(file: Path) -> tuple[int, int, int]:
    """Tensor-parallel rank, pipeline stage, number of the pass."""
    place = _place(file)
    assert place is not None
    return int(place[0][1]), int(place[0][2]), int(place[1][1])


def _content(file: Path) -> Mapping[str, Any]:
    content = pickled.load(file)
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise InputError(f"{file} holds no module outputs by name", fix="record again; the file is damaged")
    return content


def _tensors(file: Path, opened: Callable[[Path], Mapping[str, Any]]) -> dict[str, Load]:
    found: dict[str, Load] = {}
    for name, value in opened(file).items():
        if _INPUTS in name:
            short = name.rpartition(_INPUTS)[2]
            if short in (TOKEN_IDS, POSITIONS, SEQ_LENS):
                found[short] = partial(_read, file, opened, name)
        elif _LATE.fullmatch(name):
            continue
        elif isinstance(value, torch.Tensor):
            found[f"{canonical(name)}.output"] = partial(_read, file, opened, name)
        elif isinstance(value, list):
            for i, _ in enumerate(value):
                found[f"{canonical(name)}.output.{i}"] = partial(_read, file, opened, name, i)
    return found


def _read(file: Path, opened: Callable[[Path], Mapping[str, Any]], name: str, item: int | None = None) -> torch.Tensor:
    value = opened(file).get(name)
    value = value if item is None or not isinstance(value, list) else value[item]
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{file}: {name} is no tensor", fix="record again; the file has changed or is damaged")
    return value.detach()
