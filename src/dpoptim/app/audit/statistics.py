"""Statistics of an audit: how likely a finding is by chance, lower bounds on ε from guesses, and trade-off curves.

A coin flip decides whether each canary is in, and the attack gives each canary a score, which is higher where "in" is
more likely. Every bound holds with the stated confidence: it exceeds the true ε with at most the remaining probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import bdtr, bdtrc, betaincinv, chdtr, chdtrc, expit, ndtri

from dpoptim.privacy import PrivacyPlan
from dpoptim.privacy.accounting import gaussian_epsilon

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

UNLIKELY = 1e-6
"""A check fails if chance explains its findings, taken together, with less than this probability."""

_GUESSED_SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # the attack abstains from the rest
_MAX_EPSILON = 100.0
_LARGE_DELTAS = np.linspace(0.05, 0.9, 25)


def correlation_chance(total: float, count: int) -> float:
    """Bound the probability that `count` products of independent unit normals sum to ±`total` or further."""
    mean = abs(total) / count  # Chernoff: a product's moment generating function is (1 − θ²)^−½
    if mean == 0.0:
        return 1.0
    slope = (math.sqrt(1.0 + 4.0 * mean**2) - 1.0) / (2.0 * mean)
    return min(1.0, 2.0 * math.exp(-count * (slope * mean + 0.5 * math.log1p(-(slope**2)))))


def squares_chance(total: Floats, count: int) -> Floats:
    """The chance that a sum of `count` squared unit normals lies as far out, on either side."""
    return np.minimum(1.0, 2.0 * np.minimum(chdtr(count, total), chdtrc(count, total)))


def count_chance(found: NDArray[np.int64] | int, of: int, rate: float, *, only_more: bool = False) -> Floats:
    """The chance that a binomial count is as large or, unless `only_more`, lies as far out on either side."""
    counts = np.asarray(found, dtype=np.float64)
    more = np.where(counts <= 0, 1.0, bdtrc(np.maximum(counts - 1, 0), of, rate))
    if only_more:
        return np.asarray(more)
    return np.minimum(1.0, 2.0 * np.minimum(more, bdtr(counts, of, rate)))


def upper_limit(count: int, of: int, error: float) -> float:
    """Clopper and Pearson's upper limit of a rate: the true rate is above it with probability at most `error`."""
    return 1.0 if count == of else float(betaincinv(count + 1, of - count, 1.0 - error))


def guessing_bound(scores: Floats, included: Bools, *, delta: float, confidence: float) -> float:
    """Bound ε from below by the right guesses in one run (Steinke, Nasr, Jagielski 2023, Theorem 5.2)."""
    order = np.argsort(scores, kind="stable")
    error = (1.0 - confidence) / len(_GUESSED_SHARES)
    best = 0.0
    for share in _GUESSED_SHARES:  # the attack guesses the highest and the lowest scores, equally many of each
        half = int(share * len(scores)) // 2
        if half:
            right = int((~included[order[:half]]).sum() + included[order[-half:]].sum())
            best = max(best, _least_epsilon(len(scores), 2 * half, right, delta=delta, error=error))
    return best


def _least_epsilon(canaries: int, guesses: int, right: int, *, delta: float, error: float) -> float:
    """The largest ε at which that many right guesses have at most the probability `error`."""

    def excess(epsilon: float) -> float:
        return guessing_chance(canaries, guesses, right, epsilon=epsilon, delta=delta) - error

    if excess(0.0) >= 0.0:
        return 0.0
    if excess(_MAX_EPSILON) <= 0.0:
        return _MAX_EPSILON
    return float(brentq(excess, 0.0, _MAX_EPSILON, xtol=1e-6)) - 1e-6


def guessing_chance(canaries: int, guesses: int, right: int, *, epsilon: float, delta: float) -> float:
    """Bound the probability that an (ε, δ)-private run allows `right` or more right guesses."""
    if right == 0:
        return 1.0
    # P[X ≥ v] + 2mδ·max_i P[v − i ≤ X < v]/i,    X ~ Binomial(r, 1/(1 + e^−ε)), r guesses of m, v right
    probability = float(expit(epsilon))
    at_least = count_chance(np.arange(right, -1, -1), guesses, probability, only_more=True)  # of v, v − 1, ..., 0
    more = (at_least[1:] - at_least[0]) / np.arange(1, right + 1)
    return min(1.0, float(at_least[0] + 2.0 * canaries * delta * more.max()))


def gaussian_bound(scores: Floats, included: Bools, *, delta: float, confidence: float) -> float:
    """Bound ε from below, assuming that in and out differ as two Gaussians: μ ≥ Φ⁻¹(rate in) − Φ⁻¹(rate out)."""
    # The threshold is 0, because a score is a log likelihood ratio.
    passed, wrongly = int((scores[included] > 0).sum()), int((scores[~included] > 0).sum())
    error = (1.0 - confidence) / 2
    low = 1.0 - upper_limit(int(included.sum()) - passed, int(included.sum()), error)
    high = upper_limit(wrongly, int((~included).sum()), error)
    if not 0.0 < low < 1.0 or not 0.0 < high < 1.0:
        return 0.0
    distance = float(ndtri(low) - ndtri(high))
    return gaussian_epsilon(1.0 / distance, delta) if distance > 0 else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class TradeOff:
    """Pairs (ε, δ) that all hold for one plan."""

    epsilons: Floats
    deltas: Floats

    def least_missed(self, wrong: Floats | float) -> Floats:
        """The least false-negative rate that the pairs allow at the false-positive rate `wrong`."""
        rates = np.asarray(wrong, dtype=np.float64)[..., None]
        steep = 1.0 - self.deltas - np.exp(self.epsilons) * rates
        flat = np.exp(-self.epsilons) * (1.0 - self.deltas - rates)
        return np.asarray(np.maximum(0.0, np.maximum(steep, flat)).max(axis=-1))


def trade_off_of(plan: PrivacyPlan) -> TradeOff:
    """The plan's curve at its own δ and at larger ones."""
    assert plan.delta is not None
    small = np.geomspace(plan.delta, 0.03, 15)
    deltas = np.concatenate([[plan.delta], small[small > plan.delta], _LARGE_DELTAS[plan.delta < _LARGE_DELTAS]])
    epsilons = np.array([plan.epsilon(delta=float(delta)) for delta in deltas])
    return TradeOff(epsilons=epsilons, deltas=deltas)
