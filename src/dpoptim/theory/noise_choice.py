"""Which noise to use: every mechanism at one (ε, δ), side by side, and the one to choose."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from dpoptim.arguments import check_at_most, check_number, check_whole
from dpoptim.noise import (
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    Independent,
    NoiseMemory,
    PrefixSums,
    SquareRoot,
    StrategySpec,
    Workload,
)
from dpoptim.noise.series import Series
from dpoptim.optim.out_of_memory import format_bytes
from dpoptim.privacy import Adjacency, CyclicPoisson, Poisson, PrivacyPlan, Sampling, Shuffled
from dpoptim.privacy.accounting import describe_accountant

_MOST_NORMAL_ROWS = 16.0  # generating more rows of normals per step takes longer than a model's step
_AS_GOOD = 1.005  # errors within 0.5 % count as equal: time decides, then memory
_LEAST_BUDGET = 4 * 2**30
_BUDGET_PER_PARAMETER = 16
_MOST_STEPS = 100_000  # takes minutes; ten times as many take an hour
_MOST_SAMPLED_EPSILON = 100.0  # takes half a minute; privacy loss distributions grow with ε
_LEAST_MULTIPLIER = 0.05  # below, ε is in the thousands and privacy loss distributions take minutes

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A calibrated plan as one of several choices: how much noise remains, in how much memory.

    Errors are root mean squares of the noise on the workload, by default prefix sums, of the AVERAGED gradient
    for clip norm 1: noise_multiplier·column_norm·‖row of AC⁻¹‖/batch_size. `memory` is where past noise is stored.
    """

    plan: PrivacyPlan
    parameters: int
    memory: NoiseMemory = NoiseMemory()  # noqa: RUF009
    workload: Workload = PrefixSums()  # noqa: RUF009

    @property
    def name(self) -> str:
        """The noise as written in a plan, without the shared workload: BandedToeplitz(bands=128)."""
        noise: Any = self.plan.noise
        if getattr(noise, "workload", None) == self.workload:
            noise = dataclasses.replace(noise, workload=PrefixSums())
        return repr(noise)

    @cached_property
    def errors(self) -> Series:
        """The root mean square error at each step."""
        plan = self.plan
        unit = plan.noise_stddevs().gradient_sum / plan.clip_norm * plan.strategy.column_norm / plan.batch_size
        return np.asarray(unit * np.sqrt(plan.strategy.squared_errors(self.workload)), dtype=np.float64)

    @property
    def rmse_mean(self) -> float:
        """The root mean square error over all steps."""
        return float(np.sqrt(np.mean(self.errors**2)))

    @property
    def rmse_max(self) -> float:
        """The error of the noisiest step."""
        return float(self.errors.max())

    @property
    def memory_bytes(self) -> int:
        """The memory that the gradient's noise needs between steps, for all parameters."""
        kept = self.plan.strategy.memory_bytes(self.parameters, memory=self.memory)
        return 0 if self.plan.exact_noise else kept

    @property
    def normal_rows(self) -> float:
        """Rows of normals generated per step, on average. This determines the time that noise takes."""
        strategy = self.plan.strategy
        makes_all_again = self.plan.exact_noise and strategy.kept_rows > 0
        return (strategy.steps + 1) / 2 if makes_all_again else strategy.normal_rows


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen candidate, the reason in one line, and all candidates."""

    chosen: Candidate
    reason: str
    candidates: Sequence[Candidate] = field(repr=False)

    @property
    def plan(self) -> PrivacyPlan:
        """The calibrated plan to train with."""
        return self.chosen.plan

    @property
    def independent(self) -> Candidate:
        """The candidate with independent noise, which is always present."""
        return next(c for c in self.candidates if isinstance(c.plan.noise, Independent))

    def within(self, memory_budget: int) -> Choice:
        """Choose again among the same candidates, with a different number of bytes for past noise."""
        return _best(self.candidates, memory_budget)


def choose_noise(
    plan: PrivacyPlan,
    *,
    epsilon: float,
    delta: float,
    parameters: int | nn.Module,
    memory_budget: int | None = None,
    memory: NoiseMemory = NoiseMemory(),  # noqa: B008
    workload: Workload = PrefixSums(),  # noqa: B008
    more: Iterable[StrategySpec] = (),
    progress: Progress | None = None,
) -> Choice:
    """Choose the mechanism with the least error at (ε, δ) that fits into memory.

    `Shuffled()` has no amplification, so every mechanism is compared. Under `Poisson()` and `CyclicPoisson()` the proof
    needs banded noise and cyclic sampling. So the function searches for the best number of bands, and the chosen plan
    samples with that CyclicPoisson (Poisson for one band). Among mechanisms within 0.5 % of the least error, it takes
    the one with the fewest normals per step, then the least memory. Mechanisms with more than 16 rows of normals per
    step are listed but not chosen. Independent noise needs no memory, so one mechanism always fits.

    Args:
        plan: The plan without a noise multiplier, of at most 100,000 steps; its noise is ignored.
        epsilon: The target ε, at most 100 with secret sampling.
        delta: The target δ.
        parameters: The number of trained parameters, or the model.
        memory_budget: Bytes for past noise. None means 16 per parameter, but at least 4 GiB.
        memory: How past noise is stored.
        workload: What the errors are measured on.
        more: Further mechanisms to compare under `Shuffled()`.
        progress: Called with the name of each mechanism before it is calibrated.

    Returns:
        The choice, with all candidates.

    Guarantee:
        Each candidate is a calibrated plan, and its own accountant determines its ε.

    >>> plan = PrivacyPlan(num_examples=10_000, batch_size=100, steps=300)
    >>> choice = choose_noise(plan, epsilon=5.0, delta=1e-6, parameters=100_000_000)
    >>> choice.chosen.name
    'BufferedToeplitz(buffers=2)'
    """
    if isinstance(parameters, nn.Module):
        parameters = sum(p.numel() for p in parameters.parameters() if p.requires_grad)
    check_whole("parameters", parameters, hint="Pass the number of trained parameters, or the model.")
    if memory_budget is None:
        memory_budget = max(_LEAST_BUDGET, _BUDGET_PER_PARAMETER * parameters)
    check_whole("memory_budget", memory_budget, low=0, hint="It is a number of bytes.")
    check_at_most("steps", plan.steps, "the limit", _MOST_STEPS, hint="Choose for fewer steps, then use that noise.")
    if plan.sampling.is_random and epsilon < math.inf:
        check_number("epsilon with secret sampling", epsilon, high=_MOST_SAMPLED_EPSILON, hint="Use a smaller epsilon.")
    report = progress or (lambda text: None)

    def candidate(noise: StrategySpec, sampling: Sampling = plan.sampling) -> Candidate:
        report(repr(noise))
        changed = plan.replace(noise=noise, sampling=sampling, noise_multiplier=None)
        calibrated = changed.calibrate(epsilon=epsilon, delta=delta)
        return Candidate(plan=calibrated, parameters=parameters, memory=memory, workload=workload)

    if isinstance(plan.sampling, Shuffled):
        candidates = [candidate(noise) for noise in (*_unamplified(plan, workload), *more)]
    elif plan.adjacency is Adjacency.ADD_REMOVE or getattr(plan.sampling, "max_batch_size", None) is not None:
        candidates = [candidate(Independent())]  # nothing else has a proof there
    else:
        candidates = _amplified(plan, workload, candidate)
    return _best(candidates, memory_budget)


def _unamplified(plan: PrivacyPlan, workload: Workload) -> list[StrategySpec]:
    bands = min(128, plan.min_separation, plan.steps)
    kinds: list[StrategySpec] = [Independent()]
    if bands > 1:
        kinds.append(BandedToeplitz(bands=bands, workload=workload))
    kinds += [BufferedToeplitz(buffers=buffers, workload=workload) for buffers in (2, 3, 4)]
    kinds += [BandedInverse(bands=count, workload=workload) for count in (16, 128) if count <= plan.steps]
    return [*kinds, SquareRoot()]


def _amplified(
    plan: PrivacyPlan, workload: Workload, candidate: Callable[[StrategySpec, Sampling], Candidate]
) -> list[Candidate]:
    """Try powers of two as the number of bands, then search around the best while that helps.

    An example is sampled in ceil(steps/bands) rounds. Of all numbers of bands with the same number of rounds only the
    smallest is tried, because more bands would only raise the sampling probability of each round.
    """
    most = min(plan.steps, plan.num_examples // plan.batch_size)
    tried: dict[int, Candidate] = {}

    def error(bands: int) -> float:
        if bands not in tried:
            noise = BandedToeplitz(bands=bands, workload=workload) if bands > 1 else Independent()
            tried[bands] = candidate(noise, CyclicPoisson(bands=bands) if bands > 1 else Poisson())
        return tried[bands].rmse_mean

    def fewest(bands: int) -> int:
        rounds = -(-plan.steps // max(1, min(bands, most)))
        return -(-plan.steps // rounds)

    # In experiments the error falls and then rises with the number of bands. Three rises in a row end the search.
    rises, last = 0, np.inf
    for bands in sorted({fewest(2**i) for i in range(most.bit_length())} | {fewest(most)}):
        rises, last = (rises + 1 if error(bands) > last else 0), error(bands)
        if rises == 3:
            break
    best = min(tried, key=error)
    step = best // 4
    while step >= max(1, best // 8):
        best = min((fewest(best - step), best, fewest(best + step)), key=error)
        step //= 2
    return [tried[bands] for bands in sorted(tried)]


def _best(candidates: Sequence[Candidate], memory_budget: int) -> Choice:
    """The choice, and in one line what it gains and what was better but too expensive."""
    fitting = [c for c in candidates if c.memory_bytes <= memory_budget and c.normal_rows <= _MOST_NORMAL_ROWS]
    least = min(c.rmse_mean for c in fitting)
    chosen = min((c for c in fitting if c.rmse_mean <= _AS_GOOD * least), key=lambda c: (c.normal_rows, c.memory_bytes))
    choice = Choice(chosen=chosen, reason="", candidates=tuple(candidates))
    reason = f"{chosen.name}: RMSE {chosen.rmse_mean:.4g}"
    if chosen is not choice.independent:
        reason += f", {choice.independent.rmse_mean / chosen.rmse_mean:.3g} times less than independent noise"
    reason += f", in {format_bytes(chosen.memory_bytes)}"
    if not isinstance(chosen.plan.sampling, Shuffled) and len(candidates) > 1:
        reason += f"; 1 to {max(c.plan.strategy.bands for c in candidates)} bands were compared"
    better = [c for c in candidates if c.rmse_mean * _AS_GOOD < chosen.rmse_mean]
    if better:
        other = min(better, key=lambda c: c.rmse_mean)
        price = f"{other.normal_rows:.0f} rows of normals per step, above {_MOST_NORMAL_ROWS:.0f}"
        if other.memory_bytes > memory_budget:
            budget = format_bytes(memory_budget) if memory_budget else "0 bytes"
            price = f"{format_bytes(other.memory_bytes)}, above the {budget} allowed"
        reason += f"; {other.name} has RMSE {other.rmse_mean:.4g}, but would take {price}"
    return dataclasses.replace(choice, reason=reason)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A calibrated mechanism, and the ε at which its mean RMSE would equal the chosen one's.

    Error is proportional to the noise multiplier. So `epsilon_at_chosen_error` is the accountant's ε of the same plan
    at noise_multiplier·(RMSE of the chosen)/(RMSE of this one), at the same δ. It is None if that multiplier is below
    .05 under secret sampling, where ε is meaninglessly large.
    """

    candidate: Candidate
    chosen: bool
    epsilon_at_chosen_error: float | None

    @property
    def accountant(self) -> str:
        """Name and version of the accountant that computes its ε."""
        return describe_accountant(self.candidate.plan.run)


def alternatives(
    choice: Choice, *, delta: float, progress: Progress | None = None, **target: Any
) -> tuple[tuple[Alternative, ...], str | None]:
    """List all candidates of the choice's sampling, and of the other sampling the chosen one and independent noise.

    The other sampling is `Poisson()` for `Shuffled()` and the reverse. The second result is why it is missing, or None.
    """
    report = progress or (lambda name: None)
    candidates, missing, chosen = list(choice.candidates), None, choice.chosen
    other = Poisson() if isinstance(choice.plan.sampling, Shuffled) else Shuffled()
    try:
        found = choose_noise(
            choice.plan.replace(sampling=other, noise=Independent(), noise_multiplier=None),
            delta=delta,
            parameters=chosen.parameters,
            memory=chosen.memory,
            progress=lambda name: report(f"{name} under the other sampling"),
            **target,
        )
        candidates += [c for c in found.candidates if c is found.chosen or c is found.independent]
    except ValueError as refused:
        missing = str(refused)
    rows = []
    for candidate in candidates:
        report(f"{candidate.name}: epsilon at the same error")
        cost = _epsilon_at(candidate, chosen.rmse_mean, delta)
        rows.append(Alternative(candidate=candidate, chosen=candidate is chosen, epsilon_at_chosen_error=cost))
    return tuple(rows), missing


def _epsilon_at(candidate: Candidate, error: float, delta: float) -> float | None:
    plan = candidate.plan
    if not plan.noise_multiplier or not candidate.rmse_mean:
        return None
    multiplier = plan.noise_multiplier * error / candidate.rmse_mean
    if plan.sampling.is_random and multiplier < _LEAST_MULTIPLIER:
        return None
    return plan.replace(noise_multiplier=multiplier).epsilon(delta=delta)
