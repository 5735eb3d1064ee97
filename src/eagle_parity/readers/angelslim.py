"""AngelSlim: `rows_A-B/data_I.ckpt`, one sample a file, with a batch dimension of one.

tools/generate_hidden_for_draft_model.py writes input_ids and loss_mask [1, T], hidden_states [1, T, K*H] (what the
fc gets; the same key is the final state elsewhere) and target_hiddens [1, T, H], after the final norm.
"""

from __future__ import annotations

from eagle_parity.readers.contents import Contents
from eagle_parity.readers.format import TORCH, Format
from eagle_parity.readers.stored import Rows, Stored, assemble, integers, split, states, tensor
from eagle_parity.records import Model


def _recognises(contents: Contents) -> bool:
    return contents.keys >= {"input_ids", "hidden_states", "target_hiddens"}


def _read(contents: Contents, target: Model) -> Stored:
    path = contents.path
    ids = integers(path, "input_ids", tensor(contents, "input_ids"))
    joined = states(path, "hidden_states", tensor(contents, "hidden_states"))
    last = states(path, "target_hiddens", tensor(contents, "target_hiddens"))
    slots = split(path, joined, last, names=("hidden_states", "target_hiddens"), vocab_size=target.vocab_size)
    return assemble(path, ids, contents.tensors.get("loss_mask"), slots, Rows(last))


FORMAT = Format(
    name="angelslim",
    title="AngelSlim .ckpt",
    suffixes=TORCH,
    recognises=_recognises,
    read=_read,
    default_source="AngelSlim: ids 1, n//2-1, n-4 are outputs of layers",
    last="post",
    last_source="AngelSlim tools/generate_hidden_for_draft_model.py stores the normed state",
    numbered=True,
)
