"""What is broken in a live server, and what it should be called.

`expected` are the codes that name the fault, from its physics and the texts of `explain`; more than one only where the
dumps cannot tell them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.lab.engine import engine_faults as engine


@dataclass(frozen=True)
class Fault:
    """A fault of the engine (`name` is the switch's), or with `trained` alone a draft trained on other layers."""

    name: str
    expected: tuple[str, ...]
    trained: tuple[Any, ...] | None = None


# In the engine, by the name of the switch. NaN comes last: a draft fed with it may take the server down.
ENGINE = (
    Fault("captured before the all-reduce", ("partial-sum",)),
    Fault("captured before the all-reduce, one slot", ("partial-sum",)),
    Fault("partial sum of the layer's output, no residual", ("partial-sum", "residual-missing")),
    Fault("layer output without the residual", ("residual-missing",)),
    Fault("layer output reduced twice", ("double-sum",)),
    Fault("whole state reduced again", ("double-sum",)),
    Fault("mean over ranks instead of sum", ("scale-mismatch",)),
    Fault("the final norm on a slot in the middle", ("final-norm",)),
    Fault("the last slot after the final norm", ("final-norm",), (2, 4, 8)),
    Fault("RMS norm a slot (fc_norm) before the capture", ("draft-norm",)),
    Fault("slots permuted", ("concat-order",)),
    Fault("two slots exchanged", ("concat-order",)),
    Fault("all slots are the last captured buffer", ("aliased-buffer",)),
    Fault("buffer written by the next layer's attention", ("aliased-buffer",)),
    Fault("one slot written by the next layer's attention", ("aliased-buffer",)),
    Fault("channels split over the ranks", ("hidden-shard",)),
    Fault("channels not gathered, zero elsewhere", ("hidden-shard",)),
    Fault("channels not gathered, one slot", ("hidden-shard",)),
    Fault("channels gathered in the wrong order, one slot", ("hidden-shard", "rotated-basis")),
    Fault("rows not gathered, zero elsewhere", ("token-shard", "rows-lost")),
    Fault("rank 1 holds zeros", ("capture-lost", "graph-stale", "undetermined", "rows-lost")),
    Fault("rank 1 holds noise", ("undetermined", "graph-stale", "capture-lost")),
    Fault("the last rank holds the rows of an earlier step", ("graph-stale",)),
    Fault("verify reads the buffer of an earlier step", ("graph-stale",)),
    Fault("some rows of a batch exchanged", ("rows-swapped",)),
    Fault("verify rows in reverse", ("rows-swapped",)),
    Fault("a buffer of slots by rows read as rows by slots", ("rows-swapped", "concat-order")),
    Fault("only the last chunk of a prompt is kept", ("rows-lost",)),
    Fault("states one token late", ("token-shift",)),
    Fault("states one token early", ("token-shift",)),
    Fault("scaled by 1.25", ("scale-mismatch",)),
    Fault("rounded to 8 bits", ("precision",)),
    Fault(engine.VERIFY_LAYERS, ("graph-stale", "layer-set", "layer-shift")),
    Fault(engine.DRAFT_LATE, ("token-shift",)),
    Fault("NaN in one row", ("non-finite",)),
)
HALF = Fault("half of the ranks reduced together", ("partial-sum",))  # needs four ranks

# The server is right by its config: it feeds (2, 4, 6), and the draft was trained on these.
TRAINED = (
    Fault("one layer late", ("layer-shift",), (1, 3, 5)),
    Fault("one layer early", ("layer-shift",), (3, 5, 7)),
    Fault("only the middle slot one layer late", ("layer-shift",), (2, 3, 6)),
    Fault("default layers instead of the trained", ("layer-set",), (1, 5, 7)),
    Fault("stock hidden_states[0..2]", ("layer-set", "layer-shift", "embedding-missing"), (0, 1, 2)),
    Fault("embedding first in training, not served", ("embedding-missing",), (0, 2, 7)),
    Fault("slots permuted in training", ("concat-order",), (6, 2, 4)),
    Fault("two slots exchanged in training", ("concat-order",), (4, 2, 6)),
)

# On more servers, where the way to the capture differs (four ranks; a model that keeps a list of states).
ELSEWHERE = (
    "captured before the all-reduce",
    "captured before the all-reduce, one slot",
    "partial sum of the layer's output, no residual",
    "layer output without the residual",
    "layer output reduced twice",
    "buffer written by the next layer's attention",
    "channels split over the ranks",
    "channels gathered in the wrong order, one slot",
    "rank 1 holds zeros",
    "the last rank holds the rows of an earlier step",
    "verify rows in reverse",
)
# For every `make test`: one server, a fault of each kind.
FEW = (
    "captured before the all-reduce",
    "layer output without the residual",
    "one slot written by the next layer's attention",
    "verify rows in reverse",
)


def named(*names: str) -> tuple[Fault, ...]:
    """Faults of ENGINE by name."""
    return tuple(fault for fault in ENGINE if fault.name in names)
