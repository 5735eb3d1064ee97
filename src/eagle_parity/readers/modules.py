"""Which module tensors make a boundary, a slot or the replicated part of one: the one table of SGLang's module names.

Read in sglang 0.5.23 (models/llama.py, models/deepseek_v2.py, layers/layernorm.py, layers/layer_boundary) and measured
on its CPU server at TP=2 against transformers, to float32 rounding:

- `embed_tokens.output` [T, H] is boundary 0, complete on every rank.
- `layers.K.input_layernorm.output.1` [T, H], K >= 1, is boundary K: the norm adds what layer K-1 owes to the residual
  stream, after the all-reduce. Where a fused all-reduce does the adding, the module is not called and nothing is there.
- `layers.K.output` is what layer K adds, on 0.5.23 the part of one rank alone, before the all-reduce and without the
  residual stream; that is `layers.K.post_attention_layernorm.output.1`. Up to 0.5.20 a layer gives both, as output.0
  and output.1. Their sum is boundary K+1 as that rank held it, a partial sum where the reduction is still to come,
  and the stream alone is the replicated part, `residual.K+1`.
- `norm.output.1` is boundary n, `norm.output.0` the state after the final norm.
- `logits_processor.inputs.4` is what the target hands to the draft, before any norm of the draft's: K tensors [T, H],
  or one [T, K*H].
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle_parity.readers.passes import Pass
from eagle_parity.records import FINAL_NORM, boundary_name, residual_name, slot_name

AUX = "logits_processor.inputs.4"
_LAYER = re.compile(r"layers\.(\d+)\.")
_DRAFT = re.compile(r"(fc|eh_proj|(layers\.0|midlayer)\.hidden_norm)\.")
"""Modules that only a draft has: it joins the target's states, and norms them beside the embedding."""


@dataclass(frozen=True)
class Recipe:
    """The sum of some module tensors [T, W], or one of `blocks` equal parts of its width."""

    parts: tuple[str, ...]
    block: int = 0
    blocks: int = 1

    def make(self, of: Pass) -> torch.Tensor:
        """The tensor [T, W / blocks] in its own dtype."""
        total = of.read(self.parts[0])
        for part in self.parts[1:]:
            total = total + of.read(part)
        width = total.shape[1] // self.blocks
        return total[:, self.block * width : (self.block + 1) * width]


def is_draft(names: Collection[str]) -> bool:
    """Whether a pass is a draft's: the dumper writes both models' under the same names."""
    return any(_DRAFT.match(name) for name in names)


def layers_seen(names: Collection[str]) -> int:
    """One more than the highest layer number among the names; 0 without any."""
    return max((int(match[1]) + 1 for match in map(_LAYER.match, names) if match), default=0)


def proven_layers(of: Pass) -> int | None:
    """How many layers the model has, where the pass proves it: the stream enters the final norm as it left layer n-1.

    A directory may hold some layers only, so the highest number proves nothing by itself.
    """
    last = layers_seen(of.tensors)
    leaves, enters = f"layers.{last - 1}.post_attention_layernorm.output.1", "norm.inputs.1"
    if last == 0 or leaves not in of.tensors or enters not in of.tensors:
        return None
    return last if torch.equal(of.read(leaves), of.read(enters)) else None


def recipes(of: Pass, num_layers: int | None) -> dict[str, Recipe]:
    """The tensors of a dump that a pass can give, in storing order. Boundary n needs `num_layers`.

    A tensor [T, W] is one only if its shape says so; a layer's contribution without the stream makes none.
    """
    found: dict[str, Recipe] = {}
    for name, choices in _choices(of.tensors, num_layers):
        recipe = next((Recipe(parts) for parts in choices if _fits(of, parts)), None)
        if recipe is not None:
            found[name] = recipe
    hidden = next((made.make(of).shape[1] for made in found.values()), None)
    found.update(_slots(of, hidden))
    return found


def _choices(names: Mapping[str, object], num_layers: int | None) -> Iterator[tuple[str, Sequence[tuple[str, ...]]]]:
    yield boundary_name(0), [("embed_tokens.output",), ("layers.0.input_layernorm.inputs.0",)]
    for k in range(1, 1 + layers_seen(names)):
        whole, owed, stream = f"layers.{k}.input_layernorm.output.1", f"layers.{k - 1}.output", _stream(k - 1)
        sums = [(f"{owed}.0", f"{owed}.1"), (owed, stream)]
        if k == num_layers:
            whole = "norm.output.1"
        yield boundary_name(k), [(whole,), *sums]
        if whole not in names:
            yield residual_name(k), [(f"{owed}.1",), (stream,)]
    yield FINAL_NORM, [("norm.output.0",), ("logits_processor.inputs.1",)]


def _stream(layer: int) -> str:
    return f"layers.{layer}.post_attention_layernorm.output.1"


def _fits(of: Pass, parts: Sequence[str]) -> bool:
    """Whether all parts are there, floats [T, W] of one shape: some layers give router indices beside a state."""
    if not all(part in of.tensors for part in parts):
        return False
    tensors = [of.read(part) for part in parts]
    return (
        all(tensor.dim() == 2 and tensor.dtype.is_floating_point for tensor in tensors)
        and len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1
    )


def _slots(of: Pass, hidden: int | None) -> Iterator[tuple[str, Recipe]]:
    j = 0
    while f"{AUX}.{j}" in of.tensors:
        yield slot_name(j), Recipe((f"{AUX}.{j}",))
        j += 1
    if AUX in of.tensors:
        width = of.read(AUX).shape[-1]
        blocks = width // hidden if hidden and width % hidden == 0 else 0
        for j in range(blocks):
            yield slot_name(j), Recipe((AUX,), j, blocks)
