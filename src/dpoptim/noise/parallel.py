"""Spread elementwise work over the processor's cores without changing a bit of its result."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def in_chunks(work: Callable[[int, int], None], count: int, *, chunk: int, threads: int | None = None) -> None:
    """Call work(begin, end) over [0, count) in pieces of at most `chunk`, on `threads` threads.

    By default these are torch.get_num_threads().
    `work` must treat each element by itself: then pieces and threads cannot change what comes out. It should
    spend its time in calls that let other Python threads run, as numpy's do. An error in it is raised here.

    >>> squares = [0] * 5
    >>> def square(begin: int, end: int) -> None:
    ...     squares[begin:end] = [i * i for i in range(begin, end)]
    >>> in_chunks(square, 5, chunk=2)
    >>> squares
    [0, 1, 4, 9, 16]
    """
    pieces = [(begin, min(begin + chunk, count)) for begin in range(0, count, chunk)]
    workers = min(threads or torch.get_num_threads(), len(pieces))
    if workers <= 1:
        for begin, end in pieces:
            work(begin, end)
        return
    # A pool for each call, as threads do not survive a fork; starting one costs less than a chunk.
    with ThreadPoolExecutor(workers) as pool:
        for job in [pool.submit(work, begin, end) for begin, end in pieces]:
            job.result()
