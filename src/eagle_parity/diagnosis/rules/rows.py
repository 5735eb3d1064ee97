"""Faults of single rows: lost, swapped, not finite, or right in one situation and wrong in another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from eagle_parity.alignment.matching import sample
from eagle_parity.alignment.views import blocks
from eagle_parity.diagnosis.case import PROBE_ROWS, Case, TensorCase, bad_rows
from eagle_parity.records import Finding, IntArray

LEAST_SHARE = 0.01  # rows that are lost or swapped are a fault from this share on
EMPTY = 0.01  # norm ratio of a row that was never written
AS_FAR_AS_ANOTHER = 0.9  # of the rolled-rows control: as far from its token's state as another token's is


def token_notes(case: Case) -> Iterator[Finding]:
    """What the alignment of tokens noticed."""
    fixes = {
        "template-mismatch": "use one chat template and tokenizer on both sides, or replay ids with --tokens-from",
        "token-shift": "number positions alike on both sides",
        "rows-lost": "capture with a cold prefix cache (flush it, or --disable-radix-cache)",
        "undetermined": "capture with a cold prefix cache, so that every prompt begins at position 0",
    }
    for note in case.alignment.notes:
        few = ", ".join(note.requests[:3]) + (", …" if len(note.requests) > 3 else "")
        yield Finding(
            note.code,
            "warning",
            f"{note.message} (request {few})",
            fixes[note.code],
            evidence={"requests": len(note.requests)},
        )


def non_finite(case: Case) -> Iterator[Finding]:
    """NaN or infinite values, on any rank."""
    rows = np.arange(len(case.serving.tokens.token_ids), dtype=np.int64)
    for tensor in case.tensors:
        places = []
        for view in tensor.ranks.views:
            held = rows[view.holds(rows)]
            for block in blocks(len(held), view.width):
                values = view.read(held[block])
                bad = (~torch.isfinite(values.float())).nonzero()
                if len(bad):
                    row, column = bad[0].tolist()
                    places.append({"rank": view.rank, "row": int(held[block][row]), "channel": column})
                    break
        if places:
            first = places[0]
            yield Finding(
                "non-finite",
                "error",
                f"{tensor.where} holds NaN or infinite values, first on rank {first['rank']} at row {first['row']}, "
                f"channel {first['channel']}",
                "look for an overflow (fp16 states above 65504), an uninitialised or padded buffer",
                slot=tensor.slot,
                ranks=tuple(place["rank"] for place in places),
                evidence={"first": places},
            )


def _swaps(case: Case, tensor: TensorCase) -> tuple[list[int], list[int]] | None:
    """Of a tensor that is right by its median, the wrong rows: (hold another row's state, hold nothing known).

    Wrong is as far from the expected state as another token's is; a routing flip stays nearer. None without enough.
    """
    distances = bad_rows(tensor)
    if distances is None or tensor.rolled_rows is None or tensor.judgement.status != "ok":
        return None
    assert tensor.comparison is not None
    empty = tensor.comparison.norm_ratio < EMPTY
    wrong = np.flatnonzero((distances >= AS_FAR_AS_ANOTHER * tensor.rolled_rows) | empty)
    if len(wrong) < LEAST_SHARE * len(distances):
        return None
    return split_rows(case, tensor, wrong)


def split_rows(case: Case, tensor: TensorCase, wrong: IntArray) -> tuple[list[int], list[int]]:
    """Split rows (indexes into the alignment) by whether they are some other row's state at the floor."""
    assert tensor.view is not None
    assert tensor.expected is not None
    wrong = wrong[sample(len(wrong), PROBE_ROWS)]
    ours = tensor.view.read(case.alignment.serving[wrong]).float()
    everywhere = case.alignment.training
    nearest = torch.full((len(wrong),), torch.inf)
    for block in blocks(len(everywhere), ours.shape[1]):
        theirs = case.training_rows(tensor.expected, everywhere[block])
        distance = torch.cdist(ours, theirs) / theirs.norm(dim=-1).clamp_min(1e-30)
        nearest = torch.minimum(nearest, distance.min(dim=-1).values)
    swapped = nearest.numpy() <= tensor.limits[tensor.expected]
    return wrong[swapped].tolist(), wrong[~swapped].tolist()


def rows_swapped(case: Case) -> Iterator[Finding]:
    """Rows that hold the state of another row."""
    for tensor in case.tensors:
        split = _swaps(case, tensor)
        if split is None or not split[0]:
            continue
        yield swapped_finding(case, tensor, split[0])


def swapped_finding(case: Case, tensor: TensorCase, indexes: list[int]) -> Finding:
    """The finding for rows (indexes into the alignment) that hold other rows' states."""
    rows = [int(case.alignment.serving[i]) for i in indexes]
    return Finding(
        "rows-swapped",
        "error",
        f"{tensor.where}: {len(rows)} rows hold the states of other rows, first row {rows[0]}",
        "look at how rows are compacted or indexed between target and draft (batching, accepted rows, chunks)",
        slot=tensor.slot,
        boundary=tensor.expected,
        evidence={"rows": rows[:16]},
    )


def rows_lost(case: Case) -> Iterator[Finding]:
    """Rows that hold zeros or nothing that belongs to these prompts."""
    for tensor in case.tensors:
        split = _swaps(case, tensor)
        if split is None or not split[1]:
            continue
        rows = [int(case.alignment.serving[i]) for i in split[1]]
        assert tensor.view is not None
        zero = int((tensor.view.read(case.alignment.serving[split[1]]).float().abs().amax(-1) == 0).sum())
        yield Finding(
            "rows-lost",
            "error",
            f"{tensor.where}: {len(rows)} rows do not hold their token's state ({zero} are zero), first row {rows[0]}",
            "look at prefix-cache hits, chunk borders and padded rows: those positions were never written",
            slot=tensor.slot,
            boundary=tensor.expected,
            evidence={"rows": rows[:16], "zero": zero},
        )


def situation(case: Case) -> Iterator[Finding]:
    """Right altogether, wrong in one situation (phase, graph replay, short forwards, warm cache)."""
    for tensor in case.tensors:
        if tensor.judgement.status != "ok":
            continue
        failed = [part for part in tensor.strata if part.status == "fail"]
        for part in sorted(failed, key=lambda part: "graph replay" not in part.rows)[:1]:
            another = part.best != tensor.expected
            yield Finding(
                "graph-stale" if "graph replay" in part.rows else "layer-set" if another else "undetermined",
                "error",
                f"{tensor.where}: the {part.count} rows of {part.rows} "
                + (f"hold boundary {part.best}" if another else f"are {part.best_median:.3g} away from it")
                + f", the others boundary {tensor.expected}",
                "the capture differs by situation: on SGLang before 0.5.11 decode graphs capture the default layers "
                "(upgrade); otherwise repeat with --disable-cuda-graph to see which path is wrong",
                slot=tensor.slot,
                boundary=part.best,
                evidence={"rows": part.rows, "count": part.count, "rel_l2": part.best_median},
            )
