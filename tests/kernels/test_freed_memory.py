"""Freed memory stays in the process, so that the system need not clear new pages."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import numpy as np
from dpoptim.kernels.freed_memory import keep_freed_memory

def faults():
    for turn in range(6):
        if turn == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.empty(1 << 23).fill(1.0)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
keep_freed_memory()
print(first, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is changed")
def test_large_blocks_are_reused():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=120)
    without, kept = map(int, done.stdout.split())
    assert kept < without / 10
