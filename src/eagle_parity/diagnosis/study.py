"""Two captures -> a `Case`: align tokens, study ranks, match boundaries, judge. The measuring half of diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from eagle_parity.alignment import matching
from eagle_parity.alignment.borrowed import Borrowed, borrow, views_of
from eagle_parity.alignment.channels import channels_of_all, massive_channels, ordinary_channels, select
from eagle_parity.alignment.matching import Comparison, Match, References, sample
from eagle_parity.alignment.partial import PartialSum, find_partial_sum
from eagle_parity.alignment.ranks import RankStudy, study_all_ranks
from eagle_parity.alignment.tokens import TokenAlignment, align
from eagle_parity.alignment.views import RankView, View, rank_view
from eagle_parity.diagnosis import floor as estimates
from eagle_parity.diagnosis.case import PROBE_ROWS, Case, TensorCase
from eagle_parity.diagnosis.controls import Rolled, controls, roll_rows
from eagle_parity.diagnosis.expectation import Expectation, expect
from eagle_parity.diagnosis.floor import Limit
from eagle_parity.diagnosis.judgement import judge, strata
from eagle_parity.errors import InputError, UsageError
from eagle_parity.metrics.distances import numpy64, rel_l2, row_sums
from eagle_parity.metrics.distribution import median
from eagle_parity.metrics.threads import one_thread, spread
from eagle_parity.records import (
    Boundary,
    Capture,
    Floor,
    IntArray,
    Layout,
    RankMetrics,
    boundary_name,
    slot_name,
)

ALIKE = 0.5  # of the distance between two tokens' states, up to which two tensors may count as the same
RANKS_SHARE = 0.6  # of the time that a comparison takes, for the progress bar
FAR_NEARER = 0.3  # a sound rank's distance to its boundary, over the distance between ranks: at most this


@one_thread()
def study(
    training: Capture,
    serving: Capture,
    declared_ids: tuple[int, ...] | None = None,
    *,
    floors: tuple[Capture, ...] = (),
    references: tuple[Capture, ...] = (),
    proven: tuple[tuple[Boundary, ...], str] | None = None,
    step: Callable[[float], None] | None = None,
) -> Case:
    """Measure a serving capture against a training capture.

    `declared_ids` are the draft checkpoint's, `floors` serving captures known to be healthy, `references` captures that
    stand in for boundaries which the training side lacks, `proven` the order to expect before any declared one, and who
    says so; `step` is called with shares of the work done, which add up to 1. Raises InputError for dumps of different
    models or the wrong way round, UsageError for a floor that shares no row.
    """
    check_sides(training, serving)
    check_model(training, serving)
    hidden = serving.facts.model.hidden_size or training.facts.model.hidden_size
    layers = (
        serving.facts.model.num_layers or training.facts.model.num_layers or max(training.facts.boundaries, default=1)
    )
    alignment = align(training.tokens, serving.tokens)
    expectation = expect(training.facts, serving.facts, declared_ids, proven)
    for reference in references:
        check_model(training, reference)
    borrowed, remarks = borrow(training, references, alignment.training)
    views = {**matching.training_views(training), **views_of(borrowed)}
    names = _tensor_names(training, serving)
    everything = np.arange(len(serving.tokens.token_ids), dtype=np.int64)

    def report(share: float) -> None:
        if step is not None:
            step(share)

    studies = study_all_ranks(serving, names, everything, hidden, lambda share: report(RANKS_SHARE * share))
    probe = sample(len(alignment.serving), PROBE_ROWS)
    channels = channels_of_all(views, alignment.training[probe])
    massive = massive_channels(channels.values(), hidden)
    ordinary = ordinary_channels(massive, hidden)
    rounding = {name: _roundoff(training, serving, name) for name in names}
    tops = _tops(views, alignment.training[probe], ordinary, hidden)
    limits = {
        name: {b: min(estimates.estimated(b, layers, rounding[name]).limit, tops[b]) for b in views} for name in names
    }
    expected = {name: _expected(name, expectation) for name in names}
    torn = {name: _differing(studies[name], alignment, probe) for name in names}
    parts = {
        name: _partial(studies[name], views, alignment, torn[name], limits[name], expected[name], ordinary)
        for name in names
    }
    sound = {
        name: _sound_view(
            studies[name], parts[name], views, alignment, torn[name], limits[name], expected[name], ordinary
        )
        for name in names
    }
    whole = {name: view for name, (view, _) in sound.items() if view is not None}
    known = {name: b for name in whole if (b := expected[name]) is not None and b in views}
    matches = matching.match(
        whole,
        views,
        alignment.serving,
        alignment.training,
        lambda rows: report((1 - RANKS_SHARE) * rows / len(alignment.serving)),
        references=References(
            known, channels_of_all({name: whole[name] for name in known}, alignment.serving[probe]), channels
        ),
        left_out=massive,
        hidden=hidden,
    )
    seen = alignment.serving[probe]
    matches = {
        name: _fair(found, whole[name], expected[name], serving, borrowed, seen) for name, found in matches.items()
    }
    rolled = roll_rows(serving, alignment)

    def judged(name: str) -> TensorCase:
        match = matches.get(name, Match({}))
        limit = _limit(
            training, serving, floors, name, expected[name], matches.get(name), rounding[name], layers, ordinary, hidden
        )
        held = expected[name] if expected[name] is not None else match.best
        if held in tops:
            limit = replace(limit, limit=min(limit.limit, tops[held]))
        bounds = dict(limits[name])
        if floors:  # this server's noise is on whatever it feeds: another boundary is told by contrast, as always
            bounds = {b: min(max(bound, limit.limit), tops[b]) for b, bound in bounds.items()}
        if expected[name] in bounds:
            bounds[expected[name]] = limit.limit  # type: ignore[index]
        return _tensor_case(
            name,
            borrowed,
            studies[name],
            parts[name],
            sound[name],
            match,
            expected[name],
            bounds,
            limit,
            views,
            serving,
            alignment,
            ordinary,
            rolled,
        )

    tensors = spread(judged, names)
    return Case(
        training,
        serving,
        alignment,
        expectation,
        views,
        tuple(tensors),
        hidden,
        layers,
        probe,
        ordinary,
        {boundary: item.path for boundary, item in borrowed.items()},
        remarks,
    )


def _fair(
    found: Match,
    view: View,
    expected: Boundary | None,
    serving: Capture,
    borrowed: Mapping[Boundary, Borrowed],
    rows: IntArray,
) -> Match:
    """The match without the server's own boundaries, where the tensor is bit by bit the server's expected one.

    They share its noise, so that where noise is longer than a layer's step they are nearer to it than the truth is.
    """
    own = {boundary for boundary, item in borrowed.items() if item.view.capture is serving}
    rank = serving.ranks[0]
    if not own or expected is None or boundary_name(expected) not in serving.names(rank) or len(rows) == 0:
        return found
    same = rank_view(serving, rank, boundary_name(expected))
    if not same.holds(rows).all() or not torch.equal(same.read(rows).float(), view.read(rows).float()):
        return found
    own -= {expected}
    return Match(
        {b: values for b, values in found.rel_l2.items() if b not in own},
        {b: values for b, values in found.norms.items() if b not in own},
        found.comparison,
    )


def _tops(
    views: Mapping[Boundary, RankView], rows: IntArray, ordinary: torch.Tensor | None, hidden: int | None
) -> dict[Boundary, float]:
    """What no limit may exceed: half the distance between the states of two tokens, whatever the floor is said to be.

    Otherwise rows of other tokens would pass where tokens are alike (deep layers, a large common part).
    """

    def top(view: RankView) -> float:
        states = select(view, ordinary, hidden).read(rows)
        half = len(states) // 2
        sums = row_sums(states[:half], states[half : 2 * half])
        squares = (numpy64(sq) for sq in (sums.serving_sq, sums.training_sq))
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = median(np.concatenate([np.sqrt(numpy64(sums.difference_sq) / sq) for sq in squares]))
        return ALIKE * apart if apart > 0 else np.inf

    return dict(zip(views, spread(top, views.values()), strict=True))


def check_sides(training: Capture, serving: Capture) -> None:
    """Refuse a training dump as SERVING; a serving dump as TRAINING may be meant (TP=1 against TP=8)."""
    if serving.facts.side != "training":
        return
    if training.facts.side == "serving":
        raise InputError(
            f"{training.path} is a serving dump and {serving.path} a training dump: the sides are swapped",
            fix="give TRAINING first, SERVING second",
        )
    raise InputError(
        f"{serving.path} is a training dump, so nothing was served", fix="give a dump of `dump serving` as SERVING"
    )


def check_model(training: Capture, serving: Capture) -> None:
    """Refuse dumps of different models."""
    for key in ("hidden_size", "num_layers", "vocab_size"):
        ours, theirs = getattr(training.facts.model, key), getattr(serving.facts.model, key)
        if ours is not None and theirs is not None and ours != theirs:
            raise InputError(
                f"the dumps are of different models: {key} is {ours} in {training.path}, {theirs} in {serving.path}",
                fix="capture both sides of the same target model",
            )


def _tensor_names(training: Capture, serving: Capture) -> list[str]:
    stored = {name for rank in serving.ranks for name in serving.names(rank)}
    theirs = {name for rank in training.ranks for name in training.names(rank)}
    slots = [slot_name(j) for j in range(serving.facts.slots)]
    shared: Sequence[Boundary] = [*serving.facts.boundaries, "final.norm"]
    return slots + [boundary_name(b) for b in shared if boundary_name(b) in stored & theirs]


def _expected(name: str, expectation: Expectation) -> Boundary | None:
    kind, _, number = name.partition(".")
    if kind == "slot":
        known = expectation.boundaries
        return known[int(number)] if known is not None and int(number) < len(known) else None
    return "final.norm" if kind == "final" else int(number)


def _roundoff(training: Capture, serving: Capture, name: str) -> float:
    pairs = [(serving, rank, name) for rank in serving.ranks if name in serving.names(rank)][:1]
    first = training.names(training.ranks[0])
    pairs += [(training, training.ranks[0], first[0])] if first else []
    return estimates.roundoff(*pairs)


def _differing(ranks: RankStudy, alignment: TokenAlignment, probe: IntArray) -> IntArray:
    """The probe rows for questions about ranks: those where ranks differ, if only some do."""
    if ranks.shape != "differ":
        return probe
    apart = np.max([spread.rel_l2[alignment.serving] != 0 for spread in ranks.spreads], axis=0)
    rows = np.flatnonzero(apart)
    return rows[sample(len(rows), PROBE_ROWS)] if len(rows) else probe


def _partial(
    ranks: RankStudy,
    views: Mapping[Boundary, RankView],
    alignment: TokenAlignment,
    probe: IntArray,
    limits: Mapping[Boundary, float],
    expected: Boundary | None,
    ordinary: torch.Tensor | None,
) -> PartialSum | None:
    """Whether ranks that all differ are parts of a sum. A rank that is some boundary by itself excludes it."""
    if ranks.shape != "differ" or len(probe) == 0 or len(ranks.groups()) < len(ranks.views):
        return None
    ours, theirs = alignment.serving[probe], alignment.training[probe]
    found = find_partial_sum(ranks.views, views, ours, theirs, limits, expected, ordinary)
    # A stored residual proves it whatever a single rank looks like: the largest part alone can be near a boundary.
    if found is None or found.how == "residual":
        return found
    return None if _matching_ranks(ranks, views, alignment, probe, limits, ordinary) else found


def _matching_ranks(
    ranks: RankStudy,
    views: Mapping[Boundary, RankView],
    alignment: TokenAlignment,
    probe: IntArray,
    limits: Mapping[Boundary, float],
    ordinary: torch.Tensor | None,
) -> dict[tuple[int, Boundary], float]:
    """Which ranks hold which boundary all by themselves, with the median distance.

    A sound rank is far nearer to the boundary than to a broken rank; parts of a sum are as far from the truth as from
    each other, however small they are.
    """
    rows, theirs = alignment.serving[probe], alignment.training[probe]
    apart = max(median(spread.rel_l2[rows]) for spread in ranks.spreads)
    hidden = ranks.views[0].width
    tensors = {view.rank: select(view, ordinary, hidden).read(rows) for view in ranks.views}
    hits: dict[tuple[int, Boundary], float] = {}
    for boundary, view in views.items():
        reference = select(view, ordinary, hidden).read(theirs)
        for rank, tensor in tensors.items():
            if tensor.shape[1] == reference.shape[1]:
                distance = median(rel_l2(tensor, reference))
                if distance <= min(limits[boundary], FAR_NEARER * apart):
                    hits[rank, boundary] = distance
    return hits


def _sound_view(
    ranks: RankStudy,
    partial: PartialSum | None,
    views: Mapping[Boundary, RankView],
    alignment: TokenAlignment,
    probe: IntArray,
    limits: Mapping[Boundary, float],
    expected: Boundary | None,
    ordinary: torch.Tensor | None,
) -> tuple[View | None, tuple[int, ...]]:
    """The tensor to judge, and the ranks that disagree with it."""
    if ranks.whole is not None or ranks.shape != "differ":
        return ranks.whole, ()
    if partial is not None:
        return partial.whole or ranks.views[0], ()
    groups = ranks.groups()
    if len(groups[0]) > len(ranks.views) / 2:
        good = groups[0]
        view = next(v for v in ranks.views if v.rank == good[0])
        return view, tuple(v.rank for v in ranks.views if v.rank not in good)
    hits = _matching_ranks(ranks, views, alignment, probe, limits, ordinary)
    if hits:
        _, held = min(hits, key=lambda hit: (hit[1] != expected, hits[hit]))
        good = tuple(rank for rank, boundary in sorted(hits, key=lambda hit: hits[hit]) if boundary == held)
        view = next(v for v in ranks.views if v.rank == good[0])
        return view, tuple(v.rank for v in ranks.views if v.rank not in good)
    return ranks.views[0], ()


def _limit(
    training: Capture,
    serving: Capture,
    floor_dumps: tuple[Capture, ...],
    name: str,
    expected: Boundary | None,
    match: Match | None,
    rounding: float,
    layers: int,
    ordinary: torch.Tensor | None,
    hidden: int | None,
) -> Limit:
    reference = expected if expected is not None else match.best if match is not None else None
    guess = estimates.estimated(reference, layers, rounding)
    if not floor_dumps:
        return guess
    found = [
        (
            _distance(training, capture, boundary_name(reference), name, ordinary, hidden)
            if reference is not None
            else None,
            _distance(serving, capture, name, name, ordinary, hidden),
            capture.path,
        )
        for capture in floor_dumps
    ]
    to_training = [Floor(f"{path} against training", *d) for d, _, path in found if d is not None]
    to_serving = [Floor(f"{path} against serving", *d) for _, d, path in found if d is not None]
    if not to_training and not to_serving:
        raise UsageError(
            f"--floor: {', '.join(c.path for c in floor_dumps)}: no row and {name} in common with the dumps compared",
            fix="make the floor dump from the same prompts: dump serving --tokens-from TRAINING",
        )
    return estimates.measured(guess, _largest(to_training), _largest(to_serving), rounding)


def _largest(those: list[Floor]) -> Floor | None:
    return max(those, key=lambda floor: floor.median, default=None)


def _distance(
    reference: Capture,
    other: Capture,
    reference_name: str,
    name: str,
    ordinary: torch.Tensor | None,
    hidden: int | None,
) -> tuple[float, float] | None:
    """Median and 99th percentile of the relative L2 between the first ranks of two captures, on common rows."""
    if reference_name not in reference.names(reference.ranks[0]) or name not in other.names(other.ranks[0]):
        return None
    ours, theirs = rank_view(other, other.ranks[0], name), rank_view(reference, reference.ranks[0], reference_name)
    common = align(reference.tokens, other.tokens)
    keep = ours.holds(common.serving) & theirs.holds(common.training)
    if ours.width != theirs.width or not keep.any():
        return None
    views = select(ours, ordinary, hidden), select(theirs, ordinary, hidden)
    values = numpy64(matching.sums(*views, common.serving[keep], common.training[keep]).rel_l2())
    return float(np.median(values)), float(np.percentile(values, 99))


def _tensor_case(
    name: str,
    borrowed: Mapping[Boundary, Borrowed],
    ranks: RankStudy,
    partial: PartialSum | None,
    sound: tuple[View | None, tuple[int, ...]],
    match: Match,
    expected: Boundary | None,
    limits: Mapping[Boundary, float],
    limit: Limit,
    views: Mapping[Boundary, RankView],
    serving: Capture,
    alignment: TokenAlignment,
    ordinary: torch.Tensor | None,
    rolled: Rolled,
) -> TensorCase:
    view, odd = sound
    # What another capture says of a boundary can refute a slot, but the draft was trained on the training side's.
    judgement = judge(match, expected, limits, stored=expected not in borrowed)
    parts = tuple(
        judge(match.where(mask), expected, limits, situation, stored=expected not in borrowed)
        for situation, mask in strata(serving.tokens.requests, alignment.serving).items()
        if match.rel_l2
    )
    reference = expected if expected in match.rel_l2 else match.best
    comparison = None
    rolled_rows = rolled_dims = None
    if reference is not None and view is not None:
        comparison = match.comparison or matching.compare(view, views[reference], alignment.serving, alignment.training)
        best = match.best if match.best is not None else reference
        # Where the server's tensor is broken the control runs on the training side alone: is the instrument sound?
        at_floor = judgement.best_median is not None and judgement.best_median <= limits[best]
        rolled_rows, rolled_dims = controls(view if at_floor else None, views[best], alignment, ordinary, rolled)
    kind, _, number = name.partition(".")
    return TensorCase(
        name=name,
        slot=int(number) if kind == "slot" else None,
        expected=expected,
        ranks=ranks,
        layout=_layout(ranks, partial, odd, serving),
        partial=partial,
        odd_ranks=odd,
        view=view,
        match=match,
        limits=limits,
        limit=limit,
        judgement=judgement,
        strata=parts,
        reference=reference,
        comparison=comparison,
        per_rank=_per_rank(ranks, None if reference is None else views.get(reference), comparison, alignment),
        rolled_rows=rolled_rows,
        rolled_dims=rolled_dims,
    )


def _layout(ranks: RankStudy, partial: PartialSum | None, odd: tuple[int, ...], serving: Capture) -> Layout:
    if ranks.shape in ("equal", "rounding") or odd:
        return "replicated"
    if partial is not None:
        return "partial-sum"
    if ranks.shape == "hidden-shard":
        return "hidden-shard"
    if ranks.shape == "token-shard":
        return "token-shard"
    if ranks.shape == "one-rank" and serving.facts.engine is not None and serving.facts.engine.tp_size == 1:
        return "replicated"
    return "unknown"


def _per_rank(
    ranks: RankStudy, reference: RankView | None, comparison: Comparison | None, alignment: TokenAlignment
) -> tuple[RankMetrics, ...]:
    """Medians of each rank's own tensor; a hidden shard against its own channels of the reference."""
    if reference is None:
        return ()
    if ranks.shape == "equal" and comparison is not None:
        values = matching.medians_of([comparison.cosine, comparison.rel_l2, comparison.norm_ratio])
        return tuple(RankMetrics(rank, *values) for rank in ranks.ranks)
    found = []
    begins = np.cumsum([0, *(view.width for view in ranks.views)])
    if len({view.width for view in ranks.views}) == 1:  # ranks may be missing: place a shard by its number
        begins = np.array([view.rank * view.width for view in ranks.views])
    for view, begin in zip(ranks.views, begins.tolist(), strict=False):
        channels = slice(begin, begin + view.width) if ranks.shape == "hidden-shard" else slice(None)
        keep = view.holds(alignment.serving)
        rows, theirs = alignment.serving[keep], alignment.training[keep]
        index = sample(len(rows), 4 * PROBE_ROWS)
        if len(index) == 0 or (ranks.shape != "hidden-shard" and view.width != reference.width):
            continue
        sums = matching.sums(view, reference, rows[index], theirs[index], channels)
        values = matching.medians_of([numpy64(sums.cosine()), numpy64(sums.rel_l2()), numpy64(sums.norm_ratio())])
        found.append(RankMetrics(view.rank, *values))
    return tuple(found)
