"""How much noise an optimizer's update carries, how far one example could move it, and which scale minimizes it.

The update is μ̂_t over a root of the second moment, with μ̂_t = Σ_i a_i·g̃_i and a_i = (1−β₁)β₁^{t−i}/(1−β₁ᵗ), one
coordinate at a time. The noise on g̃ is √φ·(C⁻¹z)_t with φ = ζ²σ²/B², and K = C⁻¹C⁻ᵀ. `strategy=None` means independent
noise. `step=None` means the limit t → ∞ for independent noise.

`noise_cost` and its companions ask which exponent p of s = |g|^(−2p) minimizes the noise at the smallest clip norm that
clips nothing, ζ² = Σ s_i²g_i². docs/theory.md, section 8, has the three inequalities behind `least_noise_cost`.
"""

from __future__ import annotations

import enum
import itertools
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpoptim.arguments import check_at_most, check_number, check_whole
from dpoptim.noise import Strategy
from dpoptim.theory.second_moments import check, moment_weights, squared_weight

_NEGLIGIBLE = 1e-10  # weight of the oldest steps that a limit leaves out


def momentum_noise_variance(
    *, noise_variance: float, step: int | None = None, beta1: float = 0.9, strategy: Strategy | None = None
) -> float:
    """Compute φ·aᵀKa, the exact variance of the noise in μ̂_t; for independent noise in the limit φ(1−β₁)/(1+β₁).

    Args:
        noise_variance: φ, the noise variance on the averaged gradient for a unit row of C⁻¹.
        step: t, or None for the limit.
        beta1: Adam's momentum.
        strategy: Correlated noise, or None for independent noise.

    >>> round(momentum_noise_variance(noise_variance=1.0), 6)
    0.052632
    """
    check(beta1=beta1, noise_variance=noise_variance)
    return noise_variance * squared_weight(beta=beta1, step=step, strategy=strategy)


def post_processing_update_rms(
    *, step: int | None = None, beta1: float = 0.9, beta2: float = 0.999, strategy: Strategy | None = None
) -> float:
    """Compute √E[μ̂_t²/ν̂_t] in pure noise at ε_s = 0: how far post-processing Adam moves where g = 0.

    With λ_i the eigenvalues of C⁻ᵀWC⁻¹, W = diag(w), and p_i² the squares of C⁻ᵀa in its eigenbasis (w and the squares
    of a for independent noise), odd moments vanish and 1/x = ∫exp(−sx)ds gives

        E[μ̂²/ν̂] = Σ_i p_i² ∫_0^∞ (1+2sλ_i)⁻¹ Π_j (1+2sλ_j)^(−½) ds

    Exact to 1e-8, and independent of σ. As β₂ → 1 the limit over steps tends to √((1−β₁)/(1+β₁)), .22942 at β₁ = .9.
    With a strategy the cost is t³. The other arguments are those of `momentum_noise_variance`.

    Args:
        beta2: Adam's second-moment decay.

    Returns:
        The root mean square of one coordinate of the update, over the learning rate.

    Raises:
        ValueError: If an argument is out of range, or if `beta2=0` with momentum, where no finite mean exists.

    >>> round(post_processing_update_rms(), 4), round(post_processing_update_rms(step=1), 6)
    (0.2293, 1.0)
    """
    from scipy.integrate import quad

    check(step=step, strategy=strategy, beta1=beta1, beta2=beta2)
    _check_momentum(beta1, beta2, step)
    count = step or max(1, *(math.ceil(math.log(_NEGLIGIBLE) / math.log(b)) if b else 1 for b in (beta1, beta2)))
    sizes, shares = moment_weights(beta=beta2, step=count), moment_weights(beta=beta1, step=count) ** 2
    if strategy is not None:
        rows = strategy.noising_matrix()[:count, :count]
        sizes, axes = np.linalg.eigh(rows.T @ (sizes[:, None] * rows))
        sizes, shares = np.maximum(sizes, 0.0), (axes.T @ (rows.T @ np.sqrt(shares))) ** 2

    def integrand(v: float) -> float:  # s = exp(v) spreads the few scales of λ evenly
        spread = 2 * math.exp(v) * sizes
        return float(np.sum(shares / (1 + spread)) * np.exp(v - 0.5 * np.sum(np.log1p(spread))))

    centre = -math.log(float(sizes.sum()))  # ν̂ is about Σλ, so s is about its inverse
    pieces = itertools.pairwise(centre + end for end in (-30, -4, 0, 4, 60))  # beyond, the integrand is below exp(−30)
    return math.sqrt(sum(quad(integrand, *piece, epsabs=1e-10, limit=200)[0] for piece in pieces))


def bias_correction_update_bound(
    *, noise_variance: float, eps: float, step: int | None = None, beta1: float = 0.9, strategy: Strategy | None = None
) -> float:
    """Compute √(φ·aᵀKa)/ε_s, an upper bound on the RMS of μ̂/√max(ν̂ − b, ε_s²) in pure noise.

    About half of all ν̂ − b are negative there (`negative_probability`), and their denominator equals ε_s. So the bound
    is within a small factor of the truth where √φ ≫ ε_s. The other arguments are those of `momentum_noise_variance`.

    Args:
        eps: ε_s, the floor of the denominator.

    Returns:
        The bound, over the learning rate.

    >>> round(bias_correction_update_bound(noise_variance=1e-6, eps=1e-4), 4)
    2.2942
    """
    check(eps=eps)
    variance = momentum_noise_variance(noise_variance=noise_variance, step=step, beta1=beta1, strategy=strategy)
    return math.sqrt(variance) / eps


def scaled_noise_stddev(
    scale: ArrayLike, *, clip_norm: float, noise_multiplier: float, batch_size: float
) -> NDArray[np.float64]:
    """Compute ζσ/(B·s), the noise of scale-then-privatize on g̃ per coordinate: small where s is LARGE.

    In the update, s·√ν̂ ≈ 1 makes it ζσ/B times the root of `momentum_noise_variance(noise_variance=1)` in every
    coordinate. So the noise of the update does not depend on the gradient's size there.

    Args:
        scale: s, positive everywhere.
        clip_norm: ζ, the bound on ‖s⊙g‖.
        noise_multiplier: σ.
        batch_size: B.

    Returns:
        The standard deviation for a unit row of C⁻¹, with the shape of `scale`.

    >>> scaled_noise_stddev([1.0, 4.0], clip_norm=8.0, noise_multiplier=1.0, batch_size=2).tolist()
    [4.0, 1.0]
    """
    check(clip_norm=clip_norm, noise_multiplier=noise_multiplier, batch_size=batch_size)
    s = np.asarray(scale, dtype=np.float64)
    if not np.all(s > 0):
        raise ValueError(f"scale={scale!r} must be positive everywhere")
    return clip_norm * noise_multiplier / (batch_size * s)


def update_sensitivity(
    *,
    clip_norm: float,
    batch_size: float,
    eps: float,
    step: int,
    participation: int | None = None,
    beta1: float = 0.9,
    beta2: float = 0.999,
) -> float:
    """Bound how far one example at step i can change u_t = μ̂_t/(√ν̂_t + ε) without noise, in ℓ₂ norm: L·ζ/(B·ε).

        L = a_i                    if a_i ≥ k,      k = (ρ − a_i)/2,   ρ = √(w_i·Σ_j a_j²/w_j)
            (a_i + k)²/(4k)        otherwise

    Guarantee:
        An upper bound for every history of gradients that is the same except at step i. It holds for zero-out and
        add/remove adjacency, where one example moves the averaged gradient of step i by at most ζ/B. Double it for
        replacement.

    A change of norm ζ/B approaches the bound if it is spread over so many coordinates that each moves little.
    docs/theory.md, section 9, has the proofs.

    Args:
        clip_norm: ζ.
        batch_size: B.
        eps: ε, the constant in the denominator.
        step: t.
        participation: i; None means t.
        beta1: Adam's momentum.
        beta2: Adam's second-moment decay.

    Returns:
        The bound, over the learning rate.

    Raises:
        ValueError: If an argument is out of range, or if `beta2=0` with momentum, where no bound exists.

    >>> given = dict(clip_norm=1.0, batch_size=100, eps=1e-3)
    >>> round(update_sensitivity(**given, step=1), 6), round(update_sensitivity(**given, step=10_000), 6)
    (10.0, 1.0)
    """
    from scipy.special import logsumexp

    check(step=step, clip_norm=clip_norm, batch_size=batch_size, eps=eps, beta1=beta1, beta2=beta2)
    _check_momentum(beta1, beta2, step)
    last = check_whole("participation", step if participation is None else participation)
    check_at_most("participation", last, "step", step)
    age, scale = step - last, (1 - beta1) / (1 - beta1**step)
    own = rho = scale * beta1**age
    if beta2 > 0:  # in logarithms, because the sum of (β₁²/β₂)^j may overflow where β₁² > β₂
        logs = np.arange(step) * (2 * math.log(beta1) - math.log(beta2)) if beta1 else np.zeros(1)
        log_rho = 0.5 * (age * math.log(beta2) + float(logsumexp(logs)))
        rho = scale * math.exp(log_rho) if log_rho < 700 else math.inf
    spare = max(0.0, (rho - own) / 2)
    slope = own if own >= spare else spare / 4 * (1 + own / spare) ** 2
    return slope * clip_norm / (batch_size * eps)


def first_update_sensitivity(*, clip_norm: float, batch_size: float, eps: float, dimension: int) -> float:
    """Compute (ζ/B)/(ε + ζ/(2B√m)), exactly how far one example can change Adam's first update g/(|g| + ε).

    Args:
        clip_norm: ζ.
        batch_size: B. Attaining the value needs two examples.
        eps: ε, the constant in the denominator. With 0 the result is 2√m: every sign flips.
        dimension: m, the number of coordinates.

    Returns:
        The largest change in ℓ₂ norm, over the learning rate.

    >>> round(first_update_sensitivity(clip_norm=1.0, batch_size=100, eps=0.0, dimension=400), 9)
    40.0
    """
    check(clip_norm=clip_norm, batch_size=batch_size, dimension=dimension)
    check_number("eps", eps, low=0)
    change = clip_norm / batch_size
    return change / (eps + change / (2 * math.sqrt(dimension)))


def _check_momentum(beta1: float, beta2: float, step: int | None) -> None:
    if beta2 == 0 and beta1 > 0 and step != 1:
        raise ValueError("beta2=0 with momentum has no bound: old steps enter μ̂ but not ν̂. Use beta2 > 0 or beta1=0.")


class Cost(enum.Enum):
    """What the noise is summed over."""

    GRADIENT = "gradient"  # Σ ζ²/s_i², the variances on g̃: least at AdaClip's p = ¼
    REGRET = "regret"  # (Σ ζ/s_i)², as in AdaGrad's regret bound: least at PAGAN's p = ⅓
    UPDATE = "update"  # Σ ζ²/(s_i²·g_i²), the variances on g̃/|g|: least at p = ½, scale-then-privatize


def noise_cost(gradient: ArrayLike, *, exponent: float, cost: Cost = Cost.GRADIENT) -> float:
    """Compute the size of the noise with s = |g|^(−2p), at σ/B = 1 and the smallest clip norm that clips nothing.

    It assumes a constant gradient, the same for every example, and ν̂ = g². So it includes neither the bias of clipping
    nor the noise in ν̂.

    Args:
        gradient: g, without zeros, where s would be infinite.
        exponent: p.
        cost: What the noise is summed over; see `Cost`.

    Raises:
        ValueError: If the gradient has a zero or `exponent` is outside [0, 1].

    >>> [round(noise_cost([1.0, 4.0], exponent=p), 6) for p in (0.0, 0.25, 0.5)]
    [34.0, 25.0, 34.0]
    >>> noise_cost([1.0, 4.0], exponent=0.5, cost=Cost.UPDATE)
    4.0
    """
    sizes = _sizes(gradient)
    check_number("exponent", exponent, low=0, high=1)
    s = sizes ** (-2 * exponent)
    squared_clip_norm = float(np.sum((s * sizes) ** 2))
    if cost is Cost.GRADIENT:
        return squared_clip_norm * float(np.sum(s**-2.0))
    if cost is Cost.REGRET:
        return squared_clip_norm * float(np.sum(1 / s)) ** 2
    return squared_clip_norm * float(np.sum((s * sizes) ** -2.0))


def least_noise_cost(gradient: ArrayLike, *, cost: Cost = Cost.GRADIENT) -> float:
    """Compute the smallest possible `noise_cost` over all scales s, whether a power of |g| or not.

    Args:
        gradient: g, without zeros.
        cost: What the noise is summed over.

    Returns:
        (Σ|g_i|)², (Σ|g_i|^⅔)³ or m².

    Raises:
        ValueError: If the gradient has a zero.

    >>> least_noise_cost([1.0, 4.0]), least_noise_cost([1.0, 4.0], cost=Cost.UPDATE)
    (25.0, 4.0)
    """
    sizes = _sizes(gradient)
    if cost is Cost.GRADIENT:
        return float(np.sum(sizes)) ** 2
    if cost is Cost.REGRET:
        return float(np.sum(sizes ** (2 / 3))) ** 3
    return float(sizes.size) ** 2


def best_exponent(cost: Cost) -> float:
    """Return the exponent p at which `noise_cost` equals `least_noise_cost`, for every gradient.

    Args:
        cost: What the noise is summed over.

    Returns:
        ¼, ⅓ or ½.

    >>> best_exponent(Cost.GRADIENT), best_exponent(Cost.UPDATE)
    (0.25, 0.5)
    """
    return {Cost.GRADIENT: 1 / 4, Cost.REGRET: 1 / 3, Cost.UPDATE: 1 / 2}[cost]


def _sizes(gradient: ArrayLike) -> NDArray[np.float64]:
    sizes = np.abs(np.asarray(gradient, dtype=np.float64))
    if sizes.size == 0 or not np.all(np.isfinite(sizes) & (sizes > 0)):
        raise ValueError(f"gradient={gradient!r} must hold finite numbers, none of them 0, and at least one")
    return sizes
