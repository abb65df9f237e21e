"""AdaGrad on sparse logistic regression, all draws, trials and settings at once.

The slots are the library's (AdaGrad, its second moments) and so are noise levels and normals; only clipping is written
here, as it goes by run. A run is one trial at one learning rate and one ε; the runs of a trial see the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpoptim import optim
from dpoptim.clipping import Released
from dpoptim.noise import NormalSource, Strategy
from dpoptim.optim.bundle import ParameterBundle
from dpoptim.privacy import Gradient, IndependentMoments, PrivacyPlan
from experiments.logistic.problem import Datasets, Problem

VARIANTS: dict[str, str] = {
    "ground_truth": "NOT private: θ = 1, which made the data",
    "non_private": "NOT private: AdaGrad without clipping or noise",
    "post_processing": "AdaGrad on the noisy gradient; ν of g̃²",
    "post_processing_eps_tuned": "the same with ε chosen from the grid of IME",
    "independent_moments": "gradient and square released with noise of their own, √2 times as much each (IME)",
    "independent_moments_for_free": "NOT private at this σ: IME with the gradient's noise of post-processing, as if "
    "the square cost nothing",
}
TENSOR, RUN_ID = "theta", "logistic"
"""Under what name and run the normals are drawn: a library run of the same names and key sees those of the first."""


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Standard deviations per unit row: of the sum of clipped gradients, and of the released square."""

    gradient_sum: float
    square: float


def plan_of(problem: Problem, variant: str, noise: str) -> PrivacyPlan | None:
    """The plan that the variant releases under; None for those without noise."""
    if variant in ("ground_truth", "non_private"):
        return None
    plan = problem.plan(noise)
    return plan.with_release(Gradient() if variant.startswith("post_processing") else IndependentMoments())


def levels(problem: Problem, variant: str, noise: str) -> Levels:
    """The library's noise levels; "for free" takes the gradient's from post-processing and the square's from IME.

    >>> problem = Problem(batch_size=8)
    >>> levels(problem, "post_processing", "independent").gradient_sum
    1.0
    >>> free, paid = (levels(problem, f"independent_moments{end}", "independent") for end in ("_for_free", ""))
    >>> free.gradient_sum, free.square == paid.square, round(paid.gradient_sum, 6), round(paid.square, 6)
    (1.0, True, 1.414214, 0.331456)
    """
    plan = plan_of(problem, variant, noise)
    if plan is None:
        return Levels(gradient_sum=0.0, square=0.0)
    gradient_sum, square = plan.noise_stddevs()
    if variant == "independent_moments_for_free":
        gradient_sum = plan.with_release(Gradient()).noise_stddevs().gradient_sum
    return Levels(gradient_sum=gradient_sum, square=square or 0.0)


def noise_rows(problem: Problem, strategy: Strategy, stream: str) -> Tensor:
    """[steps, draws·trials] of column_norm·C⁻¹z, with the normals that the library's optimizer would draw."""
    source = NormalSource.of_tensor(
        problem.key.for_run(RUN_ID), TENSOR, numel=problem.draws * problem.trials, stream=stream
    )
    z = torch.stack([source.normals(t, dtype=torch.float64) for t in range(problem.steps)])
    return torch.from_numpy(strategy.noising_matrix() * strategy.column_norm) @ z


def walk(
    problem: Problem, data: Datasets, variant: str, noise: str, *, lrs: Sequence[float], eps: Sequence[float]
) -> Iterator[Tensor]:
    """θ_1, ..., θ_T of every run, one at a time: [draws, trials, learning rates, values of ε].

        g = (1/B)Σ_j clip(∇loss_j),  g̃ = g + noise,  ν ← ν + g̃² or ν + g² + noise,  θ ← θ − lr·g̃/(√max(ν, 0) + ε)

    Guarantee: a run moves as the library's optimizer with that rule would, with the same normals and batches. The
    average is projected to [−ζ, ζ] before it is squared, which changes nothing for batches of exactly B examples.
    Edge cases: without noise all trials are one, and one is run; a run that diverges gives inf or NaN.
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
        denominator = moment.denominator(bundle, rule, noisy_grad, released)
        theta = theta - step_sizes * rule.direction(noisy_grad, denominator, bundle)
        yield theta.view(shape)


def _clipped_sum(theta: Tensor, signed: Tensor, clip_norm: float) -> Tensor:
    """[draws·runs]: Σ_j clip(−s_j x_j·sigmoid(−θ s_j x_j)) over one step; theta [draws, runs], signed [draws, most]."""
    total = torch.zeros_like(theta)
    for column in signed.T:  # few, so that no array is larger than theta
        value = column[:, None]
        total -= (value * torch.sigmoid(-theta * value)).clamp_(-clip_norm, clip_norm)
    return total.flatten()


def _spread_out(row: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """One number a draw and trial, for all of its runs."""
    return row.view(shape[0], shape[1], 1, 1).expand(shape).flatten()
