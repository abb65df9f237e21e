"""In how many dimensions, and from which batch size on, a private second moment still sees the gradient.

A gradient of norm ‖g‖ spread evenly over m coordinates has the squared signal ‖g‖²/m in each. Against it stand, with
φ = ζ²σ²/B² and κ = (1−β₂)/(1+β₂), the variance of a long average of independent terms:

    post-processing     the bias φ itself                      φ        ≤ ‖g‖²/m
    bias correction     what is left of the noise on average   φ√κ      ≤ ‖g‖²/m
    IME                 Gaussian noise on the square           s₂√κ     ≤ ‖g‖²/m,   s₂ = √2·σΔ₂, Δ₂ = 2ζ²/B

`Signal.OPTIMISTIC` is ‖g‖ = ζ, as if all clipped gradients of a batch were equal; `Signal.PESSIMISTIC` is ‖g‖ = ζ/√B,
as if they were orthogonal. For the first two methods that puts √B in the place of B; for IME the batch size cancels
out. ζ cancels everywhere.

These are orders of magnitude: factors near 1 are left out (the standard deviation of ν̂ is √(2φ² + 4g²φ)·√κ, so √2·φ√κ
in pure noise; `second_moment_variance` has it exactly). Correlated noise multiplies σ by `row_norm`, the norm of a row
of C⁻¹ times the largest column norm of C. That counts the noise of each step alone: the covariances K_ij of different
steps enter the variance of ν̂ squared, and so can only make bias correction's limit smaller.
"""

from __future__ import annotations

import enum
import math

from dpoptim.theory.second_moments import check_beta, squared_weight


class Signal(enum.Enum):
    """How long the averaged gradient is taken to be."""

    OPTIMISTIC = "optimistic"  # ζ
    PESSIMISTIC = "pessimistic"  # ζ/√B


def largest_dimension_post_processing(
    *, batch_size: float, noise_multiplier: float, signal: Signal = Signal.OPTIMISTIC, row_norm: float = 1.0
) -> float:
    """m up to which the noise's bias φ is below the signal, so that there is little to correct: (B/σ)², or B/σ².

    >>> largest_dimension_post_processing(batch_size=2048, noise_multiplier=1.0)
    4194304.0
    """
    noise = _noise(noise_multiplier, row_norm)
    return _divide(_positive("batch_size", batch_size) ** _power(signal), noise**2)


def smallest_batch_post_processing(
    *, dimension: float, noise_multiplier: float, signal: Signal = Signal.OPTIMISTIC, row_norm: float = 1.0
) -> float:
    """B from which on the noise's bias is below the signal in m dimensions: σ√m, or σ²m.

    >>> smallest_batch_post_processing(dimension=1e6, noise_multiplier=2.0)
    2000.0
    """
    noise = _noise(noise_multiplier, row_norm)
    return (_positive("dimension", dimension) * noise**2) ** (1 / _power(signal))


def largest_dimension_bias_correction(
    *,
    batch_size: float,
    noise_multiplier: float,
    beta2: float = 0.999,
    signal: Signal = Signal.OPTIMISTIC,
    row_norm: float = 1.0,
) -> float:
    """m up to which ν̂ less its bias shows the signal: (B/σ)²/√κ, or B/(σ²√κ).

    The same condition is B/σ ≥ ((1−β₂)²/(1−β₂²))^¼·√m. Averaging gains 1/√κ, 45 at β₂ = .999, over post-processing.

    >>> setting = dict(batch_size=2048, noise_multiplier=1.0, beta2=0.999)
    >>> print(f"{largest_dimension_bias_correction(**setting):.4g}")
    1.875e+08
    >>> print(f"{largest_dimension_bias_correction(**setting, signal=Signal.PESSIMISTIC):.4g}")
    9.157e+04
    """
    return _divide(
        largest_dimension_post_processing(
            batch_size=batch_size, noise_multiplier=noise_multiplier, signal=signal, row_norm=row_norm
        ),
        _root_kappa(beta2),
    )


def smallest_batch_bias_correction(
    *,
    dimension: float,
    noise_multiplier: float,
    beta2: float = 0.999,
    signal: Signal = Signal.OPTIMISTIC,
    row_norm: float = 1.0,
) -> float:
    """B from which on ν̂ less its bias shows the signal in m dimensions: σκ^¼√m, or σ²m√κ.

    >>> round(smallest_batch_bias_correction(dimension=4.4e6, noise_multiplier=1.0), 1)
    313.7
    """
    return smallest_batch_post_processing(
        dimension=_positive("dimension", dimension) * _root_kappa(beta2),
        noise_multiplier=noise_multiplier,
        signal=signal,
        row_norm=row_norm,
    )


def largest_dimension_ime(
    *,
    batch_size: float,
    noise_multiplier: float,
    beta2: float = 0.999,
    signal: Signal = Signal.OPTIMISTIC,
    row_norm: float = 1.0,
) -> float:
    """m up to which the released square shows the signal: (B/σ)/(2√2·√κ), B/σ ≥ .0633·m at β₂ = .999.

    Linear in the batch size where bias correction is quadratic. Pessimistic: (1/σ)/(2√2·√κ), whatever the batch size.

    >>> round(largest_dimension_ime(batch_size=2048, noise_multiplier=1.0))
    32374
    """
    noise = _noise(noise_multiplier, row_norm)
    return _divide(_positive("batch_size", batch_size) ** (_power(signal) - 1), noise * _ime_factor(beta2))


def smallest_batch_ime(
    *,
    dimension: float,
    noise_multiplier: float,
    beta2: float = 0.999,
    signal: Signal = Signal.OPTIMISTIC,
    row_norm: float = 1.0,
) -> float:
    """B from which on the released square shows the signal in m dimensions: 2√2·√κ·σm.

    Edge cases: pessimistic, no batch size helps, and the answer is ∞ unless one example is enough (then 1).

    >>> round(smallest_batch_ime(dimension=1e6, noise_multiplier=1.0))
    63261
    """
    needed = _positive("dimension", dimension) * _noise(noise_multiplier, row_norm) * _ime_factor(beta2)
    if signal is Signal.OPTIMISTIC:
        return needed
    return 1.0 if needed <= 1 else math.inf


def _root_kappa(beta2: float) -> float:
    check_beta("beta2", beta2)
    return math.sqrt(squared_weight(beta=beta2))


def _ime_factor(beta2: float) -> float:
    return 2 * math.sqrt(2) * _root_kappa(beta2)


def _power(signal: Signal) -> int:
    """Of B in (B/σ)²·(‖g‖/ζ)²."""
    return 2 if signal is Signal.OPTIMISTIC else 1


def _noise(noise_multiplier: float, row_norm: float) -> float:
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier={noise_multiplier} must be a finite number of at least 0")
    return noise_multiplier * _positive("row_norm", row_norm)


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value} must be a positive finite number")
    return float(value)


def _divide(a: float, b: float) -> float:
    return a / b if b else math.inf
