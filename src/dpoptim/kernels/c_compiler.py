"""Compile short C loops, if the machine has a C compiler. Each loop has a Python function that does the same.

Compiling takes about a second per process and happens only when there is enough work to make up for it. Loops are
compiled in a private temporary directory, which is removed once they are loaded. DPOPTIM_COMPILE=0 turns this off.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

# The compiler may not reorder sums or assume finite values. It need not set errno and may compute unused values:
# otherwise it does not vectorize square roots.
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")


@functools.cache
def library(source: str, *, contract: bool = False) -> ctypes.CDLL | None:
    """Return the functions of a C source; None without a compiler, on failure, or with DPOPTIM_COMPILE=0.

    Each operation is rounded separately, unless `contract` allows fused multiply-adds.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.environ.get("DPOPTIM_COMPILE") == "0" or os.name != "posix":
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="dpoptim-") as directory:  # only its owner may enter
            made = Path(directory) / "loops.so"
            flags = [*FLAGS, f"-ffp-contract={'fast' if contract else 'off'}"]
            for for_this_machine in (["-march=native"], []):
                command = [compiler, *flags, *for_this_machine, "-x", "c", "-", "-o", str(made), "-lm"]
                done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=60, check=False)
                if done.returncode == 0:
                    return ctypes.CDLL(str(made))
    except (OSError, subprocess.SubprocessError):
        pass
    return None


def agrees(found: Tensor | None, expected: Tensor, *, atol: float = 1e-8) -> bool:
    """Return whether loops found what torch does; a compiler may be configured for unsafe optimizations."""
    finite = expected.isfinite()
    if found is None or not torch.equal(finite, found.isfinite()):
        return False
    return torch.allclose(found[finite], expected[finite], rtol=1e-5, atol=atol)


def by_rows(tensor: Tensor) -> Tensor:
    """Return the tensor with a contiguous last axis."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
