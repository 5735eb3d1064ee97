"""How torch works on blocks of rows: each on one thread, several at once, in memory that it has had before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

KEPT = 16 * 2**20
MOST = 4  # threads: memory has no more to give, and each holds a block of its own

T = TypeVar("T")
R = TypeVar("R")


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


def workers() -> int:
    """How many blocks to work on at once: the cores that this process may use, or OMP_NUM_THREADS, at most MOST."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(MOST, cores, int(asked) if asked.isdigit() else cores))


def spread(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """What `work` makes of each item, in order. Worked out by `workers()` threads, each with torch on one thread.

    `work` must not wait for another item. An error ends it; what has not begun by then never does.
    """
    items = list(items)
    count = min(workers(), len(items))
    if count <= 1:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
