"""How torch works on blocks of rows: on one thread, in memory that it has had before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

KEPT = 16 * 2**20


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, as a `with` block or a decorator.

    A block of rows is summed in microseconds. Two idle cores do it hardly faster than one; where other work runs on
    them, waiting for the second thread takes many times as long as the sum.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    # glibc hands freed memory back to the kernel above twice the largest block that it ever got back; getting the pages
    # again for every block of rows takes a sixth of the time of a small comparison.
    torch.empty(KEPT, dtype=torch.uint8)
    try:
        yield
    finally:
        torch.set_num_threads(before)
