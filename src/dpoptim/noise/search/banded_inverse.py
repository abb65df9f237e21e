"""The best Toeplitz strategy with a banded inverse: correlated noise that needs no memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dpoptim.arguments import set_whole
from dpoptim.disk_cache import Array, cached_on_disk
from dpoptim.noise.search.objective import SearchObjective, check_workload, lbfgs
from dpoptim.noise.search.workloads import PrefixSums, Workload
from dpoptim.noise.series import Series, inverse_series, sqrt_series
from dpoptim.noise.strategies.toeplitz import BandedInverseStrategy
from dpoptim.short_repr import ShortRepr


@dataclass(frozen=True, kw_only=True, repr=False)
class BandedInverse(ShortRepr):
    """Toeplitz noise that needs no memory: row t of C⁻¹z is made of the last `bands` rows of z.

        minimise  mean_error·sensitivity  over  noising_coefs = (1, d_1, ..., d_{bands-1}, 0, ...)

    The prefix sums of d must be positive, log-convex and non-increasing. A step makes `bands` rows of normals. In
    2,000 steps 16, 32, 64, 128 and 256 bands have 1.19, 1.11, 1.05, 1.02 and 1.005 times the error of
    `BufferedToeplitz(buffers=6)`, which stores six rows. In 20,000 steps 32 bands have 1.44 times its error and 256
    have 1.10.

    Args:
        bands: The largest number of diagonals of C⁻¹; 1 is independent noise. The best strategy may use fewer.
        optimized: If False, use the first coefficients of (1-x)^(1/2): the banded inverse square root (BISR).
        workload: The sums that the optimizer computes from the gradients.

    Guarantee: C is non-negative and non-increasing, so its sensitivity is exact. With p the prefix sums,
    c·(1-x) = 1/p, and the inverse of a log-convex p has no positive coefficient after the first (Kaluza), so c does
    not increase. d has none either, so c is not negative.

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
        set_whole(self, "bands", hint="bands=1 is independent noise.")
        check_workload(self.workload)

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> BandedInverseStrategy:
        """Return the best coefficients for this many steps and this pattern; results are cached."""
        search = SearchObjective(
            steps=steps, max_participations=max_participations, min_separation=min_separation, workload=self.workload
        )
        bands = min(self.bands, steps)
        found = optimized_banded_inverse(search, bands) if self.optimized else inverse_sqrt_series(bands)
        return BandedInverseStrategy(steps=steps, inverse_coefs=tuple(found.tolist()))


@cached_on_disk("banded-inverse", version=1)
def optimized_banded_inverse(search: SearchObjective, bands: int) -> Array:
    """Return the coefficients of least mean_error·sensitivity with log-convex prefix sums, by L-BFGS-B.

        -ln p_i = Σ_{l ≤ i} Σ_{j ≥ l} bends_j,    bends_j ≥ 0  for j = 1 .. bands-1

    describes all of them, so the search needs only bounds. It tends to stop early at a bound, so it restarts.
    """
    if bands == 1:
        return np.ones(1)
    falls = -np.diff(np.log(sqrt_series(bands)))  # the prefix sums of (1-x)^(1/2) are the square root's coefficients
    bends = -np.diff(falls, append=0.0)
    sizes = np.arange(1, bands) ** -1.5  # gives all variables a similar effect
    sizes[-1] = falls[-1]

    def value_and_slope(scaled: Series) -> tuple[float, Series]:
        value, gradient = _log_error(_falls(scaled * sizes), search)
        return value, np.cumsum(gradient) * sizes

    scaled, lowest = bends / sizes, np.inf
    bounds = [(0.0, None)] * (bands - 1)
    for _ in range(4):
        options = {"maxcor": 50, "maxiter": 400, "maxfun": 400, "ftol": 1e-12, "gtol": 1e-9}
        found = lbfgs(value_and_slope, scaled, bounds=bounds, **options)
        scaled = found.x
        if lowest - found.fun < 1e-6:
            break
        lowest = found.fun
    return _prefix_and_coefs(_falls(scaled * sizes))[1]


def _falls(bends: Series) -> Series:
    """Return falls_l = Σ_{j ≥ l} bends_j, the decreases of ln p."""
    return np.cumsum(bends[::-1])[::-1]


def _prefix_and_coefs(falls: Series) -> tuple[Series, Series]:
    """Return the prefix sums p_i = exp(-Σ_{l ≤ i} falls_l), p_0 = 1, and d_i = p_i - p_{i-1}."""
    prefix = np.exp(-np.cumsum(np.concatenate([[0.0], falls])))
    return prefix, np.concatenate([[1.0], prefix[:-1] * np.expm1(-falls)])


def _log_error(falls: Series, search: SearchObjective) -> tuple[float, Series]:
    """Return the objective and its gradient in `falls`."""
    prefix, inverse = _prefix_and_coefs(falls)
    noising = np.concatenate([inverse, np.zeros(search.steps - len(inverse))])
    value, slope = search.by_noising(inverse_series(inverse, search.steps), noising)
    by_prefix = -np.diff(slope[: len(inverse)], append=0.0)
    return value, -np.cumsum((by_prefix * prefix)[::-1])[::-1][1:]


def inverse_sqrt_series(n: int) -> Series:
    """Return the first n coefficients of (1-x)^(1/2), the inverse of `sqrt_series`.

        g_0 = 1,   g_k = g_{k-1}·(2k-3)/(2k)

    >>> inverse_sqrt_series(5).tolist() == [1, -1 / 2, -1 / 8, -1 / 16, -5 / 128]
    True
    """
    k = np.arange(1, n, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((2 * k - 3) / (2 * k))])
