"""Cells on several processes that share one device: while the host of one prepares, another's kernels run."""

from __future__ import annotations

import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from experiments.experiment import Outcome
from experiments.tinybert.schedule import Job
from experiments.tinybert.training_run import Workspace, run
from experiments.tinybert.unfinished import TimeIsOver, Unfinished

STARTED_BY = "spawn"
"""CUDA does not survive a fork."""
Done = tuple[Job, Outcome | None, float]  # None: time was over first; and the seconds it took


class Here:
    """One cell after the other, in this process."""

    def __init__(self, ground: Workspace, unfinished: Unfinished) -> None:
        self._ground, self._unfinished = ground, unfinished
        self._waiting: list[Job] = []
        self.places = 1

    @property
    def busy(self) -> int:
        return len(self._waiting)

    def give(self, job: Job) -> None:
        self._waiting.append(job)

    def take(self) -> Done:
        job = self._waiting.pop(0)
        started = time.perf_counter()
        return job, _run(job, self._ground, self._unfinished), time.perf_counter() - started


class Processes:
    """Several at a time, each process with its own copy of the ground."""

    def __init__(self, make_ground: Callable[[], Workspace], unfinished: Unfinished, count: int) -> None:
        context: Any = multiprocessing.get_context(STARTED_BY)
        self._jobs: Any = context.Queue()
        self._done: Any = context.Queue()
        self.places, self.busy = count, 0
        self._processes = [
            context.Process(target=_work, args=(make_ground, unfinished, self._jobs, self._done), daemon=True)
            for _ in range(count)
        ]
        for process in self._processes:
            process.start()

    def give(self, job: Job) -> None:
        self.busy += 1
        self._jobs.put(job)

    def take(self) -> Done:
        while True:
            try:
                found = self._done.get(timeout=5)
                break
            except queue.Empty:
                ended = [process.exitcode for process in self._processes if not process.is_alive()]
                if ended:  # what it was working on, or held, never comes back
                    raise RuntimeError(
                        f"a worker process has ended (exit code {ended[0]}); the same command goes on from what is "
                        "there, perhaps with fewer --workers"
                    ) from None
        self.busy -= 1
        if isinstance(found, ValueError):
            raise found
        if isinstance(found, str):
            raise RuntimeError(f"a worker failed:\n{found}")
        done: Done = found
        return done

    def stop(self) -> None:
        for each in (self._jobs, self._done):
            each.cancel_join_thread()  # else this process may wait for a reader that is no more
        for process in self._processes:
            process.terminate()


@contextmanager
def workers(
    ground: Workspace, make_ground: Callable[[], Workspace], unfinished: Unfinished, count: int
) -> Iterator[Here | Processes]:
    """Workers that end with the block; `count` = 1 is this process, with its own ground, others make one each."""
    if count == 1:
        yield Here(ground, unfinished)
        return
    pool = Processes(make_ground, unfinished, count)
    try:
        yield pool
    finally:
        pool.stop()


def _run(job: Job, ground: Workspace, unfinished: Unfinished) -> Outcome | None:
    try:
        return run(job.cell, ground, beat=job.beat, unfinished=unfinished)
    except TimeIsOver:
        return None


def _work(make_ground: Callable[[], Workspace], unfinished: Unfinished, jobs: Any, done: Any) -> None:
    try:
        ground = make_ground()
        while True:
            job = jobs.get()
            started = time.perf_counter()
            done.put((job, _run(job, ground, unfinished), time.perf_counter() - started))
    except KeyboardInterrupt:
        return
    except ValueError as error:  # told in one line
        done.put(error)
    except BaseException:
        done.put(traceback.format_exc())
        raise
