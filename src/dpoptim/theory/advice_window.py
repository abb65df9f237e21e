"""Which stability constants of scale-then-privatize keep its second moment steady, in the units of the library.

`steady_state` has the window in the paper's units: the clip norm ζ of s⊙g with s = 1/(√ν̂ + ε_s1) must satisfy
(1/m + σ²/B²)^(−½) ≤ ζ < B/σ. The library scales by s = eps_scale/(√ν̂ + eps_scale) and clips at `clip_norm`, in units
of the gradient, so ζ = clip_norm/eps_scale, and at a given clip norm c the window is one for eps_scale:

    c·σ/B < eps_scale ≤ c·√(1/m + σ²/B²)

At its lower end and below, the noise feeds on itself through ν̂, which diverges. Above its upper end ν̂ collapses: what
is left of √ν̂ is of the order of eps_scale, and the further above, the nearer is the method to post-processing with
clip norm c. The two ends are √(1 + B²/(mσ²)) apart, so the window is narrow where noise exceeds the gradient.
With correlated noise σ is times the largest column norm of C and the largest row norm of C⁻¹.

The upper end is that of one gradient for all examples. Where an average of clipped gradients has only r times the clip
norm, as examples disagree, ‖s⊙g‖ at rest is r·ζ and the end is c·√(r²/m + σ²/B²): `likely_high`. Both take gradients
to be constant over the steps, which real ones are not, and examples to be clipped at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dpoptim.theory.steady_state import SecondMomentRegime, clip_norm_window

_CLEAR_OF_DIVERGENCE = 1.1
_WIDE = 4.0


@dataclass(frozen=True, kw_only=True)
class ScaleWindow:
    """The window (low, high] of eps_scale at one clip norm, and what to try.

    `clip_norms` is the same window in the paper's units; `default` is what `scale_then_privatize` takes by itself.

    >>> window = scale_window(clip_norm=2.0, dimension=400, noise_multiplier=1.0, batch_size=100)
    >>> window.low, round(window.high, 3), [round(edge, 2) for edge in window.clip_norms]
    (0.02, 0.102, [19.61, 100.0])
    >>> [window.fate(eps_scale).value for eps_scale in (0.019, 0.05, 0.2)]
    ['diverges', 'steady', 'collapses']
    """

    clip_norm: float
    low: float
    high: float
    likely_high: float
    clip_norms: tuple[float, float]
    default: float

    def fate(self, eps_scale: float) -> SecondMomentRegime:
        """What becomes of ν̂ with this constant, for a constant gradient that is clipped."""
        if eps_scale <= self.low:
            return SecondMomentRegime.DIVERGES
        return SecondMomentRegime.STEADY if eps_scale <= self.high else SecondMomentRegime.COLLAPSES

    @property
    def width(self) -> float:
        """high/low, √(1 + B²/(mσ²)); ∞ without noise."""
        return self.high / self.low if self.low else math.inf

    def describe(self, eps_scale: float) -> str:
        """Where the constant lies, and what that does, in words."""
        fate = self.fate(eps_scale)
        if fate is SecondMomentRegime.DIVERGES:
            return "below the window: noise feeds on itself and diverges"
        if fate is SecondMomentRegime.STEADY:
            agree = "" if eps_scale <= self.likely_high else " if examples agree"
            return f"in the window{agree}: noise adds {_percent((self.low / eps_scale) ** 2)} to the mean of nu"
        kept = 1 - self.high / eps_scale
        return f"above the window: nu collapses, and a scale is {kept:.2f} where coordinates are alike (1: unscaled)"

    def place(self, eps_scale: float) -> str:
        """In a word or two: "in", "in if examples agree" (above `likely_high`), "above" or "below"."""
        fate = self.fate(eps_scale)
        if fate is SecondMomentRegime.STEADY:
            return "in" if eps_scale <= self.likely_high else "in if examples agree"
        return "above" if fate is SecondMomentRegime.COLLAPSES else "below"

    @property
    def too_narrow(self) -> bool:
        """Whether no value in the window is a tenth above its lower end, where estimates of ν̂ fluctuate."""
        return self.width < _CLEAR_OF_DIVERGENCE

    @property
    def to_try(self) -> tuple[float, ...]:
        """Three to six values: from inside the window, clear of its lower end, to where scaling fades.

        Both upper ends are among them where they are clear of the lower one. Two digits each, or as many as keep it on
        its side of the ends.
        """
        if not self.low:
            return tuple(rounded(self.high * factor) for factor in (0.01, 0.1, 1.0, 10.0))
        if self.width > _WIDE:
            ratio = (self.high / (2 * self.low)) ** (1 / 3)
            values = [2 * self.low * ratio**i for i in range(4)] + [3 * self.high]
        else:
            values = [math.sqrt(self.low * self.high), self.high, 2 * self.low, 4 * self.low, 8 * self.low]
        clear = [v for v in (self.likely_high, *values) if v >= _CLEAR_OF_DIVERGENCE * self.low]
        return _apart({self._typed(value) for value in clear})

    def _typed(self, value: float) -> float:
        """To the fewest digits, two or more, that leave it in its place."""
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
    """The window of eps_scale at a clip norm; `noise_multiplier` includes column and row norms, as said above.

    `agreement` is r; `default` the library's own constant, by default twice the lower end.
    Edge cases: without noise the window is (0, c/√m].
    """
    if not 0 <= agreement <= 1:
        raise ValueError(f"agreement={agreement} must lie in [0, 1]")
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


def _percent(part: float) -> str:
    """What a part of the whole adds to the rest: φ/(1−φ)."""
    return f"{part / (1 - part):.0%}" if part < 1 else "∞"


def _apart(values: Iterable[float]) -> tuple[float, ...]:
    """In order, without those that lie within a twentieth of the one before."""
    kept: list[float] = []
    for value in sorted(values):
        if not kept or value > 1.05 * kept[-1]:
            kept.append(value)
    return tuple(kept)


def rounded(value: float, digits: int = 2) -> float:
    """To two digits, for people to type.

    >>> rounded(0.0123456)
    0.012
    """
    return float(f"{value:.{digits - 1}e}") if value else 0.0
