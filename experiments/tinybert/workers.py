"""Run cells in this process, or in several processes that share one device: while one prepares, another computes."""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from experiments.framework import Outcome
from experiments.tinybert.schedule import Job
from experiments.tinybert.training_run import TimeLimitReached, Unfinished, Workspace, run

Finished = tuple[Outcome | None, float]  # None: the time limit came first; and the seconds it took
STARTED_BY = "spawn"  # CUDA does not survive a fork
_in_worker: tuple[Callable[[], Workspace], Unfinished] | None = None  # of a worker process


class Workers:
    """Runs up to `count` jobs at a time; a single one runs in this process."""

    def __init__(self, workspace: Workspace, unfinished: Unfinished, count: int, pool: ProcessPoolExecutor | None):
        self._workspace, self._unfinished, self._pool = workspace, unfinished, pool
        self._running: list[tuple[Job, Future[Finished] | None]] = []
        self.count = count

    @property
    def busy(self) -> int:
        """How many jobs are running or waiting to run."""
        return len(self._running)

    def start(self, job: Job) -> None:
        """Start a job; without a pool, `next_finished` runs it."""
        self._running.append((job, self._pool.submit(_run_in_worker, job) if self._pool else None))

    def next_finished(self) -> tuple[Job, Finished]:
        """Wait for a job. Exceptions of the job are raised here."""
        if self._pool is None:
            job, _ = self._running.pop(0)
            return job, _run(job, self._workspace, self._unfinished)
        done, _ = wait([future for _, future in self._running if future], return_when=FIRST_COMPLETED)
        index = next(i for i, (_, future) in enumerate(self._running) if future in done)
        job, future = self._running.pop(index)
        assert future is not None
        try:
            return job, future.result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a worker process has ended; run the same command again to resume, perhaps with fewer --workers"
            ) from error


@contextmanager
def workers(
    workspace: Workspace, make_workspace: Callable[[], Workspace], unfinished: Unfinished, count: int
) -> Iterator[Workers]:
    """Workers that end with the block; each process makes its own workspace."""
    if count == 1:
        yield Workers(workspace, unfinished, 1, None)
        return
    context = multiprocessing.get_context(STARTED_BY)
    pool = ProcessPoolExecutor(count, context, _start_worker, (make_workspace, unfinished))
    try:
        yield Workers(workspace, unfinished, count, pool)
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:  # a cell may take an hour
            process.terminate()


def _start_worker(make_workspace: Callable[[], Workspace], unfinished: Unfinished) -> None:
    """The workspace is made with the first job, so that its errors reach the caller."""
    global _in_worker
    _in_worker = functools.cache(make_workspace), unfinished


def _run_in_worker(job: Job) -> Finished:
    assert _in_worker is not None
    make_workspace, unfinished = _in_worker
    return _run(job, make_workspace(), unfinished)


def _run(job: Job, workspace: Workspace, unfinished: Unfinished) -> Finished:
    started = time.perf_counter()
    try:
        outcome = run(job.cell, workspace, beat=job.beat, unfinished=unfinished)
    except TimeLimitReached:
        outcome = None
    return outcome, time.perf_counter() - started
