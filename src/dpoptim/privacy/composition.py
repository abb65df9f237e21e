"""ε of several runs on the same data together: of every trial, every seed and every variant that anybody sees."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpoptim.privacy import accounting, calibration
from dpoptim.privacy.accounting import GaussianRun, PoissonRun, Run, TruncatedPoissonRun
from dpoptim.privacy.adjacency import Adjacency
from dpoptim.privacy.gaussian import gaussian_epsilon
from dpoptim.privacy.plan import PrivacyPlan
from dpoptim.privacy.sampled_gaussian import grid_interval, one_step, smallest_interval

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_MAX_COMPOSED_POINTS = 2_000_000

Noised = tuple[PoissonRun | TruncatedPoissonRun, float]
"""A run with its noise multiplier."""


def epsilon_of_runs(plans: Sequence[PrivacyPlan], *, delta: float) -> float:
    """The ε at which all these runs together are (ε, δ)-private, later ones chosen by what earlier ones released.

    Runs without amplification are Gaussian mechanisms of shifts μᵢ = sensitivityᵢ/σᵢ, and together one of shift √Σμᵢ²
    (Dong, Roth and Su 2022), in closed form. Runs with secret sampling compose their privacy loss distributions, each
    direction of a neighbouring pair with itself. Both kinds together: the Gaussian's distribution is one more factor.

    Guarantee: an upper bound, exact where no run is amplified; never above the sum of the runs' ε (at the sum of
    their δ). It covers every model and every log of released values, each run with a noise key of its own.
    Edge cases: no runs have ε = 0; one run has its plan's; a run that is not private makes it ∞. One neighbouring
    relation must be common to all, since statements about two of them do not add up.

    >>> plan = PrivacyPlan(num_examples=1000, batch_size=100, steps=30, noise_multiplier=2.0)
    >>> four = epsilon_of_runs([plan] * 4, delta=1e-6)
    >>> four == epsilon_of_runs([plan.replace(noise_multiplier=1.0)], delta=1e-6)
    True
    >>> four < 4 * plan.epsilon(delta=1e-6)
    True
    """
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta!r}; try 1/num_examples or less")
    if not plans:
        return 0.0
    relations = sorted({plan.adjacency.value for plan in plans})
    if len(relations) > 1:
        raise ValueError(
            f"plans have the adjacencies {', '.join(relations)}, which have no guarantee in common; account for the "
            "runs of each on their own"
        )
    if not all(plan.is_private for plan in plans):
        for plan in plans:
            plan.epsilon(delta=delta)  # which tells of a noise multiplier that is not set
        return math.inf
    squared_shift, sampled = 0.0, dict[Noised, int]()
    for plan in plans:
        run, multiplier = plan.run, float(plan.noise_multiplier or 0.0)
        if isinstance(run, GaussianRun):
            squared_shift += (run.sensitivity / multiplier) ** 2
        else:
            kind = (dataclasses.replace(run, steps=1), multiplier)
            sampled[kind] = sampled.get(kind, 0) + run.steps
    if not sampled:
        return gaussian_epsilon(1.0 / math.sqrt(squared_shift), delta)
    if not squared_shift and len(sampled) == 1:
        (one, multiplier), steps = next(iter(sampled.items()))
        merged = dataclasses.replace(one, steps=steps)
        return accounting.epsilon(merged, noise_multiplier=multiplier, delta=delta)
    return _composed(squared_shift, tuple(sampled.items()), plans[0].adjacency, delta)


def repeated(run: Run, times: int) -> Run:
    """`times` runs of one kind with one noise multiplier, as a single run.

    >>> repeated(GaussianRun(sensitivity=1.5), 4)
    GaussianRun(sensitivity=3.0)
    """
    if times < 1:
        raise ValueError(f"times={times!r} must be a whole number, 1 or more")
    if isinstance(run, GaussianRun):
        return GaussianRun(sensitivity=run.sensitivity * math.sqrt(times))
    return dataclasses.replace(run, steps=run.steps * times)


def calibrate_runs(plan: PrivacyPlan, times: int, *, epsilon: float, delta: float) -> PrivacyPlan:
    """The plan with the least noise at which `times` runs of it TOGETHER keep to (ε, δ).

    Guarantee: `epsilon_of_runs([result] * times, delta=delta)` is met within 1e-4 and never passed.

    >>> plan = PrivacyPlan(num_examples=1000, batch_size=100, steps=30)
    >>> many = calibrate_runs(plan, 9, epsilon=2.0, delta=1e-6)
    >>> 1.9999 < epsilon_of_runs([many] * 9, delta=1e-6) <= 2.0
    True
    """
    if not plan.replace(noise_multiplier=1.0).is_private:
        raise ValueError(f"release={plan.release!r} is not private at any noise multiplier; release something else")
    multiplier = calibration.calibrate(repeated(plan.run, times), epsilon=epsilon, delta=delta)
    found = plan.replace(noise_multiplier=multiplier, delta=delta)
    while epsilon_of_runs([found] * times, delta=delta) > epsilon:  # sums of squares and their root may round apart
        multiplier *= 1.0 + 1e-12
        found = found.replace(noise_multiplier=multiplier)
    return found


@functools.lru_cache(maxsize=64)
def _composed(
    squared_shift: float, sampled: tuple[tuple[Noised, int], ...], adjacency: Adjacency, delta: float
) -> float:
    """Privacy loss distributions of all kinds on one grid, composed."""
    if delta < accounting.MIN_PLD_DELTA:
        raise ValueError(
            f"delta={delta!r} is below {accounting.MIN_PLD_DELTA}, where privacy loss distributions lose their "
            "accuracy; use a larger delta"
        )
    interval = _common_interval(squared_shift, sampled, adjacency)
    total: PrivacyLossDistribution | None = None
    for (run, multiplier), steps in sampled:
        if isinstance(run, PoissonRun):
            step = one_step(multiplier, run.sampling_prob, adjacency, interval)
        else:
            step = accounting._truncated_step(run, multiplier, interval)
        part = step.self_compose(steps)
        total = part if total is None else total.compose(part)
    assert total is not None
    if not squared_shift:
        return float(total.get_epsilon_for_delta(delta))
    total = total.compose(one_step(_multiplier_of(squared_shift, adjacency), 1.0, adjacency, interval))
    alone = gaussian_epsilon(1.0 / math.sqrt(squared_shift), delta)  # a grid may lie a hair below it where ε is large
    return max(float(total.get_epsilon_for_delta(delta)), alone)


def _multiplier_of(squared_shift: float, adjacency: Adjacency) -> float:
    """The noise multiplier at which one whole participation has this shift; under REPLACE neighbours lie 2 apart."""
    return adjacency.sensitivity_factor / math.sqrt(squared_shift)


def _common_interval(squared_shift: float, sampled: tuple[tuple[Noised, int], ...], adjacency: Adjacency) -> float:
    """The finest grid that any of them asks for, as far as all of them fit in memory on it."""
    kinds = [(multiplier, run.sampling_prob, steps) for (run, multiplier), steps in sampled]
    if squared_shift:
        kinds.append((_multiplier_of(squared_shift, adjacency), 1.0, 1))
    wished = min(grid_interval(multiplier, rate, adjacency, steps=steps) for multiplier, rate, steps in kinds)
    smallest = [smallest_interval(multiplier, rate, adjacency) for multiplier, rate, _ in kinds]
    # Where a sample is cut, one step is also a REPLACE pair of twice the size, whose rate is at most 1.
    cut = [multiplier for (run, multiplier), _ in sampled if isinstance(run, TruncatedPoissonRun)]
    smallest += [smallest_interval(multiplier / 2, 1.0, Adjacency.REPLACE) for multiplier in cut]
    factor = adjacency.sensitivity_factor
    mean_loss = sum(steps * rate / multiplier**2 / 2 for multiplier, rate, steps in kinds)
    return max(wished, *smallest, factor**2 * mean_loss / _MAX_COMPOSED_POINTS)
