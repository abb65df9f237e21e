"""Sparse logistic regression in one dimension: the settings, the datasets drawn from them, and their losses.

    x_j ~ N(0, 1) with probability `present`, else x_j = 0;   y_j ~ Bernoulli(sigmoid(x_j)), so that θ* = 1
    loss_j(θ) = log(1 + exp(−s_j θ x_j)),  s_j = ±1 for y_j = 1, 0;   ∇loss_j = −s_j x_j sigmoid(−s_j θ x_j)

An example with x = 0 has the gradient 0: only the others are kept here, each with its step. Test samples are drawn
from those with x ≠ 0, as the losses that the paper prints are near that of θ* on such ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.interpolate import BPoly, CubicSpline, PPoly
from torch import Tensor

from dpoptim.noise import Dense, Independent, NoiseKey, StrategySpec
from dpoptim.noise.series import Series
from dpoptim.privacy import PrivacyPlan

NOISES: dict[str, StrategySpec] = {"independent": Independent(), "dense": Dense()}
KNOTS = np.linspace(-5.0, 7.0, 121)
"""Where losses are computed; between them they are interpolated, beyond them they go on straight."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One setting. Every example takes part in exactly one step: `batch_size · steps` examples, one epoch.

    present: the probability that an example's x is not 0.
    draws: how many datasets; trials: how many runs with noise of their own on each.
    seed: makes the datasets and the noise key, known to all; nothing here is secret.

    >>> Problem(batch_size=10, steps=20).plan("independent").num_examples
    200
    """

    present: float = 0.1
    batch_size: int = 10
    steps: int = 1000
    clip_norm: float = 1.0
    noise_multiplier: float = 1.0
    start: float = 0.0
    draws: int = 100
    trials: int = 30
    test_samples: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.present <= 1:
            raise ValueError(f"present={self.present} must lie in (0, 1]")
        for name in ("batch_size", "steps", "draws", "trials", "test_samples"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number, at least 1")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed} must lie in [0, 2^64)")
        self.plan("independent")  # checks the others

    @property
    def key(self) -> NoiseKey:
        """The noise key that `seed` makes: known to all, hence for simulations alone."""
        return NoiseKey.from_bytes(self.seed.to_bytes(32, "little"))

    def plan(self, noise: str) -> PrivacyPlan:
        """Batches of exactly batch_size, one participation, and noise of that name."""
        if noise not in NOISES:
            raise ValueError(f"noise={noise!r} must be one of {', '.join(NOISES)}")
        return PrivacyPlan(
            num_examples=self.batch_size * self.steps,
            batch_size=self.batch_size,
            steps=self.steps,
            clip_norm=self.clip_norm,
            noise_multiplier=self.noise_multiplier,
            noise=NOISES[noise],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Datasets:
    """All draws. `signed` is s_j·x_j of the examples of each step, filled up with 0, whose gradient is 0."""

    signed: Tensor  # [steps, draws, most examples of a step with x ≠ 0]
    validation: tuple[CubicSpline, ...]  # θ -> mean loss of samples to tune on, one a draw
    test: tuple[CubicSpline, ...]  # the same of samples to report on


def datasets(problem: Problem) -> Datasets:
    """The examples and the losses; draw d is the same whatever the number of draws and trials, and the noise."""
    draws = [_draw(problem, draw) for draw in range(problem.draws)]
    widest = max(filled.shape[1] for filled, _, _ in draws)
    padded = [np.pad(filled, ((0, 0), (0, widest - filled.shape[1]))) for filled, _, _ in draws]
    return Datasets(
        signed=torch.from_numpy(np.stack(padded, axis=1)),
        validation=tuple(validation for _, validation, _ in draws),
        test=tuple(test for _, _, test in draws),
    )


def _draw(problem: Problem, draw: int) -> tuple[Series, CubicSpline, CubicSpline]:
    rng = np.random.default_rng([problem.seed, draw])
    counts = rng.binomial(problem.batch_size, problem.present, size=problem.steps)
    filled = np.zeros((problem.steps, max(1, int(counts.max()))))
    for step, count in enumerate(counts):
        filled[step, :count] = signed_samples(rng, int(count))
    validation, test = (mean_loss(signed_samples(rng, problem.test_samples)) for _ in range(2))
    return filled, validation, test


def signed_samples(rng: np.random.Generator, count: int) -> Series:
    """s·x of that many examples with x ≠ 0."""
    x = rng.standard_normal(count)
    return np.asarray(np.where(rng.random(count) < 1 / (1 + np.exp(-x)), x, -x))


def mean_loss(signed: Series) -> CubicSpline:
    """θ -> mean of log(1 + exp(−θ·signed)), a cubic spline through KNOTS with the right slopes at its ends.

    Between the knots it is within 4e-8 times the mean of signed⁴ of the mean itself, which for thousands of samples
    is 1.2e-7, reached near θ = 0. See `evaluate` for θ beyond them.

    >>> signed = signed_samples(np.random.default_rng(0), 500)
    >>> exact = float(np.logaddexp(0.0, -1.234 * signed).mean())
    >>> abs(float(mean_loss(signed)(1.234)) - exact) < 1e-7
    True
    """
    values = np.array([np.logaddexp(0.0, -theta * signed).mean() for theta in KNOTS])
    ends = [float((-signed / (1 + np.exp(theta * signed))).mean()) for theta in (KNOTS[0], KNOTS[-1])]
    return CubicSpline(KNOTS, values, bc_type=((1, ends[0]), (1, ends[1])))


def population_loss() -> PPoly:
    """θ -> the mean loss of all examples with x ≠ 0, by quadrature over x; least at θ = 1, where it is .5994382.

    Quintics through the loss and its first two derivatives at KNOTS, each an integral over x by the trapezoidal rule,
    whose error falls like exp(−2π·distance/spacing) with the distance of the nearest pole, at least π/7 here.

    Guarantee: within 1e-9 between the knots, the slope within 1e-8 and the second derivative within 1e-6; at the knots
    all of them to rounding.

    >>> loss = population_loss()
    >>> [round(float(loss(1.0, order)), 7) + 0.0 for order in range(3)]
    [0.5994382, 0.0, 0.1442245]
    """
    x = np.linspace(-12.0, 12.0, 481)
    weights = np.exp(-x * x / 2)
    weights /= weights.sum()
    chance = 1 / (1 + np.exp(-x))
    said = 1 / (1 + np.exp(-np.outer(KNOTS, x)))  # sigmoid(θx)
    values = (
        chance * np.logaddexp(0.0, -np.outer(KNOTS, x)) + (1 - chance) * np.logaddexp(0.0, np.outer(KNOTS, x))
    ) @ weights
    slopes, bends = ((said - chance) * x) @ weights, (said * (1 - said) * x * x) @ weights
    return PPoly.from_bernstein_basis(BPoly.from_derivatives(KNOTS, np.stack([values, slopes, bends], axis=1)))


def evaluate(loss: PPoly, theta: Series) -> Series:
    """The loss at θ; beyond the knots it rises straight on, as steep as it is at the last one; ∞ where θ is not finite.

    Losses are convex, and those of hundreds of samples are least between the knots: beyond them this is then the
    tangent, at most what the loss really is. A loss that still falls at the last knot (all samples of one sign) is
    taken to rise there, so that a run that goes so far is never the best.
    """
    inside = np.clip(theta, KNOTS[0], KNOTS[-1])
    beyond = np.where(np.isfinite(theta), theta - inside, math.inf)
    outside = np.where(beyond == 0, 0.0, np.abs(beyond) * np.abs(loss(inside, 1)))
    return np.asarray(loss(np.where(np.isnan(inside), 0.0, inside)) + np.where(np.isfinite(theta), outside, math.inf))
