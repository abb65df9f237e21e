"""Where the second moment of scale-then-privatize comes to rest, and for which clip norms it does.

Scale-then-privatize clips s⊙g to norm ζ, s = 1/(√ν̂ + ε_s1), adds noise of variance φ = ζ²σ²/B² to each coordinate
and divides by s again. With a constant gradient g and c = min(1, ζ/‖s⊙g‖), the released square has the mean

    E g̃² = (c·g)² + φ/s² = (c·g)² + φ·(√ν̂ + ε_s1)²

so the noise feeds on the second moment that it goes into. Where nothing is clipped and ε_s1 is negligible, ν̂ rests at
g²/(1−φ); there ‖s⊙g‖² = m(1−φ), with m the number of coordinates of g that are not 0, which stays unclipped only for
ζ² ≥ m(1−φ), that is ζ ≥ (1/m + σ²/B²)^(−½). Below that, everything is clipped and √ν̂ shrinks by
ρ = ζ·√(1/m + σ²/B²) < 1 in the long run until ε_s1 dominates. For φ ≥ 1, ζ ≥ B/σ, ν̂ grows without end.
Clip norms here are those of s⊙g with s = 1/(√ν̂ + ε_s1): they have no unit. (With the normalised s = ε_s1/(√ν̂ + ε_s1),
divide the clip norm by ε_s1 first.) Noise is independent from step to step.
"""

from __future__ import annotations

import enum
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpoptim.noise.series import Series
from dpoptim.theory.second_moments import check_beta, check_step


class SecondMomentRegime(enum.Enum):
    """What becomes of the second moment under a constant gradient."""

    COLLAPSES = "collapses"
    STEADY = "steady"
    DIVERGES = "diverges"


def feedback(*, clip_norm: float, noise_multiplier: float, batch_size: float) -> float:
    """φ = ζ²σ²/B²: the part of ν̂ that comes back as noise in the next released square.

    >>> round(feedback(clip_norm=40.0, noise_multiplier=1.0, batch_size=100), 12)
    0.16
    """
    _check(clip_norm=clip_norm, noise_multiplier=noise_multiplier, batch_size=batch_size)
    return (clip_norm * noise_multiplier / batch_size) ** 2


def steady_state(
    noiseless: ArrayLike, *, clip_norm: float, noise_multiplier: float, batch_size: float
) -> NDArray[np.float64]:
    """ν̂*/(1−φ), the fixed point of the mean of ν̂ where nothing is clipped, for the noiseless second moment ν̂* = g².

    Edge cases: ∞ for φ ≥ 1 where ν̂* > 0. It says nothing about clipping: see `clip_norm_window`.

    >>> float(steady_state(0.42, clip_norm=40.0, noise_multiplier=1.0, batch_size=100).round(12))
    0.5
    """
    phi = feedback(clip_norm=clip_norm, noise_multiplier=noise_multiplier, batch_size=batch_size)
    star = np.asarray(noiseless, dtype=np.float64)
    if np.any(star < 0):
        raise ValueError(f"noiseless={noiseless!r} must hold squares, none below 0")
    return star / (1 - phi) if phi < 1 else np.where(star > 0, np.inf, 0.0)


def contraction_factor(*, clip_norm: float, noise_multiplier: float, batch_size: float, beta2: float = 0.999) -> float:
    """β₂ + (1−β₂)φ: by what one step multiplies the distance of the mean of ν̂ from its steady state, late in a run.

    Below 1 for φ < 1; noise makes the way back longer by 1/(1−φ). Holds unclipped, for ε_s1 → 0 and β₂ᵗ → 0.

    >>> round(contraction_factor(clip_norm=40.0, noise_multiplier=1.0, batch_size=100, beta2=0.9), 12)
    0.916
    """
    check_beta("beta2", beta2)
    phi = feedback(clip_norm=clip_norm, noise_multiplier=noise_multiplier, batch_size=batch_size)
    return beta2 + (1 - beta2) * phi


def clip_norm_window(*, dimension: int, noise_multiplier: float, batch_size: float) -> tuple[float, float]:
    """[(1/m + σ²/B²)^(−½), B/σ): the clip norms for which a steady state exists, with constant g.

    Never empty. m counts the coordinates of g that are not 0, whatever their sizes: s evens them out.
    Edge cases: without noise [√m, ∞).

    >>> [round(edge, 2) for edge in clip_norm_window(dimension=400, noise_multiplier=1.0, batch_size=100)]
    [19.61, 100.0]
    """
    _check(dimension=dimension, noise_multiplier=noise_multiplier, batch_size=batch_size)
    ratio = noise_multiplier / batch_size
    return (1 / dimension + ratio**2) ** -0.5, 1 / ratio if ratio else math.inf


def predict(clip_norm: float, *, dimension: int, noise_multiplier: float, batch_size: float) -> SecondMomentRegime:
    """What becomes of ν̂ at this clip norm: below the window, in it, or above it.

    >>> given = dict(dimension=400, noise_multiplier=1.0, batch_size=100)
    >>> [predict(clip_norm, **given).value for clip_norm in (19.0, 22.0, 70.0, 120.0)]
    ['collapses', 'steady', 'steady', 'diverges']
    """
    _check(clip_norm=clip_norm)
    low, high = clip_norm_window(dimension=dimension, noise_multiplier=noise_multiplier, batch_size=batch_size)
    if clip_norm < low:
        return SecondMomentRegime.COLLAPSES
    return SecondMomentRegime.STEADY if clip_norm < high else SecondMomentRegime.DIVERGES


def collapsed_state(
    *, clip_norm: float, dimension: int, noise_multiplier: float, batch_size: float, eps_scale: float
) -> float:
    """(ρ·ε_s1/(1−ρ))²: the mean-field ν̂ below the window, for coordinates of equal size, ρ = ζ·√(1/m + σ²/B²).

    √ν̂ = ρ(√ν̂ + ε_s1), as long as gradients are still clipped there: ‖g‖ ≥ ζ·ε_s1/(1−ρ). Far below the window it is
    far below ε_s1², s is 1/ε_s1, and the method is post-processing with clip norm ζ·ε_s1.
    Edge cases: ∞ from the window on.

    >>> given = dict(dimension=100, noise_multiplier=0.0, batch_size=1, eps_scale=1.0)
    >>> round(collapsed_state(clip_norm=5.0, **given), 12), collapsed_state(clip_norm=10.0, **given)
    (1.0, inf)
    """
    _check(clip_norm=clip_norm, eps_scale=eps_scale)
    low, _ = clip_norm_window(dimension=dimension, noise_multiplier=noise_multiplier, batch_size=batch_size)
    ratio = clip_norm / low
    return (ratio * eps_scale / (1 - ratio)) ** 2 if ratio < 1 else math.inf


def mean_field(
    gradient: ArrayLike,
    *,
    clip_norm: float,
    noise_multiplier: float,
    batch_size: float,
    steps: int,
    beta2: float = 0.999,
    eps_scale: float = 1e-8,
    start: ArrayLike = 0.0,
) -> Series:
    """ν̂_1, ..., ν̂_T (a row a step) of scale-then-privatize with every released square replaced by its mean.

        s_t = 1/(√ν̂_{t−1} + ε_s1),  c_t = min(1, ζ/‖s_t⊙g‖),  ν_t = β₂ν_{t−1} + (1−β₂)((c_t·g)² + φ/s_t²),
        ν̂_t = ν_t/(1−β₂ᵗ),  ν̂_0 = start

    Exact for the mean of ν̂ while nothing is clipped and ε_s1 is negligible, since E g̃² is then linear in ν̂. Otherwise
    the fluctuation of ν̂ is left out: late in a run it is of order √(1−β₂) and moves the mean by order 1−β₂, but ν̂ of
    the first steps averages few squares, and a rise or fall that is clipped can lag by tens of percent.

    >>> path = mean_field([1.0] * 400, clip_norm=40.0, noise_multiplier=1.0, batch_size=100, steps=3000, beta2=0.9)
    >>> float(path[-1, 0].round(6))
    1.190476
    """
    check_beta("beta2", beta2)
    _check(eps_scale=eps_scale)
    check_step(steps, name="steps")
    phi = feedback(clip_norm=clip_norm, noise_multiplier=noise_multiplier, batch_size=batch_size)
    g = np.atleast_1d(np.asarray(gradient, dtype=np.float64))
    nu, nu_hat = np.zeros_like(g), np.broadcast_to(np.asarray(start, dtype=np.float64), g.shape)
    path = np.empty((steps, *g.shape))
    for t in range(1, steps + 1):
        width = np.sqrt(nu_hat) + eps_scale  # 1/s
        norm = float(np.linalg.norm(g / width))
        clipped = g * min(1.0, clip_norm / norm) if norm > 0 else g
        nu = beta2 * nu + (1 - beta2) * (clipped**2 + phi * width**2)
        nu_hat = path[t - 1] = nu / (1 - beta2**t)
    return path


def _check(**values: float) -> None:
    """Positive and finite, except that there may be no noise."""
    for name, value in values.items():
        if not 0 <= value < math.inf or (value == 0 and name != "noise_multiplier"):
            raise ValueError(f"{name}={value} must be a positive finite number (a noise_multiplier may be 0)")
