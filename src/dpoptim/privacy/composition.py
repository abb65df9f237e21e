"""ε of several runs on the same data together, and of the first steps of one run."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpoptim.arguments import check_delta, check_whole
from dpoptim.noise import Independent
from dpoptim.privacy import accounting, calibration
from dpoptim.privacy.accounting import GaussianRun, Run, SampledRun, TruncatedPoissonRun, gaussian_epsilon
from dpoptim.privacy.adjacency import Adjacency
from dpoptim.privacy.sampled_gaussian import MAX_COMPOSED_POINTS, grid_interval, one_step, smallest_interval
from dpoptim.privacy.sampling import CyclicPoisson

if TYPE_CHECKING:
    from dpoptim.privacy.plan import PrivacyPlan

_CURVE_POINTS = 20

Noised = tuple[SampledRun, float]
"""A run with its noise multiplier."""


def epsilon_of_runs(plans: Sequence[PrivacyPlan], *, delta: float) -> float:
    """Return the ε at which all these runs together are (ε, δ)-private.

    Later runs may depend on what earlier runs released. Runs without amplification are Gaussian mechanisms with shifts
    μᵢ = sensitivityᵢ/σᵢ, and together one with shift √Σμᵢ² (Dong, Roth and Su 2022). Runs with secret sampling compose
    their privacy loss distributions; the Gaussian is one more factor. Counts before a run are a run of their own.

    Args:
        plans: One plan per run, all with the same adjacency. No plans give ε = 0; a run that is not private gives ∞.
        delta: δ in (0, 1).

    Guarantee: an upper bound, and exact if no run is amplified. It covers every model and every log of released values,
    if each run has its own noise key.

    >>> from dpoptim.privacy.plan import PrivacyPlan
    >>> plan = PrivacyPlan(num_examples=1000, batch_size=100, steps=30, noise_multiplier=2.0)
    >>> four = epsilon_of_runs([plan] * 4, delta=1e-6)
    >>> four == epsilon_of_runs([plan.replace(noise_multiplier=1.0)], delta=1e-6)
    True
    >>> four < 4 * plan.epsilon(delta=1e-6)
    True
    """
    check_delta(delta)
    if not plans:
        return 0.0
    relations = sorted({f"{plan.adjacency.value}{' of users' * (plan.unit == 'user')}" for plan in plans})
    if len(relations) > 1:
        raise ValueError(
            f"Expected plans with the same adjacency, got {', '.join(relations)}. Account for each separately."
        )
    for plan in plans:
        if not plan.is_private and plan.epsilon(delta=delta) == math.inf:  # raises if the noise is not set
            return math.inf
    squared_shift = 0.0
    sampled: dict[Noised, int] = {}
    for plan in plans:
        run, multiplier = plan.run, float(plan.noise_multiplier or 0.0)
        if plan.counts is not None:
            squared_shift += plan.counts.shift(plan.adjacency) ** 2
            delta -= plan.counts.exposed_delta(plan.adjacency)
        if isinstance(run, GaussianRun):
            squared_shift += (run.sensitivity / multiplier) ** 2
        else:
            kind = (dataclasses.replace(run, steps=1), multiplier)
            sampled[kind] = sampled.get(kind, 0) + run.steps
    if delta <= 0.0:
        return math.inf
    if not sampled:
        return gaussian_epsilon(1.0 / math.sqrt(squared_shift), delta)
    if not squared_shift and len(sampled) == 1:
        (one, multiplier), steps = next(iter(sampled.items()))
        merged = dataclasses.replace(one, steps=steps)
        return accounting.epsilon(merged, noise_multiplier=multiplier, delta=delta)
    return _composed(squared_shift, tuple(sampled.items()), plans[0].adjacency, delta)


def calibrate_runs(plan: PrivacyPlan, times: int, *, epsilon: float, delta: float) -> PrivacyPlan:
    """Return the plan with the least noise at which `times` runs of it TOGETHER keep to (ε, δ).

    Guarantee: `epsilon_of_runs([result] * times, delta=delta)` is within 1e-4 of `epsilon` and never above it.

    >>> from dpoptim.privacy.plan import PrivacyPlan
    >>> plan = PrivacyPlan(num_examples=1000, batch_size=100, steps=30)
    >>> many = calibrate_runs(plan, 9, epsilon=2.0, delta=1e-6)
    >>> 1.9999 < epsilon_of_runs([many] * 9, delta=1e-6) <= 2.0
    True
    """
    if not plan.replace(noise_multiplier=1.0).is_private:
        raise ValueError(f"release={plan.release!r} is not private at any noise multiplier. Use a different release.")
    run, times = plan.run, check_whole("times", times)
    merged: Run
    if plan.counts is not None:
        raise ValueError("A plan with counts cannot be repeated. Declare the columns instead of estimating them.")
    if isinstance(run, GaussianRun):
        merged = GaussianRun(sensitivity=run.sensitivity * math.sqrt(times))
    else:
        merged = dataclasses.replace(run, steps=run.steps * times)
    multiplier = calibration.calibrate(merged, epsilon=epsilon, delta=delta)
    found = plan.replace(noise_multiplier=multiplier, delta=delta)
    while epsilon_of_runs([found] * times, delta=delta) > epsilon:  # a sum of squares and its root may round up
        multiplier *= 1.0 + 1e-12
        found = found.replace(noise_multiplier=multiplier)
    return found


@functools.lru_cache(maxsize=64)
def _composed(
    squared_shift: float, sampled: tuple[tuple[Noised, int], ...], adjacency: Adjacency, delta: float
) -> float:
    """Compose the privacy loss distributions of all kinds on one grid."""
    accounting.check_pld_delta(delta)
    kinds = [(multiplier, run.sampling_prob, steps) for (run, multiplier), steps in sampled]
    if squared_shift:
        # At this noise multiplier one participation has the shift; under REPLACE neighbours lie 2 apart.
        gaussian = adjacency.sensitivity_factor / math.sqrt(squared_shift)
        kinds.append((gaussian, 1.0, 1))
    wanted = min(grid_interval(multiplier, rate, adjacency, steps=steps) for multiplier, rate, steps in kinds)
    smallest = [smallest_interval(multiplier, rate, adjacency) for multiplier, rate, _ in kinds]
    # A step of a cut sample is also a REPLACE pair of twice the size, whose rate is at most 1.
    cut = [multiplier for (run, multiplier), _ in sampled if isinstance(run, TruncatedPoissonRun)]
    smallest += [smallest_interval(multiplier / 2, 1.0, Adjacency.REPLACE) for multiplier in cut]
    mean_loss = sum(steps * rate / multiplier**2 / 2 for multiplier, rate, steps in kinds)
    # The finest grid that any run needs, or a coarser one on which all of them fit in memory.
    interval = max(wanted, *smallest, adjacency.sensitivity_factor**2 * mean_loss / MAX_COMPOSED_POINTS)
    parts = [accounting.step_distribution(run, noise, interval).self_compose(steps) for (run, noise), steps in sampled]
    alone = 0.0
    if squared_shift:
        parts.append(one_step(gaussian, 1.0, adjacency, interval))
        alone = gaussian_epsilon(1.0 / math.sqrt(squared_shift), delta)  # at a large ε the grid may lie slightly below
    total = functools.reduce(lambda one, other: one.compose(other), parts)
    return max(float(total.get_epsilon_for_delta(delta)), alone)


class EpsilonSpent:
    """An upper bound on ε after each step: the accountant's value at the next of about 25 steps.

    With independent noise the first t steps are a run of t steps with the same noise multiplier. Correlated noise is
    accounted for as a whole, so its ε is spent from the first step on; `note` is a text that explains this.

    >>> from dpoptim.privacy.plan import PrivacyPlan
    >>> plan = PrivacyPlan(num_examples=1000, batch_size=100, steps=30).calibrate(epsilon=8.0, delta=1e-6)
    >>> spent = EpsilonSpent(plan)
    >>> spent.at(0), spent.at(10) < spent.at(30) <= 8.0, spent.note
    (0.0, True, None)
    """

    def __init__(self, plan: PrivacyPlan) -> None:
        self._is_free = plan.counts is None  # until the first step
        partial = isinstance(plan.noise, Independent) and not isinstance(plan.sampling, CyclicPoisson)
        self.note = None if partial else "the whole run's: correlated noise is accounted for all steps at once"
        by_share = {math.ceil(plan.steps * part / _CURVE_POINTS) for part in range(1, _CURVE_POINTS + 1)}
        by_doubling = {2**power for power in range(plan.steps.bit_length()) if 2**power <= plan.steps // _CURVE_POINTS}
        self._grid = sorted(by_share | by_doubling) if partial else [plan.steps]
        self._value = functools.cache(
            lambda steps: (plan.replace(steps=steps) if steps < plan.steps else plan).epsilon()
        )

    def at(self, step: int) -> float:
        """Return the bound after `step` steps."""
        if step <= 0 and self._is_free:
            return 0.0
        return self._value(self._grid[bisect.bisect_left(self._grid, step)])
