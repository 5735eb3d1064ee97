"""Faults in how the ranks hold a tensor together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from eagle_parity.alignment.partial import PartialSum, find_partial_sum
from eagle_parity.alignment.views import RankView
from eagle_parity.diagnosis.case import Case, TensorCase, once
from eagle_parity.diagnosis.rules.geometry import nearest, place
from eagle_parity.metrics.distances import rel_l2
from eagle_parity.metrics.distribution import median
from eagle_parity.records import Capture, Finding, rank_names


def tp_size(capture: Capture) -> int | None:
    """The serving engine's tensor-parallel size, None when the dump does not say."""
    return capture.facts.engine.tp_size if capture.facts.engine is not None else None


def capture_lost(case: Case) -> Iterator[Finding]:
    """A tensor that some ranks have and others not, ranks without a file, or fewer slots than the draft takes."""
    for tensor in case.tensors:
        if tensor.ranks.missing:
            yield Finding(
                "capture-lost",
                "error",
                f"{tensor.where} is not stored on {rank_names(tensor.ranks.missing)} but is on "
                f"{rank_names(tensor.ranks.ranks)}",
                "capture again; if it stays, those ranks never ran the capture (pipeline or context parallelism, "
                "two-batch overlap): turn that off for the capture",
                slot=tensor.slot,
                ranks=tensor.ranks.missing,
            )
    size, present = tp_size(case.serving), case.serving.ranks
    if size is not None and len(present) > 1 and len(present) < size:
        lost = tuple(rank for rank in range(size) if rank not in present)
        yield Finding(
            "capture-lost",
            "warning",
            f"{rank_names(lost)} of TP={size} {'has' if len(lost) == 1 else 'have'} no file in the dump",
            "capture with every rank writing to the same directory, or join copies with `dump merge`",
            ranks=lost,
        )
    expected = case.expectation.boundaries
    if expected is not None and case.slots and len(expected) != len(case.slots):
        yield Finding(
            "capture-lost",
            "error",
            f"the server feeds {len(case.slots)} slots, the draft was trained on {len(expected)}: {list(expected)}",
            "declare as many layer ids as the draft has slots, each of them a layer that the server captures",
            evidence={"slots": len(case.slots), "expected_slots": len(expected)},
        )


def width_mismatch(case: Case) -> Iterator[Finding]:
    """A width that is neither the hidden size nor a shard of it."""
    for tensor in case.tensors:
        widths = sorted({view.width for view in tensor.ranks.views})
        if tensor.ranks.shape == "width":
            yield Finding(
                "width-mismatch",
                "error",
                f"{tensor.where} is {' and '.join(map(str, widths))} wide, the hidden size is {case.hidden_size}",
                "check target_hidden_size and num_aux_hidden_states in the draft's config, and that both dumps are of "
                "the same target",
                slot=tensor.slot,
                ranks=tensor.ranks.ranks,
                evidence={"widths": widths, "hidden_size": case.hidden_size},
            )


def hidden_shard(case: Case) -> Iterator[Finding]:
    """Each rank holds hidden / tp channels."""
    for tensor in case.tensors:
        if tensor.layout == "hidden-shard":
            yield Finding(
                "hidden-shard",
                "error" if tensor.slot is not None else "warning",
                f"{tensor.where}: each rank holds {tensor.ranks.views[0].width} of {case.hidden_size} channels",
                "gather the state over the ranks before the draft's fc (gather_output=True, or an all-gather)",
                slot=tensor.slot,
                ranks=tensor.ranks.ranks,
                evidence=_rebuilt(tensor),
            )


def token_shard(case: Case) -> Iterator[Finding]:
    """Each rank holds some of the tokens: right under data-parallel attention, a fault otherwise."""
    engine = case.serving.facts.engine
    own_tokens = engine is not None and (engine.dp_size or 1) > 1
    for tensor in case.tensors:
        if tensor.layout == "token-shard":
            yield Finding(
                "token-shard",
                "info" if own_tokens else "error" if tensor.slot is not None else "warning",
                f"{tensor.where}: the ranks hold different tokens"
                + (" (data-parallel attention: each rank serves its own)" if own_tokens else ""),
                "gather the rows over the ranks before the draft (all-gather along tokens), or turn off the "
                "scattered mode (two-batch overlap, context parallel, scattered attention inputs)",
                slot=tensor.slot,
                ranks=tensor.ranks.ranks,
                evidence=_rebuilt(tensor),
            )


def partial_sum(case: Case) -> Iterator[Finding]:
    """Each rank holds its own part of a sum: full width, ranks differ, and the parts add up to the truth."""
    for tensor in case.tensors:
        if tensor.partial is None:
            continue
        engine = case.serving.facts.engine
        version = engine.version if engine is not None and engine.version else "this version"
        proof = {
            "residual": "the sum less (tp-1) residuals is the training state",
            "plain-sum": "the ranks' sum is the training state",
            "residual-estimate": "(sum - truth)/(tp-1) is the residual stream, what the ranks do not share is not",
            "without-residual": "truth - sum is the residual stream: the residual is missing as well",
        }[tensor.partial.how]
        yield Finding(
            "partial-sum",
            "error",
            f"{tensor.where}: each rank holds its own part of boundary {tensor.partial.boundary}{_torn(case, tensor)}, "
            f"captured before the all-reduce: {proof}",
            f"SGLang before 0.5.14 captures DeepSeek/Kimi states before a fused all-reduce (here: {version}): upgrade "
            "to 0.5.14 or later, or start with --enforce-disable-flashinfer-allreduce-fusion",
            slot=tensor.slot,
            boundary=tensor.partial.boundary,
            ranks=tensor.ranks.ranks,
            evidence={"how": tensor.partial.how, **tensor.partial.evidence, **_spread(tensor)},
        )
        if tensor.partial.how == "without-residual":
            yield Finding(
                "residual-missing",
                "error",
                f"{tensor.where} holds the layer's output without the residual",
                "capture hidden_states + residual",
                slot=tensor.slot,
                boundary=tensor.partial.boundary,
            )


@once
def late_sums(case: Case) -> dict[str, PartialSum]:
    """Partial sums that show only on second sight, by the tensor's name.

    Groups of ranks that agree, where one of two nested reductions (over experts and over tensor-parallel ranks) was
    left out; and parts of a state whose noise is as long as a layer's step.
    """
    found: dict[str, PartialSum] = {}
    for tensor in case.tensors:
        groups = tensor.ranks.groups() if tensor.ranks.shape == "differ" else []
        sizes = {len(group) for group in groups}
        if tensor.partial is not None or tensor.odd_ranks or len(groups) < 2 or len(sizes) > 1:
            continue
        views = tuple(view for view in tensor.ranks.views if view.rank in {group[0] for group in groups})
        ours, theirs = case.alignment.serving[case.probe], case.alignment.training[case.probe]
        partial = find_partial_sum(views, case.boundaries, ours, theirs, tensor.limits, tensor.expected, case.massive)
        partial = partial or _all_short(case, tensor, views)
        if partial is not None:
            found[tensor.name] = partial
    return found


def _all_short(case: Case, tensor: TensorCase, views: tuple[RankView, ...]) -> PartialSum | None:
    """Every part by itself lies between boundary K-1 and K: each rank has the stream and some of the last step.

    Noise has no share of the step, so this also works where noise is as long as a step.
    """
    best = tensor.match.best
    candidates = [tensor.expected, best, best + 1 if isinstance(best, int) else None]
    rows = case.alignment.serving[case.probe]
    parts = [case.keep_ordinary(view.read(rows).float()) for view in views]
    for boundary in dict.fromkeys(candidates):
        if not isinstance(boundary, int) or not {boundary - 1, boundary} <= set(tensor.match.rel_l2):
            continue
        before, after = (case.keep_ordinary(case.training_rows(b)) for b in (boundary - 1, boundary))
        places = [place(part, before, after) for part in parts]
        if all(found.inside for found in places):
            shares = {f"step_share_of_rank_{v.rank}": p.step for v, p in zip(views, places, strict=True)}
            return PartialSum(boundary, "residual-estimate", None, shares)
    return None


def late_partial_sum(case: Case) -> Iterator[Finding]:
    """Parts of a sum that were found on second sight."""
    for tensor in case.tensors:
        partial = late_sums(case).get(tensor.name)
        if partial is None:
            continue
        groups = [list(group) for group in tensor.ranks.groups()]
        nested = len(groups) < len(tensor.ranks.views)
        yield Finding(
            "partial-sum",
            "error",
            f"{tensor.where}: "
            + (
                f"the ranks agree in groups {groups}, and the groups' tensors are parts of boundary {partial.boundary}:"
                " one of two nested reductions is missing"
                if nested
                else f"each rank holds its own part of boundary {partial.boundary}, captured before the all-reduce"
            ),
            "reduce over the other group too (expert and tensor parallelism), or upgrade"
            if nested
            else "upgrade SGLang to 0.5.14 or later, or start with --enforce-disable-flashinfer-allreduce-fusion",
            slot=tensor.slot,
            boundary=partial.boundary,
            ranks=tensor.ranks.ranks,
            evidence={"how": partial.how, "groups": groups, **partial.evidence},
        )


def odd_rank(case: Case) -> Iterator[Finding]:
    """Some ranks hold something else than the others: a stale or corrupt rank, which is no partial sum."""
    for tensor in case.tensors:
        held: dict[str, dict[str, list[int]]] = {}
        for rank in (view.rank for view in tensor.ranks.views if view.rank in tensor.odd_ranks):
            code, what = _what_odd_rank_holds(case, tensor, rank)
            held.setdefault(code, {}).setdefault(what, []).append(rank)
        for code, groups in held.items():
            parts = [
                f"{rank_names(ranks)} differ{'s' if len(ranks) == 1 else ''} from the others: {_each(ranks, what)}"
                for what, ranks in groups.items()
            ]
            odd = tuple(sorted(rank for ranks in groups.values() for rank in ranks))
            yield Finding(
                code,
                "error",
                f"{tensor.where}: {'; '.join(parts)}",
                "look at the capture buffer there and at the collective before it (a buffer not refreshed, a rank "
                "that skipped the step, memory corruption); capture again to see whether the ranks are always the same",
                slot=tensor.slot,
                boundary=tensor.reference,
                ranks=odd,
                evidence=_spread(tensor),
            )
        if _unexplained(case, tensor):
            yield Finding(
                "undetermined",
                "error",
                f"{tensor.where}: the ranks differ{_torn(case, tensor)}, none holds a training state there, and no sum "
                "of them does",
                "store the residual (`residual.K`) or training boundary K-1 (`dump training --boundaries all`), and "
                "record more such rows: they decide whether this is a partial sum",
                slot=tensor.slot,
                ranks=tensor.ranks.ranks,
                evidence={"hypotheses": ["partial-sum", "a corrupt or stale rank"], **_spread(tensor)},
            )


def _torn(case: Case, tensor: TensorCase) -> str:
    """` in 4 of 2309 rows, all of them verify rows`: where the ranks differ, unless it is everywhere."""
    rows = case.alignment.serving
    apart = np.any([spread.rel_l2[rows] != 0 for spread in tensor.ranks.spreads], axis=0)
    if apart.all():
        return ""
    requests = case.serving.tokens.requests
    phases = {request.phase for request in requests if apart[(rows >= request.begin) & (rows < request.end)].any()}
    only = f", all of them {phases.pop()} rows" if len(phases) == 1 else ""
    return f" in {int(apart.sum())} of {len(rows)} rows{only}"


def _unexplained(case: Case, tensor: TensorCase) -> bool:
    summed = tensor.partial is not None or tensor.name in late_sums(case)
    return tensor.ranks.shape == "differ" and not summed and not tensor.odd_ranks


def _what_odd_rank_holds(case: Case, tensor: TensorCase, rank: int) -> tuple[str, str]:
    """Compare an odd rank's rows with the training side: another boundary, other tokens' rows, or nothing known."""
    view = next(v for v in tensor.ranks.views if v.rank == rank)
    ours = view.read(case.alignment.serving[case.probe]).float()
    if not bool(ours.isfinite().all()):
        return "non-finite", "it holds NaN or infinite values"
    if not bool(ours.any()):
        return "capture-lost", "it holds zeros: its capture or its part of the collective never ran"
    ours = case.keep_ordinary(ours)
    for boundary, limit in tensor.limits.items():
        truth = case.keep_ordinary(case.training_rows(boundary))
        if truth.shape != ours.shape or median(rel_l2(ours, truth)) > limit:
            continue
        if boundary == tensor.reference:
            return "undetermined", f"most of its rows are right (boundary {boundary}), some are not"
        return "graph-stale", f"it holds boundary {boundary}"
    held = tensor.holds if tensor.holds is not None else tensor.reference
    if held is not None:
        truth = case.keep_ordinary(case.training_rows(held, case.alignment.training))
        limit = tensor.limits[held]
        if float(nearest(ours, truth).median()) <= limit:
            return "graph-stale", "it holds the rows of other tokens (a stale buffer)"
    return "undetermined", "its content is no training state of these tokens (stale or corrupt)"


def rank_rounding(case: Case) -> Iterator[Finding]:
    """Ranks that differ by roundings only."""
    for tensor in case.tensors:
        if tensor.ranks.shape == "rounding":
            yield Finding(
                "precision",
                "warning",
                f"{tensor.where}: the ranks differ in the last bits; under plain TP they should be bitwise equal",
                "harmless for the draft; an all-reduce that is not deterministic over ranks does this",
                slot=tensor.slot,
                ranks=tensor.ranks.ranks,
                evidence=_spread(tensor),
            )


def _rebuilt(tensor: TensorCase) -> dict[str, float]:
    if tensor.comparison is None:
        return {}
    return {"reconstruction_rel_l2": median(tensor.comparison.rel_l2)}


def _spread(tensor: TensorCase) -> dict[str, object]:
    return {
        "rel_l2_to_first_rank": {
            str(s.rank): {"median": median(s.rel_l2), "max": float(s.rel_l2.max(initial=0.0))}
            for s in tensor.ranks.spreads
        }
    }


def _each(ranks: Sequence[int], what: str) -> str:
    return what if len(ranks) == 1 else what.replace("it holds", "each holds", 1)
