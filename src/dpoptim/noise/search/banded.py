"""The best banded strategy for a workload: BandMF, with every entry of the band free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from dpoptim.noise.search.banded_toeplitz import optimized_bands
from dpoptim.noise.search.dense import optimal_dense
from dpoptim.noise.search.disk_cache import Array, remembered
from dpoptim.noise.search.objective import SearchObjective
from dpoptim.noise.strategies.base import check_bands, check_participation
from dpoptim.noise.strategies.matrix import MatrixStrategy, column_panels, times_banded
from dpoptim.noise.strategies.short_repr import ShortRepr
from dpoptim.noise.workloads import PrefixSums, Workload, check_workload

_MAX_EVALUATIONS = 300
_ONE_THREAD_WIDTH = 512  # products of narrower blocks gain nothing from a second core


@dataclass(frozen=True, kw_only=True, repr=False)
class Banded(ShortRepr):
    """The banded C of least mean error of the workload among those with unit columns (BandMF).

        minimise  ‖AC⁻¹‖_F  over lower triangular C with `bands` diagonals and  ‖column of C‖ = 1

    With separation ≥ bands the participations do not overlap: the sensitivity is √max_participations
    exactly, and amplification by cyclic sampling applies. A stream keeps bands-1 past rows.

    Edge cases: bands = 1 is independent noise; bands = steps is `Dense` for one participation.

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
        check_bands(self.bands)
        check_workload(self.workload)

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> MatrixStrategy:
        """The optimum for this many steps, by L-BFGS; a second call is answered from memory.

        The participations change nothing: they are taken to lie at least `bands` steps apart.
        """
        check_participation(steps, max_participations, min_separation)
        check_bands(self.bands, steps)
        return MatrixStrategy(diagonals=optimal_banded(steps, self.bands, self.workload))


@remembered("banded", version=1)
def optimal_banded(steps: int, bands: int, workload: Workload) -> Array:
    """The diagonals [bands, steps] that minimise ln ‖AC⁻¹‖_F², columns normalised, from the best Toeplitz C on.

    In X = CᵀC, which is banded where C is, the problem is convex, so that a stationary point is the optimum.
    The search runs in C, where it needs far fewer evaluations, and ends when an iteration gains less than
    1e-9, or after 300 evaluations: a C with unit columns and within the band either way.

    >>> optimal_banded(5, 1, PrefixSums()).tolist()
    [[1.0, 1.0, 1.0, 1.0, 1.0]]
    """
    if bands == 1:
        return np.ones((1, steps))
    if bands == steps:
        return optimal_dense(steps, workload)
    inverse = torch.from_numpy(workload.inverse_diagonals(steps))
    coefs = torch.tensor(optimized_bands(SearchObjective(steps=steps, workload=workload), bands), dtype=torch.float64)
    inside = torch.arange(bands)[:, None] + torch.arange(steps) < steps
    band = normalised(torch.where(inside, coefs[:, None], 0.0)).requires_grad_()
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

    with torch.no_grad(), _one_thread(width=bands):
        search.step(closure)
    return np.asarray(normalised(band.detach()).numpy(), dtype=np.float64)


def normalised(diagonals: torch.Tensor) -> torch.Tensor:
    """The same matrix with unit columns."""
    return diagonals / diagonals.norm(dim=0)


def log_error(diagonals: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ln ‖AC⁻¹‖_F² of the column-normalised C, and its gradient in the diagonals before normalising.

    `inverse` holds the diagonals of A⁻¹. AC⁻¹ is the inverse of L = CA⁻¹, which has a band or two more than C.
    In blocks as wide as that band, L_k on the diagonal and M_k on its left, with R_k = (L⁻¹L⁻ᵀ)_{k,k},
    f = Σ_k tr R_k:

        Q_k = 1 + M_k R_{k-1} M_kᵀ      R_k = L_k⁻¹ Q_k L_k⁻ᵀ                       forward
        U_k = L_k⁻ᵀ Γ_k L_k⁻¹           Γ_{k-1} = 1 + M_kᵀ U_k M_k                  backward
        ∂f/∂L_k = -2 U_k Q_k L_k⁻ᵀ      ∂f/∂M_k = 2 U_k M_k R_{k-1}

    O(steps·bands²) work, O(steps·bands) memory; everything is a sum of squares, so nothing cancels.
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

    error = -float(blocks * width - steps)  # the identity beyond the end
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
    for lag in range(min(len(inverse), steps)):  # times_banded, backwards
        of_unit[:, lag:] += of_product[lag : lag + bands, : steps - lag] * inverse[lag, : steps - lag]
    of_unit -= unit * (of_unit * unit).sum(dim=0)
    return torch.tensor(error, dtype=torch.float64).log(), of_unit / norms


def _diagonals_of(panels: torch.Tensor, *, lags: int, steps: int) -> torch.Tensor:
    """What `column_panels` was made of."""
    blocks, _, width = panels.shape
    columns = torch.arange(width)
    found = panels[:, columns + torch.arange(lags)[:, None], columns]
    return found.permute(1, 0, 2).reshape(lags, blocks * width)[:, :steps]


@contextmanager
def _one_thread(*, width: int) -> Iterator[None]:
    """Keep small products on one core: handing them out costs more than they do."""
    threads = torch.get_num_threads()
    if width < _ONE_THREAD_WIDTH:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
