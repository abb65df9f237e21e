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

# The compiler may not reorder sums or assume finite values. It need not set errno and may compute unused values:
# otherwise it does not vectorize square roots.
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")


@functools.cache
def library(source: str, *, contract: bool = False) -> ctypes.CDLL | None:
    """Return the functions of a C source, or None; each operation is rounded, unless `contract` allows fusing two."""
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
