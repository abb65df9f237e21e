"""What a search for a Toeplitz strategy minimises: error times sensitivity, with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from dpoptim.noise.search.workloads import Matrix, PrefixSums, Workload, apply_toeplitz
from dpoptim.noise.series import Series, multiply
from dpoptim.noise.strategies.base import check_participation

Objective = Literal["mean", "max"]

_MAX_SCHEDULE_STEPS = 4096  # a schedule's quadratic form has steps² entries: 128 MiB here


@dataclass(frozen=True, kw_only=True)
class SearchObjective:
    """ln(error²·sensitivity²) for a workload, a number of steps and a participation pattern.

    The gradients assume non-negative, non-increasing coefficients of C. Their worst participations start at the
    first step and are as close as allowed. The disk cache uses the `repr` as a key.
    """

    steps: int
    max_participations: int = 1
    min_separation: int = 1
    workload: Workload = PrefixSums()  # noqa: RUF009
    objective: Objective = "mean"

    def __post_init__(self) -> None:
        check_participation(self.steps, self.max_participations, self.min_separation)

    def by_strategy(self, strategy_coefs: Series, noising_coefs: Series) -> tuple[float, Series]:
        """Return the value and its gradient in the coefficients of C, both as float64 [steps].

        A change of c moves d = 1/c by -d²·δc. If g is the gradient of the error in d, its gradient in c is the
        correlation -Σ_i g_i (d²)_{i-j}.
        """
        value, by_noising, by_strategy = self._terms(strategy_coefs, noising_coefs)
        return value, by_strategy - correlate(by_noising, multiply(noising_coefs, noising_coefs, self.steps))

    def by_noising(self, strategy_coefs: Series, noising_coefs: Series) -> tuple[float, Series]:
        """Return the value and its gradient in the coefficients of C⁻¹, both as float64 [steps]."""
        value, by_noising, by_strategy = self._terms(strategy_coefs, noising_coefs)
        return value, by_noising - correlate(by_strategy, multiply(strategy_coefs, strategy_coefs, self.steps))

    def _terms(self, strategy_coefs: Series, noising_coefs: Series) -> tuple[float, Series, Series]:
        """Return the value, the gradient of ln error² in d, and that of ln sensitivity² in c."""
        error, slope = mean_square(self.workload, noising_coefs, last_row=self.objective == "max")
        energy, pull = participation_energy(strategy_coefs, self.max_participations, self.min_separation)
        return float(np.log(error) + np.log(energy)), slope / error, pull / energy


def lbfgs(value_and_slope: Callable[[Series], tuple[float, Series]], start: Series, **options: Any) -> Any:
    """Run scipy's L-BFGS-B with these options, including `bounds`."""
    from scipy import optimize

    bounds = options.pop("bounds", None)
    return optimize.minimize(value_and_slope, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)


def check_workload(workload: object) -> None:
    if not isinstance(workload, Workload):
        raise ValueError(f"Expected a workload such as PrefixSums() or DecayedSums(beta=0.999), got {workload!r}.")


def mean_square(workload: Workload, noising_coefs: Series, *, last_row: bool = False) -> tuple[float, Series]:
    """Return ‖AC⁻¹‖_F²/steps for a Toeplitz C⁻¹, or ‖last row‖², and the gradient in `noising_coefs`.

    Without rescaled rows the last row is the largest. The value is a quadratic form of the coefficients, computed by
    series for Toeplitz workloads and by its matrix for schedules of at most 4096 steps.
    """
    steps = len(noising_coefs)
    scales = workload.row_scales(steps) ** 2
    if last_row and not (workload.is_toeplitz and (scales == 1).all()):
        raise ValueError(f"objective='max' is not available for workload={workload}. Use objective='mean'.")
    if not workload.is_toeplitz:
        form = _quadratic_form(workload, steps)
        slope = form @ noising_coefs
        return float(noising_coefs @ slope), 2 * slope
    weights = np.ones(steps) if last_row else np.cumsum(scales[::-1])[::-1] / steps
    summed = apply_toeplitz(workload, noising_coefs)
    pull = 2 * weights * summed
    return float(weights @ summed**2), apply_toeplitz(workload, pull[::-1])[::-1]


@lru_cache(maxsize=1)
def _quadratic_form(workload: Workload, steps: int) -> Matrix:
    """Return Q with ‖AC⁻¹‖_F²/steps = dᵀQd for the first column d of a Toeplitz C⁻¹.

    Q[i, j] = Σ_s (AᵀA)[s + i, s + j] / steps
    """
    if steps > _MAX_SCHEDULE_STEPS:
        raise ValueError(
            f"The search with one learning rate per step needs too much memory for {steps} > {_MAX_SCHEDULE_STEPS} "
            "steps. Optimize for a constant learning rate."
        )
    matrix = workload_matrix(workload, steps)
    gram, form = matrix.T @ matrix, np.empty((steps, steps))
    for lag in range(steps):
        sums = np.cumsum(np.diagonal(gram, lag)[::-1])[::-1] / steps
        at = np.arange(steps - lag)
        form[at, at + lag] = form[at + lag, at] = sums
    return form


def participation_energy(coefs: Series, max_participations: int, min_separation: int) -> tuple[float, Series]:
    """Return sensitivity² of non-negative, non-increasing coefficients [steps], and its gradient.

        Σ_t total_t²,   total_t = Σ_{i < max_participations} c_{t - i·min_separation}

    The sums are differences of running sums along every min_separation-th coefficient, so many participations cost
    no more than one.
    """
    total = _comb(coefs, max_participations, min_separation)
    back = _comb(total[::-1], max_participations, min_separation)[::-1]
    return float(total @ total), 2 * back


def _comb(series: Series, count: int, lag: int) -> Series:
    """Return Σ_{i < count} series_{t - i·lag} for each t."""
    padded = np.zeros(-(-len(series) // lag) * lag)
    padded[: len(series)] = series
    running = np.cumsum(padded.reshape(-1, lag), axis=0)
    running[count:] -= running[:-count].copy()
    return running.reshape(-1)[: len(series)]


def correlate(a: Series, b: Series) -> Series:
    """Return Σ_i a_i b_{i-j} for each lag j in [0, len(a))."""
    return multiply(a[::-1], b, len(a))[::-1]


def workload_matrix(workload: Workload, steps: int) -> Matrix:
    """Return A as float64 [steps, steps], from the diagonals of its inverse, row by row.

    >>> workload_matrix(PrefixSums(), 3).tolist()
    [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    >>> workload_matrix(PrefixSums(learning_rate=(4.0, 2.0, 1.0)), 3)[2].tolist()
    [4.0, 2.0, 1.0]
    """
    diagonals = workload.inverse_diagonals(steps)
    inverse = np.zeros((steps, steps))
    for step in range(steps):
        row = inverse[step]
        row[step] = 1.0
        for lag in range(1, min(len(diagonals) - 1, step) + 1):
            row -= diagonals[lag, step - lag] * inverse[step - lag]
        row /= diagonals[0, step]
    return inverse
