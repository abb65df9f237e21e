"""The time of a piece of work, on the host and on the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def milliseconds(work: Callable[[], object], device: str) -> float:
    """Return how long it takes, from when the GPU has nothing left to do until it has nothing left to do again."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return 1e3 * (time.perf_counter() - start)
