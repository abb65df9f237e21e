"""The distribution of Adam's debiased second moment under noise and a constant gradient.

The noise on the averaged gradient is √φ·(C⁻¹z)_t with φ = ζ²σ²/B², one coordinate at a time, and the gradient g is the
same at every step. ν̂_t = Σ_i w_i·g̃_i² with w_i = (1−β₂)β₂^{t−i}/(1−β₂ᵗ). K = C⁻¹C⁻ᵀ is the covariance of the noise
over φ. `strategy=None` means independent noise, where K is the identity. `step=None` means the limit t → ∞, which is
defined for independent noise only. Results have the shape of `gradient`.

The functions up to `ime_negative_probability` are exact. `MomentLaw` and what follows are the adviser's approximation
from three cumulants, which is fast for many gradient sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dpoptim.arguments import check_at_most, check_number, check_whole
from dpoptim.noise import Strategy, ToeplitzStrategy
from dpoptim.noise.search.workloads import Matrix
from dpoptim.noise.series import Series

_TAIL = 1e-7  # in the limit, older steps with this total weight enter by their mean; their variance is below _TAIL²
_NODES = np.linspace(0.0, 6.0, 121)
_EXACT_UP_TO = 30  # steps
_LONGEST_BLOCK = 2000  # steps whose covariances are computed; later steps hardly differ


def second_moment_bias(strategy: Strategy, *, beta2: float = 0.999) -> Series:
    """Compute b_t/φ, the noise's share of Adam's debiased ν̂_t, for every step.

        b_t/φ = Σ_i (1−β₂)β₂^{t−i}·‖row i of C⁻¹‖² / (1−β₂ᵗ)

    φ is the noise variance of one coordinate of the averaged gradient where a row of C⁻¹ has norm 1. Bias correction
    subtracts exactly this. With independent noise it is 1 at every step.

    Args:
        strategy: An optimized noise strategy.
        beta2: Adam's second-moment decay, in [0, 1).

    >>> from dpoptim.noise import ToeplitzStrategy
    >>> banded = ToeplitzStrategy(steps=20, strategy_coefs=(1.0, 0.5, 0.3))
    >>> round(float(second_moment_bias(banded, beta2=0.9)[-1]), 7)
    1.2836411
    """
    check(step=1, strategy=strategy, beta2=beta2)
    total, biases = 0.0, []
    for step, norm in enumerate(strategy.row_norms().tolist(), start=1):
        total = beta2 * total + (1 - beta2) * norm**2
        biases.append(total / (1 - beta2**step))
    return np.asarray(biases)


def moment_weights(*, beta: float, step: int) -> Series:
    """Compute the weights of a debiased average, w_i = (1−β)β^{t−i}/(1−βᵗ), oldest step first.

    `beta` is the decay of the average, and `step` is t, counted from 1.

    >>> moment_weights(beta=0.5, step=2).round(6).tolist()
    [0.333333, 0.666667]
    """
    check(step=step, beta=beta)
    powers = beta ** np.arange(step - 1, -1, -1, dtype=np.float64)
    return np.asarray((1 - beta) / (1 - beta**step) * powers)


def squared_weight(*, beta: float, step: int | None = None, strategy: Strategy | None = None) -> float:
    """wᵀKw: the factor by which a debiased average shrinks the noise variance of one step."""
    check(step=step, strategy=strategy, beta=beta)
    if strategy is not None and step is not None:
        rows = strategy.noising_matrix()[:step, :step]
        return float(np.sum((moment_weights(beta=beta, step=step) @ rows) ** 2))
    past = 0.0 if step is None else beta**step  # K is the identity: the sum of the squared weights
    return (1 - beta) * (1 + past) / ((1 + beta) * (1 - past))


def second_moment_mean(
    gradient: ArrayLike = 0.0,
    *,
    noise_variance: float,
    step: int | None = None,
    beta2: float = 0.999,
    strategy: Strategy | None = None,
) -> Series:
    """Compute E ν̂_t = g² + φ·Σ_i w_i·K_ii: the squared signal plus the noise's bias b_t.

    Args:
        gradient: The constant gradient g of each coordinate.
        noise_variance: φ, the noise variance on the averaged gradient for a unit row of C⁻¹.
        step: t, or None for the limit.
        beta2: Adam's second-moment decay.
        strategy: Correlated noise, or None for independent noise.

    >>> float(second_moment_mean(3.0, noise_variance=0.5))
    9.5
    """
    check(step=step, strategy=strategy, beta2=beta2, noise_variance=noise_variance)
    return np.asarray(gradient, dtype=np.float64) ** 2 + noise_variance * _bias(step, beta2, strategy)


def second_moment_variance(
    gradient: ArrayLike = 0.0,
    *,
    noise_variance: float,
    step: int | None = None,
    beta2: float = 0.999,
    strategy: Strategy | None = None,
) -> Series:
    """Compute Var ν̂_t = Σ_ij w_i w_j·(2φ²K_ij² + 4g²φK_ij).

    The summand is the covariance of two squared normals with mean g and covariance φK_ij. For independent noise the sum
    is (2φ² + 4g²φ)·Σw_i². With a strategy the cost is t³: seconds at a few thousand steps. The arguments are those of
    `second_moment_mean`.

    >>> round(float(second_moment_variance(0.5, noise_variance=1.0, beta2=0.5)), 12)
    1.0
    """
    check(step=step, strategy=strategy, beta2=beta2, noise_variance=noise_variance)
    squares = np.asarray(gradient, dtype=np.float64) ** 2
    if strategy is None or step is None:
        once = twice = squared_weight(beta=beta2, step=step)
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
    """Compute P(ν̂_t − b_t < 0): how often bias correction overshoots to a negative second moment.

    ν̂_t/φ is Σ_i λ_i(z_i + δ_i)², with λ the eigenvalues of W^½KW^½ (the weights themselves for independent noise). Its
    Laplace transform has singularities only on the negative axis, so

        P(Σ < x) = (1/2πi) ∫ exp(sx − Σ_i [½log(1+2sλ_i) + sλ_iδ_i²/(1+2sλ_i)]) ds/s,     x = b_t/φ

    which is Imhof's integral. The path runs through the saddle point along a hyperbola that bends to the left, where
    the integrand decays doubly exponentially. The result is exact to 1e-10. One value costs 121·t complex logarithms; a
    strategy adds t³ once. The arguments are those of `second_moment_mean`.

    >>> round(float(negative_probability(noise_variance=1.0, step=1)), 5)
    0.68269
    >>> round(float(negative_probability(noise_variance=1.0)), 4)
    0.5056
    """
    check(step=step, strategy=strategy, beta2=beta2, noise_variance=noise_variance)
    signal = np.asarray(gradient, dtype=np.float64) ** 2
    if noise_variance == 0:
        return np.zeros_like(signal)
    if strategy is None or step is None:
        count = step or (1 if beta2 == 0 else math.ceil(math.log(_TAIL) / math.log(beta2)))
        rest = beta2**count if step is None else 0.0
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
    """Compute P(ν̂_t < 0) = Φ(−g² / (s₂·√(wᵀKw))) where g² itself is released with Gaussian noise (IME, JME).

    s₂ is `square_stddev`, the standard deviation of one step's noise on g². The other arguments are those of
    `second_moment_mean`. At g = 0 the result is ½ at every step.

    >>> ime_negative_probability([0.0, 1.0], square_stddev=1.0, step=1).round(5).tolist()
    [0.5, 0.15866]
    """
    from scipy.special import ndtr

    check(step=step, strategy=strategy, beta2=beta2, square_stddev=square_stddev)
    signal = np.asarray(gradient, dtype=np.float64) ** 2
    if square_stddev == 0:
        return np.zeros_like(signal)
    spread = square_stddev * math.sqrt(squared_weight(beta=beta2, step=step, strategy=strategy))
    return np.asarray(ndtr(-signal / spread))


def _below(level: float, sizes: Series, shifts: Series) -> float:
    """P(Σ_i λ_i(z_i + δ_i)² < level) for sizes λ_i and shifts λ_iδ_i²; see `negative_probability`."""
    from scipy.optimize import brentq

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
    # s(v) = centre + width·(i·sinh v − ½(cosh v − 1)) is the upper half; the lower half is its mirror image.
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


@dataclass(frozen=True)
class MomentLaw:
    """What the first three cumulants of ν̂_t are made of.

    κ₁ = φ·Σw_iK_ii + g²,   κ₂ = 2φ²·wᵀ(K∘K)w + 4φg²·wᵀKw,   κ₃ = 8φ³·tr((WK)³) + 24φ²g²·wᵀKWKw
    """

    step: int
    bias: float  # Σw_iK_ii, which is b_t/φ
    once: float  # wᵀKw
    twice: float  # wᵀ(K∘K)w
    cube: float  # tr((WK)³)
    shifted_cube: float  # wᵀKWKw


def moment_laws(strategy: Strategy, steps: Iterable[int], *, beta2: float = 0.999) -> list[MomentLaw]:
    """The law of ν̂ at some steps, from the covariances of at most 2,000 steps; later ones are scaled by Σw² and Σw³."""
    steps = list(steps)
    for step in steps:
        check(step=step, strategy=strategy, beta2=beta2)
    squares, covariance = strategy.row_norms() ** 2, None
    longest = min(max(steps), _LONGEST_BLOCK)
    if strategy.bands > 1:
        rows = _leading_strategy(strategy, longest).noising_matrix()[:longest, :longest]
        covariance = rows @ rows.T
    blocks: dict[int, tuple[float, float, float, float]] = {}
    laws = []
    for step in steps:
        block, weights = min(step, _LONGEST_BLOCK), moment_weights(beta=beta2, step=step)
        shorter = moment_weights(beta=beta2, step=block)
        if block not in blocks and covariance is not None:
            blocks[block] = _correlated(covariance[:block, :block], shorter)
        elif block not in blocks:
            blocks[block] = _uncorrelated(squares[:block], shorter)
        once, twice, cube, shifted = blocks[block]
        second, third = (float(np.sum(weights**p) / np.sum(shorter**p)) for p in (2, 3))
        bias = float(weights @ squares[:step])
        laws.append(MomentLaw(step, bias, once * second, twice * second, cube * third, shifted * third))
    return laws


def _correlated(covariance: Matrix, weights: Series) -> tuple[float, float, float, float]:
    """wᵀKw, wᵀ(K∘K)w, tr((WK)³), wᵀKWKw."""
    weighted, along = covariance * weights, covariance @ weights  # KW, Kw
    cube = float(np.sum((weighted @ weighted) * weighted.T))
    return float(weights @ along), float(weights @ covariance**2 @ weights), cube, float(weights @ along**2)


def _uncorrelated(variances: Series, weights: Series) -> tuple[float, float, float, float]:
    """The same for a diagonal K."""
    twice, cube = weights**2, weights**3
    return float(twice @ variances), float(twice @ variances**2), float(cube @ variances**3), float(cube @ variances**2)


def negative_fractions(strategy: Strategy, ratios: ArrayLike, *, law: MomentLaw, beta2: float = 0.999) -> Series:
    """P(ν̂_t − b_t < 0) for g²/φ = ratios; from step 30 on by a shifted gamma distribution with the law's cumulants."""
    from scipy.special import gammainc

    x = np.asarray(ratios, dtype=np.float64)
    if law.step < _EXACT_UP_TO:
        small = _leading_strategy(strategy, law.step)
        return negative_probability(np.sqrt(x), noise_variance=1.0, step=law.step, beta2=beta2, strategy=small)
    variance = 2 * law.twice + 4 * x * law.once
    skew = (8 * law.cube + 24 * x * law.shifted_cube) / variance**1.5
    return np.asarray(gammainc(4 / skew**2, np.maximum(2 / skew * (2 / skew - x / np.sqrt(variance)), 0.0)))


def momentum_weight(strategy: Strategy, *, step: int, beta1: float = 0.9) -> float:
    """aᵀKa: what momentum leaves of the noise variance, in units of φ, from the last 2,000 steps' covariances."""
    check(step=step, strategy=strategy)
    block = min(step, _LONGEST_BLOCK)
    return squared_weight(beta=beta1, step=block, strategy=_leading_strategy(strategy, block))


def _leading_strategy(strategy: Strategy, steps: int) -> Strategy:
    """A strategy with the same first rows, in a smaller matrix if the strategy is Toeplitz."""
    if isinstance(strategy, ToeplitzStrategy):
        return ToeplitzStrategy(steps=steps, strategy_coefs=tuple(strategy.strategy_coefs[:steps]))
    return strategy


def check(*, step: int | None = None, strategy: Strategy | None = None, **values: float) -> None:
    """Refuse a step beyond the strategy, and numbers out of range: decays are in [0, 1), noise ≥ 0, the rest > 0."""
    for name, value in values.items():
        if name.startswith("beta"):
            check_number(name, value, low=0, below=1)
        elif name in ("noise_multiplier", "noise_variance", "square_stddev"):
            check_number(name, value, low=0)
        else:
            check_number(name, value, above=0)
    if strategy is not None:
        if not isinstance(strategy, Strategy):
            raise ValueError(f"strategy={strategy!r} has no matrix yet. Call .optimize(steps=...) first.")
        if step is None:
            raise ValueError("step=None is the limit for independent noise. With a strategy, pass a step.")
        check_at_most("step", check_whole("step", step), "the strategy's steps", strategy.steps)
    elif step is not None:
        check_whole("step", step)
