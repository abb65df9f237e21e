"""Law of Adam's debiased second moment under noise and a constant signal: mean, variance, chance to be negative.

Noise on the averaged gradient is √φ·(C⁻¹z)_t with φ = ζ²σ²/B², one coordinate at a time, and the gradient g is the
same at every step. ν̂_t = Σ_i w_i·g̃_i² with w_i = (1−β₂)β₂^{t−i}/(1−β₂ᵗ). K = C⁻¹C⁻ᵀ is the covariance of the
noise over φ; it is the identity for independent noise, which is what `strategy=None` means. Everything here is exact;
`step=None` is the limit t → ∞ and holds for independent noise. Results have the shape of `gradient`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import ndtr

from dpoptim.noise import Strategy
from dpoptim.noise.series import Series
from dpoptim.theory.bias import check_strategy, second_moment_bias

_TAIL = 1e-7  # weight of the oldest steps, in the limit, that enter by their mean: their variance is below _TAIL²
_NODES = np.linspace(0.0, 6.0, 121)


def moment_weights(*, beta: float, step: int) -> Series:
    """w_i = (1−β)β^{t−i}/(1−βᵗ) for i = 1, ..., t, the oldest step first: the weights of a debiased average.

    >>> moment_weights(beta=0.5, step=2).round(6).tolist()
    [0.333333, 0.666667]
    """
    check_beta("beta", beta)
    _check(step=step)
    powers = beta ** np.arange(step - 1, -1, -1, dtype=np.float64)
    return np.asarray((1 - beta) / (1 - beta**step) * powers)


def squared_weight(*, beta: float, step: int | None = None, strategy: Strategy | None = None) -> float:
    """wᵀKw: by how much a debiased average shrinks the variance of the noise of one step.

        independent: Σ_i w_i² = (1−β)(1+βᵗ)/((1+β)(1−βᵗ)),    limit (1−β)/(1+β)

    >>> squared_weight(beta=0.9, step=1), round(squared_weight(beta=0.9), 6)
    (1.0, 0.052632)
    """
    check_beta("beta", beta)
    _check(step=step, strategy=strategy)
    if strategy is not None and step is not None:
        rows = strategy.noising_matrix()[:step, :step]
        return float(np.sum((moment_weights(beta=beta, step=step) @ rows) ** 2))
    past = 0.0 if step is None else beta**step
    return (1 - beta) * (1 + past) / ((1 + beta) * (1 - past))


def second_moment_mean(
    gradient: ArrayLike = 0.0,
    *,
    noise_variance: float,
    step: int | None = None,
    beta2: float = 0.999,
    strategy: Strategy | None = None,
) -> Series:
    """E ν̂_t = g² + φ·Σ_i w_i·K_ii: the squared signal plus the noise's bias b_t.

    >>> float(second_moment_mean(3.0, noise_variance=0.5))
    9.5
    """
    check_beta("beta2", beta2)
    _check(step=step, strategy=strategy, noise_variance=noise_variance)
    return np.asarray(gradient, dtype=np.float64) ** 2 + noise_variance * _bias(step, beta2, strategy)


def second_moment_variance(
    gradient: ArrayLike = 0.0,
    *,
    noise_variance: float,
    step: int | None = None,
    beta2: float = 0.999,
    strategy: Strategy | None = None,
) -> Series:
    """Var ν̂_t = Σ_ij w_i w_j·(2φ²K_ij² + 4g²φK_ij).

    Independent noise: (2φ² + 4g²φ)·Σw_i², in the limit times (1−β₂)/(1+β₂). The covariance of two squares of normals
    with mean g and covariance φK_ij is 2φ²K_ij² + 4g²φK_ij. With a strategy K is formed as a matrix, so the cost is
    t³: seconds at a few thousand steps.

    >>> round(float(second_moment_variance(0.5, noise_variance=1.0, beta2=0.5)), 12)
    1.0
    """
    check_beta("beta2", beta2)
    _check(step=step, strategy=strategy, noise_variance=noise_variance)
    squares = np.asarray(gradient, dtype=np.float64) ** 2
    if strategy is None or step is None:
        once = squared_weight(beta=beta2, step=step)
        twice = once
    else:
        rows = strategy.noising_matrix()[:step, :step]
        covariance = rows @ rows.T
        weights = moment_weights(beta=beta2, step=step)
        once, twice = float(weights @ covariance @ weights), float(weights @ covariance**2 @ weights)
    return np.asarray(2 * noise_variance**2 * twice + 4 * noise_variance * once * squares)


def negative_probability(
    gradient: ArrayLike = 0.0,
    *,
    noise_variance: float,
    step: int | None = None,
    beta2: float = 0.999,
    strategy: Strategy | None = None,
) -> Series:
    """P(ν̂_t − b_t < 0): how often bias correction overshoots to a negative second moment.

    ν̂_t/φ is Σ_i λ_i(z_i + δ_i)², with λ the eigenvalues of W^½KW^½ (the weights themselves for independent noise),
    whose Laplace transform has only singularities on the negative axis, so that

        P(Σ < x) = (1/2πi) ∫ exp(sx − Σ_i [½log(1+2sλ_i) + sλ_iδ_i²/(1+2sλ_i)]) ds/s,     x = b_t/φ

    which is Imhof's integral. It is taken through the saddle point along a hyperbola that bends to the left, where the
    integrand falls off doubly exponentially: exact to 1e-10 at every step, with no approximating law.

    In pure noise it is .68269 at the first step and falls to .5056 at β₂ = .999. (The rounder .504 is that of a plain
    average of (1+β₂)/(1−β₂) = 1,999 squares, which has the same variance and less skew.)

    Edge cases: in the limit the oldest steps, 1e-7 of the weight, enter by their mean; without noise nothing is
    negative. One value costs 121·t complex logarithms, with a strategy t³ once.

    >>> round(float(negative_probability(noise_variance=1.0, step=1)), 5)
    0.68269
    >>> round(float(negative_probability(noise_variance=1.0)), 4)
    0.5056
    """
    check_beta("beta2", beta2)
    _check(step=step, strategy=strategy, noise_variance=noise_variance)
    signal = np.asarray(gradient, dtype=np.float64) ** 2
    if noise_variance == 0:
        return np.zeros_like(signal)
    if strategy is None or step is None:
        long = step is None
        count = step or (1 if beta2 == 0 else math.ceil(math.log(_TAIL) / math.log(beta2)))
        rest = beta2**count if long else 0.0
        sizes = shares = moment_weights(beta=beta2, step=count) * (1 - rest)
    else:
        roots = np.sqrt(moment_weights(beta=beta2, step=step))
        rows = roots[:, None] * strategy.noising_matrix()[:step, :step]
        sizes, axes = np.linalg.eigh(rows @ rows.T)
        sizes, shares, rest = np.maximum(sizes, 0.0), (axes.T @ roots) ** 2, 0.0
    level = _bias(step, beta2, strategy)
    found = [
        _below(level - rest * (1 + one / noise_variance), sizes, shares * one / noise_variance)
        for one in signal.ravel().tolist()
    ]
    return np.asarray(found).reshape(signal.shape)


def ime_negative_probability(
    gradient: ArrayLike = 0.0,
    *,
    square_stddev: float,
    step: int | None = None,
    beta2: float = 0.999,
    strategy: Strategy | None = None,
) -> Series:
    """P(ν̂_t < 0) where g² itself is released with Gaussian noise of standard deviation s₂ a step (IME, JME).

        P = Φ(−g² / (s₂·√(wᵀKw)))

    Edge cases: ½ at g = 0, at every step; without noise nothing is negative.

    >>> ime_negative_probability([0.0, 1.0], square_stddev=1.0, step=1).round(5).tolist()
    [0.5, 0.15866]
    """
    check_beta("beta2", beta2)
    _check(step=step, strategy=strategy)
    if not 0 <= square_stddev < math.inf:
        raise ValueError(f"square_stddev={square_stddev} must be a finite number of at least 0")
    signal = np.asarray(gradient, dtype=np.float64) ** 2
    if square_stddev == 0:
        return np.zeros_like(signal)
    spread = square_stddev * math.sqrt(squared_weight(beta=beta2, step=step, strategy=strategy))
    return np.asarray(ndtr(-signal / spread))


def _below(level: float, sizes: Series, shifts: Series) -> float:
    """P(Σ_i λ_i(z_i + δ_i)² < level) for sizes λ_i and shifts λ_iδ_i²; see `negative_probability`."""
    if level <= 0:
        return 0.0

    def slope(c: float) -> float:  # of the exponent less log s; rises from −∞ to level as c runs over (0, ∞)
        spread = 1 + 2 * c * sizes
        return float(level - np.sum(sizes / spread + shifts / spread**2) - 1 / c)

    high = 1.0
    while slope(high) < 0:
        high *= 2
    low = high
    while slope(low) > 0:
        low /= 2
    centre = brentq(slope, low, high) if low < high else high
    spread = 1 + 2 * centre * sizes
    curvature = float(np.sum(2 * sizes**2 / spread**2 + 4 * sizes * shifts / spread**3)) + 1 / centre**2
    width = 1 / math.sqrt(curvature)
    # s(v) = centre + width·(i·sinh v − ½(cosh v − 1)): upper half; the lower half is its mirror image.
    points = centre + width * (1j * np.sinh(_NODES) - 0.5 * (np.cosh(_NODES) - 1))
    slopes = width * (1j * np.cosh(_NODES) - 0.5 * np.sinh(_NODES))
    exponents = np.empty_like(points)
    for k, s in enumerate(points):
        factor = 1 + 2 * s * sizes
        exponents[k] = s * level - np.sum(0.5 * np.log(factor) + s * shifts / factor)
    values = np.imag(np.exp(exponents) * slopes / points)
    values[0] /= 2
    return float(np.clip(values.sum() * (_NODES[1] - _NODES[0]) / math.pi, 0.0, 1.0))


def _bias(step: int | None, beta2: float, strategy: Strategy | None) -> float:
    """b_t/φ."""
    return 1.0 if strategy is None or step is None else float(second_moment_bias(strategy, beta2=beta2)[step - 1])


def check_beta(name: str, value: float) -> None:
    """Refuse a decay outside [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value} must lie in [0, 1)")


def check_step(step: int | None, *, strategy: Strategy | None = None, name: str = "step") -> None:
    """Refuse what is no whole number from 1 to the strategy's steps; None, the limit, is for independent noise."""
    if strategy is not None:
        check_strategy(strategy)
    if step is None and strategy is not None:
        raise ValueError(f"{name}=None is the limit for independent noise; with a strategy give one of 1 to its steps")
    if step is None:
        return
    if isinstance(step, bool) or not isinstance(step, int | np.integer):
        raise ValueError(f"{name}={step!r} must be a whole number, counted from 1")
    if step < 1 or (strategy is not None and step > strategy.steps):
        raise ValueError(f"{name}={step} must be at least 1 and at most the number of steps of the strategy")


def _check(*, step: int | None, strategy: Strategy | None = None, noise_variance: float | None = None) -> None:
    check_step(step, strategy=strategy)
    if noise_variance is not None and not 0 <= noise_variance < math.inf:
        raise ValueError(f"noise_variance={noise_variance} must be a finite number of at least 0")
