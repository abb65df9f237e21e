"""The best banded strategies for a workload: Toeplitz, or with every entry of the band free (BandMF)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dpoptim.arguments import check_at_most, set_whole
from dpoptim.disk_cache import Array, cached_on_disk
from dpoptim.noise.search.dense import optimal_dense
from dpoptim.noise.search.objective import SearchObjective, check_workload, lbfgs
from dpoptim.noise.search.workloads import PrefixSums, Workload
from dpoptim.noise.series import Series, inverse_series, sqrt_series
from dpoptim.noise.strategies.base import check_participation
from dpoptim.noise.strategies.matrix import MatrixStrategy, column_panels, times_banded
from dpoptim.noise.strategies.toeplitz import ToeplitzStrategy
from dpoptim.short_repr import ShortRepr

_MAX_EVALUATIONS = 300
_ONE_THREAD_WIDTH = 512  # a second core does not speed up products of narrower blocks


@dataclass(frozen=True, kw_only=True, repr=False)
class _BandedSpec(ShortRepr):
    """What both searches have in common: they assume participations at least `bands` steps apart."""

    bands: int
    workload: Workload = PrefixSums()  # noqa: RUF009

    def __post_init__(self) -> None:
        set_whole(self, "bands", hint="bands=1 is independent noise.")
        check_workload(self.workload)

    def _check(self, steps: int, max_participations: int, min_separation: int) -> None:
        check_participation(steps, max_participations, min_separation)
        check_at_most("bands", self.bands, "steps", steps, hint="Use fewer bands.")


@dataclass(frozen=True, kw_only=True, repr=False)
class BandedToeplitz(_BandedSpec):
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

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> ToeplitzStrategy:
        """Return the best coefficients for this many steps; results are cached.

        The pattern does not matter: the search assumes participations at least `bands` steps apart.
        """
        self._check(steps, max_participations, min_separation)
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


@dataclass(frozen=True, kw_only=True, repr=False)
class Banded(_BandedSpec):
    """Banded noise (BandMF): the banded C with unit columns and the least mean error of the workload.

        minimise  ‖AC⁻¹‖_F  over lower triangular C with `bands` diagonals and  ‖column of C‖ = 1

    If participations are at least `bands` steps apart, they do not overlap: the sensitivity is exactly
    √max_participations, and cyclic sampling amplifies. A stream stores bands-1 past rows.

    Args:
        bands: The number of diagonals of C; 1 is independent noise, and `steps` is `Dense`.
        workload: The sums that the optimizer computes from the gradients.

    >>> strategy = Banded(bands=8).optimize(steps=64)
    >>> round(strategy.mean_error(), 6), round(strategy.column_norm, 12)
    (2.620517, 1.0)
    >>> momentum = PrefixSums(momentum=0.9)
    >>> Banded(bands=8, workload=momentum).optimize(steps=64).mean_error(momentum) < strategy.mean_error(momentum)
    True
    """

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> MatrixStrategy:
        """Return the optimum for this many steps; results are cached.

        The pattern does not matter: the search assumes participations at least `bands` steps apart.
        """
        self._check(steps, max_participations, min_separation)
        return MatrixStrategy(diagonals=optimal_banded(steps, self.bands, self.workload))


@cached_on_disk("banded", version=1)
def optimal_banded(steps: int, bands: int, workload: Workload) -> Array:
    """Return the diagonals [bands, steps] that minimise ln ‖AC⁻¹‖_F² with normalized columns.

    The problem is convex in X = CᵀC, so a stationary point is the optimum. L-BFGS runs in C, which needs far fewer
    evaluations, and starts from the best Toeplitz C.
    """
    if bands == 1:
        return np.ones((1, steps))
    if bands == steps:
        return optimal_dense(steps, workload)
    inverse = torch.from_numpy(workload.inverse_diagonals(steps))
    coefs = torch.tensor(optimized_bands(SearchObjective(steps=steps, workload=workload), bands), dtype=torch.float64)
    inside = torch.arange(bands)[:, None] + torch.arange(steps) < steps
    start = torch.where(inside, coefs[:, None], 0.0)
    band = (start / start.norm(dim=0)).requires_grad_()
    search = torch.optim.LBFGS(
        [band],
        max_iter=_MAX_EVALUATIONS,
        max_eval=_MAX_EVALUATIONS,
        tolerance_grad=1e-8,
        tolerance_change=1e-9,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        error = log_error(torch.where(inside, band, 0.0), inverse)
        (band.grad,) = torch.autograd.grad(error, band)
        return error

    threads = torch.get_num_threads()
    try:
        if bands < _ONE_THREAD_WIDTH:
            torch.set_num_threads(1)
        search.step(closure)
    finally:
        torch.set_num_threads(threads)
    found = band.detach()
    return np.asarray((found / found.norm(dim=0)).numpy(), dtype=np.float64)


def log_error(diagonals: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return ln ‖AC⁻¹‖_F² of the column-normalized C.

    `inverse` holds the diagonals of A⁻¹. AC⁻¹ is the inverse of L = CA⁻¹, which has one or two bands more than C.
    In blocks as wide as that band, L_k on the diagonal and M_k to its left, with R_k = (L⁻¹L⁻ᵀ)_{k,k}, the square is
    Σ_k tr R_k:

        R_k = L_k⁻¹ (1 + M_k R_{k-1} M_kᵀ) L_k⁻ᵀ

    All terms are sums of squares, so nothing cancels.
    """
    product = times_banded(diagonals / diagonals.norm(dim=0), inverse)
    width = max(len(product) - 1, 32)
    panels = column_panels(product, width=width)
    blocks, identity = len(panels), torch.eye(width, dtype=torch.float64)
    inverses = torch.linalg.solve_triangular(panels[:, :width], identity.expand(blocks, width, width), upper=False)
    inner, traces = identity, []
    for own, below in zip(inverses.unbind(), panels[:, width:].unbind(), strict=True):  # L_k⁻¹ and M_{k+1}
        covariance = own @ inner @ own.mT
        traces.append(covariance.trace())
        inner = identity + below @ covariance @ below.mT
    padding = blocks * width - diagonals.shape[1]  # the identity that fills the last block
    return (torch.stack(traces).sum() - padding).log()
