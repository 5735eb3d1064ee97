"""Which tokens of a forward a rank holds, where it holds a part of them."""

from __future__ import annotations


def own_rows(held: int, total: int, rank: int, size: int) -> range | None:
    """The tokens, of `total`, behind `held` rows on a rank of a group of `size`; None where that cannot be told.

    SGLang splits rows as `tensor_split` does (layer_boundary/ops.py in 0.5.23, communicator.py before), a padded batch
    into equal parts; the two agree wherever both fit. A whole tensor may be padded too, so the one row that each rank
    has of a single token in a padded batch passes as that token.
    """
    if held >= total:
        return range(total)
    each, more = divmod(total, size)
    if held == each + (rank < more):
        begin = rank * each + min(rank, more)
        return range(begin, begin + held)
    if held * size >= total:
        return range(min(rank * held, total), min((rank + 1) * held, total))
    return None


def common(span: range, rows: range) -> range:
    """The rows that both have; an empty range inside `rows` where they have none."""
    begin = min(max(span.start, rows.start), rows.stop)
    return range(begin, max(begin, min(span.stop, rows.stop)))
