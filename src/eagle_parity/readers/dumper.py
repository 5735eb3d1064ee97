"""SGLang's `dumper` directories: one torch.save file a tensor, its tags in the file name.

`<dir>/<experiment>/step=2___rank=0___dump_index=41___name=non_intrusive__model.norm.output.0___….pt` holds
{"value", "meta"} (sglang 0.5.23, debug_utils/dumper.py). DUMPER_NON_INTRUSIVE_MODE=all writes what every module was
given and gave; `core`, the default, tokens and positions only. A step is a forward, of the target or of the draft.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eagle_parity.errors import InputError
from eagle_parity.readers import pickled
from eagle_parity.readers.passes import Load, Pass, Passes, canonical
from eagle_parity.records import Engine

TITLE = "SGLang dumper directory"
_MODULES = "non_intrusive__"


@dataclass(frozen=True)
class _File:
    path: Path
    step: int
    rank: int
    order: int
    name: str


def recognises(files: Sequence[Path]) -> bool:
    """Whether some of the files are tensors that the dumper wrote, by name and by content of the first such."""
    first = next((file for file in files if _tags(file) is not None), None)
    if first is None:
        return False
    content = pickled.load(first)
    return isinstance(content, dict) and content.keys() >= {"value", "meta"} and isinstance(content["meta"], dict)


def open_passes(path: Path, files: Sequence[Path]) -> Passes:
    """The steps of a directory. Raises InputError for several experiments, or ranks that cannot be told."""
    found = [tags for tags in map(_tags, files) if tags is not None]
    places = sorted({tags.path.parent for tags in found})
    if len(places) > 1:
        raise InputError(
            f"{path} holds {len(places)} experiments of the dumper: {', '.join(place.name for place in places[:4])}",
            fix=f"give one of them, for example {places[0]}",
        )
    steps: dict[int, dict[int, dict[str, _File]]] = defaultdict(lambda: defaultdict(dict))
    for tags in sorted(found, key=lambda tags: tags.order):
        steps[tags.rank][tags.step].setdefault(tags.name, tags)
    ranks: dict[int, dict[int, Pass]] = {}
    engine = Engine("sglang")
    for world_rank, own in sorted(steps.items()):
        info = _parallel_info(own)
        engine = _engine(info) if engine.tp_size is None else engine
        # With pipeline stages a rank's tensors are spread over as many processes.
        rank = info.get("tp_rank", world_rank)
        merged = ranks.setdefault(rank, {})
        for step, named in own.items():
            before = merged.get(step)
            ours = _pass(step, world_rank, named)
            merged[step] = (
                ours
                if before is None
                else Pass(before.label, {**before.tensors, **ours.tensors}, before.rids or ours.rids)
            )
    return Passes(path, TITLE, ranks, engine)


def _engine(info: Mapping[str, Any]) -> Engine:
    tp, dp, pp, ep = (
        size if type(size := info.get(key)) is int else None
        for key in ("tp_size", "attn_dp_size", "pp_size", "moe_ep_size")
    )
    return Engine("sglang", tp_size=tp, dp_size=dp, pp_size=pp, ep_size=ep)


def _tags(file: Path) -> _File | None:
    """The tags in a file's name; None where it is no file of the dumper."""
    pairs = dict(part.split("=", 1) for part in file.name.removesuffix(".pt").split("___") if "=" in part)
    numbers = [pairs.get(key, "") for key in ("step", "rank", "dump_index")]
    if not file.name.endswith(".pt") or "name" not in pairs or not all(number.isdecimal() for number in numbers):
        return None
    step, rank, order = map(int, numbers)
    return _File(file, step, rank, order, pairs["name"])


def _pass(step: int, rank: int, named: Mapping[str, _File]) -> Pass:
    label = f"step {step} of rank {rank}"
    tensors: dict[str, Load] = {
        canonical(name.removeprefix(_MODULES)): partial(_tensor, file.path) for name, file in named.items()
    }
    rids = tensors.pop("rids", None)
    return Pass(label, tensors, None if rids is None else _rids(named["rids"].path))


def _value(path: Path) -> Any:
    content = pickled.load(path)
    if not isinstance(content, dict) or "value" not in content:
        raise InputError(
            f"{path} is named like a file of SGLang's dumper and holds no value",
            fix="take foreign files out of the directory",
        )
    return content["value"]


def _tensor(path: Path) -> torch.Tensor:
    value = _value(path)
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{path} holds a {type(value).__name__}, expected a tensor", fix="record again")
    return value.detach()


def _rids(path: Path) -> tuple[str, ...] | None:
    value = _value(path)
    return tuple(value) if isinstance(value, list) and all(isinstance(rid, str) for rid in value) else None


def _parallel_info(own: Mapping[int, Mapping[str, _File]]) -> Mapping[str, Any]:
    """What a process said of its place in the server, from the first of its files; {} where it says nothing."""
    for file in _files(own):
        content = pickled.load(file.path)
        meta = content.get("meta") if isinstance(content, dict) else None
        info = meta.get("sglang_parallel_info") if isinstance(meta, dict) else None
        return info if isinstance(info, dict) else {}
    return {}


def _files(own: Mapping[int, Mapping[str, _File]]) -> Iterator[_File]:
    for step in own.values():
        yield from step.values()
