"""Lower triangular Toeplitz strategies: their error, their sensitivity and their rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import linalg

from dpoptim.noise.memory import NoiseMemory
from dpoptim.noise.series import Series, inverse_series
from dpoptim.noise.source import NormalSource
from dpoptim.noise.strategies.base import Strategy, check_steps, fitting_participations
from dpoptim.noise.streams import ConvolvedStream, NoiseStream, RecurrentStream
from dpoptim.noise.workloads import Matrix, PrefixSums, Workload, toeplitz_errors


@dataclass(frozen=True, kw_only=True)
class ToeplitzStrategy(Strategy):
    """A lower triangular Toeplitz strategy, C[t, s] = strategy_coefs[t - s].

    `strategy_coefs` is the first column; trailing zeros are dropped, so that its length is the number of
    bands and equal matrices are equal values. Any coefficients with a positive first one make a
    mechanism; a sensitivity is given for non-negative, non-increasing ones alone.

    >>> strategy = ToeplitzStrategy(steps=4, strategy_coefs=(1.0, 0.5, 0.0))
    >>> strategy.bands, strategy.noising_coefs.tolist()
    (2, [1.0, -0.5, 0.25, -0.125])
    >>> strategy.strategy_matrix()[2].tolist()
    [0.0, 0.5, 1.0, 0.0]
    >>> round(strategy.sensitivity(max_participations=2, min_separation=2) ** 2, 12)
    2.5
    """

    steps: int
    strategy_coefs: tuple[float, ...]

    def __post_init__(self) -> None:
        check_steps(self.steps)
        coefs = tuple(np.trim_zeros(np.asarray(self.strategy_coefs, dtype=np.float64), "b").tolist())
        if not coefs or not np.isfinite(coefs).all() or coefs[0] <= 0:
            raise ValueError(f"strategy_coefs={coefs[:4]}... must be finite, with a positive first one")
        if len(coefs) > self.steps:
            raise ValueError(f"strategy_coefs has {len(coefs)} bands for steps={self.steps}; give at most steps")
        object.__setattr__(self, "strategy_coefs", coefs)

    @property
    def bands(self) -> int:
        """The number of non-zero diagonals of C."""
        return len(self.strategy_coefs)

    @cached_property
    def noising_coefs(self) -> Series:
        """The first column of C⁻¹, float64 [steps], read-only."""
        coefs = inverse_series(self.strategy_coefs, self.steps)
        coefs.flags.writeable = False
        return coefs

    @property
    def column_norm(self) -> float:
        """‖first column of C‖, the largest of the columns: the sensitivity to one participation."""
        return float(np.linalg.norm(self.strategy_coefs))

    @property
    def sensitivity_is_exact(self) -> bool:
        """True where `sensitivity` gives a value at all: for non-negative, non-increasing coefficients."""
        coefs = np.asarray(self.strategy_coefs)
        return bool(coefs[-1] >= 0 and (np.diff(coefs) <= 0).all())

    def sensitivity(self, *, max_participations: int, min_separation: int) -> float:
        """The norm of the sum of max_participations columns of C, min_separation apart, from the first on.

            sup ‖C(x - x')‖  =  ‖ Σ_{i < max_participations} column_{i·min_separation}(C) ‖

        over x, x' that differ in the unit-norm contributions of one example, which takes part at most
        `max_participations` times, with at least `min_separation` steps from one time to the next.

        Guarantee: exact. All products of columns are non-negative, so contributions that point the same
        way are the worst; and as the coefficients do not increase, columns that are earlier and closer
        overlap more and are cut off less. With min_separation ≥ bands it is
        √max_participations·column_norm, up to the cut at the end.

        Edge cases: other coefficients are refused. Of more participations than fit into the steps, as many count
        as fit.
        """
        max_participations = fitting_participations(self.steps, max_participations, min_separation)
        if not self.sensitivity_is_exact:
            raise ValueError(
                f"strategy_coefs={self.strategy_coefs[:4]}... are not non-negative and non-increasing, so "
                "the worst participation pattern is not known; use coefficients that are"
            )
        total = np.zeros(self.steps)
        coefs = np.asarray(self.strategy_coefs)
        for first in range(0, max_participations * min_separation, min_separation):
            stop = min(first + self.bands, self.steps)
            total[first:stop] += coefs[: stop - first]
        return float(np.linalg.norm(total))

    def squared_errors(self, workload: Workload = PrefixSums()) -> Series:  # noqa: B008
        """‖row t of AC⁻¹‖² for each step, float64 [steps]; before times sensitivity.

        For prefix sums Σ_{i ≤ t} p_i², with p the prefix sums of noising_coefs.
        """
        return toeplitz_errors(workload, self.noising_coefs)

    def row_norms(self) -> Series:
        """‖row t of C⁻¹‖ = sqrt(Σ_{i≤t} noising_coefs[i]²) for each step, float64 [steps]."""
        return np.sqrt(np.cumsum(self.noising_coefs**2))

    def strategy_matrix(self) -> Matrix:
        """C as float64 [steps, steps]."""
        column = np.zeros(self.steps)
        column[: self.bands] = self.strategy_coefs
        return _lower_toeplitz(column)

    def noising_matrix(self) -> Matrix:
        """C⁻¹ as float64 [steps, steps]."""
        return _lower_toeplitz(self.noising_coefs)

    def _rows(self, source: NormalSource, memory: NoiseMemory) -> NoiseStream:
        """
        >>> from dpoptim.noise import NoiseKey
        >>> key = NoiseKey.from_bytes(bytes(32))
        >>> strategy = ToeplitzStrategy(steps=10, strategy_coefs=(1.0, 0.5, 0.4, 0.3))
        >>> stream = strategy.stream(key, stream="gradient", name="weight", numel=5)
        >>> stream.row(0).shape, stream.memory_bytes == strategy.memory_bytes(5) == 60
        (torch.Size([5]), True)
        """
        if self.kept_rows == 0:
            count = 1 if self.bands == 1 else self.steps
            return convolved(source, self.noising_coefs[:count].tolist(), steps=self.steps)
        return RecurrentStream(
            source,
            strategy_row=lambda step: self.strategy_coefs,
            bands=self.bands,
            steps=self.steps,
            row_norm=float(self.row_norms()[-1]),
            memory=memory,
        )


def convolved(source: NormalSource, noising_coefs: list[float], *, steps: int) -> ConvolvedStream:
    """The stream of a Toeplitz C⁻¹ with this first column, trailing zeros left out."""
    return ConvolvedStream(source, noising_row=lambda step: noising_coefs[: step + 1], steps=steps)


def _lower_toeplitz(column: Series) -> Matrix:
    return np.asarray(linalg.toeplitz(column, np.zeros(len(column))), dtype=np.float64)
