"""Box–Muller as one loop in C: the operations of `boxmuller`, one by one in its order, so the same bits."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.kernels import normals as boxmuller
from dpoptim.kernels.c_compiler import library

Fill = Callable[[NDArray[np.int64], NDArray[Any]], None]

ARGUMENTS = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)  # words, pairs, out

_SOURCE = """
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline double as_double(int64_t bits) { double x; memcpy(&x, &bits, 8); return x; }
static inline int64_t as_bits(double x) { int64_t bits; memcpy(&bits, &x, 8); return bits; }

#define FILL(NAME, REAL) \\
void NAME(const int64_t *restrict words, int64_t pairs, REAL *restrict out) { \\
    for (int64_t k = 0; k < pairs; k++) { \\
        double u = (double)(uint64_t)words[2 * k] + 0.5; \\
        int64_t bits = as_bits(u) - (int64_t)%(root_half_64)dLL; \\
        double m = as_double((bits & (int64_t)%(mantissa)dLL) + (int64_t)%(root_half)dLL); \\
        double e = (double)(bits >> 52); \\
        double s = (m - 1.0) / (m + 1.0); \\
        double x = s * s; \\
        double p = %(log)s; \\
        double r = sqrt(e * %(exponent)s + s * p); \\
        double a = (double)words[2 * k + 1]; \\
        x = a * a; \\
        p = %(sine)s; \\
        a = a * p; \\
        double b = 1.0 - a * a; \\
        double d = sqrt(b); \\
        b = b - 0.5; \\
        a = a * d; \\
        d = 0.125 - a * a; \\
        out[2 * k] = (REAL)(d * r); \\
        out[2 * k + 1] = (REAL)(a * b * r); \\
    } \\
}
FILL(fill_float, float)
FILL(fill_double, double)
"""


@functools.cache
def compiled_box_muller() -> Fill | None:
    """`fill(words, out)`, which does what `box_muller` does to contiguous vectors; None where it cannot be compiled.

    Guarantee: it has made the bits of `box_muller` for thousands of words, the extreme ones among them; a compiler that
    rounds otherwise is not used.
    """
    loops = library(_source())
    if loops is None:
        return None
    for loop in (loops.fill_float, loops.fill_double):
        loop.argtypes = ARGUMENTS
        loop.restype = None

    def fill(words: NDArray[np.int64], out: NDArray[Any]) -> None:
        loop = loops.fill_float if out.dtype == np.float32 else loops.fill_double
        loop(words.ctypes.data, len(words) // 2, out.ctypes.data)

    return fill if _same_bits(fill) else None


def _source() -> str:
    return _SOURCE % {
        "root_half_64": boxmuller.ROOT_HALF_64_BITS,
        "mantissa": boxmuller.MANTISSA,
        "root_half": boxmuller.ROOT_HALF_BITS,
        "exponent": float.hex(boxmuller.SCALED_EXPONENT_COEF),
        "log": _horner(boxmuller.SCALED_LOG_COEFS),
        "sine": _horner(boxmuller.SCALED_SINE_COEFS),
    }


def _horner(coefs: tuple[float, ...]) -> str:
    """Σ coefs[k]·x^k as C has it, in the order of `boxmuller`."""
    last, *others = reversed(coefs)
    text = f"x * {float.hex(last)}"
    for coef in others[:-1]:
        text = f"({text} + {float.hex(coef)}) * x"
    return f"{text} + {float.hex(others[-1])}"


def _same_bits(fill: Fill) -> bool:
    edges = [0, 1, 2**11, 2**53 - 1, 2**62, 2**63 - 1, -1, -2, -(2**11), -(2**62), -(2**63)]
    some = np.array([[a, b] for a in edges for b in edges], dtype=np.int64).ravel()
    many = np.arange(1, 1 << 14, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # spread over all words
    words = np.concatenate([some, many[: len(many) // 2 * 2].view(np.int64)])
    for dtype in (np.float32, np.float64):
        expected, found = np.empty(len(words), dtype), np.empty(len(words), dtype)
        boxmuller.box_muller(np, words, expected, np.empty((boxmuller.SCRATCH_ROWS, len(words) // 2)))
        fill(words, found)
        if expected.tobytes() != found.tobytes():
            return False
    return True
