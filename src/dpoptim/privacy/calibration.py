"""Find the smallest noise multiplier that keeps a run within an (ε, δ)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from importlib.metadata import version

import numpy as np

from dpoptim import disk_cache
from dpoptim.arguments import check_delta, check_number
from dpoptim.privacy import accounting
from dpoptim.privacy.accounting import GaussianRun, Run, SampledRun, gaussian_noise_multiplier

_COARSE_RESOLUTION = 6.0
_SMALLEST_MULTIPLIER = 1e-3
_LARGEST_MULTIPLIER = 1e9
_LARGEST_SAMPLED_EPSILON = 500.0


def tolerance(epsilon: float) -> float:
    """Return how far a calibrated ε may lie below its target: 1e-4, or 1e-4 of a target below 1."""
    return 1e-4 * min(1.0, epsilon)


def calibrate(run: Run, *, epsilon: float, delta: float) -> float:
    """Return the noise multiplier σ with ε − tolerance(ε) ≤ ε(σ) ≤ ε.

    A `GaussianRun` has a closed form. Otherwise the search brackets the root of ln ε(σ) in ln σ on a coarse grid of
    privacy losses and finishes on the fine one. Results are cached on disk. ε = ∞ gives 0. A target that σ < 1e-3
    already meets, or that no finite σ meets, is refused. With secret sampling, so is ε > 500: e^−ε must not vanish
    in float64, or the accountant rounds ε up to its grid.

    Guarantee: `accounting.epsilon` at the result never exceeds `epsilon`. A cached result is checked by computing ε.
    """
    check_number("epsilon", epsilon, above=0.0, infinity=True)
    check_delta(delta)
    if epsilon == math.inf:
        return 0.0
    if isinstance(run, GaussianRun):
        return _gaussian(run, epsilon, delta)
    if epsilon > _LARGEST_SAMPLED_EPSILON:
        raise ValueError(
            f"epsilon={epsilon!r} > {_LARGEST_SAMPLED_EPSILON:g} cannot be accounted for with secret sampling, "
            "and protects nobody. Use a smaller epsilon, Shuffled() sampling, or epsilon=inf for no noise."
        )

    def fine(multiplier: float) -> float:
        return accounting.epsilon(run, noise_multiplier=multiplier, delta=delta)

    inputs = _inputs(run, epsilon, delta)
    stored = disk_cache.load("calibration", inputs)
    if stored is not None and stored.shape == (1,) and stored[0] > 0 and _accepts(fine(float(stored[0])), epsilon):
        return float(stored[0])

    def coarse(multiplier: float) -> float:
        return accounting.epsilon(run, noise_multiplier=multiplier, delta=delta, resolution=_COARSE_RESOLUTION)

    multiplier = refine(fine, _coarse_root(coarse, epsilon), epsilon)
    disk_cache.store("calibration", inputs, np.array([multiplier]))
    return multiplier


def _gaussian(run: GaussianRun, epsilon: float, delta: float) -> float:
    multiplier = gaussian_noise_multiplier(epsilon, delta) * run.sensitivity
    while accounting.epsilon(run, noise_multiplier=multiplier, delta=delta) > epsilon:
        multiplier *= 1.0 + 1e-12  # multiplying and dividing by the sensitivity may round differently
    return multiplier


def _accepts(achieved: float, epsilon: float) -> bool:
    return epsilon - tolerance(epsilon) <= achieved <= epsilon


def _coarse_root(curve: Callable[[float], float], epsilon: float) -> float:
    from scipy.optimize import brentq

    low = high = 1.0
    while curve(low) <= epsilon:
        low /= 2.0
        if low < _SMALLEST_MULTIPLIER:
            raise ValueError(
                f"A noise multiplier below {_SMALLEST_MULTIPLIER} meets epsilon={epsilon!r}, which protects nobody. "
                "Use a smaller epsilon."
            )
    while curve(high) > epsilon:
        high *= 2.0
        if high > _LARGEST_MULTIPLIER:
            raise ValueError(
                f"No noise multiplier up to {_LARGEST_MULTIPLIER:g} meets epsilon={epsilon!r}. "
                "Use a larger epsilon or delta."
            )

    def excess(log_multiplier: float) -> float:
        return max(curve(math.exp(log_multiplier)), 1e-12) - epsilon

    return math.exp(brentq(excess, math.log(low), math.log(high), xtol=1e-3))


def refine(curve: Callable[[float], float], start: float, epsilon: float) -> float:
    """Run regula falsi in (ln σ, ln ε), aimed at the middle of the accepted band, from a start near it."""
    target = math.log(epsilon - tolerance(epsilon) / 2)
    below: tuple[float, float] | None = None  # (ln σ, ln ε) with too little noise: ε lies above the band
    above: tuple[float, float] | None = None
    point, slope = math.log(start), -2.0
    for _ in range(60):
        achieved = curve(math.exp(point))
        if _accepts(achieved, epsilon):
            return math.exp(point)
        height = math.log(max(achieved, 1e-300))
        previous = above if achieved > epsilon else below
        if achieved > epsilon:
            below = (point, height)
        else:
            above = (point, height)
        if below is not None and above is not None:
            slope = (above[1] - below[1]) / (above[0] - below[0])
            guess = below[0] + (target - below[1]) / slope
            width = above[0] - below[0]
            inside = below[0] + 0.01 * width <= guess <= above[0] - 0.01 * width
            point = guess if inside or previous is None else (below[0] + above[0]) / 2
        else:
            step = (target - height) / slope
            point += max(-0.5, min(0.5, step)) * (1.0 if below is None else 1.05)
    raise ValueError(f"Calibration to epsilon={epsilon!r} did not converge. Use a slightly different epsilon.")


def _inputs(run: SampledRun, epsilon: float, delta: float) -> dict[str, object]:
    return {
        "run": type(run).__name__,
        **dataclasses.asdict(run),
        "adjacency": run.adjacency.value,
        "epsilon": epsilon,
        "delta": delta,
        "accounting_version": accounting.ACCOUNTING_VERSION,
        "dp_accounting": version("dp-accounting"),
    }
