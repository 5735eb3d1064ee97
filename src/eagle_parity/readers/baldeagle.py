"""BaldEagle: `I/data_J.ckpt`, one sample a file, the states stacked rather than joined.

generate_data_fused_features.py writes input_ids and loss_mask [T] and hidden_state [3, T, H], low to high. Its EAGLE-1
script writes hidden_state [1, T, H], the state after the final norm; no last state goes with the fused ones.
"""

from __future__ import annotations

from eagle_parity.readers.contents import Contents
from eagle_parity.readers.format import TORCH, Format
from eagle_parity.readers.stored import Rows, Stored, assemble, broken, integers, states, tensor
from eagle_parity.records import Model


def _recognises(contents: Contents) -> bool:
    stacked = contents.tensors.get("hidden_state")
    return (
        stacked is not None
        and stacked.dim() == 3
        and "input_ids" in contents.keys
        and not contents.keys & {"aux_hidden_state", "target"}
    )


def _read(contents: Contents, _target: Model) -> Stored:
    path = contents.path
    ids = integers(path, "input_ids", tensor(contents, "input_ids"))
    stacked = tensor(contents, "hidden_state")
    if stacked.dim() != 3 or stacked.shape[0] == 0:
        raise broken(path, f"hidden_state is {list(stacked.shape)}, expected [K, T, H]")
    blocks = [Rows(states(path, "hidden_state", block)) for block in stacked]
    mask = contents.tensors.get("loss_mask")
    if len(blocks) == 1:
        return assemble(path, ids, mask, (), blocks[0], ("one state a token: written for EAGLE-1, no slots",))
    return assemble(path, ids, mask, blocks, None)


FORMAT = Format(
    name="baldeagle",
    title="BaldEagle .ckpt",
    suffixes=TORCH,
    recognises=_recognises,
    read=_read,
    default_source="BaldEagle generate_data_fused_features.py: hidden_states 2, n//2, n-3 of the HF tuple",
    last="post",
    last_source="BaldEagle's EAGLE-1 script stores the last of the HF tuple, which is normed",
    numbered=True,
)
