"""Lower triangular Toeplitz strategies: given by C, by buffers, or by a banded inverse; and two closed forms."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from dpoptim.arguments import check_at_most, check_whole, set_whole
from dpoptim.noise.normals import NormalSource
from dpoptim.noise.search.workloads import Matrix, PrefixSums, Workload, toeplitz_errors
from dpoptim.noise.series import Series, divide, inverse_series, noising_series, powers, sqrt_series
from dpoptim.noise.strategies.base import Strategy, check_participation, fitting_participations
from dpoptim.noise.streams import BufferedStream, ConvolvedStream, NoiseMemory, NoiseStream, RecurrentStream

_ROUNDING = 1e-13  # smaller increases of C's coefficients, relative to the first, count as rounding


@dataclass(frozen=True, kw_only=True)
class ToeplitzStrategy(Strategy):
    """A lower triangular Toeplitz strategy, C[t, s] = strategy_coefs[t - s].

    Args:
        steps: The number of steps.
        strategy_coefs: The first column of C, with a positive first entry. Trailing zeros are dropped, so the length
            is the number of bands and equal matrices are equal values.

    Guarantee: `sensitivity` is defined only for non-negative, non-increasing coefficients, where it is exact.

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
        object.__setattr__(self, "strategy_coefs", _trimmed("strategy_coefs", self.strategy_coefs, self.steps))

    @property
    def bands(self) -> int:
        return len(self.strategy_coefs)

    @cached_property
    def noising_coefs(self) -> Series:
        """The first column of C⁻¹, float64 [steps], read-only."""
        return _read_only(inverse_series(self.strategy_coefs, self.steps))

    @property
    def column_norm(self) -> float:
        """‖first column of C‖, the largest column norm: the sensitivity to one participation."""
        return float(np.linalg.norm(self.strategy_coefs))

    @property
    def sensitivity_is_exact(self) -> bool:
        """Whether the coefficients are non-negative and non-increasing; otherwise `sensitivity` raises."""
        coefs = np.asarray(self.strategy_coefs)
        return bool(coefs[-1] >= 0 and (np.diff(coefs) <= 0).all())

    def sensitivity(self, *, max_participations: int, min_separation: int) -> float:
        """Return the norm of the sum of max_participations columns of C, min_separation apart, starting at the first.

            sup ‖C(x - x')‖  =  ‖ Σ_{i < max_participations} column_{i·min_separation}(C) ‖

        The supremum is over x, x' that differ in the unit-norm contributions of one example, which takes part at
        most `max_participations` times, at least `min_separation` steps apart.

        Raises:
            ValueError: If the coefficients are negative or increase.

        Guarantee: exact. All products of columns are non-negative, so contributions in the same direction are the
        worst. Because the coefficients do not increase, columns that are earlier and closer overlap more. With
        min_separation ≥ bands the result is √max_participations·column_norm, up to the cut at the last step.
        """
        count = fitting_participations(self.steps, max_participations, min_separation)
        if not self.sensitivity_is_exact:
            raise ValueError(
                f"strategy_coefs={self.strategy_coefs[:4]}... are negative or increase, so the worst participation "
                "pattern is not known. Use non-negative, non-increasing coefficients."
            )
        # `window` is the sum of the first 2^bit columns. Nothing cancels, since all terms are non-negative.
        window = np.pad(self.strategy_coefs, (0, self.steps - self.bands))
        total = np.zeros(self.steps)
        first = 0  # where the next columns begin
        for bit in range(count.bit_length()):
            if count >> bit & 1:
                total[first:] += window[: self.steps - first]
                first += min_separation << bit
            shift = min(min_separation << bit, self.steps)
            window[shift:] += window[: self.steps - shift].copy()
        return float(np.linalg.norm(total))

    def squared_errors(self, workload: Workload = PrefixSums()) -> Series:  # noqa: B008
        return toeplitz_errors(workload, self.noising_coefs)

    def row_norms(self) -> Series:
        return np.sqrt(np.cumsum(self.noising_coefs**2))

    def strategy_matrix(self) -> Matrix:
        return _lower_toeplitz(np.pad(self.strategy_coefs, (0, self.steps - self.bands)))

    def noising_matrix(self) -> Matrix:
        return _lower_toeplitz(self.noising_coefs)

    def noising_row(self, step: int) -> list[float]:
        row: list[float] = self.noising_coefs[: 1 if self.bands == 1 else step + 1].tolist()
        return row

    def _stream_from(self, source: NormalSource, memory: NoiseMemory) -> NoiseStream:
        if self.kept_rows == 0:
            return ConvolvedStream(source, noising_row=self.noising_row, steps=self.steps)
        return RecurrentStream(
            source,
            strategy_row=lambda step: self.strategy_coefs,
            bands=self.bands,
            steps=self.steps,
            row_norm=float(self.row_norms()[-1]),
            memory=memory,
        )


@dataclass(frozen=True, kw_only=True)
class Independent:
    """Fresh noise at each step, as in DP-SGD: the matrix mechanism with C = I.

    >>> round(Independent().optimize(steps=3).mean_error() ** 2, 12)  # the mean of 1, 2, 3
    2.0
    """

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> ToeplitzStrategy:
        """Return C = I for this many steps; the participation pattern does not matter."""
        check_participation(steps, max_participations, min_separation)
        return ToeplitzStrategy(steps=steps, strategy_coefs=(1.0,))


@dataclass(frozen=True, kw_only=True)
class SquareRoot:
    """C = A^(1/2), the square root of the prefix sums: a closed form near the optimum for one participation.

        strategy_coefs = 1, 1/2, 3/8, 5/16, ...

    It needs no memory, but row t costs t + 1 rows of normals.

    >>> SquareRoot().optimize(steps=4).strategy_coefs
    (1.0, 0.5, 0.375, 0.3125)
    """

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> ToeplitzStrategy:
        """Return the square root for this many steps; the participation pattern does not matter."""
        check_participation(steps, max_participations, min_separation)
        return ToeplitzStrategy(steps=steps, strategy_coefs=tuple(sqrt_series(steps).tolist()))


@dataclass(frozen=True, kw_only=True)
class BufferedToeplitzStrategy(ToeplitzStrategy):
    """The Toeplitz strategy of some buffers, each with a decay and a weight.

        c_0 = 1,   c_i = Σ_j weights[j]·decays[j]^(i-1)

    Args:
        steps: The number of steps.
        decays: In [0, 1).
        weights: Positive, one per decay, with a sum of at most 1.

    Guarantee: with these limits the coefficients are non-negative and non-increasing, so `sensitivity` is exact.

    >>> strategy = BufferedToeplitzStrategy(steps=4, decays=(0.5,), weights=(0.25,))
    >>> strategy.strategy_coefs, strategy.noising_coefs.round(12).tolist()
    ((1.0, 0.25, 0.125, 0.0625), [1.0, -0.25, -0.0625, -0.015625])
    """

    strategy_coefs: tuple[float, ...] = field(init=False, repr=False, compare=False)
    decays: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        set_whole(self, "steps")
        decays, weights = np.asarray(self.decays, dtype=np.float64), np.asarray(self.weights, dtype=np.float64)
        if decays.shape != weights.shape or decays.ndim != 1:
            raise ValueError(f"Expected one weight per decay, got weights={self.weights}, decays={self.decays}.")
        if not ((decays >= 0) & (decays < 1)).all():
            raise ValueError(f"Expected decays in [0, 1), got {self.decays}.")
        if not (weights > 0).all() or not weights.sum() <= 1:
            raise ValueError(
                f"Expected positive weights with a sum of at most 1, got {self.weights}. Otherwise the coefficients "
                "of C increase, and their sensitivity is not known."
            )
        order = np.argsort(-decays, kind="stable")
        object.__setattr__(self, "decays", tuple(decays[order].tolist()))
        object.__setattr__(self, "weights", tuple(weights[order].tolist()))
        tail = weights[order] @ powers(decays[order], self.steps - 1)
        # Decays close to 1 give equal coefficients; rounding must not make them increase by an ulp.
        coefs = np.minimum.accumulate(np.concatenate([[1.0], tail]))
        object.__setattr__(self, "strategy_coefs", tuple(coefs.tolist()))
        super().__post_init__()

    @cached_property
    def noising_coefs(self) -> Series:
        return _read_only(noising_series(self.decays, self.weights, self.steps))

    @property
    def kept_rows(self) -> int:
        return len(self.decays)

    @property
    def normal_rows(self) -> float:
        return 1.0

    def _stream_from(self, source: NormalSource, memory: NoiseMemory) -> NoiseStream:
        if not self.decays:
            return super()._stream_from(source, memory)
        # The largest standard deviation of each buffer Σ_i decay^i·y_{t-i} over the steps.
        norms = [float(np.linalg.norm(divide(self.noising_coefs, [1.0, -decay], self.steps))) for decay in self.decays]
        return BufferedStream(
            source, decays=self.decays, weights=self.weights, buffer_norms=norms, steps=self.steps, memory=memory
        )


@dataclass(frozen=True, kw_only=True)
class BandedInverseStrategy(ToeplitzStrategy):
    """The Toeplitz strategy with C⁻¹[t, s] = inverse_coefs[t - s].

    It stores nothing: a row of noise needs only the last few rows of normals, which are recomputed.

    Args:
        steps: The number of steps.
        inverse_coefs: The first column of C⁻¹, with a positive first entry. Trailing zeros are dropped.

    Guarantee: if the coefficients of C are negative or increase, `sensitivity` raises. Increases below 1e-13 are
    rounding and are removed.

    >>> strategy = BandedInverseStrategy(steps=4, inverse_coefs=(1.0, -0.5))
    >>> strategy.strategy_coefs, strategy.normal_rows  # 1, 2, 2 and 2 rows of normals
    ((1.0, 0.5, 0.25, 0.125), 1.75)
    """

    strategy_coefs: tuple[float, ...] = field(init=False, repr=False, compare=False)
    inverse_coefs: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "inverse_coefs", _trimmed("inverse_coefs", self.inverse_coefs, self.steps))
        coefs = inverse_series(self.inverse_coefs, self.steps)
        level = np.maximum(np.minimum.accumulate(coefs), 0.0)
        if np.abs(level - coefs).max() <= _ROUNDING * coefs[0]:
            coefs = level
        object.__setattr__(self, "strategy_coefs", tuple(coefs.tolist()))
        super().__post_init__()

    @cached_property
    def noising_coefs(self) -> Series:
        return _read_only(np.pad(self.inverse_coefs, (0, self.steps - len(self.inverse_coefs))))

    @property
    def kept_rows(self) -> int:
        return 0

    @property
    def normal_rows(self) -> float:
        return float(np.minimum(np.arange(1, self.steps + 1), len(self.inverse_coefs)).mean())

    def noising_row(self, step: int) -> list[float]:
        return list(self.inverse_coefs[: step + 1])


def _trimmed(name: str, coefs: ArrayLike, steps: int) -> tuple[float, ...]:
    """Drop trailing zeros; check that the rest is finite, starts with a positive number and fits into the steps."""
    steps = check_whole("steps", steps)
    series = np.trim_zeros(np.asarray(coefs, dtype=np.float64), "b")
    if not len(series) or not np.isfinite(series).all() or series[0] <= 0:
        raise ValueError(f"Expected finite {name} with a positive first one, got {series[:4].tolist()}...")
    check_at_most(f"the length of {name}", len(series), "steps", steps)
    return tuple(series.tolist())


def _lower_toeplitz(column: Series) -> Matrix:
    lag = np.arange(len(column))[:, None] - np.arange(len(column))
    return np.where(lag >= 0, column[lag], 0.0)


def _read_only(series: Series) -> Series:
    series.flags.writeable = False
    return series
