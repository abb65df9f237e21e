"""Where and when a number was made: commit, machine, versions, time."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dpoptim.version import __version__

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("torch", "numpy", "scipy", "transformers", "dp-accounting", "opacus")


def setting(started: float, *, commit: str | None = None, device: str = "cpu") -> dict[str, Any]:
    """Commit, machine, versions, the time now, and the seconds since `started` (of `time.perf_counter`).

    >>> sorted(setting(time.perf_counter()))
    ['commit', 'machine', 'made', 'seconds', 'versions']
    """
    return {
        "commit": commit or this_commit(),
        "machine": machine(device),
        "versions": versions(),
        "made": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "seconds": round(time.perf_counter() - started, 3),
    }


@cache
def this_commit() -> str:
    """The commit of the repository, "+changes" if src or experiments have uncommitted changes.

    Asked once per process, because later changes are not what runs. Without a repository, the package's version.
    """
    top = _git("rev-parse", "--show-toplevel")
    if not top or not ROOT.samefile(top):
        return f"dpoptim {__version__}"
    head = _git("rev-parse", "--short", "HEAD") or "no commit"
    return head + ("+changes" if _git("status", "--porcelain", "--", ":/src", ":/experiments") else "")


def machine(device: str = "cpu") -> str:
    """The GPU's name, or the processor's kind and the number of threads."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def is_gpu(name: str) -> bool:
    """Whether a name from `machine` is a GPU.

    >>> is_gpu("NVIDIA H200"), is_gpu(machine("cpu"))
    (True, False)
    """
    return not name.endswith(" threads")


def versions(names: Sequence[str] = NAMES) -> dict[str, str]:
    """The versions of Python, dpoptim and those named packages that are installed.

    >>> versions(["no such package"])["dpoptim"] == __version__
    True
    """
    found = {"Python": platform.python_version(), "dpoptim": __version__}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _git(*command: str) -> str:
    try:
        done = subprocess.run(["git", *command], capture_output=True, text=True, cwd=ROOT, check=False)
    except OSError:  # git is not installed
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
