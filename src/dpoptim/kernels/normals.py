"""Turn random words into normals by Box–Muller, with the same bits on every machine: by numpy, torch or C."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from fractions import Fraction
from math import factorial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.kernels.c_compiler import library

Fill = Callable[[NDArray[np.int64], NDArray[Any]], None]

_PI = Fraction("3.14159265358979323846264338327950288419716939937510")
_LN2 = Fraction("0.69314718055994530941723212145817656807550013436026")

# sin(πx/4) = x·Σ SINE_COEFS[k]·x^2k on |x| ≤ 1: Taylor's series, whose ninth term is below 2^-54.
SINE_COEFS = tuple(float((-1) ** k * (_PI / 4) ** (2 * k + 1) / factorial(2 * k + 1)) for k in range(8))
# -2·ln((1+s)/(1-s)) = s·Σ LOG_COEFS[k]·s^2k on |s| ≤ 0.172: the series of atanh, cut where a term is below 2^-53.
LOG_COEFS = tuple(-4.0 / (2 * k + 1) for k in range(10))
MINUS_2_LN2 = float(-2 * _LN2)
ROOT_HALF_BITS = 0x3FE6A09E667F3BCD  # the float64 √½, read as an integer

# Multiplying by a power of two commutes with rounding (nothing here is near under- or overflow). So scalings are folded
# into constants to save passes over the data: u is 2^64 times, the angle 2^63 times, the radius 8 times too large.
MANTISSA = 2**52 - 1
ROOT_HALF_64_BITS = ROOT_HALF_BITS + (64 << 52)  # the float64 2^64·√½
SCALED_LOG_COEFS = tuple(64.0 * coef for coef in LOG_COEFS)
SCALED_EXPONENT_COEF = 64.0 * MINUS_2_LN2
SCALED_SINE_COEFS = tuple(coef * 2.0 ** (-63 * (2 * k + 1)) for k, coef in enumerate(SINE_COEFS))

SCRATCH_ROWS = 4


def box_muller(xp: Any, words: Any, out: Any, scratch: Any) -> None:
    """Fill `out` [n] with the normals of `words` (int64 [n]): one Box–Muller pair from every two words.

        u = (w[2k] + ½)·2^-64,   r = sqrt(-2 ln u),   a = 2π·w[2k+1]·2^-64
        out[2k] = r·cos a,   out[2k+1] = r·sin a

    `xp` is `numpy` or `torch`; on a CPU use numpy, because torch's √ may not round correctly. `scratch` is float64
    [SCRATCH_ROWS, ≥ n/2].

    Guarantee: each operation (+, -, ×, ÷, √ and conversions) is rounded correctly under IEEE 754. So an element's bits
    depend only on its two words, not on its position, the vector width, the number of threads or the device. Values
    are within 1e-14 of exact arithmetic on u rounded to float64. The largest radius is √(130·ln 2) = 9.493 at w = 0.
    """
    half = len(words) // 2
    a, b, c, d = (scratch[row][:half] for row in range(SCRATCH_ROWS))
    a_bits, b_bits = a.view(xp.int64), b.view(xp.int64)
    one = xp.ones((), dtype=xp.float64)

    # u = 2^e·m with √½ ≤ m < √2, so that ln u has no cancellation near u = 1.
    b[...] = words.view(xp.uint64)[0::2]
    b += 0.5  # 2^64·u
    b_bits -= ROOT_HALF_64_BITS  # e·2^52 + (bits of m) - (bits of √½)
    xp.bitwise_and(b_bits, MANTISSA, out=a_bits)
    a_bits += ROOT_HALF_BITS  # a = m
    b_bits >>= 52
    c[...] = b_bits  # e
    xp.add(a, 1.0, out=b)
    a -= 1.0
    a /= b  # s = (m-1)/(m+1), and ln m = 2·atanh(s)
    xp.multiply(a, a, out=b)
    _horner(xp, SCALED_LOG_COEFS, b, d)
    a *= d
    c *= SCALED_EXPONENT_COEF
    c += a
    xp.sqrt(c, out=c)  # 8r

    # The angle as a signed word is πx with -1 ≤ x < 1; the sine of a quarter of it, then two doublings.
    a[...] = words[1::2]
    xp.multiply(a, a, out=b)
    _horner(xp, SCALED_SINE_COEFS, b, d)
    a *= d  # sin(πx/4), at most √½
    xp.multiply(a, a, out=b)
    xp.subtract(one, b, out=b)
    xp.sqrt(b, out=d)  # cos(πx/4)
    b -= 0.5  # cos(πx/2)/2
    a *= d  # sin(πx/2)/2
    xp.multiply(a, a, out=d)
    xp.subtract(0.125 * one, d, out=d)  # cos(πx)/8
    d *= c
    out[0::2] = d
    a *= b  # sin(πx)/8
    a *= c
    out[1::2] = a


def _horner(xp: Any, coefs: tuple[float, ...], x: Any, out: Any) -> None:
    """Compute out = Σ coefs[k]·x^k with separate products and sums; a fused multiply-add rounds differently."""
    xp.multiply(x, coefs[-1], out=out)
    for coef in coefs[-2:0:-1]:
        out += coef
        out *= x
    out += coefs[0]


def _horner_in_c(coefs: tuple[float, ...]) -> str:
    """Return Σ coefs[k]·x^k as a C expression, in the order of `_horner`."""
    last, *others = reversed(coefs)
    text = f"x * {float.hex(last)}"
    for coef in others[:-1]:
        text = f"({text} + {float.hex(coef)}) * x"
    return f"{text} + {float.hex(others[-1])}"


ARGUMENTS = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)  # words, pairs, out

SOURCE = f"""
#define ROOT_HALF {ROOT_HALF_BITS}LL
#define ROOT_HALF_64 {ROOT_HALF_64_BITS}LL
#define MANTISSA {MANTISSA}LL
#define EXPONENT {float.hex(SCALED_EXPONENT_COEF)}
#define LOG {_horner_in_c(SCALED_LOG_COEFS)}
#define SINE {_horner_in_c(SCALED_SINE_COEFS)}
"""
SOURCE += """
#if defined(__AVX512F__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")  /* a third faster than the 256 bits that GCC prefers */
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline double as_double(int64_t bits) { double x; memcpy(&x, &bits, 8); return x; }
static inline int64_t as_bits(double x) { int64_t bits; memcpy(&bits, &x, 8); return bits; }

#define FILL(NAME, REAL) \\
void NAME(const int64_t *restrict words, int64_t pairs, REAL *restrict out) { \\
    for (int64_t k = 0; k < pairs; k++) { \\
        double u = (double)(uint64_t)words[2 * k] + 0.5; \\
        int64_t bits = as_bits(u) - (int64_t)ROOT_HALF_64; \\
        double m = as_double((bits & (int64_t)MANTISSA) + (int64_t)ROOT_HALF); \\
        double e = (double)(bits >> 52); \\
        double s = (m - 1.0) / (m + 1.0); \\
        double x = s * s; \\
        double p = LOG; \\
        double r = sqrt(e * EXPONENT + s * p); \\
        double a = (double)words[2 * k + 1]; \\
        x = a * a; \\
        p = SINE; \\
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
    """Return `fill(words, out)`, the compiled `box_muller` for contiguous vectors; None if it cannot be compiled.

    Guarantee: the loop has reproduced the bits of `box_muller` for thousands of words, including extreme ones. A
    compiler that rounds differently is not used.
    """
    loops = library(SOURCE)
    if loops is None:
        return None
    for loop in (loops.fill_float, loops.fill_double):
        loop.argtypes = ARGUMENTS
        loop.restype = None

    def fill(words: NDArray[np.int64], out: NDArray[Any]) -> None:
        loop = loops.fill_float if out.dtype == np.float32 else loops.fill_double
        loop(words.ctypes.data, len(words) // 2, out.ctypes.data)

    return fill if _same_bits(fill) else None


def _same_bits(fill: Fill) -> bool:
    edges = [0, 1, 2**11, 2**53 - 1, 2**62, 2**63 - 1, -1, -2, -(2**11), -(2**62), -(2**63)]
    some = np.array([[a, b] for a in edges for b in edges], dtype=np.int64).ravel()
    many = np.arange(1 << 14, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # spread over the whole range of words
    words = np.concatenate([some, many.view(np.int64)])
    for dtype in (np.float32, np.float64):
        expected, found = np.empty(len(words), dtype), np.empty(len(words), dtype)
        box_muller(np, words, expected, np.empty((SCRATCH_ROWS, len(words) // 2)))
        fill(words, found)
        if expected.tobytes() != found.tobytes():
            return False
    return True
