"""Run elementwise work on all CPU cores without changing a bit of the result."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

_STARTED_IN = os.getpid()
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
    threads = torch.get_num_threads()
    if min(threads, len(jobs)) <= 1:
        for job in jobs:
            job()
        return
    waiting, done, errors = deque(jobs), deque[None](), deque[BaseException]()

    def work() -> None:
        try:
            while not errors:
                try:
                    job = waiting.popleft()  # no other thread gets the same job
                except IndexError:
                    return
                job()
                done.append(None)
        except BaseException as error:
            errors.append(error)

    (_on_torch_threads() or _on_new_threads)(work, threads)
    if len(done) < len(jobs):  # an interrupt may arrive where it is not caught
        raise errors[0] if errors else KeyboardInterrupt


@functools.cache
def _on_torch_threads() -> Callable[[Callable[[], None], int], None] | None:
    """Return a function that calls `work` on each thread of torch's OpenMP; None if that is not GNU's.

    After each operation of torch, its threads wait for the next in a loop of milliseconds. Other threads would have to
    share the cores with that loop.
    """
    body: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    try:
        run = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD).GOMP_parallel  # of the library that torch has loaded
    except (AttributeError, OSError):
        return None
    run.argtypes, run.restype = (body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None

    def on_torch_threads(work: Callable[[], None], threads: int) -> None:
        if os.getpid() == _STARTED_IN:
            run(body(lambda _: work()), None, threads, 0)
        else:  # OpenMP would wait forever for threads that did not survive a fork
            _on_new_threads(work, threads)

    return on_torch_threads


def _on_new_threads(work: Callable[[], None], threads: int) -> None:
    helpers = [threading.Thread(target=work) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()


def in_chunks_on(device: torch.device, work: Callable[[int, int], None], count: int) -> None:
    """Run `in_chunks` for tensors on `device`; on an accelerator, larger pieces one after another in this thread."""
    if device.type == "cpu":
        in_chunks(work, count, chunk=CHUNK)
        return
    for begin in range(0, count, DEVICE_CHUNK):
        work(begin, min(begin + DEVICE_CHUNK, count))
