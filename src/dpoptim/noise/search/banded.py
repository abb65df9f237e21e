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
        error, slope = log_error(band.detach(), inverse)
        band.grad = torch.where(inside, slope, 0.0)
        return error

    threads = torch.get_num_threads()
    try:
        if bands < _ONE_THREAD_WIDTH:
            torch.set_num_threads(1)
        with torch.no_grad():
            search.step(closure)
    finally:
        torch.set_num_threads(threads)
    found = band.detach()
    return np.asarray((found / found.norm(dim=0)).numpy(), dtype=np.float64)


def log_error(diagonals: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ln ‖AC⁻¹‖_F² of the column-normalized C, and its gradient in the diagonals before normalizing.

    `inverse` holds the diagonals of A⁻¹. AC⁻¹ is the inverse of L = CA⁻¹, which has one or two bands more than C.
    In blocks as wide as that band, L_k on the diagonal and M_k to its left, with R_k = (L⁻¹L⁻ᵀ)_{k,k} and
    f = Σ_k tr R_k:

        Q_k = 1 + M_k R_{k-1} M_kᵀ      R_k = L_k⁻¹ Q_k L_k⁻ᵀ                       forward
        U_k = L_k⁻ᵀ Γ_k L_k⁻¹           Γ_{k-1} = 1 + M_kᵀ U_k M_k                  backward
        ∂f/∂L_k = -2 U_k Q_k L_k⁻ᵀ      ∂f/∂M_k = 2 U_k M_k R_{k-1}

    All terms are sums of squares, so nothing cancels.
    """
    bands, steps = diagonals.shape
    norms = diagonals.norm(dim=0)
    unit = diagonals / norms
    product = times_banded(unit, inverse)
    width = max(len(product) - 1, 32)
    panels = column_panels(product, width=width)
    blocks, identity = len(panels), torch.eye(width, dtype=torch.float64)
    inverses = torch.linalg.solve_triangular(panels[:, :width], identity.expand(blocks, width, width), upper=False)
    below = panels[:, width:]  # below[k] is M_{k+1}

    error = -float(blocks * width - steps)  # removes the identity that pads the last block
    inner, inners, carried = identity, [], []
    for block in range(blocks):
        half = inner @ inverses[block].mT
        covariance = inverses[block] @ half
        error += float(covariance.trace())
        inners.append(half)
        carried.append(below[block] @ covariance)
        inner = identity + carried[block] @ below[block].mT

    slope, outer = torch.zeros_like(panels), identity
    for block in reversed(range(blocks)):
        pull = inverses[block].mT @ outer @ inverses[block]
        slope[block, :width] = -2 * pull @ inners[block]
        if block > 0:
            pulled = pull @ below[block - 1]
            slope[block - 1, width:] = 2 * pull @ carried[block - 1]
            outer = identity + below[block - 1].mT @ pulled

    of_product = _diagonals_of(slope, lags=len(product), steps=steps) / error
    of_unit = torch.zeros_like(unit)
    for lag in range(min(len(inverse), steps)):  # the backward pass of times_banded
        of_unit[:, lag:] += of_product[lag : lag + bands, : steps - lag] * inverse[lag, : steps - lag]
    of_unit -= unit * (of_unit * unit).sum(dim=0)
    return torch.tensor(error, dtype=torch.float64).log(), of_unit / norms


def _diagonals_of(panels: torch.Tensor, *, lags: int, steps: int) -> torch.Tensor:
    """Undo `column_panels`."""
    blocks, _, width = panels.shape
    columns = torch.arange(width)
    found = panels[:, columns + torch.arange(lags)[:, None], columns]
    return found.permute(1, 0, 2).reshape(lags, blocks * width)[:, :steps]
