"""In how many dimensions, and at which batch sizes, a private second moment still sees the gradient.

A gradient of norm ‖g‖ spread evenly over m coordinates has the squared signal ‖g‖²/m in each. It competes with the
following, where φ = ζ²σ²/B² and κ = (1−β₂)/(1+β₂) is the variance of a long average of independent terms:

    post-processing     the bias φ itself                      φ        ≤ ‖g‖²/m
    bias correction     what averaging leaves of the noise     φ√κ      ≤ ‖g‖²/m
    IME                 Gaussian noise on the square           s₂√κ     ≤ ‖g‖²/m,   s₂ = √2·σΔ₂, Δ₂ = 2ζ²/B

ζ cancels. These are orders of magnitude, without factors near 1; `second_moment_variance` is exact. With correlated
noise, multiply σ by the largest column norm of C and the norm of a row of C⁻¹.
"""

from __future__ import annotations

import enum
import math

from dpoptim.noise import DecayedSums, Strategy
from dpoptim.theory.second_moments import check, squared_weight

_IME = 2 * math.sqrt(2)  # s₂ over σζ²/B


class Signal(enum.Enum):
    """How long the averaged gradient is assumed to be."""

    OPTIMISTIC = "optimistic"  # ζ, as if all clipped gradients of a batch were equal
    PESSIMISTIC = "pessimistic"  # ζ/√B, as if they were orthogonal


def largest_dimension_post_processing(
    *, batch_size: float, noise_multiplier: float, signal: Signal = Signal.OPTIMISTIC
) -> float:
    """Compute the largest m at which the bias φ is below the signal: (B/σ)², or B/σ² if the signal is pessimistic.

    Args:
        batch_size: B.
        noise_multiplier: σ. Without noise the result is ∞.
        signal: The assumed gradient norm.

    >>> largest_dimension_post_processing(batch_size=2048, noise_multiplier=1.0)
    4194304.0
    """
    check(batch_size=batch_size, noise_multiplier=noise_multiplier)
    return _divide(float(batch_size) ** _power(signal), noise_multiplier**2)


def smallest_batch_post_processing(
    *, dimension: float, noise_multiplier: float, signal: Signal = Signal.OPTIMISTIC
) -> float:
    """Compute the smallest B at which the bias φ is below the signal in m dimensions: σ√m, or σ²m.

    Args:
        dimension: m.
        noise_multiplier: σ.
        signal: The assumed gradient norm.

    >>> smallest_batch_post_processing(dimension=1e6, noise_multiplier=2.0)
    2000.0
    """
    check(dimension=dimension, noise_multiplier=noise_multiplier)
    return float(dimension * noise_multiplier**2) ** (1 / _power(signal))


def largest_dimension_bias_correction(
    *, batch_size: float, noise_multiplier: float, beta2: float = 0.999, signal: Signal = Signal.OPTIMISTIC
) -> float:
    """Compute the largest m at which ν̂ minus its bias shows the signal: (B/σ)²/√κ, or B/(σ²√κ).

    Equivalently B/σ ≥ ((1−β₂)²/(1−β₂²))^¼·√m. Averaging gains 1/√κ over post-processing, 45 at β₂ = .999. The other
    arguments are those of `largest_dimension_post_processing`.

    >>> setting = dict(batch_size=2048, noise_multiplier=1.0, beta2=0.999)
    >>> print(f"{largest_dimension_bias_correction(**setting):.4g}")
    1.875e+08
    >>> print(f"{largest_dimension_bias_correction(**setting, signal=Signal.PESSIMISTIC):.4g}")
    9.157e+04
    """
    plain = largest_dimension_post_processing(batch_size=batch_size, noise_multiplier=noise_multiplier, signal=signal)
    return _divide(plain, _root_kappa(beta2))


def smallest_batch_bias_correction(
    *, dimension: float, noise_multiplier: float, beta2: float = 0.999, signal: Signal = Signal.OPTIMISTIC
) -> float:
    """Compute the smallest B at which ν̂ minus its bias shows the signal in m dimensions: σκ^¼√m, or σ²m√κ.

    The other arguments are those of `smallest_batch_post_processing`.

    >>> round(smallest_batch_bias_correction(dimension=4.4e6, noise_multiplier=1.0), 1)
    313.7
    """
    check(dimension=dimension)
    averaged = float(dimension) * _root_kappa(beta2)
    return smallest_batch_post_processing(dimension=averaged, noise_multiplier=noise_multiplier, signal=signal)


def largest_dimension_ime(
    *, batch_size: float, noise_multiplier: float, beta2: float = 0.999, signal: Signal = Signal.OPTIMISTIC
) -> float:
    """Compute the largest m at which the released square shows the signal: (B/σ)/(2√2·√κ), or (1/σ)/(2√2·√κ).

    Linear in the batch size where bias correction is quadratic: B/σ ≥ .0633·m at β₂ = .999. The other arguments are
    those of `largest_dimension_post_processing`.

    >>> round(largest_dimension_ime(batch_size=2048, noise_multiplier=1.0))
    32374
    """
    check(batch_size=batch_size, noise_multiplier=noise_multiplier)
    return _divide(float(batch_size) ** (_power(signal) - 1), noise_multiplier * (_IME * _root_kappa(beta2)))


def smallest_batch_ime(
    *, dimension: float, noise_multiplier: float, beta2: float = 0.999, signal: Signal = Signal.OPTIMISTIC
) -> float:
    """Compute the smallest B at which the released square shows the signal in m dimensions: 2√2·√κ·σm.

    If the signal is pessimistic, no batch size helps: the result is 1 if one example is enough, else ∞. The other
    arguments are those of `smallest_batch_post_processing`.

    >>> round(smallest_batch_ime(dimension=1e6, noise_multiplier=1.0))
    63261
    """
    check(dimension=dimension, noise_multiplier=noise_multiplier)
    needed = float(dimension) * noise_multiplier * (_IME * _root_kappa(beta2))
    if signal is Signal.OPTIMISTIC:
        return needed
    return 1.0 if needed <= 1 else math.inf


def averaging_gain(strategy: Strategy, *, beta2: float = 0.999) -> float:
    """Compute how many times less noise a strategy leaves on ν than independent noise, where ν is LINEAR in the noise.

    That is so for IME: divide `smallest_batch_ime` by the gain. Post-processing and bias correction square the noise,
    and correlated noise makes them worse (`second_moment_variance`). The best Toeplitz strategy for β₂ = .999 and 2,000
    steps gains 6.9, and no strategy gains more than 7.01 (`python -m experiments claims`).

    Args:
        strategy: The noise of the released square, such as an optimized
            `BandedToeplitz(workload=DecayedSums(beta=beta2, debiased=False))`.
        beta2: Adam's second-moment decay.

    Returns:
        The root mean square over all steps of the noise on ν_t = β₂ν_{t−1} + (1−β₂)x_t with independent noise, over
        the strategy's, for examples that take part once. Without debiasing, which would weigh the first steps most.

    >>> from dpoptim.noise import BandedToeplitz, DecayedSums
    >>> noise = BandedToeplitz(bands=2000, workload=DecayedSums(beta=0.999, debiased=False)).optimize(steps=2000)
    >>> round(averaging_gain(noise), 2)
    6.9
    """
    check(step=1, strategy=strategy, beta2=beta2)
    workload = DecayedSums(beta=beta2, debiased=False)
    alone = workload.coefs(strategy.steps) ** 2
    independent = float((alone * range(strategy.steps, 0, -1)).sum())  # a noise enters the averages of all later steps
    return math.sqrt(independent / float(strategy.squared_errors(workload).sum())) / strategy.column_norm


def _root_kappa(beta2: float) -> float:
    check(beta2=beta2)
    return math.sqrt(squared_weight(beta=beta2))


def _power(signal: Signal) -> int:
    """The power of B in (B/σ)²·(‖g‖/ζ)²."""
    return 2 if signal is Signal.OPTIMISTIC else 1


def _divide(a: float, b: float) -> float:
    return a / b if b else math.inf
