"""The frozen records that flow through the program, and the names of the tensors in a dump.

A leaf: imports nothing of eagle-parity. Words are those of the design: boundary k is the residual stream entering
layer k (0 = embedding output, n = after the last layer, before the final norm), `final.norm` is the state after
that norm, slot j is the j-th hidden-wide block that the target hands to the draft's fc.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

FINAL_NORM: Literal["final.norm"] = "final.norm"
Boundary: TypeAlias = "int | Literal['final.norm']"
IntArray: TypeAlias = "NDArray[np.int64]"
Side: TypeAlias = Literal["training", "serving"]
Phase: TypeAlias = Literal["prefill", "verify", "decode"]
Layout: TypeAlias = Literal[
    "replicated", "partial-sum", "double-sum", "hidden-shard", "token-shard", "missing", "inconsistent", "unknown"
]
Status: TypeAlias = Literal["ok", "fail", "inconclusive", "skipped"]
Severity: TypeAlias = Literal["error", "warning", "info"]
Verdict: TypeAlias = Literal["pass", "fail", "inconclusive"]

# --------------------------------------------------------------------------------------------- tensor names


def boundary_name(boundary: Boundary) -> str:
    """`boundary.K` or `final.norm`: the key of a boundary in a rank file."""
    return FINAL_NORM if boundary == FINAL_NORM else f"boundary.{boundary}"


def boundary_of(name: str) -> Boundary:
    """The boundary whose `boundary_name` this is."""
    return FINAL_NORM if name == FINAL_NORM else int(name.removeprefix("boundary."))


def slot_name(slot: int) -> str:
    """`slot.J`: the key of a slot in a rank file."""
    return f"slot.{slot}"


def residual_name(boundary: int) -> str:
    """`residual.K`: the replicated part of boundary K's sum over ranks."""
    return f"residual.{boundary}"


def rank_names(ranks: Sequence[int]) -> str:
    """Ranks as a sentence has them: `rank 1`, `ranks 0, 3`, `no rank`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "no rank"


# ------------------------------------------------------------------------------------------- what was captured


@dataclass(frozen=True)
class Source:
    """Who produced a capture: `pipeline` is hf, specforge, sglang, …"""

    pipeline: str
    version: str | None = None
    detail: str | None = None


@dataclass(frozen=True)
class Model:
    """The target model. Unknown values are None."""

    name: str | None = None
    architecture: str | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    vocab_size: int | None = None
    dtype: str | None = None
    quantization: str | None = None


@dataclass(frozen=True)
class Engine:
    """The serving engine, its parallel sizes and the flags that matter to a capture."""

    name: str
    version: str | None = None
    tp_size: int | None = None
    dp_size: int | None = None
    pp_size: int | None = None
    ep_size: int | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Draft:
    """What the serving side knows of its draft. `declared_ids` are the config's own, untranslated."""

    name: str | None = None
    declared_ids: tuple[int, ...] | None = None
    num_slots: int | None = None
    spec_accept_length: float | None = None


@dataclass(frozen=True)
class Request:
    """The rows [begin, end) of one request in one forward.

    `graph`: CUDA-graph replay (None: unknown); `forward_tokens`: tokens of the whole forward, other requests
    included; `cached_tokens`: tokens of the prompt that came from a prefix cache and have no rows.
    """

    id: str
    begin: int
    end: int
    phase: Phase = "prefill"
    batch: int = 1
    graph: bool | None = None
    forward_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Facts:
    """Everything that a dump's manifest says, except its rows."""

    side: Side
    source: Source
    model: Model
    engine: Engine | None = None
    draft: Draft | None = None
    boundaries: tuple[int, ...] = ()
    slots: int = 0
    slot_boundaries: tuple[Boundary, ...] | None = None
    run: str | None = None
    """What the parts of one capture share: the 16 hex digits in its probes' ids."""
    missing_ranks: tuple[int, ...] = ()
    """Ranks that took part in the forwards and are not in this dump."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, width and dtype (safetensors spelling: BF16, F32, …) before any row is written."""

    name: str
    width: int
    dtype: str


@dataclass(frozen=True)
class Sample:
    """Rows of one request in one forward, as a capture or a reader yields them.

    `token_ids`, `positions` [T] and optional `loss_mask`, `parents`, `accepted` [T]; `parents` counts within this
    sample's request (-1 at a start). `tensors[rank][name]` is [T, W], or [T', W] where `rows[rank]` [T'] names the
    rows of this sample that the rank held.
    """

    id: str
    token_ids: Sequence[int]
    positions: Sequence[int]
    tensors: Mapping[int, Mapping[str, torch.Tensor]]
    phase: Phase = "prefill"
    batch: int = 1
    graph: bool | None = None
    forward_tokens: int | None = None
    cached_tokens: int | None = None
    loss_mask: Sequence[int] | None = None
    parents: Sequence[int] | None = None
    accepted: Sequence[int] | None = None
    rows: Mapping[int, Sequence[int]] | None = None


@dataclass(frozen=True)
class Tokens:
    """The token table of a capture: T rows, and the requests that own them."""

    token_ids: IntArray
    positions: IntArray
    requests: tuple[Request, ...]
    loss_mask: IntArray | None = None
    parents: IntArray | None = None
    accepted: IntArray | None = None


class Capture(Protocol):
    """One side's tensors, by rank, name and row. Opened lazily: nothing is read before `read`."""

    @property
    def path(self) -> str:
        """Where it lies, for messages."""

    @property
    def facts(self) -> Facts:
        """What the manifest says."""

    @property
    def tokens(self) -> Tokens:
        """Token ids, positions and requests."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks present, ascending."""

    def names(self, rank: int) -> tuple[str, ...]:
        """The tensors that a rank holds."""

    def spec(self, rank: int, name: str) -> TensorSpec:
        """Width and dtype of a tensor."""

    def length(self, rank: int, name: str) -> int:
        """Stored rows of a tensor."""

    def rows(self, rank: int, name: str) -> IntArray | None:
        """The token rows that the tensor's rows stand for, or None when it holds all of them in order."""

    def read(self, rank: int, name: str, begin: int, end: int) -> torch.Tensor:
        """Stored rows [begin, end) of a tensor, [end - begin, W], in its own dtype."""


@dataclass(frozen=True)
class Plan:
    """What is going to be captured, known before the first row: facts, T tokens, and the tensors of each rank."""

    facts: Facts
    tokens: int
    tensors: Mapping[int, Sequence[TensorSpec]]
    rank_rows: Mapping[int, int] | None = None
    """Rows of each rank where a rank holds only some tokens (then every sample must say `rows`)."""
    columns: tuple[str, ...] = ()
    """The optional token columns that every sample carries: loss_mask, parents, accepted."""


@dataclass(frozen=True)
class Stream:
    """A plan and the samples that fill it. The samples are made while they are iterated."""

    plan: Plan
    samples: Iterator[Sample]


# --------------------------------------------------------------------------------------------- what was found


@dataclass(frozen=True)
class Distribution:
    """A per-token quantity over the aligned rows. Percentiles are linear. NaN becomes null in JSON."""

    median: float
    mean: float
    p01: float
    p99: float
    min: float
    max: float


@dataclass(frozen=True)
class RankMetrics:
    """Medians of one rank's own tensor against the expected boundary."""

    rank: int
    cosine: float
    rel_l2: float
    norm_ratio: float


@dataclass(frozen=True)
class Floor:
    """How far two correct runs differ, and who says so."""

    source: str
    median: float
    p99: float | None = None


@dataclass(frozen=True)
class Row:
    """One line of the verdict: a slot against the boundary it should hold, or a boundary against itself."""

    slot: int | None
    boundary: Boundary | None
    expected_boundary: Boundary | None
    width: int
    expected_width: int | None
    layout: Layout
    ranks: tuple[int, ...]
    rank_equal: bool | None
    tokens: int
    cosine: Distribution | None
    rel_l2: Distribution | None
    norm_ratio: Distribution | None
    cosine_no_massive: Distribution | None
    cosine_centred: Distribution | None
    per_rank: tuple[RankMetrics, ...]
    floor: Floor | None
    best_boundary: Boundary | None
    runner_up: Boundary | None
    margin: float | None
    status: Status


@dataclass(frozen=True)
class Finding:
    """A named fault (see `Findings` in the design) with its evidence and its fix."""

    code: str
    severity: Severity
    message: str
    fix: str
    slot: int | None = None
    boundary: Boundary | None = None
    ranks: tuple[int, ...] | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Control:
    """A negative control: data that must not match. `failed_as_expected` is None when it could not be run."""

    name: str
    failed_as_expected: bool | None


@dataclass(frozen=True)
class Coverage:
    """Which situations the serving dump holds, and which nobody has looked at."""

    phases: tuple[str, ...]
    graph: tuple[bool | None, ...]
    max_forward_tokens: int | None
    batch: int
    warm_cache: bool | None
    ranks: tuple[int, ...]
    not_seen: tuple[str, ...]


@dataclass(frozen=True)
class Layers:
    """The four answers to "which layers?", in boundary coordinates."""

    trained: tuple[Boundary, ...] | None = None
    stored: tuple[Boundary, ...] | None = None
    served: tuple[Boundary | None, ...] | None = None
    declared: tuple[Boundary | None, ...] | None = None
    trained_from: str | None = None
    """Who says what the draft was trained on."""
    ranking: tuple[Mapping[str, Any], ...] = ()
    ambiguous: bool = False
    replay: Mapping[str, Any] | None = None
    """What the ranking is worth: rows, z, control, how it was searched."""
    declarations: tuple[Mapping[str, Any], ...] = ()
    """What the config's ids mean under each engine's and trainer's rule."""
    acceptance: Mapping[str, Any] | None = None
    """The forecast accept length on training states and on what the server feeds, and the measured one."""


@dataclass(frozen=True)
class Report:
    """The whole answer; `report` renders it, `gate` turns it into an exit code."""

    command: str
    verdict: Verdict
    inputs: Mapping[str, Any]
    thresholds: Mapping[str, Any]
    coverage: Coverage | None
    controls: tuple[Control, ...]
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    layers: Layers | None
