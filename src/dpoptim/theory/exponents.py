"""Which exponent of the geometry, s = |g|^(−2p), makes the noise smallest: it depends on what the noise is summed over.

The clip norm ζ = ‖s⊙g‖ just clips nothing, and noise of standard deviation ζσ/(B·s_i) is left on coordinate i. With
σ/B = 1 and ζ² = Σ s_i²g_i², three sums are each least at an exponent of their own:

    the gradient's noise        Σ ζ²/s_i²          ≥ (Σ|g_i|)²     at s ∝ |g|^(−½),   p = ¼   (AdaClip)
    a regret bound of AdaGrad   (Σ ζ/s_i)²         ≥ (Σ|g_i|^⅔)³   at s ∝ |g|^(−⅔),   p = ⅓   (PAGAN)
    the noise of Adam's update  Σ ζ²/(s_i²·g_i²)   ≥ m²            at s ∝ |g|^(−1),   p = ½   (scale-then-privatize)

Proof. The first and the last are Cauchy and Schwarz for (1/s_i)·(s_i|g_i|) and (1/(s_i|g_i|))·(s_i|g_i|), the second is
Hölder with exponents 3/2 and 3 for s_i^(−⅔)·(s_i|g_i|)^⅔; equality holds where the two factors are proportional. ∎
(The regret bound sums the roots of second moments, and noise that dominates them makes each root ζσ/(B·s_i).)
The first sum is Σ|g|^(2−4p)·Σ|g|^(4p), the same at p and at ½ − p: so scale-then-privatize puts as much noise on the
gradient as plain clipping does, and only puts it elsewhere.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import ArrayLike


class Cost(enum.Enum):
    """What the noise is summed over."""

    GRADIENT = "gradient"  # Σ of the variances on g̃
    REGRET = "regret"  # (Σ of the standard deviations on g̃)²
    UPDATE = "update"  # Σ of the variances on g̃/|g|


def noise_cost(gradient: ArrayLike, *, exponent: float, cost: Cost = Cost.GRADIENT) -> float:
    """The noise's size with s = |g|^(−2p), at σ/B = 1 and the least clip norm that clips nothing, as `cost` counts it.

    With a constant gradient, the same for every example, and ν̂ = g² known: neither the bias of clipping nor the noise
    in ν̂ is in it. Edge cases: coordinates where g is 0 would have an infinite s and are refused.

    >>> [round(noise_cost([1.0, 4.0], exponent=p), 6) for p in (0.0, 0.25, 0.5)]
    [34.0, 25.0, 34.0]
    >>> noise_cost([1.0, 4.0], exponent=0.5, cost=Cost.UPDATE)
    4.0
    """
    sizes, s = _scaled(gradient, exponent)
    squared_clip_norm = float(np.sum((s * sizes) ** 2))
    if cost is Cost.GRADIENT:
        return squared_clip_norm * float(np.sum(s**-2.0))
    if cost is Cost.REGRET:
        return squared_clip_norm * float(np.sum(1 / s)) ** 2
    return squared_clip_norm * float(np.sum((s * sizes) ** -2.0))


def least_noise_cost(gradient: ArrayLike, *, cost: Cost = Cost.GRADIENT) -> float:
    """The least that `noise_cost` can be for any s whatever, power of |g| or not: the right-hand sides above.

    >>> least_noise_cost([1.0, 4.0]), least_noise_cost([1.0, 4.0], cost=Cost.UPDATE)
    (25.0, 4.0)
    """
    sizes, _ = _scaled(gradient, 0.0)
    if cost is Cost.GRADIENT:
        return float(np.sum(sizes)) ** 2
    if cost is Cost.REGRET:
        return float(np.sum(sizes ** (2 / 3))) ** 3
    return float(sizes.size) ** 2


def best_exponent(cost: Cost) -> float:
    """¼, ⅓ or ½: the p at which `noise_cost` is `least_noise_cost`, whatever the gradient.

    >>> best_exponent(Cost.GRADIENT), best_exponent(Cost.UPDATE)
    (0.25, 0.5)
    """
    return {Cost.GRADIENT: 1 / 4, Cost.REGRET: 1 / 3, Cost.UPDATE: 1 / 2}[cost]


def _scaled(gradient: ArrayLike, exponent: float) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.abs(np.asarray(gradient, dtype=np.float64))
    if sizes.size == 0 or not np.all(np.isfinite(sizes) & (sizes > 0)):
        raise ValueError(f"gradient={gradient!r} must hold finite numbers, none of them 0, and at least one")
    if not 0 <= exponent <= 1:
        raise ValueError(f"exponent={exponent} must lie in [0, 1]")
    return sizes, sizes ** (-2 * exponent)
