"""Which noise to use: every mechanism at one (ε, δ), side by side, and the one that we would take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

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
from dpoptim.privacy import Adjacency, CyclicPoisson, Poisson, PrivacyPlan, Sampling, Shuffled

_MOST_NORMAL_ROWS = 16.0  # a mechanism that makes more rows of normals a step costs more time than a model's step
_AS_GOOD = 1.005  # errors within half a percent are equal: time decides, then memory
_LEAST_BUDGET = 4 * 2**30
_BUDGET_PER_PARAMETER = 16
_MOST_STEPS = 100_000  # minutes; ten times as many take an hour
_MOST_SAMPLED_EPSILON = 100.0  # half a minute; privacy loss distributions grow with ε

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A calibrated plan, seen as a choice: how much noise remains, in what memory.

    Errors are root mean squares of the noise on the workload, by default prefix sums, of the AVERAGED gradient,
    for clip norm 1: noise_multiplier·column_norm·‖row of AC⁻¹‖/batch_size.
    """

    plan: PrivacyPlan
    parameters: int
    memory: NoiseMemory = NoiseMemory()  # noqa: RUF009
    workload: Workload = PrefixSums()  # noqa: RUF009

    @property
    def name(self) -> str:
        """As it is written in a plan, without the workload that all are compared on: BandedToeplitz(bands=128)."""
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
        return float(np.sqrt(np.mean(self.errors**2)))

    @property
    def rmse_max(self) -> float:
        return float(self.errors.max())

    @property
    def memory_bytes(self) -> int:
        """Kept between steps for all parameters, for the gradient's noise."""
        return self.plan.strategy.memory_bytes(self.parameters, memory=self.memory)

    @property
    def normal_rows(self) -> float:
        """Rows of normals made in a step, on average: the time that noise takes."""
        return self.plan.strategy.normal_rows


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen plan, why, and what it was chosen from."""

    chosen: Candidate
    reason: str
    candidates: Sequence[Candidate] = field(repr=False)

    @property
    def plan(self) -> PrivacyPlan:
        """The plan to train with, calibrated."""
        return self.chosen.plan

    @property
    def independent(self) -> Candidate:
        """The candidate with independent noise, which is always there."""
        return next(c for c in self.candidates if isinstance(c.plan.noise, Independent))


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
    """The mechanism of least error at (ε, δ) that fits into memory, for the plan's sampling; and the others.

    `Shuffled()` amplifies nothing, and every mechanism is tried, `more` included. Under `Poisson()` and
    `CyclicPoisson()` the proof wants banded noise and cyclic sampling: the number of bands of least error is
    searched, and the chosen plan's sampling is CyclicPoisson with as many (Poisson for one). `parameters` is the
    number of trained parameters, or the model; `memory_budget` is in bytes, by default 16 a parameter but at least
    4 GiB. Among errors within half a percent of the least, the fewest normals a step decide, then memory.

    Guarantee: each candidate is a calibrated plan, whose own accountant stands for its ε.
    Edge cases: independent noise needs no memory, so something always fits. Mechanisms that make more than 16 rows of
    normals a step are shown and not chosen. Refused, as the search would take many minutes: more than 100,000 steps,
    and ε above 100 under secret sampling, which protects nobody.

    >>> plan = PrivacyPlan(num_examples=10_000, batch_size=100, steps=300)
    >>> choice = choose_noise(plan, epsilon=5.0, delta=1e-6, parameters=100_000_000)
    >>> choice.chosen.name
    'BufferedToeplitz(buffers=2)'
    """
    if isinstance(parameters, nn.Module):
        parameters = sum(p.numel() for p in parameters.parameters() if p.requires_grad)
    if isinstance(parameters, bool) or not isinstance(parameters, int) or parameters < 1:
        raise ValueError(f"parameters={parameters!r} must be the number of trained parameters, or the model")
    if memory_budget is None:
        memory_budget = max(_LEAST_BUDGET, _BUDGET_PER_PARAMETER * parameters)
    if not isinstance(memory_budget, int) or memory_budget < 0:
        raise ValueError(f"memory_budget={memory_budget!r} must be a number of bytes, 0 or more")
    if plan.steps > _MOST_STEPS:
        raise ValueError(
            f"steps={plan.steps}: mechanisms are compared for at most {_MOST_STEPS:,} steps; compare them for fewer, "
            "and give that noise to a plan of the steps in question"
        )
    if plan.sampling.is_random and _MOST_SAMPLED_EPSILON < epsilon < math.inf:
        raise ValueError(
            f"epsilon={epsilon:g}: under secret sampling mechanisms are compared up to epsilon="
            f"{_MOST_SAMPLED_EPSILON:g}, beyond which accounting takes minutes and nobody is protected; ask for less"
        )
    tell = progress or (lambda text: None)

    def candidate(noise: StrategySpec, sampling: Sampling = plan.sampling) -> Candidate:
        tell(repr(noise))
        calibrated = plan.replace(noise=noise, sampling=sampling, noise_multiplier=None).calibrate(
            epsilon=epsilon, delta=delta
        )
        return Candidate(plan=calibrated, parameters=parameters, memory=memory, workload=workload)

    if isinstance(plan.sampling, Shuffled):
        candidates = [candidate(noise) for noise in (*_unamplified(plan, workload), *more)]
    elif plan.adjacency is Adjacency.ADD_REMOVE or getattr(plan.sampling, "max_batch_size", None) is not None:
        candidates = [candidate(Independent())]  # nothing else is proved there
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
    """Bands in powers of two, then halfway to either side of the best, while that helps.

    An example is sampled in ceil(steps/bands) rounds, so of all bands with as many rounds the fewest are tried: more
    would only raise the chance of each.
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

    # The error falls and then rises in the number of bands, by trial; three rises in a row end the search.
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
    fitting = [c for c in candidates if c.memory_bytes <= memory_budget and c.normal_rows <= _MOST_NORMAL_ROWS]
    least = min(c.rmse_mean for c in fitting)
    chosen = min((c for c in fitting if c.rmse_mean <= _AS_GOOD * least), key=lambda c: (c.normal_rows, c.memory_bytes))
    choice = Choice(chosen=chosen, reason="", candidates=tuple(candidates))
    return dataclasses.replace(choice, reason=_reason(choice, memory_budget))


def _reason(choice: Choice, memory_budget: int) -> str:
    """One line: what was chosen, what it gains, and what was better but too dear."""
    chosen, candidates = choice.chosen, choice.candidates
    reason = f"{chosen.name}: RMSE {chosen.rmse_mean:.4g}"
    if chosen is not choice.independent:
        reason += f", {choice.independent.rmse_mean / chosen.rmse_mean:.3g} times below independent noise"
    reason += f", in {format_bytes(chosen.memory_bytes)}"
    if not isinstance(chosen.plan.sampling, Shuffled) and len(candidates) > 1:
        most = max(c.plan.strategy.bands for c in candidates)
        reason += f"; {chosen.plan.strategy.bands} bands are the best of 1 to {most}"
    better = [c for c in candidates if c.rmse_mean * _AS_GOOD < chosen.rmse_mean]
    if better:
        other = min(better, key=lambda c: c.rmse_mean)
        dear = f"{other.normal_rows:.0f} rows of normals a step, above {_MOST_NORMAL_ROWS:.0f}"
        if other.memory_bytes > memory_budget:
            dear = f"{format_bytes(other.memory_bytes)}, above the {_in_bytes(memory_budget)} allowed"
        reason += f"; {other.name} has RMSE {other.rmse_mean:.4g}, but would take {dear}"
    return reason


def _in_bytes(budget: int) -> str:
    return format_bytes(budget) if budget else "0 bytes"


def format_bytes(count: int) -> str:
    """Bytes in decimal units, for people.

    >>> format_bytes(0), format_bytes(2_228_047_360)
    ('no memory', '2.23 GB')
    """
    if count == 0:
        return "no memory"
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
