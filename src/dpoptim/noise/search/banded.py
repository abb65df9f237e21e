"""The best banded strategy for a workload (BandMF): every entry of the band is free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dpoptim.arguments import check_at_most, set_whole
from dpoptim.disk_cache import Array, cached_on_disk
from dpoptim.noise.search.banded_toeplitz import optimized_bands
from dpoptim.noise.search.dense import optimal_dense
from dpoptim.noise.search.objective import SearchObjective, check_workload
from dpoptim.noise.strategies.base import check_participation
from dpoptim.noise.strategies.matrix import MatrixStrategy, column_panels, times_banded
from dpoptim.noise.workloads import PrefixSums, Workload
from dpoptim.short_repr import ShortRepr

_MAX_EVALUATIONS = 300
_ONE_THREAD_WIDTH = 512  # a second core does not speed up products of narrower blocks


@dataclass(frozen=True, kw_only=True, repr=False)
class Banded(ShortRepr):
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

    bands: int
    workload: Workload = PrefixSums()  # noqa: RUF009

    def __post_init__(self) -> None:
        set_whole(self, "bands", hint="bands=1 is independent noise.")
        check_workload(self.workload)

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> MatrixStrategy:
        """Return the optimum for this many steps; results are cached.

        The pattern does not matter: the search assumes participations at least `bands` steps apart.
        """
        check_participation(steps, max_participations, min_separation)
        check_at_most("bands", self.bands, "steps", steps, hint="Use fewer bands.")
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
