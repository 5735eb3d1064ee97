"""SpecForge: `rows_A-B/data_I.ckpt` and `.ckpt.gz`, one sample a file, in all its eras.

scripts/prepare_hidden_states.py writes input_ids and loss_mask int64 [T], aux_hidden_state [1, T, K*H] (what the
draft's fc gets) and hidden_state [1, T, H], after the final norm. Batches larger than one are stored padded with
id 0; the attention mask is not stored.
"""

from __future__ import annotations

import numpy as np

from eagle_parity.readers.contents import Contents
from eagle_parity.readers.format import TORCH, Format
from eagle_parity.readers.stored import Rows, Stored, assemble, broken, integers, split, states, tensor
from eagle_parity.records import Model


def _recognises(contents: Contents) -> bool:
    # aux_hidden_state may be None (2025-11 to 2026-07, --enable-aux-hidden-states off); the key is there.
    return contents.keys >= {"input_ids", "aux_hidden_state", "hidden_state"}


def _read(contents: Contents, target: Model) -> Stored:
    path = contents.path
    ids = integers(path, "input_ids", tensor(contents, "input_ids"))
    if contents.others.get("aux_hidden_state", ids) is None:
        raise broken(
            path,
            "aux_hidden_state is None: written without --enable-aux-hidden-states, so it holds nothing that EAGLE-3 "
            "trains on",
            fix="write the hidden states again with --enable-aux-hidden-states",
        )
    joined = states(path, "aux_hidden_state", tensor(contents, "aux_hidden_state"))
    last = states(path, "hidden_state", tensor(contents, "hidden_state"))
    slots = split(path, joined, last, names=("aux_hidden_state", "hidden_state"), vocab_size=target.vocab_size)
    mask = contents.tensors.get("loss_mask")
    return _without_padding(contents, assemble(path, ids, mask, slots, Rows(last)))


def _without_padding(contents: Contents, sample: Stored) -> Stored:
    """Leave out a trailing run of id 0 outside the loss mask: attention is causal, so the rows before it are right.

    A real last token 0 goes with it, which costs one row and changes no other.
    """
    if sample.loss_mask is None:
        return sample
    real = np.flatnonzero((sample.token_ids != 0) | (sample.loss_mask != 0))
    if len(real) == 0:
        raise broken(contents.path, "every token id is 0 and outside the loss mask: padding only")
    end = int(real[-1]) + 1
    return sample if end == sample.length else sample.cut(0, end, "right padding (id 0) is left out")


FORMAT = Format(
    name="specforge",
    title="SpecForge .ckpt",
    suffixes=TORCH,
    recognises=_recognises,
    read=_read,
    default_source="SpecForge algorithms/model_providers.py: ids 1, n//2-1, n-4 are outputs of layers",
    last="post",
    last_source="SpecForge offline_capture/sglang_backend/utils.py takes it after the final norm",
    numbered=True,
)
