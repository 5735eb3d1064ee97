"""Integer bookkeeping that SGLang imports on every CPU: key-value cache slots and EAGLE's token trees.

Each function follows the Triton kernel beside its call site in SGLang (sglang/kernels/ops) and takes its
arguments in the same order. Those that SGLang calls by keyword keep the spelling of the call, `retrive`
included. Speed does not matter here: the demo has one request of a few tokens.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

FULL_MASK, QLEN_ONLY = 0, 1  # SGLang's TreeMaskMode; its third mode packs bits
NO_LINK = -1  # ends a linked list inside the token tree
ROOT, UNSELECTED = -1, -2  # parents that are not among the selected tokens


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, target_slots: Tensor, source_slots: Tensor) -> None:
    """Move cache rows in every layer's buffer; all are read before any is written, as slots may overlap."""
    sources, targets = source_slots.tolist(), target_slots.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        contents = [ctypes.string_at(base + slot * stride, stride) for slot in sources]
        for slot, content in zip(targets, contents, strict=True):
            ctypes.memmove(base + slot * stride, content, stride)


def assign_req_to_token_pool_cpu(
    rows: Tensor, slot_table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, table_width: int
) -> None:
    """Write a flat list of slots into the table: positions start..end of each request."""
    offset = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slot_table[row, start:end] = slots[offset : offset + end - start].to(slot_table.dtype)
        offset += end - start


def assign_extend_cache_locs_cpu(
    rows: Tensor, slot_table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, table_width: int
) -> None:
    """Read positions start..end of each request from the table into a flat list of slots."""
    offset = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots[offset : offset + end - start] = slot_table[row, start:end].to(slots.dtype)
        offset += end - start


def assign_draft_cache_locs_contiguous_cpu(
    rows: Tensor, slot_table: Tensor, lengths: Tensor, slots: Tensor, table_width: int, topk: int, steps: int
) -> None:
    """Read the slots reserved for each request's draft tokens, which follow its committed tokens."""
    count = topk * steps
    flat = slots.view(-1)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        flat[i * count : (i + 1) * count] = slot_table[row, length : length + count].to(slots.dtype)


def build_draft_decode_metadata_cpu(
    slot_table: Tensor, rows: Tensor, lengths: Tensor, topk: int, steps: int, table_width: int
) -> Tensor:
    """A slot table with one row per branch: the shared prefix, then the slots of that branch alone."""
    table = torch.zeros(len(lengths) * topk, table_width, dtype=slot_table.dtype)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        for branch in range(topk):
            first = length + branch * steps
            table[i * topk + branch, :length] = slot_table[row, :length]
            table[i * topk + branch, length : length + steps] = slot_table[row, first : first + steps]
    return table


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Pick the last accepted token of each request: the one that the target added itself."""
    flat = accept_tokens.reshape(-1)
    for i, length in enumerate(accept_lens.tolist()):
        bonus_tokens[i] = flat[accept_stride * i + length - 1]


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, slots: Tensor, accepted_slots: Tensor) -> None:
    """Pack the slots of the accepted tokens to the front."""
    indices = accept_index.reshape(-1)
    indices = indices[indices > -1].long()
    accepted_slots[: indices.numel()] = slots[indices].to(accepted_slots.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor, starts: Tensor, lengths: Tensor, new_tokens: Tensor, select_index: Tensor | None = None
) -> None:
    """Shift each request's tokens to the left; put its new token at the end, or where `select_index` says."""
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if length == 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        last = start + length - 1 if select_index is None else int(select_index.reshape(-1)[i])
        input_ids[last] = new_tokens.reshape(-1)[i]


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    lengths: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Lay out the verify step's token tree: links for the walk, an attention mask and positions.

    Node 0 is the last committed token, node i + 1 is selected token i. All outputs are written in place.
    """
    mode = int(tree_mask_mode)
    if mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError("sgl_kernel stand-in: no bit-packed tree mask")
    one_row_each = parent_list.dim() > 1 and parent_list.numel() > 0
    all_parents = parent_list.tolist() if one_row_each else [parent_list.reshape(-1).tolist()] * len(lengths)
    nodes = draft_token_num
    mask, flat_positions = tree_mask.view(-1), positions.view(-1)
    index, child, sibling = (tensor.view(-1) for tensor in (retrieve_index, retrieve_next_token, retrieve_next_sibling))
    committed_before = 0
    for request, (length, selected) in enumerate(zip(lengths.tolist(), selected_index.tolist(), strict=True)):
        base = request * nodes
        parents = _selected_parents(selected[: nodes - 1], all_parents[request], topk)
        index[base : base + nodes] = torch.arange(base, base + nodes)

        for node in range(nodes - 1, 0, -1):  # from the back, so that the best sibling ends up first
            parent = parents[node - 1]
            if parent == UNSELECTED:
                continue
            parent_node = base + (0 if parent == ROOT else parent + 1)
            if child[parent_node] != NO_LINK:
                sibling[base + node] = child[parent_node]
            child[parent_node] = node

        flat_positions[base] = length
        for node in range(nodes):
            if mode == FULL_MASK:  # a row covers the committed tokens too
                row = nodes * base + committed_before * nodes + (length + nodes) * node + length
            else:
                row = nodes * base + nodes * node
            mask[row] = 1
            mask[row + 1 : row + nodes] = 0
            ancestors = _path_to_root(node - 1, parents, depth) if node else []
            for ancestor in ancestors:
                mask[row + 1 + ancestor] = 1
            flat_positions[base + node] = length + len(ancestors)
        committed_before += length


def _selected_parents(selected: list[int], parent_of_group: list[int], topk: int) -> list[int]:
    """For each selected token, which selected token it hangs from."""
    parents = []
    for candidate in selected:
        group = candidate // topk
        if group == 0:
            parents.append(ROOT)
        elif parent_of_group[group] in selected:
            parents.append(selected.index(parent_of_group[group]))
        else:
            parents.append(UNSELECTED)
    return parents


def _path_to_root(token: int, parents: list[int], depth: int) -> list[int]:
    """The selected token itself and those above it, nearest first."""
    path = []
    while token >= 0 and len(path) < depth:
        path.append(token)
        token = parents[token]
    return path


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each token tree along the target's own greedy choices and accept what agrees."""
    requests, max_accepted = accept_index.shape
    wanted, predicted = target_predict.reshape(-1), predicts.view(-1)
    for request in range(requests):
        last = int(retrive_index[request, 0])
        accept_index[request, 0] = last
        accepted, node = 0, 0
        for _ in range(1, max_accepted):
            node = int(retrive_next_token[request, node])
            while node != NO_LINK and candidates[request, node] != wanted[last]:
                node = int(retrive_next_sibling[request, node])
            if node == NO_LINK:
                break
            predicted[last] = wanted[last]
            last = int(retrive_index[request, node])
            accepted += 1
            accept_index[request, accepted] = last
        accept_token_num[request] = accepted
        predicted[last] = wanted[last]
