"""Jobs on several threads: each runs once, wherever it runs, and errors arrive."""

from __future__ import annotations

import os
import threading
import time
from functools import partial

import pytest
import torch

from dpoptim.kernels import threads
from tests import torch_settings


@pytest.fixture(params=["torch's", "new"], autouse=True)
def three_threads(request, monkeypatch):
    if request.param == "new":
        monkeypatch.setattr(threads, "_on_torch_threads", lambda: None)
    elif threads._on_torch_threads() is None:
        pytest.skip("needs GNU's OpenMP")
    with torch_settings.threads(3):
        yield


def test_each_job_runs_once():
    for count in (0, 1, 2, 3, 500):
        found: list[int] = []
        threads.in_threads([partial(found.append, number) for number in range(count)])
        assert sorted(found) == list(range(count))


def test_jobs_run_at_the_same_time():
    meeting = threading.Barrier(3, timeout=60)

    def meet():
        meeting.wait()

    threads.in_threads([meet] * 3)


def test_one_thread_runs_jobs_itself():
    torch.set_num_threads(1)
    found: list[int] = []
    threads.in_threads([lambda: found.append(threading.get_ident())] * 3)
    assert set(found) == {threading.get_ident()}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_arrive(error):
    done: list[int] = []

    def fail():
        time.sleep(0.01)
        raise error("of a job")

    with pytest.raises(error, match="of a job"):
        threads.in_threads([fail, *[partial(done.append, 1)] * 50])
    threads.in_threads([partial(done.append, 1)] * 3)


def test_jobs_that_were_lost_are_an_error(monkeypatch):
    """As if an interrupt had ended all threads outside of their jobs."""
    monkeypatch.setattr(threads, "_on_torch_threads", lambda: lambda work, count: None)
    with pytest.raises(KeyboardInterrupt):
        threads.in_threads([lambda: None] * 3)


def test_in_a_forked_process():
    """The threads of OpenMP do not exist there."""
    torch.ones(1 << 20).add_(1)
    child = os.fork()
    if child == 0:
        found: list[int] = []
        threads.in_threads([partial(found.append, 1)] * 7)
        os._exit(len(found))
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended
    assert os.waitstatus_to_exitcode(status) == 7
