"""Run elementwise work on all CPU cores without changing a bit of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

CHUNK = 2**16  # elements per job on a core, few enough to stay in its cache
DEVICE_CHUNK = 2**22  # the same on an accelerator


def in_chunks(work: Callable[[int, int], None], count: int, *, chunk: int) -> None:
    """Call work(begin, end) over [0, count) in pieces of at most `chunk`, on torch.get_num_threads() threads.

    `work` must treat each element separately, so that pieces and threads cannot change the result. It should spend
    its time in calls that release Python's lock, such as numpy's. Errors in it are raised here.
    """
    in_threads([partial(work, begin, min(begin + chunk, count)) for begin in range(0, count, chunk)])


def in_threads(jobs: Sequence[Callable[[], None]]) -> None:
    """Call all jobs on torch.get_num_threads() threads; an error in one is raised here."""
    workers = min(torch.get_num_threads(), len(jobs))
    if workers <= 1:
        for job in jobs:
            job()
        return
    # Each call starts a pool, because threads do not survive a fork. Starting one costs less than a job.
    with ThreadPoolExecutor(workers) as pool:
        for running in [pool.submit(job) for job in jobs]:
            running.result()


def in_chunks_on(device: torch.device, work: Callable[[int, int], None], count: int) -> None:
    """Run `in_chunks` for tensors on `device`; on an accelerator, larger pieces one after another in this thread."""
    if device.type == "cpu":
        in_chunks(work, count, chunk=CHUNK)
        return
    for begin in range(0, count, DEVICE_CHUNK):
        work(begin, min(begin + DEVICE_CHUNK, count))
