"""Two captures -> a `Case`: align tokens, study ranks, match boundaries, judge. The measuring half of diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from eagle_parity.alignment import matching
from eagle_parity.alignment.borrowed import Borrowed, borrow, views_of
from eagle_parity.alignment.channels import channels_of, massive_channels, sample_of
from eagle_parity.alignment.matching import Comparison, Match, References, begin_match, sample
from eagle_parity.alignment.ranks import RankStudy, begin_ranks
from eagle_parity.alignment.tokens import TokenAlignment, align
from eagle_parity.alignment.views import RankView, View, rank_view
from eagle_parity.diagnosis import floor as estimates
from eagle_parity.diagnosis.case import PROBE_ROWS, Case, TensorCase
from eagle_parity.diagnosis.controls import Rolled, controls, roll_rows
from eagle_parity.diagnosis.expectation import Expectation, expect
from eagle_parity.diagnosis.floor import Limit
from eagle_parity.diagnosis.judgement import judge, strata
from eagle_parity.diagnosis.soundness import Boundaries, Sound
from eagle_parity.errors import InputError, UsageError
from eagle_parity.metrics.distances import numpy64
from eagle_parity.metrics.threads import one_thread
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
RANKS_SHARE = 0.3  # of the time that a comparison takes, for the progress bar


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

    ranks = begin_ranks(serving, names, everything, hidden, lambda share: report(RANKS_SHARE * share))
    probe = sample(len(alignment.serving), PROBE_ROWS)
    samples = {boundary: sample_of(view, alignment.training[probe]) for boundary, view in views.items()}
    channels = {boundary: found.channels for boundary, found in samples.items()}
    massive = massive_channels(channels.values(), hidden)
    # No limit may exceed half the distance between the states of two tokens, whatever the floor is said to be:
    # otherwise rows of other tokens would pass where tokens are alike (deep layers, a large common part).
    tops = {boundary: ALIKE * found.apart if found.apart > 0 else np.inf for boundary, found in samples.items()}
    expected = {name: _expected(name, expectation) for name in names}

    def begin_matches(
        tensors: Mapping[str, View], step: Callable[[int], None] | None = None
    ) -> Callable[[], dict[str, Match]]:
        known = {name: b for name in tensors if (b := expected[name]) is not None and b in views}
        ours = {name: channels_of(tensors[name], alignment.serving[probe]) for name in known}
        rows = alignment.serving, alignment.training
        references = References(known, ours, channels)
        return begin_match(tensors, views, *rows, step, references=references, left_out=massive, hidden=hidden)

    # Ranks are nearly always the same or nearly so: the first ones are matched while all of them are compared.
    first = _first_ranks(serving, names, alignment.serving)
    guessed = begin_matches(first, lambda rows: report((1 - RANKS_SHARE) * rows / len(alignment.serving)))
    rounding = {name: _roundoff(training, serving, name) for name in names}
    limits = {
        name: {b: min(estimates.estimated(b, layers, rounding[name]).limit, tops[b]) for b in views} for name in names
    }
    matches = guessed()
    studies = ranks()
    held_against = Boundaries(views, alignment, massive, probe)
    sound = {name: held_against.sound(studies[name], limits[name], expected[name]) for name in names}
    whole = {name: found.view for name, found in sound.items() if found.view is not None}
    others = {name: view for name, view in whole.items() if not _same_view(view, first.get(name))}
    matches |= begin_matches(others)()
    seen = alignment.serving[probe]
    matches = {
        name: _fair(matches[name], view, expected[name], serving, borrowed, seen) for name, view in whole.items()
    }
    rolled = roll_rows(serving, alignment)

    def judged(name: str) -> TensorCase:
        match = matches.get(name, Match({}))
        limit = _limit(
            training, serving, floors, name, expected[name], matches.get(name), rounding[name], layers, massive, hidden
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
            sound[name],
            match,
            expected[name],
            bounds,
            limit,
            views,
            serving,
            alignment,
            massive,
            rolled,
        )

    tensors = [judged(name) for name in names]
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
        massive,
        {boundary: item.path for boundary, item in borrowed.items()},
        remarks,
    )


def _first_ranks(serving: Capture, names: Sequence[str], rows: IntArray) -> dict[str, RankView]:
    """Each tensor on the first rank that has it, where that holds all of the rows."""
    found = {}
    for name in names:
        rank = next(rank for rank in serving.ranks if name in serving.names(rank))
        view = rank_view(serving, rank, name)
        if view.holds(rows).all():
            found[name] = view
    return found


def _same_view(view: View, other: RankView | None) -> bool:
    return isinstance(view, RankView) and other is not None and view.rank == other.rank


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


def _limit(
    training: Capture,
    serving: Capture,
    floor_dumps: tuple[Capture, ...],
    name: str,
    expected: Boundary | None,
    match: Match | None,
    rounding: float,
    layers: int,
    massive: torch.Tensor,
    hidden: int | None,
) -> Limit:
    reference = expected if expected is not None else match.best if match is not None else None
    guess = estimates.estimated(reference, layers, rounding)
    if not floor_dumps:
        return guess
    found = [
        (
            _distance(training, capture, boundary_name(reference), name, massive, hidden)
            if reference is not None
            else None,
            _distance(serving, capture, name, name, massive, hidden),
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
    massive: torch.Tensor,
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
    rows = common.serving[keep], common.training[keep]
    values = numpy64(matching.sums(ours, theirs, *rows, massive=massive, hidden=hidden).rel_l2())
    return float(np.median(values)), float(np.percentile(values, 99))


def _tensor_case(
    name: str,
    borrowed: Mapping[Boundary, Borrowed],
    ranks: RankStudy,
    sound: Sound,
    match: Match,
    expected: Boundary | None,
    limits: Mapping[Boundary, float],
    limit: Limit,
    views: Mapping[Boundary, RankView],
    serving: Capture,
    alignment: TokenAlignment,
    massive: torch.Tensor,
    rolled: Rolled,
) -> TensorCase:
    view = sound.view
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
        rolled_rows, rolled_dims = controls(view if at_floor else None, views[best], alignment, massive, rolled)
    kind, _, number = name.partition(".")
    return TensorCase(
        name=name,
        slot=int(number) if kind == "slot" else None,
        expected=expected,
        ranks=ranks,
        layout=_layout(ranks, sound, serving),
        partial=sound.partial,
        odd_ranks=sound.odd_ranks,
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


def _layout(ranks: RankStudy, sound: Sound, serving: Capture) -> Layout:
    if ranks.shape in ("equal", "rounding") or sound.odd_ranks:
        return "replicated"
    if sound.partial is not None:
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
