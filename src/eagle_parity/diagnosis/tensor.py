"""All measurements of one serving tensor together: its `TensorCase`."""

from __future__ import annotations

import numpy as np

from eagle_parity.alignment import matching
from eagle_parity.alignment.matching import Comparison, Match, sample
from eagle_parity.alignment.ranks import RankStudy
from eagle_parity.diagnosis.case import PROBE_ROWS, Case, TensorCase
from eagle_parity.diagnosis.controls import controls
from eagle_parity.diagnosis.judgement import judge
from eagle_parity.diagnosis.limits import Limits
from eagle_parity.diagnosis.soundness import Sound
from eagle_parity.metrics.distances import numpy64
from eagle_parity.records import Boundary, Layout, RankMetrics


def tensor_case(case: Case, ranks: RankStudy, sound: Sound, match: Match, limits: Limits) -> TensorCase:
    """Judge a tensor by its match, row by row and by situation, and measure what is left: controls, each rank."""
    name, view, alignment = ranks.name, sound.view, case.alignment
    expected = case.expected(name)
    limit, bounds = limits.of(name, match.best if expected is None else expected)
    # What another capture says of a boundary can refute a slot, but the draft was trained on the training side's.
    stored = expected not in case.borrowed
    judgement = judge(match, expected, bounds, stored=stored)
    parts = tuple(
        judge(match.where(mask), expected, bounds, situation, stored=stored)
        for situation, mask in case.strata.items()
        if match.rel_l2
    )
    reference = expected if expected in match.rel_l2 else match.best
    comparison = None
    rolled_rows = rolled_dims = None
    if reference is not None and view is not None:
        rows = alignment.serving, alignment.training
        comparison = match.comparison or matching.compare(view, case.boundaries[reference], *rows)
        best = match.best if match.best is not None else reference
        # Where the server's tensor is broken the control runs on the training side alone: is the instrument sound?
        at_floor = judgement.best_median is not None and judgement.best_median <= bounds[best]
        rolled_rows, rolled_dims = controls(case, view if at_floor else None, case.boundaries[best])
    kind, _, number = name.partition(".")
    return TensorCase(
        name=name,
        slot=int(number) if kind == "slot" else None,
        expected=expected,
        ranks=ranks,
        layout=_layout(case, ranks, sound),
        partial=sound.partial,
        odd_ranks=sound.odd_ranks,
        view=view,
        match=match,
        limits=bounds,
        limit=limit,
        judgement=judgement,
        strata=parts,
        reference=reference,
        comparison=comparison,
        per_rank=_per_rank(case, ranks, reference, comparison),
        rolled_rows=rolled_rows,
        rolled_dims=rolled_dims,
    )


def _layout(case: Case, ranks: RankStudy, sound: Sound) -> Layout:
    if ranks.shape in ("equal", "rounding") or sound.odd_ranks:
        return "replicated"
    if sound.partial is not None:
        return "partial-sum"
    if ranks.shape == "hidden-shard":
        return "hidden-shard"
    if ranks.shape == "token-shard":
        return "token-shard"
    if ranks.shape == "one-rank" and case.serving.facts.engine is not None and case.serving.facts.engine.tp_size == 1:
        return "replicated"
    return "unknown"


def _per_rank(
    case: Case, ranks: RankStudy, boundary: Boundary | None, comparison: Comparison | None
) -> tuple[RankMetrics, ...]:
    """Medians of each rank's own tensor; a hidden shard against its own channels of the boundary."""
    if boundary is None:
        return ()
    reference, alignment = case.boundaries[boundary], case.alignment
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
