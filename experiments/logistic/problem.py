"""Sparse logistic regression in one dimension: the settings, the datasets, their losses, and AdaGrad on all of them.

    x_j ~ N(0, 1), set to 0 for all but a share `present` of the examples;   y_j ~ Bernoulli(sigmoid(x_j)), so θ* = 1
    loss_j(θ) = log(1 + exp(−s_j θ x_j)),  s_j = ±1 for y_j = 1, 0;   ∇loss_j = −s_j x_j sigmoid(−s_j θ x_j)

An example with x = 0 has gradient 0, so only the others are kept, each with its step. Test samples are drawn from those
with x ≠ 0, as in the paper.

AdaGrad, its second moments, noise levels and normals are the library's; only clipping is written here, because it works
per run. A run is one trial at one learning rate and one ε. All runs of a trial see the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.interpolate import BPoly, CubicSpline, PPoly
from torch import Tensor

from dpoptim import optim
from dpoptim.clipping import Released
from dpoptim.noise import Dense, Independent, NoiseKey, NormalSource, Strategy, StrategySpec
from dpoptim.noise.series import Series
from dpoptim.optim.bundle import ParameterBundle
from dpoptim.privacy import Gradient, IndependentMoments, PrivacyPlan

NOISES: dict[str, StrategySpec] = {"independent": Independent(), "dense": Dense()}
KNOTS = np.linspace(-5.0, 7.0, 121)
"""Where losses are computed. They are interpolated between these points and continued straight beyond them."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One setting. Every example takes part in exactly one step: `batch_size · steps` examples, one epoch.

    present: the share of the examples whose x is not 0; which ones is drawn.
    draws: the number of datasets; trials: the number of runs on each, with different noise.
    seed: determines the datasets and the noise key; nothing here is secret.

    >>> Problem(batch_size=10, steps=20).plan("independent").num_examples
    200
    """

    present: float = 0.1
    batch_size: int = 1
    steps: int = 1000
    clip_norm: float = 1.0
    noise_multiplier: float = 0.1
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
        """The noise key from `seed`: not secret, so only for simulations."""
        return NoiseKey.from_bytes(self.seed.to_bytes(32, "little"))

    def plan(self, noise: str) -> PrivacyPlan:
        """The plan with batches of exactly batch_size, one participation per example, and this noise."""
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
    """All draws. `signed` is s_j·x_j of the examples of each step, padded with 0, whose gradient is 0."""

    signed: Tensor  # [steps, draws, most examples of a step with x ≠ 0]
    validation: tuple[CubicSpline, ...]  # θ -> mean loss of samples to tune on, one per draw
    test: tuple[CubicSpline, ...]  # the same for samples to report on


def datasets(problem: Problem) -> Datasets:
    """The examples and the losses. Draw d does not depend on the number of draws and trials, or on the noise."""
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
    examples = problem.batch_size * problem.steps
    present = rng.choice(examples, round(problem.present * examples), replace=False)
    counts = np.bincount(present // problem.batch_size, minlength=problem.steps)
    filled = np.zeros((problem.steps, max(1, int(counts.max()))))
    for step, count in enumerate(counts):
        filled[step, :count] = signed_samples(rng, int(count))
    validation, test = (mean_loss(signed_samples(rng, problem.test_samples)) for _ in range(2))
    return filled, validation, test


def signed_samples(rng: np.random.Generator, count: int) -> Series:
    """s·x of `count` examples with x ≠ 0."""
    x = rng.standard_normal(count)
    return np.asarray(np.where(rng.random(count) < 1 / (1 + np.exp(-x)), x, -x))


def mean_loss(signed: Series) -> CubicSpline:
    """θ -> mean of log(1 + exp(−θ·signed)), a cubic spline through KNOTS with the right slopes at its ends.

    The error between the knots is below 4e-8 times the mean of signed⁴, which is 1.2e-7 for thousands of samples.
    See `evaluate` for θ beyond the knots.

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

    Quintics through the loss and its first two derivatives at KNOTS, each an integral over x by the trapezoidal rule.
    Between the knots the loss is within 1e-9, its slope within 1e-8 and its second derivative within 1e-6.

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
    """The loss at θ. Beyond the knots it rises with the slope at the last knot; ∞ where θ is not finite.

    Losses are convex, and with hundreds of samples least between the knots. So beyond them this is the tangent, a lower
    bound. A loss that still falls at the last knot is taken to rise, so that such a run is never the best.
    """
    inside = np.clip(theta, KNOTS[0], KNOTS[-1])
    beyond = np.where(np.isfinite(theta), theta - inside, math.inf)
    outside = np.where(beyond == 0, 0.0, np.abs(beyond) * np.abs(loss(inside, 1)))
    return np.asarray(loss(np.where(np.isnan(inside), 0.0, inside)) + np.where(np.isfinite(theta), outside, math.inf))


VARIANTS: dict[str, str] = {
    "ground_truth": "NOT private: θ = 1, which made the data",
    "non_private": "NOT private: AdaGrad without clipping or noise",
    "post_processing": "AdaGrad on the noisy gradient; ν of g̃²",
    "post_processing_floored": "the same with the rate of IME, lr/max(1, √ν)",
    "post_processing_eps_tuned": "the same with the rate lr/(√ν + ε), ε tuned",
    "independent_moments": "gradient and square released with separate noise, √2 times as much each (IME)",
    "independent_moments_for_free": "NOT private at this σ: IME without the factor √2, as if the square cost nothing",
}
FLOORED = ("post_processing_floored", "independent_moments", "independent_moments_for_free")
"""Variants with the rate lr/max(1, √ν). The paper gives it to IME, whose ν can be negative."""
TENSOR, RUN_ID = "theta", "logistic"
"""Name and run of the normals: a library run with the same names and key sees those of the first trial."""


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Standard deviations per unit row: on the sum of clipped gradients, and on the released square."""

    gradient_sum: float
    square: float


def plan_of(problem: Problem, variant: str, noise: str) -> PrivacyPlan | None:
    """The plan of the variant; None for those without noise."""
    if variant in ("ground_truth", "non_private"):
        return None
    plan = problem.plan(noise)
    return plan.with_release(Gradient() if variant.startswith("post_processing") else IndependentMoments())


def levels(problem: Problem, variant: str, noise: str) -> Levels:
    """The library's noise levels; "for free" has those of IME without the factor √2.

    >>> problem = Problem(batch_size=8, noise_multiplier=1.0)
    >>> levels(problem, "post_processing", "independent").gradient_sum
    1.0
    >>> free, paid = (levels(problem, f"independent_moments{end}", "independent") for end in ("_for_free", ""))
    >>> [round(level, 6) for level in (paid.gradient_sum, paid.square, free.gradient_sum, free.square)]
    [1.414214, 0.331456, 1.0, 0.234375]
    """
    plan = plan_of(problem, variant, noise)
    if plan is None:
        return Levels(gradient_sum=0.0, square=0.0)
    gradient_sum, square = plan.noise_stddevs()
    price = math.sqrt(2) if variant == "independent_moments_for_free" else 1.0
    return Levels(gradient_sum=gradient_sum / price, square=(square or 0.0) / price)


def noise_rows(problem: Problem, strategy: Strategy, stream: str) -> Tensor:
    """[steps, draws·trials]: column_norm·C⁻¹z, with the normals that the library's optimizer would draw."""
    source = NormalSource.of_tensor(
        problem.key.for_run(RUN_ID), TENSOR, numel=problem.draws * problem.trials, stream=stream
    )
    z = torch.stack([source.normals(t, dtype=torch.float64) for t in range(problem.steps)])
    return torch.from_numpy(strategy.noising_matrix() * strategy.column_norm) @ z


def walk(
    problem: Problem,
    data: Datasets,
    variant: str,
    noise: str,
    *,
    lrs: Sequence[float],
    eps: Sequence[float],
    floor: float = 0.0,
) -> Iterator[Tensor]:
    """θ_1, ..., θ_T of every run, one at a time: [draws, trials, learning rates, values of ε].

        g = (1/B)Σ_j clip(∇loss_j),  g̃ = g + noise,  ν ← ν + g̃² or ν + g² + noise
        θ ← θ − lr·g̃/max(floor, √max(ν, 0) + ε)

    Without a floor, a run moves as the library's optimizer would, with the same normals and batches. The average is
    projected to [−ζ, ζ] before it is squared, which changes nothing for batches of exactly B examples. Without noise
    one trial is run. A run that diverges gives inf or NaN.
    """
    level, plan = levels(problem, variant, noise), plan_of(problem, variant, noise)
    trials, clip_norm = (1, math.inf) if plan is None else (problem.trials, problem.clip_norm)
    shape = (problem.draws, trials, len(lrs), len(eps))
    rows = square_rows = torch.zeros(problem.steps, problem.draws * trials, dtype=torch.float64)
    if plan is not None:
        rows = noise_rows(problem, plan.strategy, "gradient") * (level.gradient_sum / problem.batch_size)
        if level.square:
            square_rows = noise_rows(problem, plan.square_strategy, "square") * level.square
    rule = optim.AdaGrad()
    moment = optim.OfReleasedSquare() if level.square else optim.OfNoisyGradient()
    step_sizes = torch.tensor(lrs, dtype=torch.float64)[:, None].expand(shape).flatten()
    group = {**rule.defaults(), "eps": torch.tensor(eps, dtype=torch.float64).expand(shape).flatten()}
    theta = torch.full((step_sizes.numel(),), problem.start, dtype=torch.float64)
    state: dict[str, Tensor] = {}
    for t in range(1, problem.steps + 1):
        average = _clipped_sum(theta.view(problem.draws, -1), data.signed[t - 1], clip_norm) / problem.batch_size
        noisy_grad = average + _spread_out(rows[t - 1], shape)
        square = average.clamp(-clip_norm, clip_norm) ** 2 + _spread_out(square_rows[t - 1], shape)
        bundle = ParameterBundle([TENSOR], [theta], state, {}, group, t)
        released = Released(t - 1, {TENSOR: noisy_grad}, {TENSOR: square}, noise_variance=0.0)
        denominator = moment.denominator(bundle, rule, noisy_grad, released).clamp(min=floor)
        theta = theta - step_sizes * rule.direction(noisy_grad, denominator, bundle)
        yield theta.view(shape)


def _clipped_sum(theta: Tensor, signed: Tensor, clip_norm: float) -> Tensor:
    """[draws·runs]: Σ_j clip(−s_j x_j·sigmoid(−θ s_j x_j)) over one step; theta [draws, runs], signed [draws, most]."""
    total = torch.zeros_like(theta)
    for column in signed.T:  # few columns, so no array is larger than theta
        value = column[:, None]
        total -= (value * torch.sigmoid(-theta * value)).clamp_(-clip_norm, clip_norm)
    return total.flatten()


def _spread_out(row: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """One number per draw and trial, expanded to all of its runs."""
    return row.view(shape[0], shape[1], 1, 1).expand(shape).flatten()
