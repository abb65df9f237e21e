"""The workload A: the sums that the optimizer computes from released gradients. A strategy keeps their noise small.

Each workload is a recurrence that an optimizer runs, so its inverse has two or three diagonals. The error of any
strategy is computed from the inverse of the banded matrix CA⁻¹, without forming A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpoptim.arguments import check_number
from dpoptim.noise.series import Series, divide, multiply
from dpoptim.short_repr import ShortRepr

Matrix = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, repr=False)
class PrefixSums(ShortRepr):
    """The iterates of SGD: prefix sums of the gradients, optionally with momentum, weight decay and a schedule.

        m_t = momentum·m_{t-1} + g_t,     θ_t = (1 - learning_rate_t·weight_decay)·θ_{t-1} + learning_rate_t·m_t

    Args:
        momentum: In [0, 1).
        weight_decay: At least 0, with learning_rate·weight_decay < 1.
        learning_rate: One positive number, or one for each step.

    >>> PrefixSums(momentum=0.5).coefs(3).tolist()
    [1.0, 1.5, 1.75]
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    learning_rate: float | tuple[float, ...] = 1.0

    def __post_init__(self) -> None:
        check_number("momentum", self.momentum, low=0, below=1)
        rates = np.asarray(self.learning_rate, dtype=np.float64)
        if rates.ndim == 1:  # a list or an array cannot be hashed
            object.__setattr__(self, "learning_rate", tuple(rates.tolist()))
        rates = np.atleast_1d(rates)
        if rates.ndim != 1 or not len(rates) or not (np.isfinite(rates) & (rates > 0)).all():
            raise ValueError(f"Expected learning_rate > 0, as one number or one per step, got {self.learning_rate!r}.")
        if not self.weight_decay >= 0 or not (rates * self.weight_decay < 1).all():
            raise ValueError(f"Expected learning_rate * weight_decay in [0, 1), got weight_decay={self.weight_decay}.")

    @property
    def is_toeplitz(self) -> bool:
        """Whether the workload treats all steps alike, that is, has no schedule."""
        return not isinstance(self.learning_rate, tuple)

    def coefs(self, steps: int) -> Series:
        """Return the first column of A, which determines A if `is_toeplitz`."""
        rate = float(self._rates(steps)[0])
        if self == PrefixSums():
            return np.ones(steps)
        decay = 1.0 - rate * self.weight_decay
        return divide([rate], multiply([1.0, -decay], [1.0, -self.momentum], 3), steps)

    def row_scales(self, steps: int) -> Series:
        """Return the factor of each row of the Toeplitz matrix of `coefs`."""
        return np.ones(steps)

    def inverse_diagonals(self, steps: int) -> Matrix:
        """Return A⁻¹[s + lag, s] as float64 [lags, steps], zero outside of the matrix."""
        rates = self._rates(steps)
        decays = 1.0 - rates * self.weight_decay
        diagonals = np.zeros((3, steps))
        diagonals[0] = 1.0 / rates
        diagonals[1, :-1] = -(decays[1:] / rates[1:] + self.momentum / rates[:-1])
        diagonals[2, :-2] = self.momentum * decays[1:-1] / rates[1:-1]
        return diagonals if self.momentum else diagonals[:2]

    def _rates(self, steps: int) -> Series:
        if not isinstance(self.learning_rate, tuple):
            return np.full(steps, float(self.learning_rate))
        if len(self.learning_rate) != steps:
            raise ValueError(f"Expected one learning_rate per step, got {len(self.learning_rate)} for {steps} steps.")
        return np.asarray(self.learning_rate, dtype=np.float64)


@dataclass(frozen=True, kw_only=True, repr=False)
class DecayedSums(ShortRepr):
    """Adam's moments: exponential moving averages of the released values.

        ν_t = beta·ν_{t-1} + (1 - beta)·x_t,      ν̂_t = ν_t / (1 - beta^t)

    Args:
        beta: In [0, 1). For sums without decay use `PrefixSums`.
        debiased: Whether to divide by 1 - beta^t.

    >>> DecayedSums(beta=0.5).coefs(2).tolist(), DecayedSums(beta=0.5).row_scales(2).round(6).tolist()
    ([0.5, 0.25], [2.0, 1.333333])
    """

    beta: float
    debiased: bool = True

    def __post_init__(self) -> None:
        check_number("beta", self.beta, low=0, below=1, hint="For sums without decay use PrefixSums().")

    @property
    def is_toeplitz(self) -> bool:
        return True

    def coefs(self, steps: int) -> Series:
        """Return the first column of A without debiasing."""
        powers: Series = np.power(self.beta, np.arange(steps, dtype=np.float64))
        return (1 - self.beta) * powers

    def row_scales(self, steps: int) -> Series:
        """Return 1/(1 - beta^t) for t = 1 .. steps, or ones."""
        if not self.debiased or self.beta == 0:
            return np.ones(steps)
        return -1.0 / np.expm1(np.arange(1, steps + 1) * math.log(self.beta))

    def inverse_diagonals(self, steps: int) -> Matrix:
        """Return A⁻¹[s + lag, s] as float64 [2, steps], zero outside of the matrix."""
        first = 1.0 / (self.row_scales(steps) * (1 - self.beta))
        diagonals = np.stack([first, -self.beta * first])
        diagonals[1, -1] = 0.0
        return diagonals


Workload = PrefixSums | DecayedSums
"""The sums that a strategy is optimized for."""


def apply_toeplitz(workload: Workload, noising_coefs: Series) -> Series:
    """Return the first column of AC⁻¹ before row scales, for a Toeplitz workload and C⁻¹ with this first column."""
    if workload == PrefixSums():
        return np.cumsum(noising_coefs)
    if isinstance(workload, DecayedSums):
        return divide(noising_coefs * (1 - workload.beta), [1.0, -workload.beta], len(noising_coefs))
    return multiply(workload.coefs(len(noising_coefs)), noising_coefs, len(noising_coefs))


def toeplitz_errors(workload: Workload, noising_coefs: Series) -> Series:
    """Return ‖row t of AC⁻¹‖² for each step, for a Toeplitz C⁻¹ with this first column.

        row_scales_t²·Σ_{i ≤ t} p_i²,   p = coefs·noising_coefs (as series)

    With a schedule, the recurrence of A runs over the rows of C⁻¹: O(steps²) time and O(steps) memory.

    >>> toeplitz_errors(PrefixSums(), np.array([1.0, 0.0, 0.0])).tolist()
    [1.0, 2.0, 3.0]
    """
    steps = len(noising_coefs)
    if workload.is_toeplitz:
        return workload.row_scales(steps) ** 2 * np.cumsum(apply_toeplitz(workload, noising_coefs) ** 2)
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
