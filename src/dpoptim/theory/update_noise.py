"""How much noise an optimizer's update carries, and how far one example could move it.

The update is μ̂_t over a root of the second moment, μ̂_t = Σ_i a_i·g̃_i with a_i = (1−β₁)β₁^{t−i}/(1−β₁ᵗ), one
coordinate at a time. Noise on g̃ is √φ·(C⁻¹z)_t, φ = ζ²σ²/B²; K = C⁻¹C⁻ᵀ; `strategy=None` is independent noise and
`step=None` the limit t → ∞ for it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import quad
from scipy.special import logsumexp

from dpoptim.noise import Strategy
from dpoptim.theory.second_moments import check_beta, check_step, moment_weights, squared_weight

_NEGLIGIBLE = 1e-10  # weight of the oldest steps that a limit leaves out


def momentum_noise_variance(
    *, noise_variance: float, step: int | None = None, beta1: float = 0.9, strategy: Strategy | None = None
) -> float:
    """φ·aᵀKa: the variance of the noise in μ̂_t, before it is divided by anything.

    Independent noise: φ(1−β₁)(1+β₁ᵗ)/((1+β₁)(1−β₁ᵗ)), in the limit φ(1−β₁)/(1+β₁). Exact.

    >>> round(momentum_noise_variance(noise_variance=1.0), 6)
    0.052632
    """
    check_beta("beta1", beta1)
    if not 0 <= noise_variance < math.inf:
        raise ValueError(f"noise_variance={noise_variance} must be a finite number of at least 0")
    return noise_variance * squared_weight(beta=beta1, step=step, strategy=strategy)


def post_processing_update_rms(
    *, step: int | None = None, beta1: float = 0.9, beta2: float = 0.999, strategy: Strategy | None = None
) -> float:
    """√E[μ̂_t²/ν̂_t] in pure noise, ε_s = 0: the size of the steps that post-processing Adam takes where g = 0.

    With λ_i the eigenvalues of C⁻ᵀWC⁻¹, W = diag(w), and p_i² the squares of C⁻ᵀa in its eigenbasis (the squares of a,
    and w, for independent noise), odd moments vanish and 1/x = ∫exp(−sx)ds gives

        E[μ̂²/ν̂] = Σ_i p_i² ∫_0^∞ (1+2sλ_i)⁻¹ Π_j (1+2sλ_j)^(−½) ds

    Exact, by quadrature to 1e-8; φ cancels. As β₂ → 1 the limit over steps tends to √((1−β₁)/(1+β₁)), .22942 at
    β₁ = .9 (.22930 at β₂ = .999). At t = 1 every update is ±1. A coordinate without gradient moves by this much a
    step, whatever σ is.
    Edge cases: β₂ = 0 with momentum has no finite mean and is refused. With a strategy the cost is t³.

    >>> round(post_processing_update_rms(), 4), round(post_processing_update_rms(step=1), 6)
    (0.2293, 1.0)
    """
    check_beta("beta1", beta1)
    check_beta("beta2", beta2)
    _check_momentum(beta1, beta2, step)
    check_step(step, strategy=strategy)
    count = step or max(1, *(math.ceil(math.log(_NEGLIGIBLE) / math.log(b)) if b else 1 for b in (beta1, beta2)))
    sizes, shares = moment_weights(beta=beta2, step=count), moment_weights(beta=beta1, step=count) ** 2
    if strategy is not None:
        rows = strategy.noising_matrix()[:count, :count]
        sizes, axes = np.linalg.eigh(rows.T @ (sizes[:, None] * rows))
        sizes, shares = np.maximum(sizes, 0.0), (axes.T @ (rows.T @ np.sqrt(shares))) ** 2

    def integrand(v: float) -> float:  # s = exp(v), which spreads the few scales of λ evenly
        spread = 2 * math.exp(v) * sizes
        return float(np.sum(shares / (1 + spread)) * np.exp(v - 0.5 * np.sum(np.log1p(spread))))

    centre = -math.log(float(sizes.sum()))  # ν̂ is about Σλ, so s is about its inverse
    total = sum(quad(integrand, *ends, epsabs=1e-10, limit=200)[0] for ends in _pieces(centre))
    return math.sqrt(total)


def bias_correction_update_bound(
    *,
    noise_variance: float,
    eps: float,
    step: int | None = None,
    beta1: float = 0.9,
    strategy: Strategy | None = None,
) -> float:
    """√(φ·aᵀKa)/ε_s ≤ √φ·max‖row of C⁻¹‖/ε_s: no less than the RMS of μ̂/√max(ν̂ − b, ε_s²) in pure noise.

    The denominator is at least ε_s. About half of ν̂ − b is negative there (`negative_probability`), and at those
    coordinates the denominator IS ε_s, so the bound is within a small factor of the truth where √φ ≫ ε_s.

    >>> round(bias_correction_update_bound(noise_variance=1e-6, eps=1e-4), 4)
    2.2942
    """
    _check_positive(eps=eps)
    return (
        math.sqrt(momentum_noise_variance(noise_variance=noise_variance, step=step, beta1=beta1, strategy=strategy))
        / eps
    )


def scaled_noise_stddev(
    scale: ArrayLike, *, clip_norm: float, noise_multiplier: float, batch_size: float
) -> NDArray[np.float64]:
    """ζσ/(B·s): the noise of scale-then-privatize on g̃, per coordinate and unit row of C⁻¹; small where s is LARGE.

    In the update, s·√ν̂ ≈ 1 makes it ζσ/B times the root of `momentum_noise_variance(noise_variance=1)` in every
    coordinate: the noise of the update does not depend on the gradient's size there.

    >>> scaled_noise_stddev([1.0, 4.0], clip_norm=8.0, noise_multiplier=1.0, batch_size=2).tolist()
    [4.0, 1.0]
    """
    _check_positive(clip_norm=clip_norm, batch_size=batch_size)
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier={noise_multiplier} must be a finite number of at least 0")
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
    """The most that one example at step i can change u_t = μ̂_t/(√ν̂_t + ε) without noise, in ℓ₂ norm: L·ζ/(B·ε).

        L = a_i                    if a_i ≥ k,      k = (ρ − a_i)/2,   ρ = √(w_i·Σ_j a_j²/w_j)
            (a_i + k)²/(4k)        otherwise

    Guarantee: an upper bound for every history of gradients, the same but for step i; `participation` is i, by default
    t. Zero-out or add/remove adjacency, so that one example moves the averaged gradient of step i by at most ζ/B; twice
    that for replacement.
    Proof. u is a function of each coordinate alone, so its Lipschitz constant is the largest slope. Put q = √ν̂ and
    e_j = √w_j·g_j/q, a unit vector; then μ̂ = q·(b·e) with b_j = a_j/√w_j, and

        ∂u/∂g_i = a_i/(q+ε) − (b·e)·e_i·√w_i·q/(q+ε)²

    The form −(b·e)e_i has the eigenvalues (±‖b‖ − b_i)/2 and 0, so with τ = ε/(q+ε) in (0, 1] the slope times ε is
    at most a_iτ + k·τ(1−τ), and at least a_iτ − (k+a_i)τ(1−τ), since √w_i·b_i = a_i and √w_i·‖b‖ = ρ ≥ a_i. The first
    has the maximum L, at τ = 1 (no gradient at all) or at τ = (a_i+k)/(2k); the second the minimum −k²/(4(k+a_i)),
    which is smaller. Along a line u is continuously differentiable, also through ν̂ = 0. ∎
    Every slope up to L/ε occurs. A change of norm ζ/B comes up to the bound when it is spread over so many coordinates
    that each moves little; `first_update_sensitivity` has the exact value for t = 1. Without ε there is no bound but
    that of the update itself.

    >>> given = dict(clip_norm=1.0, batch_size=100, eps=1e-3)
    >>> round(update_sensitivity(**given, step=1), 6), round(update_sensitivity(**given, step=10_000), 6)
    (10.0, 1.0)
    """
    _check_positive(clip_norm=clip_norm, batch_size=batch_size, eps=eps)
    check_beta("beta1", beta1)
    check_beta("beta2", beta2)
    check_step(step)
    check_step(participation, name="participation")
    _check_momentum(beta1, beta2, step)
    last = step if participation is None else participation
    if not 1 <= last <= step:
        raise ValueError(f"participation={participation} must lie between 1 and step={step}")
    age, scale = step - last, (1 - beta1) / (1 - beta1**step)
    own = rho = scale * beta1**age
    if beta2 > 0:  # in logarithms, since the sum of (β₁²/β₂)^j may overflow where β₁² > β₂
        logs = np.arange(step) * (2 * math.log(beta1) - math.log(beta2)) if beta1 else np.zeros(1)
        log_rho = 0.5 * (age * math.log(beta2) + float(logsumexp(logs)))
        rho = scale * math.exp(log_rho) if log_rho < 700 else math.inf
    spare = max(0.0, (rho - own) / 2)
    slope = own if own >= spare else spare / 4 * (1 + own / spare) ** 2
    return slope * clip_norm / (batch_size * eps)


def first_update_sensitivity(*, clip_norm: float, batch_size: float, eps: float, dimension: int) -> float:
    """(ζ/B)/(ε + ζ/(2B√m)): exactly the most that one example can change g/(|g| + ε), Adam's first update.

    Proof. For d = |x − y| in one coordinate, |x/(|x|+ε) − y/(|y|+ε)| is largest at x = −y = d/2, where it is
    d/(d/2+ε). Its square is concave in d², so over all changes with Σd² ≤ (ζ/B)² the sum is largest where all d are
    equal. Attained by an example with equal coordinates, beside others that sum up to minus half of it. ∎
    Edge cases: ε = 0 gives 2√m, every sign flipped, whatever the batch size. One batch needs two examples for it.

    >>> round(first_update_sensitivity(clip_norm=1.0, batch_size=100, eps=0.0, dimension=400), 9)
    40.0
    """
    _check_positive(clip_norm=clip_norm, batch_size=batch_size, dimension=dimension)
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps={eps} must be a finite number of at least 0")
    change = clip_norm / batch_size
    return change / (eps + change / (2 * math.sqrt(dimension)))


def _pieces(centre: float) -> list[tuple[float, float]]:
    """Four pieces of the line around a centre; beyond, the integrand is below exp(−30)."""
    return [(centre - 30, centre - 4), (centre - 4, centre), (centre, centre + 4), (centre + 4, centre + 60)]


def _check_momentum(beta1: float, beta2: float, step: int | None) -> None:
    if beta2 == 0 and beta1 > 0 and step != 1:
        raise ValueError("beta2=0 with momentum has no bound: old steps enter μ̂ and not ν̂; use beta2 > 0 or beta1=0")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be a positive finite number")
