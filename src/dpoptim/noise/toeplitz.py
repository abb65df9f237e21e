"""Lower triangular Toeplitz strategies: their error, their sensitivity, and the best banded one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import fft, linalg, optimize

from dpoptim.noise.key import NoiseKey
from dpoptim.noise.series import Series, divide, inverse_series, sqrt_series
from dpoptim.noise.stream import ConvolvedStream, NoiseStream, NormalSource, RecurrentStream

Matrix = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ToeplitzStrategy:
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

        Edge cases: other coefficients are refused; so is a pattern that does not fit into the steps.
        """
        _check_participation(self.steps, max_participations, min_separation)
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

    def mean_error(self) -> float:
        """Root of the mean over t of ‖row t of AC⁻¹‖², with A the prefix sums; before times sensitivity.

        sqrt( Σ_i (steps - i)/steps · p_i² ),   p = prefix sums of noising_coefs
        """
        weights = np.arange(self.steps, 0, -1) / self.steps
        return float(np.sqrt(weights @ np.cumsum(self.noising_coefs) ** 2))

    def max_error(self) -> float:
        """‖last row of AC⁻¹‖, the largest over t; before times sensitivity."""
        return float(np.linalg.norm(np.cumsum(self.noising_coefs)))

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

    def stream(
        self,
        key: NoiseKey,
        *,
        stream: str,
        name: str,
        numel: int,
        start: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> NoiseStream:
        """Rows of C⁻¹z for elements [start, start + numel) of the tensor `name`, in noise `stream`.

        A strategy of fewer bands than steps keeps bands-1 past rows; a full one makes its old normals again.

        >>> key = NoiseKey.from_bytes(bytes(32))
        >>> strategy = ToeplitzStrategy(steps=10, strategy_coefs=(1.0, 0.5, 0.4, 0.3))
        >>> stream = strategy.stream(key, stream="gradient", name="weight", numel=5)
        >>> stream.row(0).shape, stream.memory_bytes
        (torch.Size([5]), 60)
        """
        source = NormalSource(
            key=key,
            stream=stream,
            name=name,
            numel=numel,
            start=start,
            dtype=dtype,
            device=device,
        )
        if self.bands == 1:
            return ConvolvedStream(source, noising_coefs=self.noising_coefs[:1].tolist(), steps=self.steps)
        if self.bands == self.steps:
            return ConvolvedStream(source, noising_coefs=self.noising_coefs.tolist(), steps=self.steps)
        return RecurrentStream(source, strategy_coefs=self.strategy_coefs, steps=self.steps)


@lru_cache(maxsize=256)
def optimized_bands(steps: int, bands: int) -> ToeplitzStrategy:
    """The coefficients (1, c_1, ..., c_{bands-1}) that minimise mean_error·column_norm, by L-BFGS in float64.

    The search starts from the square root's coefficients. What it ends with is verified to be stationary,
    non-negative and non-increasing, so that `sensitivity` is exact; RuntimeError otherwise.

    >>> optimized_bands(2, 2).strategy_coefs[1] < 0.5  # below the square root's
    True
    """
    if bands == 1:
        return ToeplitzStrategy(steps=steps, strategy_coefs=(1.0,))
    found = optimize.minimize(
        lambda tail: _log_error(tail, steps),
        sqrt_series(bands)[1:],
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, 1.0)] * (bands - 1),  # beyond 1 the inverse grows without bound
        options={"maxcor": 30, "maxiter": 2000, "maxfun": 4000, "ftol": 0.0, "gtol": 1e-10},
    )
    slope = float(np.abs(found.jac).max())
    strategy = ToeplitzStrategy(steps=steps, strategy_coefs=(1.0, *found.x.tolist()))
    if not slope < 1e-6 or not strategy.sensitivity_is_exact:
        raise RuntimeError(
            f"the search for bands={bands}, steps={steps} ended with slope {slope:.1e}, non-negative and "
            f"non-increasing: {strategy.sensitivity_is_exact}; use another number of bands"
        )
    return strategy


def _log_error(tail: Series, steps: int) -> tuple[float, Series]:
    """ln(mean_error²·column_norm²) of the coefficients (1, *tail), and its gradient in `tail`.

    With p = 1/((1-x)c) and h = p/c, a change of c moves p by -h·δc, so that for E = Σ w_i p_i² the
    gradient is the correlation dE/dc_j = -Σ_i 2 w_i p_i h_{i-j}.
    """
    coefs = np.concatenate([[1.0], tail])
    prefix = divide(np.ones(steps), coefs, steps)
    second = divide(prefix, coefs, steps)
    weights = np.arange(steps, 0, -1) / steps
    error, norm = float(weights @ prefix**2), float(coefs @ coefs)
    size = fft.next_fast_len(2 * steps, real=True)
    pull = fft.rfft(2 * weights * prefix, size)
    correlation = fft.irfft(pull * np.conj(fft.rfft(second, size)), size)[1 : len(coefs)]
    return float(np.log(error) + np.log(norm)), 2 * tail / norm - correlation / error


def _lower_toeplitz(column: Series) -> Matrix:
    return np.asarray(linalg.toeplitz(column, np.zeros(len(column))), dtype=np.float64)


def check_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")


def _check_participation(steps: int, max_participations: int, min_separation: int) -> None:
    if max_participations < 1:
        raise ValueError(f"max_participations={max_participations} must be at least 1")
    if min_separation < 1:
        raise ValueError(f"min_separation={min_separation} must be at least 1")
    if (max_participations - 1) * min_separation >= steps:
        most = (steps - 1) // min_separation + 1
        raise ValueError(
            f"max_participations={max_participations} at min_separation={min_separation} do not fit into "
            f"steps={steps}; use max_participations={most} or fewer"
        )
