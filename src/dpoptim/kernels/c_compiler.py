"""Short loops in C, where the machine has a C compiler; each stands beside Python code that does the same without one.

A loop is compiled into a directory of its own that is gone as soon as it is loaded: no other user can put anything
there, and nothing is left behind. It takes about a second, once a process, and only where so much is to be done that
it is soon made up for. Set DPOPTIM_COMPILE=0 to do without.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# The compiler may not reorder sums or assume that all is finite. It need not set errno and may compute what is thrown
# away, without which a square root is not vectorised.
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@functools.cache
def library(source: str, *, contract: bool = False) -> ctypes.CDLL | None:
    """The functions of a C source; None where there is no compiler, it fails, or DPOPTIM_COMPILE=0.

    Each operation is rounded by itself, unless `contract` lets a·b + c be rounded once.

    >>> found = library("int twice(int x) { return 2 * x; }")
    >>> found is None or found.twice(21) == 42
    True
    >>> library("no C at all") is None
    True
    """
    compiler = _compiler()
    if compiler is None or os.environ.get("DPOPTIM_COMPILE") == "0" or os.name != "posix":
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="dpoptim-") as directory:  # which only its owner may enter
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
