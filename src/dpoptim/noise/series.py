"""Power series in float64. A lower triangular Toeplitz matrix is the series of its first column."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpoptim.arguments import check_whole

Series = NDArray[np.float64]

_DIRECT_PRODUCTS = 2**22  # up to this many products direct sums are fast enough and round better


def multiply(a: ArrayLike, b: ArrayLike, n: int) -> Series:
    """Return the first n coefficients of a(x)·b(x), by FFT where both are long.

        (a·b)_k = Σ_i a_i b_{k-i}

    The error is about one ulp of Σ|a_i b_{k-i}| for direct sums, and one ulp of ‖a‖·‖b‖ for the FFT.

    >>> multiply([1, 1], [1, 1], 4).tolist()
    [1.0, 2.0, 1.0, 0.0]
    """
    n = check_whole("n", n)
    left, right = _as_series(a, "a")[:n], _as_series(b, "b")[:n]
    if len(left) * len(right) <= _DIRECT_PRODUCTS:
        product = np.convolve(left, right)
    else:
        from scipy import fft

        size = fft.next_fast_len(len(left) + len(right) - 1, real=True)
        product = fft.irfft(fft.rfft(left, size) * fft.rfft(right, size), size)
    return _padded(product, n)


def divide(numerator: ArrayLike, denominator: ArrayLike, n: int) -> Series:
    """Return the first n coefficients of numerator(x)/denominator(x).

        q_k = (numerator_k - Σ_{i≥1} denominator_i q_{k-i}) / denominator_0

    Long series use Newton's iteration with FFT products instead of the recurrence.

    Raises:
        ValueError: If denominator[0] is 0.

    >>> divide([1.0], [1.0, -1.0], 4).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    n = check_whole("n", n)
    top, bottom = _padded(_as_series(numerator, "numerator"), n), _as_series(denominator, "denominator")[:n]
    if bottom[0] == 0:
        raise ValueError("Expected denominator[0] != 0: the series has no inverse.")
    if n * len(bottom) <= 16 * _DIRECT_PRODUCTS:
        return _recurrence(bottom, top)
    return multiply(top, _newton_inverse(bottom, n), n)


def inverse_series(coefs: ArrayLike, n: int) -> Series:
    """Return the first n coefficients of 1/coefs(x), the first column of the inverse matrix.

    >>> inverse_series([1.0, 0.5], 4).tolist()
    [1.0, -0.5, 0.25, -0.125]
    """
    return divide([1.0], coefs, n)


def sqrt_series(n: int) -> Series:
    """Return the first n coefficients of (1-x)^(-1/2), the square root of the prefix workload 1/(1-x).

        f_0 = 1,   f_k = f_{k-1}·(2k-1)/(2k)

    >>> sqrt_series(5).tolist() == [1, 1 / 2, 3 / 8, 5 / 16, 35 / 128]
    True
    """
    n = check_whole("n", n)
    k = np.arange(1, n, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])


def noising_series(decays: ArrayLike, weights: ArrayLike, steps: int) -> Series:
    """Return the first coefficients of 1/c(x), for c(x) = 1 + x·Σ_j weights[j]/(1 - decays[j]·x).

        1/c(x) = 1 - x·uᵀ(I - x(diag(decays) - uuᵀ))⁻¹u,    u = √weights

    So 1/c has as many buffers. Their decays are the eigenvalues of a symmetric matrix Q·diag·Qᵀ, in [-1, 1) if the
    weights sum to at most 1, and their weights are -(Qᵀu)². Symmetry keeps this accurate for decays that are close
    together, unlike the roots of a polynomial.

    >>> noising_series([0.5], [0.25], 4).round(12).tolist()
    [1.0, -0.25, -0.0625, -0.015625]
    """
    root = np.sqrt(np.asarray(weights, dtype=np.float64))
    inverse_decays, vectors = np.linalg.eigh(np.diag(np.asarray(decays, dtype=np.float64)) - np.outer(root, root))
    return np.concatenate([[1.0], -((vectors.T @ root) ** 2) @ powers(inverse_decays, steps - 1)])


def powers(bases: ArrayLike, count: int) -> Series:
    """Return bases[j]^i for i in [0, count) as [len(bases), count], as products of two powers for speed."""
    column = np.asarray(bases, dtype=np.float64)[:, None]
    low, high = column ** np.arange(256), column ** np.arange(0, count, 256)
    return (high[:, :, None] * low[:, None, :]).reshape(len(column), high.shape[1] * 256)[:, :count]


def _newton_inverse(coefs: Series, n: int) -> Series:
    """Compute 1/coefs(x) by r ← r·(2 - coefs·r), which doubles the number of correct coefficients."""
    inverse = _recurrence(coefs[:64], np.eye(1, min(n, 64))[0])
    while len(inverse) < n:
        length = min(2 * len(inverse), n)
        residual = -multiply(coefs, inverse, length)
        residual[0] += 2.0
        inverse = multiply(inverse, residual, length)
    return inverse


def _recurrence(coefs: Series, series: Series) -> Series:
    """Compute series / coefs term by term."""
    if len(coefs) == 1:  # independent noise; importing scipy.signal takes about half a second
        return series * (1.0 / coefs[0])
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], coefs, series), dtype=np.float64)


def _as_series(coefs: ArrayLike, argument: str) -> Series:
    series = np.asarray(coefs, dtype=np.float64)
    if series.ndim != 1 or len(series) == 0:
        raise ValueError(f"Expected {argument} to be a vector with at least one coefficient, got shape {series.shape}.")
    return series


def _padded(series: Series, n: int) -> Series:
    return np.concatenate([series[:n], np.zeros(max(0, n - len(series)))])
