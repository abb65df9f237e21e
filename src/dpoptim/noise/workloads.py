"""What the released gradients are summed up to: the workload A, whose noise AC⁻¹z a strategy keeps small.

Each workload has an inverse of two or three diagonals, since each is a recurrence that an optimizer runs:
so the error of any strategy is that of the inverse of the few-banded CA⁻¹, and no A is ever formed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpoptim.noise.series import Series, divide, multiply
from dpoptim.noise.strategies.short_repr import ShortRepr

Matrix = NDArray[np.float64]

_MOST_STEPS_OF_A_SCHEDULE = 4096  # a schedule's quadratic form is a matrix of steps², 128 MiB there


@dataclass(frozen=True, kw_only=True, repr=False)
class PrefixSums(ShortRepr):
    """The iterates of SGD: prefix sums of the gradients, with momentum, decay and a schedule where given.

        m_t = momentum·m_{t-1} + g_t,     θ_t = (1 - learning_rate_t·weight_decay)·θ_{t-1} + learning_rate_t·m_t

    `learning_rate` is one number or one for each step. The defaults are the plain prefix sums of the theory.

    Edge cases: a learning rate of 0 is refused, as its step would have no say in the error.

    >>> PrefixSums().matrix(3).tolist()
    [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    >>> PrefixSums(momentum=0.5).matrix(3)[2].tolist()
    [1.75, 1.5, 1.0]
    >>> PrefixSums(learning_rate=(4.0, 2.0, 1.0)).matrix(3)[2].tolist()
    [4.0, 2.0, 1.0]
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    learning_rate: float | tuple[float, ...] = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum} must lie in [0, 1)")
        rates = np.asarray(self.learning_rate, dtype=np.float64)
        if rates.ndim == 1:  # of a list or an array, which would be no value to compare and hash
            object.__setattr__(self, "learning_rate", tuple(rates.tolist()))
        rates = np.atleast_1d(rates)
        if rates.ndim != 1 or not len(rates) or not (np.isfinite(rates) & (rates > 0)).all():
            raise ValueError(f"learning_rate={self.learning_rate!r} must be positive, one number or one for each step")
        if not self.weight_decay >= 0 or not (rates * self.weight_decay < 1).all():
            raise ValueError(f"weight_decay={self.weight_decay}: learning_rate·weight_decay must lie in [0, 1)")

    @property
    def is_toeplitz(self) -> bool:
        """Whether all steps are treated alike: whether there is no schedule."""
        return not isinstance(self.learning_rate, tuple)

    def coefs(self, steps: int) -> Series:
        """The first column of A, which is all of it where `is_toeplitz`."""
        rate = float(self._rates(steps)[0])
        if self == PrefixSums():
            return np.ones(steps)
        decay = 1.0 - rate * self.weight_decay
        return divide([rate], multiply([1.0, -decay], [1.0, -self.momentum], 3), steps)

    def row_scales(self, steps: int) -> Series:
        """What row t of the Toeplitz matrix of `coefs` is multiplied by."""
        return np.ones(steps)

    def inverse_diagonals(self, steps: int) -> Matrix:
        """A⁻¹[s + lag, s] as float64 [lags, steps], zero outside of the matrix."""
        rates = self._rates(steps)
        decays = 1.0 - rates * self.weight_decay
        diagonals = np.zeros((3, steps))
        diagonals[0] = 1.0 / rates
        diagonals[1, :-1] = -(decays[1:] / rates[1:] + self.momentum / rates[:-1])
        diagonals[2, :-2] = self.momentum * decays[1:-1] / rates[1:-1]
        return diagonals if self.momentum else diagonals[:2]

    def matrix(self, steps: int) -> Matrix:
        """A as float64 [steps, steps]."""
        return _inverse_of(self.inverse_diagonals(steps))

    def _rates(self, steps: int) -> Series:
        if not isinstance(self.learning_rate, tuple):
            return np.full(steps, float(self.learning_rate))
        if len(self.learning_rate) != steps:
            raise ValueError(f"learning_rate has {len(self.learning_rate)} values for steps={steps}; give one a step")
        return np.asarray(self.learning_rate, dtype=np.float64)


@dataclass(frozen=True, kw_only=True, repr=False)
class DecayedSums(ShortRepr):
    """Adam's moments: decaying averages of what is released, divided by 1 - beta^t where `debiased`.

        ν_t = beta·ν_{t-1} + (1 - beta)·x_t,      ν̂_t = ν_t / (1 - beta^t)

    >>> DecayedSums(beta=0.5).matrix(2).round(6).tolist()
    [[1.0, 0.0], [0.333333, 0.666667]]
    """

    beta: float
    debiased: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta={self.beta} must lie in [0, 1); for sums without decay use PrefixSums()")

    @property
    def is_toeplitz(self) -> bool:
        return True

    def coefs(self, steps: int) -> Series:
        """The first column of A without debiasing."""
        powers: Series = np.power(self.beta, np.arange(steps, dtype=np.float64))
        return (1 - self.beta) * powers

    def row_scales(self, steps: int) -> Series:
        """1/(1 - beta^t) for t = 1 .. steps, or ones."""
        if not self.debiased or self.beta == 0:
            return np.ones(steps)
        return -1.0 / np.expm1(np.arange(1, steps + 1) * math.log(self.beta))

    def inverse_diagonals(self, steps: int) -> Matrix:
        """A⁻¹[s + lag, s] as float64 [2, steps], zero outside of the matrix."""
        first = 1.0 / (self.row_scales(steps) * (1 - self.beta))
        diagonals = np.stack([first, -self.beta * first])
        diagonals[1, -1] = 0.0
        return diagonals

    def matrix(self, steps: int) -> Matrix:
        """A as float64 [steps, steps]."""
        return _inverse_of(self.inverse_diagonals(steps))


Workload = PrefixSums | DecayedSums


def check_workload(workload: object) -> None:
    if not isinstance(workload, Workload):
        raise ValueError(f"workload={workload!r} must be a workload such as PrefixSums() or DecayedSums(beta=0.999)")


def toeplitz_errors(workload: Workload, noising_coefs: Series) -> Series:
    """‖row t of AC⁻¹‖² for each step, where C⁻¹ is Toeplitz with this first column.

        row_scales_t²·Σ_{i ≤ t} p_i²,   p = coefs·noising_coefs (as series)

    With a schedule, AC⁻¹ is run through the recurrence of A row by row, O(steps²) in time and O(steps) in memory.

    >>> toeplitz_errors(PrefixSums(), np.array([1.0, 0.0, 0.0])).tolist()
    [1.0, 2.0, 3.0]
    """
    steps = len(noising_coefs)
    if workload.is_toeplitz:
        return workload.row_scales(steps) ** 2 * np.cumsum(_summed(workload, noising_coefs) ** 2)
    inverse = workload.inverse_diagonals(steps)
    errors, past = np.empty(steps), [np.zeros(steps)] * (len(inverse) - 1)
    for step in range(steps):
        row = np.zeros(steps)
        row[: step + 1] = noising_coefs[step::-1]
        for lag, before in enumerate(past[:step], start=1):
            row -= inverse[lag, step - lag] * before
        row /= inverse[0, step]
        errors[step] = row @ row
        past = [row, *past[:-1]]
    return errors


def mean_square(workload: Workload, noising_coefs: Series, *, last_row: bool = False) -> tuple[float, Series]:
    """‖AC⁻¹‖_F²/steps for a Toeplitz C⁻¹, or the square of its last row, and the gradient in `noising_coefs`.

    A quadratic form of the coefficients, by series for Toeplitz workloads; with a schedule by its matrix.

    Edge cases: a schedule is for at most 4096 steps; the last row is the largest, and asked for, only where rows
    are not rescaled.

    >>> mean_square(PrefixSums(), np.array([1.0, 0.0]))[0]
    1.5
    """
    steps = len(noising_coefs)
    if workload.is_toeplitz:
        scales = workload.row_scales(steps) ** 2
        if last_row and not (scales == 1).all():
            raise ValueError(f"objective='max' is not offered for workload={workload}; use objective='mean'")
        weights = np.ones(steps) if last_row else np.cumsum(scales[::-1])[::-1] / steps
        summed = _summed(workload, noising_coefs)
        pull = 2 * weights * summed
        return float(weights @ summed**2), _summed(workload, pull[::-1])[::-1]
    if last_row:
        raise ValueError(f"objective='max' is not offered for workload={workload}; use objective='mean'")
    form = _quadratic_form(workload, steps)
    slope = form @ noising_coefs
    return float(noising_coefs @ slope), 2 * slope


def _summed(workload: Workload, noising_coefs: Series) -> Series:
    if workload == PrefixSums():
        return np.cumsum(noising_coefs)
    if isinstance(workload, DecayedSums):
        return divide(noising_coefs * (1 - workload.beta), [1.0, -workload.beta], len(noising_coefs))
    return multiply(workload.coefs(len(noising_coefs)), noising_coefs, len(noising_coefs))


@lru_cache(maxsize=1)
def _quadratic_form(workload: Workload, steps: int) -> Matrix:
    """Q with ‖AC⁻¹‖_F²/steps = dᵀQd for the first column d of a Toeplitz C⁻¹.

    Q[i, j] = Σ_s (AᵀA)[s + i, s + j] / steps
    """
    if steps > _MOST_STEPS_OF_A_SCHEDULE:
        raise ValueError(
            f"steps={steps} with a learning rate for each is more than {_MOST_STEPS_OF_A_SCHEDULE}, for which the "
            "search would need too much memory; optimize for a constant learning rate"
        )
    matrix = workload.matrix(steps)
    gram, form = matrix.T @ matrix, np.empty((steps, steps))
    for lag in range(steps):
        sums = np.cumsum(np.diagonal(gram, lag)[::-1])[::-1] / steps
        at = np.arange(steps - lag)
        form[at, at + lag] = form[at + lag, at] = sums
    return form


def _inverse_of(diagonals: Matrix) -> Matrix:
    """The inverse of the lower triangular matrix with these diagonals, row by row."""
    steps = diagonals.shape[1]
    inverse = np.zeros((steps, steps))
    for step in range(steps):
        row = inverse[step]
        row[step] = 1.0
        for lag in range(1, min(len(diagonals) - 1, step) + 1):
            row -= diagonals[lag, step - lag] * inverse[step - lag]
        row /= diagonals[0, step]
    return inverse
