"""How torch works on blocks of rows: each on one thread, several at once, in memory that it has had before."""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

MOST = 3  # threads: memory has no more to give, and each holds some 25 MB of its own
HUGE_PAGE = 2 * 2**20

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, and threads that `spread` uses, as a `with` block or a decorator. Inside another: nothing.

    A block of rows is summed in microseconds. Two idle cores do it hardly faster than one; where other work runs on
    them, waiting for the second thread takes many times as long as the sum.
    """
    if _crew.get() is not None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    crew = _Crew(workers())
    token = _crew.set(crew)
    try:
        yield
    finally:
        _crew.reset(token)
        if crew.others is not None:
            crew.others.shutdown(cancel_futures=True)
        crew.memory.__dict__.clear()  # the crew and its threads' pool know each other, and would keep it for a while
        torch.set_num_threads(before)


def workers() -> int:
    """How many blocks to work on at once: the cores that this process may use, or OMP_NUM_THREADS, at most MOST."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(MOST, cores, int(asked) if asked.isdigit() else cores))


def spread(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """What `work` makes of each item, in order. Inside `one_thread`, `workers()` threads work it out.

    An error ends it; what has not begun by then never does. `work` must not wait for another item; what it spreads
    itself is done by its own thread.
    """
    return start(work, items)()


def start(work: Callable[[T], R], items: Iterable[T]) -> Callable[[], Iterator[R]]:
    """The same, begun by the other threads at once: the calling thread lends a hand when it asks for the results."""
    items = list(items)
    crew = _crew.get()
    if crew is None or crew.others is None:
        return lambda: map(work, items)
    begun = [crew.others.submit(work, item) for item in items]

    def results() -> Iterator[R]:
        mine: dict[int, R] = {}
        ahead = iter(range(len(items)))
        try:
            for i, future in enumerate(begun):
                while i not in mine and not future.done():
                    free = next((j for j in ahead if begun[j].cancel()), None)
                    if free is None:
                        break
                    mine[free] = work(items[free])
                yield mine.pop(i) if i in mine else future.result()
        finally:
            for future in begun:
                future.cancel()

    return results


def scratch(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory of the calling thread, of this name, for a tensor: the next call with the name gives the same again.

    Pages are dear: a tensor that is made anew for every block costs as much as the sums. Outside `one_thread` it is.
    """
    crew = _crew.get()
    if crew is None:
        return torch.empty(tuple(shape), dtype=dtype)
    memory: dict[str, torch.Tensor] = crew.memory.__dict__
    nbytes = math.prod(shape) * dtype.itemsize
    if name not in memory or memory[name].nbytes < nbytes:
        memory[name] = _pages(nbytes)
    return memory[name][:nbytes].view(dtype).view(tuple(shape))


def _pages(nbytes: int) -> torch.Tensor:
    """Fresh memory, in huge pages where the kernel has them and it fills most of one; given back when it is dropped."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes > HUGE_PAGE // 2 and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    block = np.frombuffer(memory, dtype=np.uint8)
    begin = -block.ctypes.data % HUGE_PAGE
    return torch.from_numpy(block[begin : begin + nbytes])


@dataclass
class _Crew:
    """The threads that work beside the one that asks, and what each thread has in its memory."""

    count: int
    memory: threading.local = field(default_factory=threading.local)
    others: ThreadPoolExecutor | None = None

    def __post_init__(self) -> None:
        if self.count > 1:
            self.others = ThreadPoolExecutor(self.count - 1, initializer=self._join)

    def _join(self) -> None:
        torch.set_num_threads(1)
        _crew.set(_Crew(1, self.memory))  # alone from here on: threads that waited for each other would wait forever


_crew: ContextVar[_Crew | None] = ContextVar("crew", default=None)
