"""Is the noise as strong as planned at every step, Gaussian, and never the same twice?

Residuals are what is left of the releases without canaries and without C: unit normals, all independent, if the noise
is the plan's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import kolmogorov, ndtr

from dpoptim.app.audit.chance import UNLIKELY, correlation_chance, squares_chance
from dpoptim.app.audit.check import Check

Floats = NDArray[np.float64]

_LAGS = 8
_PAIRED = 2000  # steps that are compared each with each


@dataclass(frozen=True, kw_only=True, eq=False)
class Noise:
    """One stream of noise in one game, in sums."""

    canaries: int
    squares: Floats  # [steps]
    twice: float  # the least chance of a correlation between two places, times how many were looked at
    first: Floats  # [canaries] of the first step
    sample: Floats  # residuals of many places


def measured(residuals: Floats) -> Noise:
    """What is kept of residuals [steps, canaries]."""
    steps, canaries = residuals.shape
    places = np.arange(max(steps, canaries))
    stride = max(1, steps // canaries)
    return Noise(
        canaries=canaries,
        squares=(residuals**2).sum(axis=1),
        twice=min(_between_steps(residuals), _between_lags(residuals), _between_coordinates(residuals)) * 3,
        first=residuals[0],
        sample=residuals[places * stride % steps, places % canaries],
    )


def _between_steps(residuals: Floats) -> float:
    """Each step's noise with each other's."""
    some = residuals[:: -(-len(residuals) // _PAIRED)]
    if len(some) < 2:
        return 1.0
    products = some @ some.T
    np.fill_diagonal(products, 0.0)
    pairs = len(some) * (len(some) - 1) // 2
    return correlation_chance(float(np.abs(products).max()), residuals.shape[1]) * pairs


def _between_lags(residuals: Floats) -> float:
    """All steps with those a few steps before: a weak correlation that all of them have."""
    steps, canaries = residuals.shape
    lags = range(1, min(_LAGS, steps - 1) + 1)
    found = [
        correlation_chance(float((residuals[lag:] * residuals[:-lag]).sum()), (steps - lag) * canaries) for lag in lags
    ]
    return min(found, default=1.0) * len(lags)


def _between_coordinates(residuals: Floats) -> float:
    """Each canary's noise with that of those so many places further, at the same steps."""
    steps, canaries = residuals.shape
    total = np.zeros(canaries + 1)
    for start in range(0, steps, 64):
        spectrum = np.fft.rfft(residuals[start : start + 64], n=2 * canaries, axis=1)
        total += (np.abs(spectrum) ** 2).sum(axis=0)
    apart = np.fft.irfft(total, n=2 * canaries)[1:canaries]
    counts = steps * (canaries - np.arange(1, canaries))
    chances = [correlation_chance(value, count) for value, count in zip(apart.tolist(), counts.tolist(), strict=True)]
    return min(chances, default=1.0) * len(chances)


def noise_checks(games: list[Noise], *, which: str = "") -> list[Check]:
    """Level, independence and shape of one stream of noise; `which` is put before the names, where there are two."""
    steps, canaries = len(games[0].squares), sum(game.canaries for game in games)
    squares = np.sum([game.squares for game in games], axis=0)
    level = math.sqrt(squares.sum() / (steps * canaries))
    by_step = np.sqrt(squares / canaries)
    worst = float(by_step[np.abs(np.log(np.maximum(by_step, 1e-9))).argmax()])
    overall = float(squares_chance(np.array(squares.sum()), steps * canaries))
    at_a_step = float(squares_chance(squares, canaries).min()) * steps
    twice = min(game.twice for game in games) * len(games)
    sample = np.concatenate([game.sample for game in games])
    distance = distance_from_normal(sample)
    strange = float(kolmogorov(distance * math.sqrt(len(sample))))
    return [
        Check(
            name=f"{which}noise level",
            passed=min(overall, at_a_step) >= UNLIKELY,
            found=f"{level:.5f} times the plan's, at the strangest step {worst:.4f} times",
        ),
        Check(
            name=f"{which}noise is never the same",
            passed=twice >= UNLIKELY,
            found=_by_chance("the largest correlation between steps or coordinates", twice),
        ),
        Check(
            name=f"{which}noise is Gaussian",
            passed=strange >= UNLIKELY,
            found=_by_chance(f"the distance from the normal distribution, {distance:.4f}", strange),
        ),
    ]


def keys_check(one: Floats, other: Floats) -> Check:
    """Two keys make two noises; residuals of a first step under each."""
    chance = correlation_chance(float((one * other).sum()), len(one))
    return Check(
        name="another key is another noise",
        passed=chance >= UNLIKELY,
        found=_by_chance("the correlation of first steps under two keys", chance),
    )


def _by_chance(what: str, chance: float) -> str:
    return f"{what} is as large by chance with probability {min(1.0, chance):.2g}"


def distance_from_normal(sample: Floats) -> float:
    """Kolmogorov and Smirnov's: between the sample's distribution function and Φ.

    >>> round(distance_from_normal(np.zeros(10)), 3)
    0.5
    """
    expected = ndtr(np.sort(sample))
    places = np.arange(len(sample) + 1) / len(sample)
    return float(max(np.abs(expected - places[1:]).max(), np.abs(expected - places[:-1]).max()))
