"""Power series in float64: a lower triangular Toeplitz matrix is the series of its first column."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import fft

Series = NDArray[np.float64]

_DIRECT_PRODUCTS = 2**22  # below this many products the direct way is fast enough, and rounds better


def multiply(a: ArrayLike, b: ArrayLike, n: int) -> Series:
    """The first n coefficients of a(x)·b(x), by FFT where both are long.

        (a·b)_k = Σ_i a_i b_{k-i}

    Rounding: direct sums are accurate to an ulp or so of Σ|a_i b_{k-i}|; the FFT to an ulp or so of ‖a‖·‖b‖.

    >>> multiply([1, 1], [1, 1], 4).tolist()
    [1.0, 2.0, 1.0, 0.0]
    """
    _check_length(n)
    left, right = _as_series(a, "a")[:n], _as_series(b, "b")[:n]
    if len(left) * len(right) <= _DIRECT_PRODUCTS:
        product = np.convolve(left, right)
    else:
        size = fft.next_fast_len(len(left) + len(right) - 1, real=True)
        product = fft.irfft(fft.rfft(left, size) * fft.rfft(right, size), size)
    return _padded(product, n)


def divide(numerator: ArrayLike, denominator: ArrayLike, n: int) -> Series:
    """The first n coefficients of numerator(x)/denominator(x).

        q_k = (numerator_k - Σ_{i≥1} denominator_i q_{k-i}) / denominator_0

    The recurrence is used while it costs little, and Newton's iteration with FFT products beyond.

    >>> divide([1.0], [1.0, -1.0], 4).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    _check_length(n)
    top, bottom = _padded(_as_series(numerator, "numerator"), n), _as_series(denominator, "denominator")[:n]
    if bottom[0] == 0:
        raise ValueError("denominator[0]=0.0: such a series has no inverse; give a non-zero first coefficient")
    if n * len(bottom) <= 16 * _DIRECT_PRODUCTS:
        return _recursion(bottom, top)
    return multiply(top, _newton_inverse(bottom, n), n)


def inverse_series(coefs: ArrayLike, n: int) -> Series:
    """The first n coefficients of 1/coefs(x), the first column of the inverse matrix.

    >>> inverse_series([1.0, 0.5], 4).tolist()
    [1.0, -0.5, 0.25, -0.125]
    """
    return divide([1.0], coefs, n)


def correlate(a: Series, b: Series) -> Series:
    """Σ_i a_i b_{i-j} for each lag j of [0, len(a)), by FFT.

    >>> correlate(np.array([1.0, 2.0]), np.array([3.0, 4.0])).round(12).tolist()
    [11.0, 6.0]
    """
    size = fft.next_fast_len(2 * len(a), real=True)
    return np.asarray(fft.irfft(fft.rfft(a, size) * np.conj(fft.rfft(b, size)), size)[: len(a)], dtype=np.float64)


def sqrt_series(n: int) -> Series:
    """The first n coefficients of (1-x)^(-1/2), the square root of the prefix workload 1/(1-x).

        f_0 = 1,   f_k = f_{k-1}·(2k-1)/(2k)

    >>> sqrt_series(5).tolist() == [1, 1 / 2, 3 / 8, 5 / 16, 35 / 128]
    True
    """
    _check_length(n)
    k = np.arange(1, n, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])


def inverse_sqrt_series(n: int) -> Series:
    """The first n coefficients of (1-x)^(1/2), the inverse of `sqrt_series`.

        g_0 = 1,   g_k = g_{k-1}·(2k-3)/(2k)

    >>> inverse_sqrt_series(5).tolist() == [1, -1 / 2, -1 / 8, -1 / 16, -5 / 128]
    True
    """
    _check_length(n)
    k = np.arange(1, n, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((2 * k - 3) / (2 * k))])


def _newton_inverse(coefs: Series, n: int) -> Series:
    """1/coefs(x) by r ← r·(2 - coefs·r), which doubles the number of right coefficients."""
    inverse = _recursion(coefs[:64], np.eye(1, min(n, 64))[0])
    while len(inverse) < n:
        length = min(2 * len(inverse), n)
        residual = -multiply(coefs, inverse, length)
        residual[0] += 2.0
        inverse = multiply(inverse, residual, length)
    return inverse


def _as_series(coefs: ArrayLike, argument: str) -> Series:
    series = np.asarray(coefs, dtype=np.float64)
    if series.ndim != 1 or len(series) == 0:
        raise ValueError(f"{argument} has shape {series.shape}; give a vector of at least one coefficient")
    return series


def _padded(series: Series, n: int) -> Series:
    return np.concatenate([series[:n], np.zeros(max(0, n - len(series)))])


def _check_length(n: int) -> None:
    if n < 1:
        raise ValueError(f"n={n} coefficients; ask for at least 1")


def _recursion(coefs: Series, series: Series) -> Series:
    """series / coefs, term by term."""
    from scipy.signal import lfilter  # slow to import, and only strategies need it

    return np.asarray(lfilter([1.0], coefs, series), dtype=np.float64)
