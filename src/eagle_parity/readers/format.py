"""What one training format is: how it is recognised and read, and what its pipeline stores by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from eagle_parity.readers.contents import Contents
from eagle_parity.readers.stored import Stored
from eagle_parity.records import Boundary, IntArray, Model

TORCH = (".pt", ".ckpt", ".ckpt.gz")
SAFETENSORS = (".safetensors",)
Norm: TypeAlias = Literal["pre", "post"]


def middle_layers(num_layers: int) -> tuple[int, ...]:
    """Boundaries 2, n//2, n-3: what every pipeline but speculators v1 stores by default, whatever it calls the ids.

    SafeAILab/EAGLE modeling_llama_kv.py, SpecForge algorithms/model_providers.py, Model-Optimizer, TorchSpec,
    AngelSlim, BaldEagle, NeMo Automodel, speculators launch_vllm.py.
    """
    return (2, num_layers // 2, num_layers - 3)


@dataclass(frozen=True)
class Recorded:
    """Boundaries that a side file records, in stored order. `last` is None where it says nothing of a last state."""

    slots: tuple[Boundary, ...]
    last: Boundary | None
    where: str


@dataclass(frozen=True)
class Mask:
    """A loss mask found outside the sample's file, or the reason why there is none."""

    values: IntArray | None
    note: str | None = None


@dataclass(frozen=True)
class Batch:
    """A file of several samples: how many, and one of them as if it lay in a file of its own."""

    count: Callable[[Contents], int]
    pick: Callable[[Contents, int], Contents]


@dataclass(frozen=True)
class Format:
    """A training format. To add one: a module with one of these, and one line in registry.py."""

    name: str
    """The word for `--reader`."""
    title: str
    suffixes: tuple[str, ...]
    recognises: Callable[[Contents], bool]
    """By keys and shapes of one file."""
    read: Callable[[Contents, Model], Stored]
    """The sample of a file, its blocks not read. Raises InputError naming the file and why it cannot be used."""
    default_slots: Callable[[int], tuple[int, ...]] | None = middle_layers
    """Number of layers -> the pipeline's default boundaries, in stored order; None: it has no default."""
    default_source: str = ""
    """Where the public project says so."""
    last: Norm | None = "post"
    """Whether the last state is before or after the final norm; None: none is stored."""
    last_source: str = ""
    one_tensor: bool = False
    """The last state is the last of K states in one tensor, so that `--slots` may number it too."""
    batch: Batch | None = None
    """How to take a file apart that holds several samples."""
    recorded: Callable[[Path], Recorded | None] | None = None
    """Boundaries from a side file of the directory."""
    loss_mask: Callable[[Path, Stored], Mask] | None = None
    """(file, sample) -> its loss mask, where a side file holds it."""
    longest: Callable[[Path], int | None] | None = None
    """Rows at which the pipeline cut samples, where a side file of the directory says so."""
    numbered: bool = False
    """Whether files are called `…_0`, `…_1`, …, so that a hole means something."""
