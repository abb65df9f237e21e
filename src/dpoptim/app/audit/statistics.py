"""Statistics of an audit: how likely a finding is by chance, lower bounds on ε from guesses, and trade-off curves.

A coin flip decides whether each canary is in, and the attack gives each canary a score, which is higher where "in" is
more likely. Every bound holds with the stated confidence: it exceeds the true ε with at most the remaining probability.

Theorem. One game has m canaries and fair, independent coins. If any one coin changes, all else being equal, the game is
(ε, δ)-private. From what it releases, the attack guesses r coins, where r is fixed in advance; V guesses are right. Let
B ~ Binomial(r, e^ε/(1 + e^ε)), and let v satisfy v + 1 > (r − v)·e^ε. Then

    P[V ≥ v] ≤ P[B ≥ v] + m·δ / (v − v·(r − v)·e^ε/(v + 1)).

Proof. Fix all coins but that of canary i. Let V₋ᵢ count the right guesses of other coins, and take a function h of V₋ᵢ
with 0 ≤ h ≤ 1. The event "the guess of i is g" weighed by h(V₋ᵢ) depends only on the releases, so privacy bounds its
mean if the coin is g by e^ε times its mean if the coin is not g, plus δ. Average over g and the coins, and sum over i:

    E[V·h(V − 1)] ≤ e^ε·E[(r − V)·h(V)] + m·δ.                                                    (1)

Let w(c) = P[B = c], b = P[B ≥ v] and K = v·w(v)/(b(1 − b)). Choose h(c) = K·b·P[B ≤ c]/((c + 1)·w(c + 1)) for c < v,
and K·(1 − b)·P[B > c]/((c + 1)·w(c + 1)) for v ≤ c < r. As (c + 1)·w(c + 1) = e^ε·(r − c)·w(c), the difference
V·h(V − 1) − e^ε·(r − V)·h(V) equals K·(1{V ≥ v} − b) for each V. Because w is log-concave, h increases up to v − 1,
where it is 1, and decreases afterwards. So (1) says K·(P[V ≥ v] − b) ≤ m·δ. Finally b/w(v) is at most the sum of a
geometric series with ratio (r − v)·e^ε/(v + 1) < 1, and 1 − b ≤ 1.

If the attack only guesses "in", half of the m·δ suffices: a sum over one value of g, each with probability 1/2.

A mechanism with a trade-off curve is private for all its pairs (ε, δ), so the least of their bounds holds. (1) averages
the argument of Mahloujifar, Melis and Chaudhuri (2024) over h; h solves the binomial Stein equation.

Each game draws its randomness afresh, so it is as private as claimed whatever earlier games showed. Its bound is then a
p-value given all earlier games, and Fisher's method combines them: −2·Σ ln pₖ is at most χ² with 2K degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import bdtr, bdtrc, betaincinv, chdtr, chdtrc, expit, ndtri

from dpoptim.privacy import PrivacyPlan
from dpoptim.privacy.accounting import GaussianRun, Run, gaussian_epsilon, step_distribution
from dpoptim.privacy.sampled_gaussian import Direction, grid_interval, hockey_stick

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

UNLIKELY = 1e-6
"""A check fails if chance explains its findings, taken together, with less than this probability."""

_GUESSES, _GUESSES_OF_IN = 10.0, 4.0  # per square root of the canaries; these prove much at any ε from 1 to 10
_MAX_EPSILON = 100.0
_EPSILONS = np.geomspace(0.02, _MAX_EPSILON, 300)
_FACTOR = 1.25


def correlation_chance(total: float, count: int) -> float:
    """Bound the probability that `count` products of independent unit normals sum to ±`total` or further."""
    mean = abs(total) / count  # Chernoff: a product's moment generating function is (1 − θ²)^−½
    if mean == 0.0:
        return 1.0
    slope = (math.sqrt(1.0 + 4.0 * mean**2) - 1.0) / (2.0 * mean)
    return min(1.0, 2.0 * math.exp(-count * (slope * mean + 0.5 * math.log1p(-(slope**2)))))


def squares_chance(total: Floats, count: float) -> Floats:
    """The chance that a sum of `count` squared unit normals lies as far out, on either side."""
    return np.minimum(1.0, 2.0 * np.minimum(chdtr(count, total), chdtrc(count, total)))


def count_chance(found: NDArray[np.int64] | int, of: int, rate: Floats | float, *, only_more: bool = False) -> Floats:
    """The chance that a binomial count is as large or, unless `only_more`, lies as far out on either side."""
    counts = np.asarray(found, dtype=np.float64)
    more = np.where(counts <= 0, 1.0, bdtrc(np.maximum(counts - 1, 0), of, rate))
    if only_more:
        return np.asarray(more)
    return np.minimum(1.0, 2.0 * np.minimum(more, bdtr(counts, of, rate)))


def upper_limit(count: int, of: int, error: float) -> float:
    """Clopper and Pearson's upper limit of a rate: the true rate is above it with probability at most `error`."""
    return 1.0 if count == of else float(betaincinv(count + 1, of - count, 1.0 - error))


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """The attack's guesses in one game."""

    canaries: int
    count: int
    right: int
    only_in: bool  # whether "out" is never guessed


def guess(scores: Floats, included: Bools, *, only_in: bool) -> Guesses:
    """Guess the coins with the largest |score|, or "in" at the largest scores, as many as the theorem's r."""
    per_root = _GUESSES_OF_IN if only_in else _GUESSES
    count = min(len(scores), math.ceil(per_root * math.sqrt(len(scores))))
    surest = np.argsort(-scores if only_in else -np.abs(scores), kind="stable")[:count]
    right = included[surest] == (only_in | (scores[surest] > 0))
    return Guesses(canaries=len(scores), count=count, right=int(right.sum()), only_in=only_in)


def guessing_chance(found: Guesses, *, epsilons: Floats, deltas: Floats) -> float:
    """Bound the chance of so many right guesses in a game that is private for all pairs, by the theorem above."""
    count, right = found.count, found.right
    if right == 0:
        return 1.0
    gap = right - right * (count - right) / (right + 1) * np.exp(epsilons)
    sides = 1 if found.only_in else 2
    revealed = found.canaries * sides / 2 * deltas / np.where(gap > 0, gap, np.nan)
    chances = count_chance(right, count, expit(epsilons), only_more=True) + revealed
    return float(np.nanmin(chances, initial=1.0))


def games_chance(games: Sequence[Guesses], *, epsilons: Floats, deltas: Floats) -> float:
    """Bound the chance of such guesses in all games, by Fisher's method."""
    chances = [guessing_chance(found, epsilons=epsilons, deltas=deltas) for found in games]
    return float(chdtrc(2 * len(chances), -2.0 * np.log(np.maximum(chances, 1e-300)).sum()))


def guessing_bound(games: Sequence[Guesses], *, delta: float, confidence: float) -> float:
    """Bound ε at one δ from below: at less than this ε, so many right guesses are too unlikely."""

    def excess(epsilon: float) -> float:
        pair = {"epsilons": np.array([epsilon]), "deltas": np.array([delta])}
        return games_chance(games, **pair) - (1.0 - confidence)

    if excess(0.0) >= 0.0:
        return 0.0
    if excess(_MAX_EPSILON) <= 0.0:
        return _MAX_EPSILON
    return float(brentq(excess, 0.0, _MAX_EPSILON, xtol=1e-6)) - 1e-6


def contradicted_noise(run: Run, games: Sequence[Guesses], *, noise_multiplier: float, confidence: float) -> float:
    """Bound a run's noise multiplier from above: its curve contradicts the guesses here; ∞ if none is found.

    The curve rises as the noise falls, so all larger noise multipliers are contradicted, too. The search begins at the
    planned `noise_multiplier`, and ends between a fifth and a hundred times of it.
    """

    def allows(multiplier: float) -> bool:
        pairs = {"epsilons": _EPSILONS, "deltas": deltas_of(run, multiplier)}
        return games_chance(games, **pairs) >= 1.0 - confidence

    high = noise_multiplier
    while allows(high):
        high *= _FACTOR
        if high > 100.0 * noise_multiplier:
            return math.inf
    low = high / _FACTOR
    while not allows(low) and low > noise_multiplier / 5:
        low, high = low / _FACTOR, low
    for _ in range(6):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if allows(middle) else (low, middle)
    return high


def deltas_of(run: Run, noise_multiplier: float) -> Floats:
    """The δ of a run at each of `_EPSILONS`."""
    if isinstance(run, GaussianRun):
        deltas = hockey_stick(_EPSILONS, noise_multiplier / run.sensitivity, 1.0, Direction.REMOVE)
    else:
        interval = grid_interval(noise_multiplier, run.sampling_prob, run.adjacency, steps=run.steps)
        step = step_distribution(run, noise_multiplier, interval)
        deltas = np.asarray(step.self_compose(run.steps).get_delta_for_epsilon(_EPSILONS))
    return np.maximum(deltas, 1e-14)  # below, rounding errors matter


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
    """The curve of the plan's run."""
    assert plan.noise_multiplier is not None
    return TradeOff(epsilons=_EPSILONS, deltas=deltas_of(plan.run, plan.noise_multiplier))
