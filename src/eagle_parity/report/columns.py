"""The columns of the table of rows, once for all formats that show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eagle_parity.records import Boundary, Distribution, Row


@dataclass(frozen=True)
class Column:
    """A column: its head, the text of a row's cell, and how many characters a terminal must have to get it."""

    name: str
    cell: Callable[[Row], str]
    right: bool = True
    """Numbers stand to the right."""
    at: int = 0


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


USUAL, WIDE = 74, 120

COLUMNS: tuple[Column, ...] = (
    Column("", row_name, right=False),
    Column("want", lambda row: show(row.expected_boundary)),
    Column("holds", lambda row: show(row.best_boundary)),
    Column("next", lambda row: show(row.runner_up), at=WIDE),
    Column("margin", _margin, at=USUAL),
    Column("cos", lambda row: _number(row.cosine, "median", ".5f")),
    Column("rel L2", lambda row: _number(row.rel_l2, "median", ".2g")),
    Column("norm", lambda row: _number(row.norm_ratio, "median", ".3f"), at=USUAL),
    Column("width", _width, at=USUAL),
    Column("layout", lambda row: row.layout, right=False),
    Column("floor", lambda row: "–" if row.floor is None else f"{row.floor.median:.2g}", at=WIDE),
    Column("cos p01", lambda row: _number(row.cosine, "p01", ".5f"), at=WIDE),
    Column("cos centred", lambda row: _number(row.cosine_centred, "median", ".5f"), at=WIDE),
    Column("rel L2 p99", lambda row: _number(row.rel_l2, "p99", ".2g"), at=WIDE),
    Column("tokens", lambda row: str(row.tokens), at=WIDE),
    Column("ranks", _ranks, right=False, at=WIDE),
    Column("status", lambda row: row.status, right=False),
)


def columns(width: int) -> tuple[Column, ...]:
    """The columns that fit into `width` characters."""
    return tuple(column for column in COLUMNS if column.at <= width)
