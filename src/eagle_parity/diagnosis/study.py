"""Two captures -> a `Case`: align tokens, study ranks, match boundaries, judge. The measuring half of diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from eagle_parity.alignment.borrowed import borrow
from eagle_parity.alignment.channels import channels_of, massive_channels, sample_of
from eagle_parity.alignment.matching import Match, References, match, sample, training_views
from eagle_parity.alignment.ranks import begin_ranks
from eagle_parity.alignment.tokens import align
from eagle_parity.alignment.views import RankView, View, rank_view
from eagle_parity.diagnosis.case import PROBE_ROWS, Case
from eagle_parity.diagnosis.expectation import expect
from eagle_parity.diagnosis.judgement import strata
from eagle_parity.diagnosis.limits import Limits
from eagle_parity.diagnosis.soundness import sound_of
from eagle_parity.diagnosis.tensor import tensor_case
from eagle_parity.errors import InputError
from eagle_parity.metrics.channels import ChannelSums
from eagle_parity.metrics.threads import one_thread
from eagle_parity.records import FINAL_NORM, Boundary, Capture, IntArray, boundary_name, slot_name

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
    for other in (serving, *references):
        check_model(training, other)
    alignment = align(training.tokens, serving.tokens)
    borrowed, remarks = borrow(training, references, alignment.training)
    boundaries = {**training_views(training), **borrowed}
    ours, theirs = serving.facts.model, training.facts.model
    hidden = ours.hidden_size or theirs.hidden_size
    names = _tensor_names(training, serving)

    progress = _Progress(step)

    def matched(rows: int) -> None:
        progress.add((1 - RANKS_SHARE) * rows / (len(names) * len(alignment.serving)))

    # Ranks are nearly always the same or nearly so: the first ones are matched while all of them are compared.
    everything = np.arange(len(serving.tokens.token_ids), dtype=np.int64)
    ranks = begin_ranks(serving, names, everything, hidden, lambda share: progress.add(RANKS_SHARE * share))
    probe = sample(len(alignment.serving), PROBE_ROWS)
    samples = {boundary: sample_of(view, alignment.training[probe]) for boundary, view in boundaries.items()}
    channels = {boundary: found.channels for boundary, found in samples.items()}
    case = Case(
        training=training,
        serving=serving,
        alignment=alignment,
        expectation=expect(training.facts, serving.facts, declared_ids, proven),
        boundaries=boundaries,
        tensors=(),
        hidden_size=hidden,
        num_layers=ours.num_layers or theirs.num_layers or max(training.facts.boundaries, default=1),
        probe=probe,
        massive=massive_channels(channels.values(), hidden),
        strata=strata(serving.tokens.requests, alignment.serving),
        borrowed={boundary: view.capture.path for boundary, view in borrowed.items()},
        remarks=remarks,
    )
    first = _first_ranks(serving, names, alignment.serving)
    matches = _matches(case, first, channels, matched)
    studies = ranks()
    limits = Limits(case, floors, {boundary: found.apart for boundary, found in samples.items()})
    sound = {name: sound_of(case, studies[name], limits.estimated(name)) for name in names}
    whole = {name: found.view for name, found in sound.items() if found.view is not None}
    others = {name: view for name, view in whole.items() if not _same_view(view, first.get(name))}
    matches |= _matches(case, others, channels, matched)
    fair = {name: _fair(case, matches[name], name, view) for name, view in whole.items()}
    tensors = [tensor_case(case, studies[name], sound[name], fair.get(name, Match({})), limits) for name in names]
    progress.finish()
    return replace(case, tensors=tuple(tensors))


class _Progress:
    """Shares of the work done: they add up to 1, whatever has to be done twice or not at all."""

    def __init__(self, step: Callable[[float], None] | None) -> None:
        self._step, self._left = step, 1.0

    def add(self, share: float) -> None:
        """So much more is done."""
        share = min(share, self._left)
        self._left -= share
        if self._step is not None and share > 0:
            self._step(share)

    def finish(self) -> None:
        """All is done."""
        self.add(self._left)


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


def _matches(
    case: Case,
    tensors: Mapping[str, View],
    channels: Mapping[Boundary, ChannelSums],
    step: Callable[[int], None],
) -> dict[str, Match]:
    """Match serving tensors. `channels` are the boundaries'. `step` is called with the number of tensors' rows done."""
    known = {name: b for name in tensors if (b := case.expected(name)) is not None and b in case.boundaries}
    rows = case.alignment.serving, case.alignment.training
    ours = {name: channels_of(tensors[name], rows[0][case.probe]) for name in known}
    return match(
        tensors,
        case.boundaries,
        *rows,
        references=References(known, ours, channels),
        left_out=case.massive,
        hidden=case.hidden_size,
        step=step,
    )


def _fair(case: Case, found: Match, name: str, view: View) -> Match:
    """The match without the server's own boundaries, where the tensor is bit by bit the server's expected one.

    They share its noise, so that where noise is longer than a layer's step they are nearer to it than the truth is.
    """
    expected, rows = case.expected(name), case.alignment.serving[case.probe]
    own = {b for b in case.borrowed if case.boundaries[b].capture is case.serving}
    rank = case.serving.ranks[0]
    if not own or expected is None or boundary_name(expected) not in case.serving.names(rank) or len(rows) == 0:
        return found
    same = rank_view(case.serving, rank, boundary_name(expected))
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
    shared: Sequence[Boundary] = [*serving.facts.boundaries, FINAL_NORM]
    return slots + [boundary_name(b) for b in shared if boundary_name(b) in stored & theirs]
