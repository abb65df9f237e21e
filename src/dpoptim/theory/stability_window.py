"""For which clip norms, or which `eps_scale`, the second moment of scale-then-privatize stays stable.

Scale-then-privatize clips s⊙g to norm ζ with s = 1/(√ν̂ + ε_s1), adds noise of variance φ = ζ²σ²/B² to each coordinate
and divides by s again. With a constant gradient g and c = min(1, ζ/‖s⊙g‖), the released square has the mean

    E g̃² = (c·g)² + φ/s² = (c·g)² + φ·(√ν̂ + ε_s1)²

so part of ν̂ returns as noise in the next release. docs/theory.md, section 5, derives the clip norms where ν̂ is steady,
(1/m + σ²/B²)^(−½) ≤ ζ < B/σ, with m the number of nonzero coordinates of g.

These clip norms are in the paper's units. The library scales by s = eps_scale/(√ν̂ + eps_scale) and clips at
`clip_norm`, in gradient units, so ζ = clip_norm/eps_scale. At a given clip norm c the window becomes one for eps_scale:

    c·σ/B < eps_scale ≤ c·√(1/m + σ²/B²)

The upper end assumes that all examples have the same gradient. If the average of clipped gradients has only r times the
clip norm because examples disagree, the end is c·√(r²/m + σ²/B²): `likely_high`. Both assume that gradients are
constant over the steps and that examples are clipped. With correlated noise, multiply σ by the largest column norm of C
and the largest row norm of C⁻¹.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpoptim.arguments import check_number, check_whole
from dpoptim.noise.series import Series
from dpoptim.theory.second_moments import check

_CLEAR_OF_DIVERGENCE = 1.1
_WIDE = 4.0


class SecondMomentRegime(enum.Enum):
    """What happens to the second moment under a constant gradient."""

    COLLAPSES = "collapses"
    STEADY = "steady"
    DIVERGES = "diverges"


def feedback(*, clip_norm: float, noise_multiplier: float, batch_size: float) -> float:
    """Compute φ = ζ²σ²/B², the part of ν̂ that returns as noise in the next released square.

    Args:
        clip_norm: ζ, in the paper's units.
        noise_multiplier: σ.
        batch_size: B.

    >>> round(feedback(clip_norm=40.0, noise_multiplier=1.0, batch_size=100), 12)
    0.16
    """
    check(clip_norm=clip_norm, noise_multiplier=noise_multiplier, batch_size=batch_size)
    return (clip_norm * noise_multiplier / batch_size) ** 2


def steady_second_moment(
    noiseless: ArrayLike, *, clip_norm: float, noise_multiplier: float, batch_size: float
) -> NDArray[np.float64]:
    """Compute ν̂*/(1−φ), where the mean of ν̂ rests if nothing is clipped; ∞ for φ ≥ 1 where ν̂* > 0.

    `noiseless` is ν̂* = g², the second moment without noise. The other arguments are those of `feedback`.

    >>> float(steady_second_moment(0.42, clip_norm=40.0, noise_multiplier=1.0, batch_size=100).round(12))
    0.5
    """
    phi = feedback(clip_norm=clip_norm, noise_multiplier=noise_multiplier, batch_size=batch_size)
    star = np.asarray(noiseless, dtype=np.float64)
    if np.any(star < 0):
        raise ValueError(f"noiseless={noiseless!r} must hold squares, none below 0")
    return star / (1 - phi) if phi < 1 else np.where(star > 0, np.inf, 0.0)


def contraction_factor(*, clip_norm: float, noise_multiplier: float, batch_size: float, beta2: float = 0.999) -> float:
    """Compute β₂ + (1−β₂)φ, by which one late step multiplies the distance of the mean of ν̂ from its steady state.

    Below 1 for φ < 1: noise slows the return by 1/(1−φ). Holds while nothing is clipped, for ε_s1 → 0 and β₂ᵗ → 0. The
    arguments are those of `feedback`, and Adam's second-moment decay.

    >>> round(contraction_factor(clip_norm=40.0, noise_multiplier=1.0, batch_size=100, beta2=0.9), 12)
    0.916
    """
    check(beta2=beta2)
    phi = feedback(clip_norm=clip_norm, noise_multiplier=noise_multiplier, batch_size=batch_size)
    return beta2 + (1 - beta2) * phi


def clip_norm_window(*, dimension: int, noise_multiplier: float, batch_size: float) -> tuple[float, float]:
    """Compute [(1/m + σ²/B²)^(−½), B/σ), the clip norms with a steady state, in the paper's units; it is never empty.

    Args:
        dimension: m, the number of nonzero coordinates of g. Their sizes do not matter, because s evens them out.
        noise_multiplier: σ, times the column and row norms if noise is correlated. Without noise the window is
            [√m, ∞).
        batch_size: B.

    >>> [round(edge, 2) for edge in clip_norm_window(dimension=400, noise_multiplier=1.0, batch_size=100)]
    [19.61, 100.0]
    """
    check(dimension=dimension, noise_multiplier=noise_multiplier, batch_size=batch_size)
    ratio = noise_multiplier / batch_size
    return (1 / dimension + ratio**2) ** -0.5, 1 / ratio if ratio else math.inf


def predict(clip_norm: float, *, dimension: int, noise_multiplier: float, batch_size: float) -> SecondMomentRegime:
    """Predict the regime of ν̂ at a clip norm ζ in the paper's units: below the window, in it, or above it.

    The other arguments are those of `clip_norm_window`.

    >>> given = dict(dimension=400, noise_multiplier=1.0, batch_size=100)
    >>> [predict(clip_norm, **given).value for clip_norm in (19.0, 22.0, 70.0, 120.0)]
    ['collapses', 'steady', 'steady', 'diverges']
    """
    check(clip_norm=clip_norm)
    low, high = clip_norm_window(dimension=dimension, noise_multiplier=noise_multiplier, batch_size=batch_size)
    if clip_norm < low:
        return SecondMomentRegime.COLLAPSES
    return SecondMomentRegime.STEADY if clip_norm < high else SecondMomentRegime.DIVERGES


def collapsed_state(
    *, clip_norm: float, dimension: int, noise_multiplier: float, batch_size: float, eps_scale: float
) -> float:
    """Compute (ρ·ε_s1/(1−ρ))², the mean-field ν̂ below the window, for coordinates of equal size.

    It solves √ν̂ = ρ(√ν̂ + ε_s1) with ρ = ζ·√(1/m + σ²/B²), if gradients are still clipped there: ‖g‖ ≥ ζ·ε_s1/(1−ρ).
    The other arguments are those of `clip_norm_window`.

    Args:
        clip_norm: ζ, in the paper's units.
        eps_scale: ε_s1.

    Returns:
        ν̂; ∞ from the window on.

    >>> given = dict(dimension=100, noise_multiplier=0.0, batch_size=1, eps_scale=1.0)
    >>> round(collapsed_state(clip_norm=5.0, **given), 12), collapsed_state(clip_norm=10.0, **given)
    (1.0, inf)
    """
    check(clip_norm=clip_norm, eps_scale=eps_scale)
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
    """Follow ν̂ of scale-then-privatize with every released square replaced by its mean; one row per step.

        s_t = 1/(√ν̂_{t−1} + ε_s1),  c_t = min(1, ζ/‖s_t⊙g‖),  ν_t = β₂ν_{t−1} + (1−β₂)((c_t·g)² + φ/s_t²),
        ν̂_t = ν_t/(1−β₂ᵗ),  ν̂_0 = start

    Exact for the mean of ν̂ while nothing is clipped and ε_s1 is negligible, because E g̃² is then linear in ν̂. Otherwise
    it ignores fluctuations of ν̂: late in a run the mean is off by order 1−β₂, early by tens of percent. The other
    arguments are those of `feedback`.

    Args:
        gradient: The constant gradient g.
        steps: The number of steps.
        beta2: Adam's second-moment decay.
        eps_scale: ε_s1.
        start: ν̂ before the first step.

    >>> path = mean_field([1.0] * 400, clip_norm=40.0, noise_multiplier=1.0, batch_size=100, steps=3000, beta2=0.9)
    >>> float(path[-1, 0].round(6))
    1.190476
    """
    check(beta2=beta2, eps_scale=eps_scale)
    check_whole("steps", steps)
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


@dataclass(frozen=True, kw_only=True)
class ScaleWindow:
    """The window (low, high] of eps_scale at one clip norm, and which values to try.

    Attributes:
        clip_norm: The clip norm, in gradient units.
        low: At this value and below, ν̂ diverges.
        high: Above this value, ν̂ collapses.
        likely_high: The upper end if examples disagree.
        clip_norms: The same window in the paper's units.
        default: What `scale_then_privatize` uses by default.

    >>> window = scale_window(clip_norm=2.0, dimension=400, noise_multiplier=1.0, batch_size=100)
    >>> window.low, round(window.high, 3), [round(edge, 2) for edge in window.clip_norms]
    (0.02, 0.102, [19.61, 100.0])
    >>> [window.regime(eps_scale).value for eps_scale in (0.019, 0.05, 0.2)]
    ['diverges', 'steady', 'collapses']
    """

    clip_norm: float
    low: float
    high: float
    likely_high: float
    clip_norms: tuple[float, float]
    default: float

    def regime(self, eps_scale: float) -> SecondMomentRegime:
        """Predict what happens to ν̂ for a constant gradient that is clipped."""
        outside = {"below": SecondMomentRegime.DIVERGES, "above": SecondMomentRegime.COLLAPSES}
        return outside.get(self.place(eps_scale), SecondMomentRegime.STEADY)

    @property
    def width(self) -> float:
        """high/low = √(1 + B²/(mσ²)); ∞ without noise."""
        return self.high / self.low if self.low else math.inf

    def describe(self, eps_scale: float) -> str:
        """Describe where a value lies and what that means."""
        place = self.place(eps_scale)
        if place == "below":
            return "below the window: noise feeds on itself and diverges"
        if place == "above":
            kept = 1 - self.high / eps_scale
            return f"above the window: nu collapses; the scale is about {kept:.2f} everywhere (1 means unscaled)"
        phi = (self.low / eps_scale) ** 2
        added = f"{phi / (1 - phi):.0%}" if phi < 1 else "∞"
        return f"{place.replace('in', 'in the window', 1)}: noise adds {added} to the mean of nu"

    def place(self, eps_scale: float) -> str:
        """Name the place of a value: "in", "in if examples agree" (above `likely_high`), "above" or "below"."""
        if not self.low < eps_scale <= self.high:
            return "below" if eps_scale <= self.low else "above"
        return "in" if eps_scale <= self.likely_high else "in if examples agree"

    @property
    def too_narrow(self) -> bool:
        """Whether no value in the window is 10 % above its lower end, where estimates of ν̂ fluctuate."""
        return self.width < _CLEAR_OF_DIVERGENCE

    @property
    def to_try(self) -> tuple[float, ...]:
        """Three to six values, more than 5 % apart, from inside the window and clear of its lower end."""
        if not self.low:
            return tuple(rounded(self.high * factor) for factor in (0.01, 0.1, 1.0, 10.0))
        if self.width > _WIDE:
            ratio = (self.high / (2 * self.low)) ** (1 / 3)
            values = [2 * self.low * ratio**i for i in range(4)] + [3 * self.high]
        else:
            values = [math.sqrt(self.low * self.high), self.high, 2 * self.low, 4 * self.low, 8 * self.low]
        clear = [v for v in (self.likely_high, *values) if v >= _CLEAR_OF_DIVERGENCE * self.low]
        kept: list[float] = []
        for value in sorted(self._short(v) for v in clear):
            if not kept or value > 1.05 * kept[-1]:
                kept.append(value)
        return tuple(kept)

    def _short(self, value: float) -> float:
        """Round to the fewest digits, two or more, that keep the value's place."""
        found = (rounded(value, digits) for digits in range(2, 17))
        return next((short for short in found if self.place(short) == self.place(value)), value)


def scale_window(
    *,
    clip_norm: float,
    dimension: int,
    noise_multiplier: float,
    batch_size: float,
    agreement: float = 1.0,
    default: float | None = None,
) -> ScaleWindow:
    """Compute the window of eps_scale at a clip norm. The other arguments are those of `clip_norm_window`.

    Args:
        clip_norm: The clip norm, in gradient units.
        agreement: r, the norm of the averaged clipped gradient over the clip norm.
        default: The library's own eps_scale; None means twice the lower end.
    """
    check_number("agreement", agreement, low=0, high=1)
    ends = clip_norm_window(dimension=dimension, noise_multiplier=noise_multiplier, batch_size=batch_size)
    ratio = noise_multiplier / batch_size
    low = clip_norm * ratio
    return ScaleWindow(
        clip_norm=clip_norm,
        low=low,
        high=clip_norm / ends[0],
        likely_high=clip_norm * math.sqrt(agreement**2 / dimension + ratio**2),
        clip_norms=ends,
        default=2 * low if default is None else default,
    )


def rounded(value: float, digits: int = 2) -> float:
    """Round to significant digits."""
    return float(f"{value:.{digits - 1}e}") if value else 0.0
