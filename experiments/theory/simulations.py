"""Monte Carlo twins of the theory's closed forms: plain averages over draws, each with its standard error.

They use no formula of `dpoptim.theory`: what is compared with a formula must not come from it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dpoptim.noise.series import Series


class Estimate(NamedTuple):
    """A number found by simulation and its standard error."""

    value: float
    standard_error: float


def average_of(values: Series) -> Estimate:
    """The mean of draws.

    >>> average_of(np.array([1.0, 3.0]))
    Estimate(value=2.0, standard_error=1.0)
    """
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))))


def spread_of(values: Series) -> Estimate:
    """The standard deviation of draws; its error from that of the mean squared deviation, for any distribution."""
    squares = average_of((values - values.mean()) ** 2)
    root = math.sqrt(squares.value)
    return Estimate(root, squares.standard_error / (2 * root))


def averaged_noise(*, square: bool, beta2: float, steps: int, draws: int, seed: int) -> Series:
    """[draws]: the debiased exponential average, after `steps` steps, of z_t or of z_t², z_t standard normal."""
    rng, total = np.random.default_rng(seed), np.zeros(draws)
    for _ in range(steps):
        z = rng.standard_normal(draws)
        total = beta2 * total + (1 - beta2) * (z**2 if square else z)
    return np.asarray(total / (1 - beta2**steps))


def averaged_correlated_squares(noising: Series, *, beta2: float, draws: int, seed: int) -> Series:
    """[draws]: the debiased exponential average of (C⁻¹z)_t² after as many steps as `noising` = C⁻¹ has rows."""
    rows = noising @ np.random.default_rng(seed).standard_normal((len(noising), draws))
    powers = beta2 ** np.arange(len(noising) - 1, -1, -1)
    return np.asarray((powers / powers.sum()) @ rows**2)


def prefix_errors(noising: Series, *, column_norm: float, draws: int, seed: int, last: bool) -> Estimate:
    """The root mean square over draws of the noise in prefix sums: over all steps, or of the last, the longest sum."""
    rows = column_norm * noising @ np.random.default_rng(seed).standard_normal((len(noising), draws))
    squares = np.cumsum(rows, axis=0) ** 2
    per_draw = squares[-1] if last else squares.mean(0)
    found = average_of(per_draw)
    root = math.sqrt(found.value)
    return Estimate(root, found.standard_error / (2 * root))


def update_squares(*, beta1: float, beta2: float, steps: int, draws: int, seed: int) -> Series:
    """[draws]: μ̂²/ν̂ of Adam in pure noise after `steps` steps, without ε."""
    rng, mu, nu = np.random.default_rng(seed), np.zeros(draws), np.zeros(draws)
    for _ in range(steps):
        z = rng.standard_normal(draws)
        mu, nu = beta1 * mu + (1 - beta1) * z, beta2 * nu + (1 - beta2) * z**2
    return np.asarray((mu / (1 - beta1**steps)) ** 2 / (nu / (1 - beta2**steps)))


def contraction(*, feedback: float, beta2: float, steps: int, draws: int, seed: int) -> Estimate:
    """By what a step multiplies the distance of the mean of ν̂ from its rest, g = 1, started at twice the rest.

        ν ← β₂ν + (1−β₂)(1 + √(φν)·z)²

    The rest is estimated by a second group of draws started at 1 with the same normals, so that the mean difference
    of the two falls by the same factor whatever the rest is.
    """
    rng = np.random.default_rng(seed)
    high, low = np.full(draws, 2 / (1 - feedback)), np.ones(draws)
    start = high - low
    for _ in range(steps):
        z = rng.standard_normal(draws)
        high = beta2 * high + (1 - beta2) * (1 + np.sqrt(feedback * high) * z) ** 2
        low = beta2 * low + (1 - beta2) * (1 + np.sqrt(feedback * low) * z) ** 2
    left = average_of((high - low) / start)
    factor = left.value ** (1 / steps)
    return Estimate(factor, factor * left.standard_error / (steps * left.value))


def logistic_draws(*, draws: int, seed: int) -> tuple[Series, Series]:
    """[draws] of the loss at θ = 1 and of its second derivative there, x ~ N(0,1), y ~ Bernoulli(sigmoid(x))."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(draws)
    chance = 1 / (1 + np.exp(-x))
    sign = np.where(rng.random(draws) < chance, 1.0, -1.0)
    return np.logaddexp(0.0, -sign * x), x**2 * chance * (1 - chance)
