"""How many coordinates' second moments will be negative, for gradients of any spread and at many steps, quickly.

`second_moments.negative_probability` is exact, at t³ for each step and t for each size of gradient. Here the law of
ν̂_t = Σ_i w_i·g̃_i² is taken from its first three cumulants, which cost a product of matrices a step, and then nothing
for each further size:

    κ₁ = φ·Σw_iK_ii + g²,   κ₂ = 2φ²·wᵀ(K∘K)w + 4φg²·wᵀKw,   κ₃ = 8φ³·tr((WK)³) + 24φ²g²·wᵀKWKw

A shifted gamma law with these three is within .003 of the exact probability from step 30 on at β₂ = .999 (.008 at .9,
where few steps count); before that, the exact one is used. K = C⁻¹C⁻ᵀ and w are as in `second_moments`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammainc

from dpoptim.noise import Strategy, ToeplitzStrategy
from dpoptim.noise.series import Series
from dpoptim.noise.workloads import Matrix
from dpoptim.theory.second_moments import check_beta, check_step, moment_weights, negative_probability, squared_weight

_EXACT_UP_TO = 30  # steps
_LONGEST_BLOCK = 2000  # steps whose covariances are formed; later ones hardly differ
_LARGEST_MATRIX = 5000  # steps for which a strategy that is not Toeplitz is asked for its whole matrix


@dataclass(frozen=True, kw_only=True)
class MomentLaw:
    """The cumulants of ν̂_t at unit noise φ = 1, as they depend on g²/φ; `covariances` says whether K's were used."""

    step: int
    bias: float  # Σw_iK_ii, b_t/φ
    once: float  # wᵀKw
    twice: float  # wᵀ(K∘K)w
    cube: float  # tr((WK)³)
    shifted_cube: float  # wᵀKWKw
    covariances: bool = True

    def below_bias(self, ratios: ArrayLike) -> Series:
        """P(ν̂_t < b_t) for g²/φ = ratios, by the shifted gamma law."""
        x = np.asarray(ratios, dtype=np.float64)
        variance = 2 * self.twice + 4 * x * self.once
        skew = (8 * self.cube + 24 * x * self.shifted_cube) / variance**1.5
        return np.asarray(gammainc(4 / skew**2, np.maximum(2 / skew * (2 / skew - x / np.sqrt(variance)), 0.0)))


def moment_laws(strategy: Strategy, steps: Iterable[int], *, beta2: float = 0.999) -> list[MomentLaw]:
    """The law of ν̂ at each of some steps, with the covariances of the noise over at most 2,000 steps.

    Edge cases: later than step 2,000 the quantities of step 2,000 are scaled by Σw², Σw³ (row norms have settled by
    then). A strategy that is not Toeplitz counts as independent with its row norms beyond 5,000 steps.

    >>> from dpoptim.noise import Independent
    >>> (law,) = moment_laws(Independent().optimize(steps=50), [50], beta2=0.9)
    >>> round(law.bias, 12), round(float(law.below_bias(0.0)), 4)
    (1.0, 0.5575)
    """
    check_beta("beta2", beta2)
    steps = list(steps)
    for step in steps:
        check_step(step, strategy=strategy)
    squares = strategy.row_norms() ** 2
    rows = _leading_rows(strategy, min(max(steps), _LONGEST_BLOCK)) if strategy.bands > 1 else None
    covariance = None if rows is None else rows @ rows.T
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
        laws.append(
            MomentLaw(
                step=step,
                bias=float(weights @ squares[:step]),
                once=once * second,
                twice=twice * second,
                cube=cube * third,
                shifted_cube=shifted * third,
                covariances=strategy.bands == 1 or covariance is not None,
            )
        )
    return laws


def _correlated(covariance: Matrix, weights: Series) -> tuple[float, float, float, float]:
    """wᵀKw, wᵀ(K∘K)w, tr((WK)³), wᵀKWKw."""
    weighted, along = covariance * weights, covariance @ weights  # KW, Kw
    cube = float(np.sum((weighted @ weighted) * weighted.T))
    return float(weights @ along), float(weights @ covariance**2 @ weights), cube, float(weights @ along**2)


def _uncorrelated(variances: Series, weights: Series) -> tuple[float, float, float, float]:
    """The same for a diagonal K."""
    twice, cube = weights**2, weights**3
    return (
        float(twice @ variances),
        float(twice @ variances**2),
        float(cube @ variances**3),
        float(cube @ variances**2),
    )


def negative_fractions(strategy: Strategy, ratios: ArrayLike, *, law: MomentLaw, beta2: float = 0.999) -> Series:
    """P(ν̂_t − b_t < 0) of bias correction, for g²/φ = ratios; φ is the noise's variance for a unit row.

    `law` is that of the strategy at the step in question, by `moment_laws` with the same beta2.

    >>> from dpoptim.noise import Independent
    >>> strategy = Independent().optimize(steps=100)
    >>> negative_fractions(strategy, [0.0, 0.5], law=moment_laws(strategy, [100])[0]).round(3).tolist()
    [0.519, 0.003]
    """
    small = _leading_strategy(strategy, law.step) if law.step < _EXACT_UP_TO else None
    if small is not None:
        roots = np.sqrt(np.asarray(ratios, dtype=np.float64))
        return negative_probability(roots, noise_variance=1.0, step=law.step, beta2=beta2, strategy=small)
    return law.below_bias(ratios)


def momentum_weight(strategy: Strategy, *, step: int, beta1: float = 0.9) -> float:
    """aᵀKa: what momentum leaves of the noise's variance, in units of φ, with the last 2,000 steps' covariances.

    >>> from dpoptim.noise import Independent
    >>> round(momentum_weight(Independent().optimize(steps=500), step=500), 6)
    0.052632
    """
    check_step(step, strategy=strategy)
    block = min(step, _LONGEST_BLOCK)
    small = _leading_strategy(strategy, block)
    if small is not None:
        return squared_weight(beta=beta1, step=block, strategy=small)
    return float(moment_weights(beta=beta1, step=step) ** 2 @ strategy.row_norms()[:step] ** 2)


def _leading_strategy(strategy: Strategy, steps: int) -> Strategy | None:
    """A strategy with the same first rows; None where only a matrix too large would have them."""
    if isinstance(strategy, ToeplitzStrategy):
        return ToeplitzStrategy(steps=steps, strategy_coefs=tuple(strategy.strategy_coefs[:steps]))
    return strategy if strategy.steps <= _LARGEST_MATRIX else None


def _leading_rows(strategy: Strategy, steps: int) -> Matrix | None:
    small = _leading_strategy(strategy, steps)
    return None if small is None else small.noising_matrix()[:steps, :steps]
