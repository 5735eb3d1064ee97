"""Faults of single rows: lost, swapped, not finite, or right in one situation and wrong in another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import torch

from eagle_parity.alignment.matching import sample
from eagle_parity.alignment.views import blocks
from eagle_parity.diagnosis.case import PROBE_ROWS, Case, TensorCase
from eagle_parity.diagnosis.judgement import Judgement
from eagle_parity.diagnosis.rules.geometry import nearest, nearest_row
from eagle_parity.diagnosis.rules.strays import strays
from eagle_parity.metrics.distances import FloatArray, numpy64, rel_l2, row_sums
from eagle_parity.metrics.distribution import median
from eagle_parity.records import Boundary, Finding, IntArray

LEAST_SHARE = 0.01  # rows that are lost or swapped are a fault from this share on
LEAST_ROWS = 2  # and from this number on, unless they are empty
EMPTY = 0.01  # norm ratio of a row that was never written
AS_FAR_AS_ANOTHER = 0.9  # of the rolled-rows control: as far from its token's state as another token's is
HALFWAY = 0.5  # a row is another token's state when that is at most half as far away as its own token's
RUN = 3  # equal tokens in a row that may be the placeholders of an image


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
    for tensor in case.tensors:
        places = [asdict(place) for place in tensor.ranks.non_finite]
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


def _wrong(case: Case, tensor: TensorCase) -> tuple[Boundary, IntArray] | None:
    """The boundary that most rows hold, and the rows (indexes into the alignment) that do not; None with few of them.

    Wrong is as far from the token's state as another token's is, or empty; a routing flip stays nearer.
    """
    held = tensor.holds
    if held is None and graph_part(tensor) is not None:
        held = tensor.expected  # the eager rows hold it
    if held is None or tensor.view is None or tensor.rolled_rows is None:
        return None
    distances = tensor.match.rel_l2[held]
    far = AS_FAR_AS_ANOTHER * tensor.rolled_rows
    if (distances >= far).any():
        far = max(far, AS_FAR_AS_ANOTHER * _another_token(case, held))
    astray, empty = distances >= far, _empty(case, tensor, held)
    if astray.sum() < LEAST_ROWS:
        astray[:] = False  # one row may have taken other experts all the way
    elsewhere = _elsewhere(case, tensor, held)
    astray[elsewhere] = True  # but not to another token's state: that counts however few rows it is
    found = strays(case).get(tensor.name)
    if found is not None:
        astray[found.rows] = False
    wrong = np.flatnonzero(astray | empty)
    least = 1 if len(elsewhere) else max(1, LEAST_SHARE * len(distances))
    return (held, wrong) if len(wrong) >= least else None


def _elsewhere(case: Case, tensor: TensorCase, boundary: Boundary) -> IntArray:
    """Rows (indexes into the alignment) that hold the state of another token: at its floor, and far from their own.

    One row proves it. Its deviation is then the difference of two states that are as unlike as half of all pairs are
    (half of their usual distance), in one direction out of as many as the state has. Noise has no such aim, and where
    two states differ by the choice of an expert alone they are near each other, or of one token.
    """
    assert tensor.view is not None
    own = tensor.match.rel_l2[boundary]
    limit = tensor.limits[boundary]
    suspects = np.flatnonzero(own > limit)
    if len(suspects):
        suspects = suspects[own[suspects] > HALFWAY * _another_token(case, boundary)]
    if len(suspects) == 0:
        return suspects
    suspects = suspects[sample(len(suspects), PROBE_ROWS)]
    ours = case.keep_ordinary(tensor.view.read(case.alignment.serving[suspects]).float())
    near = np.full(len(suspects), np.inf)
    token = np.full(len(suspects), -1, dtype=np.int64)
    everywhere = case.alignment.training
    for block in blocks(len(everywhere), ours.shape[1]):
        theirs = case.keep_ordinary(case.training_rows(boundary, everywhere[block]))
        index, distance = nearest_row(ours, theirs)
        closer = distance < near
        near[closer] = distance[closer]
        token[closer] = case.training.tokens.token_ids[everywhere[block][index[closer]]]
    other = token != case.serving.tokens.token_ids[case.alignment.serving[suspects]]
    found: IntArray = suspects[other & (near <= limit) & (near <= HALFWAY * own[suspects])]
    return found


def _another_token(case: Case, boundary: Boundary) -> float:
    """How far apart the states of two tokens are that do not follow each other."""
    rows = case.training_rows(boundary)
    return median(rel_l2(rows.roll(len(rows) // 2, dims=0), rows))


def _empty(case: Case, tensor: TensorCase, held: Boundary) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Rows of hardly any length, where the boundary has some."""
    if held == tensor.reference and tensor.comparison is not None:
        return tensor.comparison.norm_ratio < EMPTY
    assert tensor.view is not None
    ours, theirs = case.alignment.serving, case.alignment.training
    ratios: list[FloatArray] = []
    for block in blocks(len(ours), tensor.view.width):
        sums = row_sums(tensor.view.read(ours[block]).float(), case.training_rows(held, theirs[block]))
        ratios.append(numpy64(sums.norm_ratio()))
    return np.concatenate(ratios) < EMPTY if ratios else np.zeros(0, dtype=bool)


def _in_graph(case: Case) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which aligned rows come from graph replay."""
    rows = case.alignment.serving
    mask = np.zeros(len(rows), dtype=bool)
    for request in case.serving.tokens.requests:
        if request.graph:
            mask |= (rows >= request.begin) & (rows < request.end)
    return mask


def graph_part(tensor: TensorCase) -> Judgement | None:
    """The graph-replayed rows, where they are wrong and the eager ones are not."""
    parts = {part.rows: part for part in tensor.strata}
    # Few rows, of which some took other experts, are inconclusive: that is no proof that they are wrong.
    wrong = next((p for name, p in parts.items() if "graph replay" in name and p.status == "fail"), None)
    right = any("eager" in name and p.status == "ok" for name, p in parts.items())
    return wrong if right else None


def split_rows(case: Case, tensor: TensorCase, boundary: Boundary, wrong: IntArray) -> tuple[list[int], list[int]]:
    """Split rows (indexes into the alignment) by whether they are some other row's state of that boundary."""
    assert tensor.view is not None
    if len(wrong) == 0:
        return [], []
    wrong = wrong[sample(len(wrong), PROBE_ROWS)]
    ours = case.keep_ordinary(tensor.view.read(case.alignment.serving[wrong]).float())
    everywhere = case.alignment.training
    found = torch.full((len(wrong),), torch.inf)
    for block in blocks(len(everywhere), ours.shape[1]):
        theirs = case.keep_ordinary(case.training_rows(boundary, everywhere[block]))
        found = torch.minimum(found, nearest(ours, theirs))
    own = torch.from_numpy(tensor.match.rel_l2[boundary][wrong]).float()
    swapped = ((found <= tensor.limits[boundary]) | (found <= HALFWAY * own)).numpy()
    return wrong[swapped].tolist(), wrong[~swapped].tolist()


def row_faults(case: Case) -> Iterator[Finding]:
    """Rows of a tensor that is right by its median: another row's state, or nothing that belongs to these prompts."""
    for tensor in case.tensors:
        found = _wrong(case, tensor)
        if found is None:
            continue
        held, wrong = found
        if graph_part(tensor) is not None:
            wrong = wrong[~_in_graph(case)[wrong]]  # `situation` tells about the others
        if len(wrong) == 0:
            continue
        images = missing_images(case, tensor)
        if images is not None:
            yield images
            continue
        swapped, unknown = split_rows(case, tensor, held, wrong)
        if swapped and len(unknown) <= len(swapped) // 4:
            swapped, unknown = sorted(swapped + unknown), []  # an exchange, seen through noise
        if swapped:
            yield swapped_finding(case, tensor, held, swapped)
        if unknown:
            yield _lost_finding(case, tensor, held, unknown)


def swapped_finding(case: Case, tensor: TensorCase, boundary: Boundary, indexes: list[int]) -> Finding:
    """The finding for rows (indexes into the alignment) that hold other rows' states."""
    rows = [int(case.alignment.serving[i]) for i in indexes]
    return Finding(
        "rows-swapped",
        "error",
        f"{tensor.where}: {len(rows)} rows hold the states of other rows, first row {rows[0]}",
        "look at how rows are compacted or indexed between target and draft (batching, accepted rows, chunks)",
        slot=tensor.slot,
        boundary=boundary,
        evidence={"rows": rows[:16]},
    )


def _lost_finding(case: Case, tensor: TensorCase, boundary: Boundary, indexes: list[int]) -> Finding:
    assert tensor.view is not None
    rows = [int(case.alignment.serving[i]) for i in indexes]
    zero = int((tensor.view.read(case.alignment.serving[indexes]).float().abs().amax(-1) == 0).sum())
    return Finding(
        "rows-lost",
        "error",
        f"{tensor.where}: {len(rows)} rows do not hold their token's state ({zero} are zero), first row {rows[0]}",
        "look at prefix-cache hits, chunk borders and padded rows: those positions were never written",
        slot=tensor.slot,
        boundary=boundary,
        evidence={"rows": rows[:16], "zero": zero},
    )


def missing_images(case: Case, tensor: TensorCase) -> Finding | None:
    """Placeholder tokens (one id, several times in a row) whose rows are wrong, and rows after them that are off.

    Rows before the first placeholder know nothing of the image and must be right; later rows attend to it.
    """
    if tensor.expected is None or tensor.expected not in tensor.match.rel_l2:
        return None
    distances, limit = tensor.match.rel_l2[tensor.expected], tensor.limits[tensor.expected]
    before, inside, after = _around_placeholders(case)
    if min(before.sum(), after.sum()) < 8 or inside.sum() < RUN:
        return None
    near, there, later = (median(distances[mask]) for mask in (before, inside, after))
    if near > limit or there <= limit or there < 4 * near or later < 3 * near:
        return None
    return Finding(
        "multimodal-missing",
        "error",
        f"{tensor.where}: rows before the first placeholder token are right ({near:.2g}), those of the placeholders "
        f"are not ({there:.2g}), and later ones are off ({later:.2g})",
        "pass the images (or audio) to the forward that collects the states, or capture them from the server",
        slot=tensor.slot,
        boundary=tensor.expected,
        evidence={"before": near, "placeholders": there, "after": later, "rows": int(inside.sum())},
    )


def _around_placeholders(case: Case) -> tuple[IntArray, ...]:
    """Aligned rows before, in and after the first run of equal tokens of each request: three masks."""
    ids, rows = case.serving.tokens.token_ids, case.alignment.serving
    kind = np.zeros(len(ids), dtype=np.int64)
    for request in case.serving.tokens.requests:
        own = ids[request.begin : request.end]
        if request.phase != "prefill" or len(own) < RUN:
            continue
        equal = np.flatnonzero(own[1:] == own[:-1])
        starts = [i for i in equal.tolist() if np.all(own[i : i + RUN] == own[i]) and i + RUN <= len(own)]
        if not starts:
            continue
        first = starts[0]
        end = first + int(np.argmax(np.append(own[first:] != own[first], True)))
        kind[request.begin : request.begin + first] = 1
        kind[request.begin + first : request.begin + end] = 2
        kind[request.begin + end : request.end] = 3
    return tuple(kind[rows] == value for value in (1, 2, 3))


def situation(case: Case) -> Iterator[Finding]:
    """Right altogether, wrong in one situation (phase, graph replay, short forwards, warm cache)."""
    for tensor in case.tensors:
        part = graph_part(tensor)
        if part is None and tensor.judgement.status == "ok":
            part = next((part for part in tensor.strata if part.status == "fail"), None)
        if part is None:
            continue
        another = (
            part.best != tensor.expected
            and part.best_median is not None
            and (part.best is None or part.best_median <= tensor.limits[part.best])
        )
        yield Finding(
            "graph-stale" if "graph replay" in part.rows else "layer-set" if another else "undetermined",
            "error",
            f"{tensor.where}: the {part.count} rows of {part.rows} "
            + (f"hold boundary {part.best}" if another else "do not hold it")
            + f", the others boundary {tensor.expected}",
            "the capture differs by situation: on SGLang before 0.5.11 decode graphs capture the default layers "
            "(upgrade); otherwise repeat with --disable-cuda-graph to see which path is wrong",
            slot=tensor.slot,
            boundary=part.best,
            evidence={"rows": part.rows, "count": part.count, "rel_l2": part.best_median},
        )
