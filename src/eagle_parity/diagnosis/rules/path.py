"""Tensors on the path of the residual stream from one boundary to the next, and off it by a layer's step."""

from __future__ import annotations

import torch

from eagle_parity.alignment.partial import residual_like
from eagle_parity.diagnosis.case import Case, TensorCase
from eagle_parity.diagnosis.judgement import MIN_ROWS
from eagle_parity.diagnosis.rules.explanation import Explained, error
from eagle_parity.diagnosis.rules.geometry import FAR_OFF, OFF, Place, fitted, place
from eagle_parity.diagnosis.steps import step_sums
from eagle_parity.metrics.distances import numpy64
from eagle_parity.metrics.distribution import median


def _step(case: Case, tensor: TensorCase) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The expected boundary K; the tensor, boundary K-1 and K on ordinary channels; None where training lacks one."""
    boundary = tensor.expected
    if not isinstance(boundary, int) or not {boundary - 1, boundary} <= set(tensor.match.rel_l2).difference(
        case.borrowed
    ):
        return None
    rows = [case.serving_rows(tensor), case.training_rows(boundary - 1), case.training_rows(boundary)]
    x, before, after = (case.keep_ordinary(r) for r in rows)
    return boundary, x, before, after


def double_output(case: Case, tensor: TensorCase) -> Explained | None:
    """R + tp M instead of R + M: truth - (x - truth) / (tp - 1) is then the residual stream R."""
    rows = _step(case, tensor)
    if rows is None:
        return None
    boundary, x, before, after = rows
    engine = case.serving.facts.engine
    sizes = dict.fromkeys([len(case.serving.ranks), (engine.tp_size if engine else None) or 0, 2, 4, 8])
    for size in [size for size in sizes if size > 1]:
        evidence = residual_like(after - (x - after) / (size - 1), after, before)
        if evidence is None:
            continue
        finding = error(
            tensor,
            "double-sum",
            f"holds boundary {boundary} with the output of layer {boundary - 1} counted about {size} times",
            "remove one of the two all-reduces (or reduce-scatters) after that layer",
            boundary,
            times=size,
            **evidence,
        )
        return Explained(finding, boundary)
    return None


def residual_missing(case: Case, tensor: TensorCase) -> Explained | None:
    """A layer's output alone: a share of the step and none of the stream."""
    rows = _step(case, tensor)
    if rows is None:
        return None
    boundary, x, before, after = rows
    found = place(x, before, after)
    size = median(numpy64(x.double().norm(dim=-1) / (after - before).double().norm(dim=-1).clamp_min(1e-30)))
    if abs(found.stream) > 0.1 or not found.forward or found.along(found.step) < 0.15 or size > 1.2:
        return None
    finding = error(
        tensor,
        "residual-missing",
        f"holds the output of layer {boundary - 1} without the residual",
        "capture hidden_states + residual",
        boundary,
        **found.evidence,
    )
    return Explained(finding, boundary)


def between(case: Case, tensor: TensorCase) -> Explained | None:
    """On the way to the next stored boundary, or short of the expected one.

    Short of it is no proof of a partial sum: that is told by ranks that differ (rule 6), and looked for before.
    """
    boundary = tensor.expected
    if not isinstance(boundary, int) or boundary not in tensor.match.rel_l2 or boundary in case.borrowed:
        return None
    before, after = _neighbours(case, tensor, boundary)
    ahead = None if after is None else _on_the_way(case, tensor, boundary, after)
    behind = None if before is None else _on_the_way(case, tensor, before, boundary)
    if ahead is not None and after is not None and (behind is None or ahead.rest <= behind.rest):
        return _ahead(tensor, boundary, after, ahead)
    return None if behind is None or before is None else _behind(tensor, before, boundary, behind)


def _neighbours(case: Case, tensor: TensorCase, boundary: int) -> tuple[int | None, int | None]:
    """The boundaries next to one that the training side stores; None where there is none on that side.

    Not borrowed ones: a server's own map has its noise in common with the tensor, which pulls the tensor towards it.
    """
    stored = [b for b in tensor.match.rel_l2 if isinstance(b, int) and b not in case.borrowed]
    return max((b for b in stored if b < boundary), default=None), min(
        (b for b in stored if b > boundary), default=None
    )


def _ahead(tensor: TensorCase, boundary: int, after: int, at: Place) -> Explained:
    holds = f"holds boundary {boundary} and {at.step:.0%} of the way to {after}"
    if after == boundary + 1:
        finding = error(
            tensor,
            "aliased-buffer",
            f"{holds}: a part of layer {boundary} was added after the capture",
            "clone the state when it is captured: the buffer is written again by the next layer",
            boundary,
            **at.evidence,
        )
        return Explained(finding, boundary)
    finding = error(
        tensor,
        "undetermined",
        f"{holds}: a later layer, or a buffer that a later layer has written",
        f"store the boundaries between on the training side (dump training --boundaries all): if it is {boundary + 1} "
        "the layers are shifted",
        None,
        hypotheses=["layer-shift", "aliased-buffer"],
        **at.evidence,
    )
    return Explained(finding, None)


def _behind(tensor: TensorCase, before: int, boundary: int, at: Place) -> Explained:
    holds = f"holds boundary {before} and {at.step:.0%} of the way to {boundary}"
    short = "captured before the MLP's output was added"
    one_rank = tensor.ranks.shape == "one-rank" and tensor.layout != "replicated"
    hypotheses = ["partial-sum", short] if one_rank or tensor.ranks.shape == "differ" else [short]
    fix = "capture after the layer's output is complete, that is hidden_states + residual"
    fix += "" if "partial-sum" not in hypotheses else "; capture every rank: if they differ it is a partial sum"
    unseen = "; with one rank's data a partial sum can neither be shown nor excluded" if one_rank else ""
    if before < boundary - 1:
        hypotheses, what = ["layer-shift", *hypotheses], "an earlier layer, or a part of the last one is not in it"
        fix = "store the boundaries between on the training side (dump training --boundaries all); " + fix
    else:
        what = "a part of its layer's output is not in it"
        what += "" if one_rank else ", on every rank alike" if tensor.ranks.shape != "differ" else ""
    finding = error(
        tensor, "undetermined", f"{holds}: {what}{unseen}", fix, boundary, hypotheses=hypotheses, **at.evidence
    )
    return Explained(finding, boundary if before == boundary - 1 else None)


def _on_the_way(case: Case, tensor: TensorCase, begin: int, end: int) -> Place | None:
    """The tensor's place between two boundaries, if it lies there: nearer to both than they are to each other.

    This judges layers that hardly change the stream too, where every distance is below its floor.
    """
    found = _place(case, tensor, begin, end)
    inside = found.within(OFF if end == begin + 1 else FAR_OFF)
    return found if inside and found.between else None


def _place(case: Case, tensor: TensorCase, begin: int, end: int) -> Place:
    """The tensor's place from one boundary to another, wherever that is."""
    sums = step_sums(case).get((tensor.name, begin, end))
    if sums is not None:
        return fitted(sums)
    states = [case.serving_rows(tensor), case.training_rows(begin), case.training_rows(end)]
    return place(*(case.keep_ordinary(rows) for rows in states))


def midway(case: Case, tensor: TensorCase) -> Explained | None:
    """The finding for a tensor that looks right, or like the next stored boundary, and lies between the two."""
    expected, best = tensor.expected, tensor.match.best
    if not isinstance(expected, int) or best not in (expected, *_neighbours(case, tensor, expected)):
        return None
    if tensor.view is None or len(case.probe) < MIN_ROWS:
        return None
    if tensor.partial is not None or (tensor.ranks.shape == "differ" and not tensor.odd_ranks):
        return None
    found = between(case, tensor)
    if found is not None or tensor.judgement.status == "fail":
        return found
    if not {expected - 1, expected} <= set(tensor.match.rel_l2):
        return None
    found_at = _place(case, tensor, expected - 1, expected)
    if not found_at.beyond:
        return None
    return double_output(case, tensor) or _beyond(tensor, expected, found_at)


def _beyond(tensor: TensorCase, boundary: int, at: Place) -> Explained:
    """More than once the last step, by how often cannot be said."""
    finding = error(
        tensor,
        "double-sum",
        f"holds {at.step:.2f} times the step to boundary {boundary}: a part of layer {boundary - 1}'s output counts "
        "more than once",
        "remove one of the two reductions after that layer",
        boundary,
        **at.evidence,
    )
    return Explained(finding, boundary)
