"""The Gaussian mechanism in closed form, stable from ε = 1e-6 to 1e5 and for very small δ."""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import erfcx, ndtr

_SQRT2 = math.sqrt(2.0)


def gaussian_log_delta(noise_multiplier: float, epsilon: float) -> float:
    """ln δ(ε) of one Gaussian release with sensitivity 1 and standard deviation `noise_multiplier`.

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) with μ = 1/σ (Balle and Wang 2018, exact). With x = ε/μ − μ/2 and
    y = ε/μ + μ/2 we have y² − x² = 2ε, hence δ = ½ e^{−x²/2} (erfcx(x/√2) − erfcx(y/√2)): no large terms
    cancel.

    Edge cases: σ = 0 gives ln 1 = 0; σ = ∞ gives −∞.

    >>> round(math.exp(gaussian_log_delta(1.0, 1.0)), 6)
    0.126937
    """
    if noise_multiplier == 0.0:
        return 0.0
    shift = 1.0 / noise_multiplier
    if shift == 0.0:
        return -math.inf
    x = epsilon / shift - shift / 2
    y = epsilon / shift + shift / 2
    if x < 0.0:
        delta = float(ndtr(-x)) - 0.5 * math.exp(-x * x / 2) * float(erfcx(y / _SQRT2))
        return math.log(delta) if delta > 0.0 else -math.inf
    difference = float(erfcx(x / _SQRT2)) - float(erfcx(y / _SQRT2))
    return math.log(0.5 * difference) - x * x / 2 if difference > 0.0 else -math.inf


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """The smallest δ at which a Gaussian release of sensitivity 1 is (ε, δ)-private.

    >>> gaussian_delta(0.0, 3.0)
    1.0
    """
    return math.exp(gaussian_log_delta(noise_multiplier, epsilon))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The smallest ε ≥ 0 at which a Gaussian release of sensitivity 1 is (ε, δ)-private.

    Solves ln δ(ε) = ln δ; the root lies below μ²/2 + μ√(2 ln 1/δ), since δ(ε) ≤ Φ(−x) ≤ e^{−x²/2}.

    Edge cases: σ = 0 gives ∞; a δ that already holds at ε = 0 gives 0.

    >>> round(gaussian_epsilon(1.0 / math.sqrt(3.0), 1e-7), 4)
    10.0453
    """
    if noise_multiplier == 0.0:
        return math.inf
    log_delta = math.log(delta)
    if gaussian_log_delta(noise_multiplier, 0.0) <= log_delta:
        return 0.0
    shift = 1.0 / noise_multiplier
    upper = shift * shift / 2 + shift * math.sqrt(-2.0 * log_delta)
    return float(
        brentq(
            lambda epsilon: gaussian_log_delta(noise_multiplier, epsilon) - log_delta,
            0.0,
            upper,
            xtol=1e-300,
            rtol=1e-14,
            maxiter=500,
        )
    )


def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """The smallest σ (to a part in 1e12) at which a Gaussian release of sensitivity 1 is (ε, δ)-private.

    Guarantee: `gaussian_epsilon` of the result never exceeds `epsilon`.

    >>> sigma = gaussian_noise_multiplier(10.0453, 1e-7)
    >>> round(sigma * math.sqrt(3.0), 4)
    1.0
    """
    if epsilon == math.inf:
        return 0.0
    log_delta = math.log(delta)

    def excess(log_multiplier: float) -> float:
        return max(gaussian_log_delta(math.exp(log_multiplier), epsilon), -1e9) - log_delta

    low, high = 0.0, 0.0
    while excess(low) <= 0.0:
        low -= 1.0
    while excess(high) > 0.0:
        high += 1.0
    multiplier = math.exp(brentq(excess, low, high, xtol=1e-13, rtol=1e-14, maxiter=500))
    while gaussian_epsilon(multiplier, delta) > epsilon:
        multiplier *= 1.0 + 1e-12
    return multiplier
