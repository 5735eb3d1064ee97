"""What the draft itself says: the order that it was trained on, and the accept length that its states give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_parity.diagnosis.case import Case
from eagle_parity.draft.acceptance import Fed, Forecast, Speculation, forecast
from eagle_parity.draft.checkpoint import DraftCheckpoint
from eagle_parity.draft.forward import Draft, load_draft, pick_device
from eagle_parity.draft.ordering import Ordering
from eagle_parity.draft.passages import find_passages, limited
from eagle_parity.draft.proof import WIDE, Proof, prove_order
from eagle_parity.draft.race import SURE
from eagle_parity.draft.states import aligned, ordered, prompt_lengths, reader, served, stored_states
from eagle_parity.draft.target import Target, open_target
from eagle_parity.draft.teacher import teach
from eagle_parity.errors import InputError
from eagle_parity.records import Boundary, Capture, Engine, Finding

SHOWN = 12  # orderings in a report
ROWS = 2000  # for a forecast, which replays several steps of each


@dataclass(frozen=True)
class Replay:
    """The draft, loaded, and the ranking of orderings on one training capture."""

    draft: Draft
    target: Target | None
    proof: Proof

    @property
    def ordering(self) -> Ordering:
        """The ranking."""
        return self.proof.ordering

    @property
    def order(self) -> tuple[Boundary, ...] | None:
        """The proven order; None when the data cannot tell."""
        return self.ordering.best

    @property
    def source(self) -> str:
        """Who says what the draft was trained on."""
        return f"replaying the draft on {self.ordering.rows} rows ({self.ordering.z:.1f} standard errors)"


@dataclass(frozen=True)
class Acceptance:
    """Forecasts on the states of the proven order and on what the server feeds, and the server's own count."""

    training: Forecast
    serving: Forecast
    measured: float | None


def replay(
    checkpoint: DraftCheckpoint,
    training: Capture,
    target: Path | None,
    *,
    device: str = "auto",
    step: Callable[[int], None] | None = None,
) -> Replay:
    """Load the draft and rank the orderings of what the capture stores.

    Raises InputError where the draft cannot be replayed, or the capture holds nothing to replay it on.
    """
    where = pick_device(device)
    head = None if target is None else open_target(target, where)
    draft = load_draft(
        checkpoint, head, device=where, fast=checkpoint.hidden_size >= WIDE
    )  # float32 would take minutes
    return Replay(draft, head, prove_order(draft, training, head, step=step))


def try_replay(
    checkpoint: DraftCheckpoint, training: Capture, target: Path | None, **how: Any
) -> tuple[Replay | None, Finding | None]:
    """`replay`, with a finding in place of an error: the other answers do not need it."""
    try:
        try:
            found = replay(checkpoint, training, target, **how)
        except torch.OutOfMemoryError:  # a server may fill the GPU
            found = replay(checkpoint, training, target, **{**how, "device": "cpu"})
    except InputError as error:
        return None, Finding("undetermined", "info", f"the trained order was not proven: {error.message}", error.fix)
    ordering = found.ordering
    if ordering.why is None:
        return found, None
    fix = "give more rows, of other prompts; all boundaries; and the target's directory with --target"
    if ordering.rows_needed is not None:
        fix = f"about {ordering.rows_needed} rows would tell ({ordering.rows} were there); " + fix
    evidence = {"z": ordering.z, "control_z": ordering.control_z, "rows": ordering.rows}
    message = f"the replay does not decide the order: {ordering.why}"
    return found, Finding("undetermined", "info", message, fix, evidence=evidence)


def refuted(case: Case, found: Replay | None) -> Iterator[Finding]:
    """The server feeds an order that the draft was not trained on, whatever else it was trained on.

    Where the order is proven, the comparison by content says so slot by slot; this is for what remains: two orders that
    cannot be told apart, and a third one that is served.
    """
    if found is None or found.order is not None or None in case.served:
        return
    fed = tuple(boundary for boundary in case.served if boundary is not None)
    standing = found.proof.refutes(fed) if len(fed) == found.draft.slots else None
    if standing is None:
        return
    best = found.ordering.ranking[0]
    close = [entry.order for entry in found.ordering.ranking if entry.z < SURE][:3]
    yield Finding(
        "concat-order" if Counter(fed) == Counter(best.order) else "layer-set",
        "error",
        f"the server feeds {list(fed)}, on which the draft does worse than on {list(best.order)} by {standing.z:.1f} "
        f"standard errors (top-1 {standing.agreement:.1%} against {best.agreement:.1%}): it was trained on "
        f"{' or '.join(str(list(order)) for order in close)}",
        "give more rows to learn which one (see the ranking), then declare its layers in the draft's config",
        evidence={"served": fed, "candidates": close, "z": standing.z},
    )


def speculation(engine: Engine | None) -> Speculation:
    """The server's own settings, as far as its dump has them."""
    usual = Speculation()
    flags = engine.flags if engine is not None else {}
    values = [flags.get(f"speculative_{name}") for name in ("num_steps", "eagle_topk", "num_draft_tokens")]
    steps, topk, tokens = (value if isinstance(value, int) and value > 0 else None for value in values)
    steps, topk = steps or usual.steps, topk or usual.topk
    return Speculation(steps, topk, tokens or steps + 1)


def accept(case: Case, found: Replay, order: tuple[Boundary, ...], *, rows: int = ROWS) -> Acceptance | None:
    """Forecast the accept length on training states and on what the server feeds; None where a slot has no tensor."""
    slots = [slot.view for slot in case.slots]
    views = [view for view in slots if view is not None]
    if len(views) != found.draft.slots or len(views) < len(slots):
        return None
    passages = limited(aligned(find_passages(case.training.tokens), case.alignment), rows)
    if not passages:
        return None
    width = found.draft.checkpoint.target_hidden_size
    states, read = stored_states(case.training, width), reader(case.training)
    teacher = teach(
        found.draft, passages, target=found.target, boundaries=states, num_layers=case.num_layers, read=read
    )
    given = prompt_lengths(passages, case.alignment, case.serving.tokens)
    settings = speculation(case.serving.facts.engine)

    def predict(fed: Fed) -> Forecast:
        return forecast(found.draft, teacher, fed, settings, prompts=given)

    known = case.serving.facts.draft
    return Acceptance(
        predict(ordered(case.training, order)),
        predict(served(views, case.alignment)),
        None if known is None else known.spec_accept_length,
    )


def ranking(ordering: Ordering) -> tuple[Mapping[str, Any], ...]:
    """The ranking as a report holds it: `kl` where the target's distribution is known, else `cross_entropy`."""
    loss = "kl" if ordering.measure.startswith("KL") else "cross_entropy"
    return tuple(
        {
            "order": standing.order,
            loss: standing.loss,
            "excess": standing.excess,
            "z": standing.z,
            "agreement": standing.agreement,
            "rows": standing.rows,
            "dropped": standing.dropped,
        }
        for standing in ordering.ranking[:SHOWN]
    )


def summary(ordering: Ordering) -> Mapping[str, Any]:
    """What the ranking is worth, as a report holds it."""
    kept = ("measure", "rows", "z", "control_z", "why", "rows_needed", "tried", "total", "how")
    return {key: value for key, value in vars(ordering).items() if key in kept}


def acceptance(found: Acceptance) -> Mapping[str, Any]:
    """The forecasts as a report holds them."""
    return {"training": asdict(found.training), "serving": asdict(found.serving), "measured": found.measured}
