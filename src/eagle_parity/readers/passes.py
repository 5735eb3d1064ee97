"""Forward passes of a server as a debugging aid wrote them: named module tensors per rank, opened one at a time.

SGLang's `dumper` and `--debug-tensor-dump-output-folder` both write what a module was given or gave, under the module's
name. Here a pass is what both have in common: `layers.3.input_layernorm.output.1` -> a tensor that is read on demand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_parity.errors import InputError
from eagle_parity.records import Engine

Load = Callable[[], torch.Tensor]
TOKEN_IDS, POSITIONS, SEQ_LENS = "input_ids", "positions", "seq_lens"
_WRAPPERS = re.compile(r"(?:(?:language_model|model)\.)+")


@dataclass(frozen=True)
class Pass:
    """One forward on one rank. `label` names it in messages; names in `tensors` count from inside the wrappers."""

    label: str
    tensors: Mapping[str, Load]
    rids: tuple[str, ...] | None = None
    """The request of each sequence, where the source says it."""

    def read(self, name: str) -> torch.Tensor:
        """A tensor. Raises InputError where it cannot be read, KeyError where there is none."""
        return self.tensors[name]()

    def integers(self, name: str) -> list[int] | None:
        """A short integer tensor [N] as a list; None where it was not recorded."""
        if name not in self.tensors:
            return None
        values = self.read(name)
        if values.dim() != 1 or values.dtype.is_floating_point:
            raise InputError(
                f"{self.label}: {name} is {values.dtype} {list(values.shape)}, expected integers [N]",
                fix="record again; these are not the files of an SGLang forward",
            )
        return [int(value) for value in values.tolist()]


@dataclass(frozen=True)
class Passes:
    """A directory of passes, by rank and by the number of the pass. Nothing but names has been read."""

    path: Path
    title: str
    """What wrote it, in words."""
    ranks: Mapping[int, Mapping[int, Pass]]
    engine: Engine
    graph: bool | None = None
    """Whether CUDA graphs were replayed; None where it is not known."""


def canonical(name: str) -> str:
    """A module's name without the wrappers around the decoder, which every model class names as it likes."""
    return _WRAPPERS.sub("", name, count=1) if _WRAPPERS.match(name) else name
