"""Toeplitz strategies whose inverse is banded: correlated noise that needs no memory, as few old normals suffice."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy import optimize

from dpoptim.noise.memory import NoiseMemory
from dpoptim.noise.search.disk_cache import Array, remembered
from dpoptim.noise.search.objective import SearchObjective
from dpoptim.noise.series import Series, inverse_series, inverse_sqrt_series, sqrt_series
from dpoptim.noise.source import NormalSource
from dpoptim.noise.strategies.base import check_bands, check_steps
from dpoptim.noise.strategies.short_repr import ShortRepr
from dpoptim.noise.strategies.toeplitz import ToeplitzStrategy, convolved
from dpoptim.noise.streams import NoiseStream
from dpoptim.noise.workloads import PrefixSums, Workload, check_workload

_ROUNDING = 1e-13  # rises of the coefficients of C by less, where c_0 = 1, are rounding


@dataclass(frozen=True, kw_only=True, repr=False)
class BandedInverse(ShortRepr):
    """A Toeplitz C whose inverse has at most `bands` diagonals: row t of C⁻¹z is made of the last `bands` rows of z.

        minimise  mean_error·sensitivity  over  noising_coefs = (1, d_1, ..., d_{bands-1}, 0, ...)

    such that the prefix sums of d are positive, log-convex and do not increase. With optimized=False the
    coefficients are the first ones of (1-x)^(1/2), the banded inverse square root (BISR), which are of that
    kind.

    Guarantee: then C is non-negative and non-increasing, so that sensitivity is exact. For with p the prefix
    sums, c·(1-x) = 1/p, and the inverse of a log-convex p has no positive coefficient after the first
    (Kaluza), so c does not increase; and as d has none either, c is not negative.

    A step makes as many rows of normals as there are bands, 32 by default: in 2000 steps 16, 32, 64, 128 and 256 bands
    have 1.19, 1.11, 1.05, 1.02 and 1.005 times the error of `BufferedToeplitz(buffers=6)`, which keeps six rows
    instead. Much longer runs gain from more: in 20,000 steps 32 bands have 1.44 times its error, 256 have 1.10.

    Edge cases: bands = 1 is independent noise; bands = steps and optimized=False is the square root. More bands than
    steps are as many as steps, and the best may have fewer than asked for.

    >>> strategy = BandedInverse(bands=3, optimized=False).optimize(steps=5)
    >>> strategy.noising_coefs.tolist()
    [1.0, -0.5, -0.125, 0.0, 0.0]
    >>> best = BandedInverse(bands=3).optimize(steps=5)
    >>> best.mean_error() * best.column_norm < strategy.mean_error() * strategy.column_norm
    True
    """

    bands: int = field(default=32, metadata={"shown": True})
    optimized: bool = True
    workload: Workload = PrefixSums()  # noqa: RUF009

    def __post_init__(self) -> None:
        check_bands(self.bands)
        check_workload(self.workload)

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> BandedInverseStrategy:
        """The best coefficients for this many steps and that participation; a second call is answered from memory."""
        goal = SearchObjective(
            steps=steps,
            max_participations=max_participations,
            min_separation=min_separation,
            workload=self.workload,
        )
        bands = min(self.bands, steps)
        found = optimized_banded_inverse(goal, bands) if self.optimized else inverse_sqrt_series(bands)
        return BandedInverseStrategy(steps=steps, inverse_coefs=tuple(found.tolist()))


@dataclass(frozen=True, kw_only=True)
class BandedInverseStrategy(ToeplitzStrategy):
    """The Toeplitz strategy with C⁻¹[t, s] = inverse_coefs[t - s], which it is equal and hashed by.

    Trailing zeros of `inverse_coefs` are dropped. Rises of C's coefficients by less than 1e-13 are rounding and
    are levelled; where they truly increase or are negative, `sensitivity` refuses.

    >>> strategy = BandedInverseStrategy(steps=4, inverse_coefs=(1.0, -0.5))
    >>> strategy.strategy_coefs, strategy.inverse_bands
    ((1.0, 0.5, 0.25, 0.125), 2)
    """

    strategy_coefs: tuple[float, ...] = field(init=False, repr=False, compare=False)
    inverse_coefs: tuple[float, ...]

    def __post_init__(self) -> None:
        check_steps(self.steps)
        inverse = np.trim_zeros(np.asarray(self.inverse_coefs, dtype=np.float64), "b")
        if not len(inverse) or not np.isfinite(inverse).all() or inverse[0] <= 0:
            raise ValueError(f"inverse_coefs={self.inverse_coefs[:4]}... must be finite, with a positive first one")
        if len(inverse) > self.steps:
            raise ValueError(f"inverse_coefs has {len(inverse)} bands for steps={self.steps}; give at most steps")
        object.__setattr__(self, "inverse_coefs", tuple(inverse.tolist()))
        coefs = inverse_series(inverse, self.steps)
        level = np.maximum(np.minimum.accumulate(coefs), 0.0)
        if np.abs(level - coefs).max() <= _ROUNDING * coefs[0]:
            coefs = level
        object.__setattr__(self, "strategy_coefs", tuple(coefs.tolist()))
        super().__post_init__()

    @property
    def inverse_bands(self) -> int:
        """The number of non-zero diagonals of C⁻¹, which is the number of rows of normals a streamed row costs."""
        return len(self.inverse_coefs)

    @cached_property
    def noising_coefs(self) -> Series:
        """The first column of C⁻¹, float64 [steps], read-only."""
        coefs = np.zeros(self.steps)
        coefs[: self.inverse_bands] = self.inverse_coefs
        coefs.flags.writeable = False
        return coefs

    @property
    def kept_rows(self) -> int:
        return 0

    @property
    def normal_rows(self) -> float:
        return float(np.minimum(np.arange(1, self.steps + 1), self.inverse_bands).mean())

    def _rows(self, source: NormalSource, memory: NoiseMemory) -> NoiseStream:
        """The old normals are made again.

        >>> from dpoptim.noise import NoiseKey
        >>> key = NoiseKey.from_bytes(bytes(32))
        >>> strategy = BandedInverseStrategy(steps=1000, inverse_coefs=(1.0, -0.5, -0.125))
        >>> stream = strategy.stream(key, stream="gradient", name="weight", numel=5)
        >>> stream.row(999).shape, stream.memory_bytes
        (torch.Size([5]), 0)
        """
        return convolved(source, list(self.inverse_coefs), steps=self.steps)


@remembered("banded-inverse", version=1)
def optimized_banded_inverse(goal: SearchObjective, bands: int) -> Array:
    """The coefficients of least mean_error·sensitivity among those of log-convex prefix sums, by L-BFGS-B in float64.

        -ln p_i = Σ_{l ≤ i} Σ_{j ≥ l} bends_j,    bends_j ≥ 0  for j = 1 .. bands-1

    are all of them, so that the search has bounds alone to keep to. It starts from the inverse square root, and
    is begun again from where it ends until that no longer helps: at a bound it tends to stop early.

    >>> optimized_banded_inverse(SearchObjective(steps=20, max_participations=20), 5)[1:].any()  # nothing to correlate
    np.False_
    """
    if bands == 1:
        return np.ones(1)
    falls = -np.diff(np.log(sqrt_series(bands)))  # the prefix sums of (1-x)^(1/2) are those of the square root
    bends = -np.diff(falls, append=0.0)
    sizes = np.arange(1, bands) ** -1.5  # brings the variables to like effect
    sizes[-1] = falls[-1]

    def value_and_slope(scaled: Series) -> tuple[float, Series]:
        value, gradient = _log_error(_falls(scaled * sizes), goal)
        return value, np.cumsum(gradient) * sizes

    scaled, lowest = bends / sizes, np.inf
    for _ in range(4):
        found = optimize.minimize(
            value_and_slope,
            scaled,
            jac=True,
            method="L-BFGS-B",
            bounds=[(0.0, None)] * (bands - 1),
            options={"maxcor": 50, "maxiter": 400, "maxfun": 400, "ftol": 1e-12, "gtol": 1e-9},
        )
        scaled = found.x
        if lowest - found.fun < 1e-6:
            break
        lowest = found.fun
    return _prefix_and_coefs(_falls(scaled * sizes))[1]


def _falls(bends: Series) -> Series:
    """falls_l = Σ_{j ≥ l} bends_j, the steps down of ln p."""
    return np.cumsum(bends[::-1])[::-1]


def _prefix_and_coefs(falls: Series) -> tuple[Series, Series]:
    """The prefix sums p_i = exp(-Σ_{l ≤ i} falls_l), p_0 = 1, and d_i = p_i - p_{i-1}."""
    prefix = np.exp(-np.cumsum(np.concatenate([[0.0], falls])))
    return prefix, np.concatenate([[1.0], prefix[:-1] * np.expm1(-falls)])


def _log_error(falls: Series, goal: SearchObjective) -> tuple[float, Series]:
    """The goal, and its gradient in `falls`."""
    prefix, inverse = _prefix_and_coefs(falls)
    noising = np.concatenate([inverse, np.zeros(goal.steps - len(inverse))])
    value, slope = goal.by_noising(inverse_series(inverse, goal.steps), noising)
    by_prefix = -np.diff(slope[: len(inverse)], append=0.0)
    return value, -np.cumsum((by_prefix * prefix)[::-1])[::-1][1:]
