"""Runs `dpoptim` commands in forked processes, which can be killed and need no import of torch.

The process that forks must never have run a backward: autograd does not survive a fork after that.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import dp_accounting.pld  # noqa: F401  # the children would import these one by one
import pytest
import scipy.signal  # noqa: F401
import torch
import torch._dynamo

from dpoptim.app.cli.main import main
from tests.app.runs import fixed_keys

LONGEST = 300  # seconds


def start(command: list[str], printed: Path, *, processes: int = 1, one_key: bool = True) -> list[int]:
    """Start a command in one process, or in several with the variables that torchrun sets; runs can share one key."""
    printed.write_text("")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in map(str, range(processes)):
        process = os.fork()
        if process == 0:
            _run(command, printed, {**group, "RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {}, one_key)
        started.append(process)
    return started


def _run(command: list[str], printed: Path, environment: dict[str, str], one_key: bool) -> None:
    status = 1
    try:
        os.setsid()  # Ctrl-C is for the parent
        torch.set_num_threads(1)
        handle = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.environ.update(environment)
        if one_key:
            fixed_keys(pytest.MonkeyPatch())
        status = main(command)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait(processes: list[int], seconds: float = LONGEST) -> list[int | None]:
    """The exit statuses of processes once all have ended; None for one that still runs after that many seconds."""
    found: dict[int, int | None] = dict.fromkeys(processes)
    deadline = time.monotonic() + seconds
    while None in found.values() and time.monotonic() < deadline:
        for process in [one for one, status in found.items() if status is None]:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                found[process] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return list(found.values())


def kill(process: int) -> None:
    """Kill a process, unless it has ended and `wait` has seen it."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def run(command: list[str], printed: Path, *, processes: int = 1, one_key: bool = True) -> int:
    """Run a command to its end; return the first status that is not 0, or 0."""
    started = start(command, printed, processes=processes, one_key=one_key)
    statuses = wait(started)
    for process in started:
        kill(process)
    return next((-1 if status is None else status for status in statuses if status != 0), 0)
