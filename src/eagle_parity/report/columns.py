"""The columns of the table of rows, once for all formats that show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eagle_parity.records import Boundary, Distribution, Row

_STAYS = 10


@dataclass(frozen=True)
class Column:
    """A column: its head, the text of a row's cell, and what it is worth where not all columns fit."""

    name: str
    cell: Callable[[Row], str]
    right: bool = True
    """Numbers stand to the right."""
    worth: int = _STAYS
    """Columns of less worth go first."""


def show(boundary: Boundary | None) -> str:
    """A boundary as tables name it."""
    return "–" if boundary is None else str(boundary)


def row_name(row: Row) -> str:
    """`slot 1`, or `boundary 5` for a boundary that both sides store."""
    return f"slot {row.slot}" if row.slot is not None else f"boundary {row.boundary}"


def _margin(row: Row) -> str:
    if row.margin is None:
        return "–"
    return f"{row.margin:.3g}x" if row.margin < 1000 else ">1000x"


def _width(row: Row) -> str:
    return str(row.width) if row.width == row.expected_width else f"{row.width}/{row.expected_width or '?'}"


def _number(values: Distribution | None, key: str, spec: str) -> str:
    return "–" if values is None else format(getattr(values, key), spec)


def _ranks(row: Row) -> str:
    return ",".join(map(str, row.ranks)) + {True: " equal", False: " differ", None: ""}[row.rank_equal]


COLUMNS: tuple[Column, ...] = (
    Column("", row_name, right=False),
    Column("want", lambda row: show(row.expected_boundary)),
    Column("holds", lambda row: show(row.best_boundary)),
    Column("next", lambda row: show(row.runner_up), worth=4),
    Column("margin", _margin, worth=8),
    Column("cos", lambda row: _number(row.cosine, "median", ".5f"), worth=9),
    Column("rel L2", lambda row: _number(row.rel_l2, "median", ".2g")),
    Column("norm", lambda row: _number(row.norm_ratio, "median", ".3f"), worth=7),
    Column("width", _width, worth=6),
    Column("layout", lambda row: row.layout, right=False, worth=9),
    Column("floor", lambda row: "–" if row.floor is None else f"{row.floor.median:.2g}", worth=5),
    Column("cos p01", lambda row: _number(row.cosine, "p01", ".5f"), worth=2),
    Column("cos centred", lambda row: _number(row.cosine_centred, "median", ".5f"), worth=1),
    Column("rel L2 p99", lambda row: _number(row.rel_l2, "p99", ".2g"), worth=3),
    Column("tokens", lambda row: str(row.tokens), worth=3),
    Column("ranks", _ranks, right=False, worth=2),
    Column("status", lambda row: row.status, right=False),
)
USUAL: tuple[Column, ...] = tuple(column for column in COLUMNS if column.worth >= 6)
"""Without what only a wide place has room for."""


def fitting(rows: Sequence[Row], width: int) -> list[tuple[Column, int]]:
    """The columns that fit side by side into `width` characters, the worthiest first, each with its width."""
    shown = [(c, max(len(c.name), *(len(c.cell(row)) for row in rows))) for c in COLUMNS]
    while sum(size + 1 for _, size in shown) - 1 > width:
        least = min(shown, key=lambda entry: entry[0].worth)
        if least[0].worth == _STAYS:
            break
        shown.remove(least)
    return shown
