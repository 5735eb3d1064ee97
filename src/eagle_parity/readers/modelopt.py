"""NVIDIA Model-Optimizer: `<conversation>.pt`, one sample a file, no batch dimension.

examples/speculative_decoding/collect_hidden_states writes input_ids [T], hidden_states [T, H] (the last state),
aux_hidden_states [T, K*H] and, since 2026-04-25 and never from TRT-LLM, loss_mask [T]. Three dumpers write these same
keys and record nothing that tells them apart.
"""

from __future__ import annotations

from eagle_parity.readers.contents import Contents
from eagle_parity.readers.format import TORCH, Format
from eagle_parity.readers.stored import Rows, Stored, assemble, integers, split, states, tensor
from eagle_parity.records import Model


def _recognises(contents: Contents) -> bool:
    return contents.keys >= {"input_ids", "hidden_states", "aux_hidden_states"}


def _read(contents: Contents, target: Model) -> Stored:
    path = contents.path
    ids = integers(path, "input_ids", tensor(contents, "input_ids"))
    joined = states(path, "aux_hidden_states", tensor(contents, "aux_hidden_states"))
    last = states(path, "hidden_states", tensor(contents, "hidden_states"))
    slots = split(path, joined, last, names=("aux_hidden_states", "hidden_states"), vocab_size=target.vocab_size)
    return assemble(path, ids, contents.tensors.get("loss_mask"), slots, Rows(last))


FORMAT = Format(
    name="modelopt",
    title="Model-Optimizer .pt",
    suffixes=TORCH,
    recognises=_recognises,
    read=_read,
    default_source="Model-Optimizer compute_hidden_states_hf.py; its vLLM dumper, same keys, has 1, n//2-1, n-4",
    last="post",
    last_source="Model-Optimizer compute_hidden_states_hf.py takes hidden_states[-1]; its vLLM dumper's is before it",
)
