"""Where and when a number was made: commit, machine, versions, time. A number means little without them."""

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

PACKAGE = Path(__file__).resolve().parents[1]
NAMES = ("torch", "numpy", "scipy", "transformers", "dp-accounting")


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
    """The commit of the working tree that the package lies in, "+changes" where src is not as committed.

    Asked once: later changes to the tree are not what runs.
    Edge cases: without such a tree (an installed package, also one in an environment inside some other repository),
    the package's version.
    """
    top = _git("rev-parse", "--show-toplevel")
    if not top or not (Path(top) / "src" / "dpoptim").exists() or not PACKAGE.samefile(Path(top) / "src" / "dpoptim"):
        return f"dpoptim {__version__}"
    head = _git("rev-parse", "--short", "HEAD") or "no commit"
    return head + ("+changes" if _git("status", "--porcelain", "--", ":/src") else "")


def machine(device: str = "cpu") -> str:
    """The GPU's name, or the processor's kind and how many threads were used."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def is_gpu(name: str) -> bool:
    """Whether what `machine` called so is a GPU.

    >>> is_gpu("NVIDIA H200"), is_gpu(machine("cpu"))
    (True, False)
    """
    return not name.endswith(" threads")


def versions(names: Sequence[str] = NAMES) -> dict[str, str]:
    """Of Python, dpoptim and those of the named packages that are installed.

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
        done = subprocess.run(["git", *command], capture_output=True, text=True, cwd=PACKAGE, check=False)
    except OSError:  # no git
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
