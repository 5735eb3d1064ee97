"""How many threads the sums run on: one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, as a `with` block or a decorator.

    A block of rows is summed in microseconds. Sharing it costs more than it brings: four times the time on two idle
    cores that other work competes for, up to a hundred times on busy ones.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
