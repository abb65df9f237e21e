"""The best banded Toeplitz strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dpoptim.arguments import check_at_most, set_whole
from dpoptim.disk_cache import Array, cached_on_disk
from dpoptim.noise.search.objective import SearchObjective, check_workload, lbfgs
from dpoptim.noise.series import Series, inverse_series, sqrt_series
from dpoptim.noise.strategies.base import check_participation
from dpoptim.noise.strategies.toeplitz import ToeplitzStrategy
from dpoptim.noise.workloads import PrefixSums, Workload
from dpoptim.short_repr import ShortRepr


@dataclass(frozen=True, kw_only=True, repr=False)
class BandedToeplitz(ShortRepr):
    """Banded Toeplitz noise: the best coefficients for participations at least `bands` steps apart.

        minimise  mean_error·column_norm  over  (1, c_1, ..., c_{bands-1})

    Such participations do not overlap, which amplification by cyclic sampling needs too. A stream stores bands-1
    past rows.

    Args:
        bands: The number of diagonals of C; 1 is independent noise.
        workload: The sums that the optimizer computes from the gradients.

    >>> strategy = BandedToeplitz(bands=16).optimize(steps=256)
    >>> round(strategy.mean_error() * strategy.column_norm, 6)
    3.637574
    """

    bands: int
    workload: Workload = PrefixSums()  # noqa: RUF009

    def __post_init__(self) -> None:
        set_whole(self, "bands", hint="bands=1 is independent noise.")
        check_workload(self.workload)

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> ToeplitzStrategy:
        """Return the best coefficients for this many steps; results are cached.

        The pattern does not matter: the search assumes participations at least `bands` steps apart.
        """
        check_participation(steps, max_participations, min_separation)
        check_at_most("bands", self.bands, "steps", steps, hint="Use fewer bands.")
        found = optimized_bands(SearchObjective(steps=steps, workload=self.workload), self.bands)
        return ToeplitzStrategy(steps=steps, strategy_coefs=tuple(found.tolist()))


@cached_on_disk("banded-toeplitz", version=1)
def optimized_bands(search: SearchObjective, bands: int) -> Array:
    """Return the coefficients (1, c_1, ..., c_{bands-1}) that minimise mean_error·column_norm, by L-BFGS.

    If the best coefficients increase, as they may for an erratic learning rate, the search repeats among non-increasing
    ones, so that the sensitivity is exact.
    """
    if bands == 1:
        return np.ones(1)
    coefs, slope = _minimum(search, lambda tail: (tail, lambda pull: pull), sqrt_series(bands)[1:])
    if not slope < 1e-6 or (np.diff(coefs) > 0).any():
        coefs, slope = _minimum(search, _falling, np.minimum(sqrt_series(bands)[1:] / sqrt_series(bands)[:-1], 0.999))
    if not slope < 1e-6:
        raise RuntimeError(f"The search for bands={bands}, {search} ended with slope {slope:.1e}. Use fewer bands.")
    return coefs


_Pull = Callable[[Series], Series]


def _minimum(
    search: SearchObjective, tail_of: Callable[[Series], tuple[Series, _Pull]], start: Series
) -> tuple[Series, float]:
    """Return the best (1, *tail_of(x)) for x in [0, 1], and its distance from a stationary point."""

    def value_and_slope(x: Series) -> tuple[float, Series]:
        tail, back = tail_of(x)
        coefs = np.concatenate([[1.0], tail])
        padded = np.concatenate([coefs, np.zeros(search.steps - len(coefs))])
        value, pull = search.by_strategy(padded, inverse_series(coefs, search.steps))
        return value, back(pull[1 : len(coefs)])

    options = {"maxcor": 30, "maxiter": 2000, "maxfun": 4000, "ftol": 0.0, "gtol": 1e-10}
    found = lbfgs(value_and_slope, start, bounds=[(0.0, 1.0)] * len(start), **options)
    inward = np.where(
        found.x <= 0, np.minimum(found.jac, 0), np.where(found.x >= 1, np.maximum(found.jac, 0), found.jac)
    )
    return np.concatenate([[1.0], tail_of(found.x)[0]]), float(np.abs(inward).max())


def _falling(ratios: Series) -> tuple[Series, _Pull]:
    """Return c_i = ratios_1 ··· ratios_i, which never increases, and the map of gradients in c to the ratios."""
    at = torch.tensor(ratios, requires_grad=True)
    tail = at.cumprod(0)
    return tail.detach().numpy(), lambda pull: torch.autograd.grad(tail, at, torch.from_numpy(pull))[0].numpy()
