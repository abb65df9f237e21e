"""From guesses to ε: the least that a mechanism must have spent, if an attack guesses so well.

Each canary was in or out by a fair coin, and the attack gives it a score, higher where it rather takes it for in.
Every bound holds with the stated confidence: it exceeds the true ε with at most the remaining probability.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, ndtri

from dpoptim.app.audit.chance import count_chance, upper_limit
from dpoptim.privacy.accounting import gaussian_epsilon

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_GUESSED = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # shares that are guessed; the rest is passed over
_MOST_EPSILON = 100.0


def guessing_bound(scores: Floats, included: Bools, *, delta: float, confidence: float) -> float:
    """ε from how many guesses of one run are right, whatever the canaries do to each other.

    Guesses are made for the highest and the lowest scores, equally many of each; how many is tried for a few shares,
    which divide the allowed chance of error among them (Steinke, Nasr, Jagielski 2023, Theorem 5.2).

    >>> import numpy as np
    >>> coins = np.arange(1000) % 2 == 0
    >>> round(guessing_bound(coins.astype(float), coins, delta=0.0, confidence=0.95), 2)
    5.26
    """
    order = np.argsort(scores, kind="stable")
    found = 0.0
    for share in _GUESSED:
        half = int(share * len(scores)) // 2
        if half:
            right = int((~included[order[:half]]).sum() + included[order[-half:]].sum())
            error = (1.0 - confidence) / len(_GUESSED)
            found = max(found, _least_epsilon(len(scores), 2 * half, right, delta=delta, error=error))
    return found


def _least_epsilon(canaries: int, guesses: int, right: int, *, delta: float, error: float) -> float:
    """The largest ε at which so many right guesses have at most the probability `error`."""

    def excess(epsilon: float) -> float:
        return guessing_chance(canaries, guesses, right, epsilon=epsilon, delta=delta) - error

    if excess(0.0) >= 0.0:
        return 0.0
    if excess(_MOST_EPSILON) <= 0.0:
        return _MOST_EPSILON
    return float(brentq(excess, 0.0, _MOST_EPSILON, xtol=1e-6)) - 1e-6


def guessing_chance(canaries: int, guesses: int, right: int, *, epsilon: float, delta: float) -> float:
    """At most this is the probability that an (ε, δ)-private run lets somebody guess `right` or more coins.

        P[X ≥ v] + 2mδ·max_i P[v − i ≤ X < v]/i,    X ~ Binomial(r, 1/(1 + e^−ε)), r guesses of m, v right

    >>> round(guessing_chance(10, 10, 10, epsilon=0.0, delta=0.0) * 1024, 9)
    1.0
    """
    if right == 0:
        return 1.0
    probability = float(expit(epsilon))
    at_least = count_chance(np.arange(right, -1, -1), guesses, probability, only_more=True)  # of v, v − 1, ..., 0
    more = (at_least[1:] - at_least[0]) / np.arange(1, right + 1)
    return min(1.0, float(at_least[0] + 2.0 * canaries * delta * more.max()))


def gaussian_bound(scores: Floats, included: Bools, *, delta: float, confidence: float) -> float:
    """ε of two Gaussians that a threshold at 0 tells apart as well: μ ≥ Φ⁻¹(rate in) − Φ⁻¹(rate out).

    The score is a logarithm of likelihoods, so that 0 is where in and out are as likely.
    """
    passed, wrongly = int((scores[included] > 0).sum()), int((scores[~included] > 0).sum())
    error = (1.0 - confidence) / 2
    low = 1.0 - upper_limit(int(included.sum()) - passed, int(included.sum()), error)
    high = upper_limit(wrongly, int((~included).sum()), error)
    if not 0.0 < low < 1.0 or not 0.0 < high < 1.0:
        return 0.0
    apart = float(ndtri(low) - ndtri(high))
    return gaussian_epsilon(1.0 / apart, delta) if apart > 0 else 0.0
