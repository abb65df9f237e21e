"""What a search for a Toeplitz strategy minimises: error times sensitivity, with its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dpoptim.noise.series import Series, correlate, multiply
from dpoptim.noise.strategies.base import check_participation
from dpoptim.noise.workloads import PrefixSums, Workload, mean_square

Objective = Literal["mean", "max"]


@dataclass(frozen=True, kw_only=True)
class SearchObjective:
    """ln(error²·sensitivity²) for a workload, a number of steps and a pattern of participations.

    `error` is the mean or the max error of the workload, as `objective` says. Both gradients are for
    non-negative, non-increasing coefficients of C, whose sensitivity is that of participations from the first step
    on, as close as they may be.

    >>> goal = SearchObjective(steps=4)
    >>> round(goal.by_strategy(np.array([1.0, 0, 0, 0]), np.array([1.0, 0, 0, 0]))[0], 6)  # ln(2.5)
    0.916291
    """

    steps: int
    max_participations: int = 1
    min_separation: int = 1
    workload: Workload = PrefixSums()  # noqa: RUF009
    objective: Objective = "mean"

    def __post_init__(self) -> None:
        check_participation(self.steps, self.max_participations, self.min_separation)
        if self.objective not in ("mean", "max"):
            raise ValueError(f"objective={self.objective!r} must be 'mean' or 'max'")

    def by_strategy(self, strategy_coefs: Series, noising_coefs: Series) -> tuple[float, Series]:
        """The value, and its gradient in the coefficients of C, both given as float64 [steps].

        A change of c moves d = 1/c by -d²·δc, so that with g the gradient of the error in d, that in c is the
        correlation -Σ_i g_i (d²)_{i-j}.
        """
        error, slope = self._error(noising_coefs)
        energy, pull = self._energy(strategy_coefs)
        by_error = -correlate(slope, multiply(noising_coefs, noising_coefs, self.steps))
        return float(np.log(error) + np.log(energy)), by_error / error + pull / energy

    def by_noising(self, strategy_coefs: Series, noising_coefs: Series) -> tuple[float, Series]:
        """The value, and its gradient in the coefficients of C⁻¹, both given as float64 [steps]."""
        error, slope = self._error(noising_coefs)
        energy, pull = self._energy(strategy_coefs)
        by_energy = -correlate(pull, multiply(strategy_coefs, strategy_coefs, self.steps))
        return float(np.log(error) + np.log(energy)), slope / error + by_energy / energy

    def _error(self, noising_coefs: Series) -> tuple[float, Series]:
        return mean_square(self.workload, noising_coefs, last_row=self.objective == "max")

    def _energy(self, strategy_coefs: Series) -> tuple[float, Series]:
        return participation_energy(strategy_coefs, self.max_participations, self.min_separation)


def participation_energy(coefs: Series, max_participations: int, min_separation: int) -> tuple[float, Series]:
    """The sensitivity² of non-negative, non-increasing coefficients [steps], and its gradient in each of them.

        Σ_t total_t²,   total_t = Σ_{i < max_participations} c_{t - i·min_separation}

    The sums over participations are differences of running sums along every min_separation-th coefficient,
    so that many participations cost no more than one.

    >>> participation_energy(np.array([1.0, 0.5, 0.0, 0.0]), 2, 1)[0]  # totals 1, 1.5, 0.5, 0
    3.5
    """
    total = _comb(coefs, max_participations, min_separation)
    back = _comb(total[::-1], max_participations, min_separation)[::-1]
    return float(total @ total), 2 * back


def _comb(series: Series, count: int, lag: int) -> Series:
    """Σ_{i < count} series_{t - i·lag} for each t."""
    padded = np.zeros(-(-len(series) // lag) * lag)
    padded[: len(series)] = series
    running = np.cumsum(padded.reshape(-1, lag), axis=0)
    running[count:] -= running[:-count].copy()
    return running.reshape(-1)[: len(series)]
