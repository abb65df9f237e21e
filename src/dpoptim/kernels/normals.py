"""Words to normals with correctly rounded operations only, so that every machine makes the same bits."""

from __future__ import annotations

from fractions import Fraction
from math import factorial
from typing import Any

_PI = Fraction("3.14159265358979323846264338327950288419716939937510")
_LN2 = Fraction("0.69314718055994530941723212145817656807550013436026")

# sin(πx/4) = x·Σ SINE_COEFS[k]·x^2k on |x| ≤ 1: Taylor's series, whose ninth term is below 2^-54.
SINE_COEFS = tuple(float((-1) ** k * (_PI / 4) ** (2 * k + 1) / factorial(2 * k + 1)) for k in range(8))
# -2·ln((1+s)/(1-s)) = s·Σ LOG_COEFS[k]·s^2k on |s| ≤ 0.172: the series of atanh, cut where a term is below 2^-53.
LOG_COEFS = tuple(-4.0 / (2 * k + 1) for k in range(10))
MINUS_2_LN2 = float(-2 * _LN2)
ROOT_HALF_BITS = 0x3FE6A09E667F3BCD  # the float64 √½, read as an integer

# Multiplying by a power of two commutes with rounding (nothing here comes near under- or overflow), so scalings are
# put where they cost no pass over the data: u is 2^64 times, the angle 2^63 times, the radius 8 times too large.
MANTISSA = 2**52 - 1
ROOT_HALF_64_BITS = ROOT_HALF_BITS + (64 << 52)  # the float64 2^64·√½
SCALED_LOG_COEFS = tuple(64.0 * coef for coef in LOG_COEFS)
SCALED_EXPONENT_COEF = 64.0 * MINUS_2_LN2
SCALED_SINE_COEFS = tuple(coef * 2.0 ** (-63 * (2 * k + 1)) for k, coef in enumerate(SINE_COEFS))

SCRATCH_ROWS = 4


def box_muller(xp: Any, words: Any, out: Any, scratch: Any) -> None:
    """Fill `out` with the normals of `words`, a Box–Muller pair from each two words.

        u = (w[2k] + ½)·2^-64,   r = sqrt(-2 ln u),   a = 2π·w[2k+1]·2^-64
        out[2k] = r·cos a,   out[2k+1] = r·sin a

    `xp` is `numpy` or `torch`, the module whose arrays are given: `words` int64 [n] (bits of the unsigned
    words), `out` [n] of a floating dtype, `scratch` float64 [SCRATCH_ROWS, ≥ n/2]; n is even.

    Guarantee: only +, -, ×, ÷, √ and conversions are used, one operation a call, each rounded correctly under
    IEEE 754. So an element's bits depend on its two words alone: not on its position, the vector width, the
    number of threads, or the device (on a CPU with numpy: torch's √ there may not round correctly). Values are
    within 1e-14 of those of exact arithmetic on u rounded to float64.

    Edge cases: w = 0 gives the largest radius, √(130·ln 2) = 9.493; u rounds to 1 for the largest words:
    radius 0.

    >>> import numpy as np
    >>> out = np.empty(2)
    >>> box_muller(np, np.array([0, 0]), out, np.empty((SCRATCH_ROWS, 1)))
    >>> out.round(6).tolist()
    [9.492583, 0.0]
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
    """out = Σ coefs[k]·x^k, a product and a sum at a time (a fused multiply-add would round otherwise)."""
    xp.multiply(x, coefs[-1], out=out)
    for coef in coefs[-2:0:-1]:
        out += coef
        out *= x
    out += coefs[0]
