"""The best strategy for a workload: a full lower triangular matrix, with a bound that proves it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dpoptim.disk_cache import Array, cached_on_disk
from dpoptim.noise.search.banded_inverse import BandedInverse
from dpoptim.noise.search.objective import check_workload, lbfgs, workload_matrix
from dpoptim.noise.search.workloads import Matrix, PrefixSums, Workload
from dpoptim.noise.series import Series
from dpoptim.noise.strategies.base import Strategy, check_participation
from dpoptim.noise.strategies.matrix import MatrixStrategy
from dpoptim.short_repr import ShortRepr

_GAP = 1e-5  # the relative gap allowed between the squared error and the dual bound
_GAP_OF_SEVERAL = 5e-3  # the same with several participations
_GOOD_GAP_OF_SEVERAL = 2e-5  # at this gap the search ends early
_SHARPNESS = (1e2, 3e2, 1e3, 3e3, 1e4, 3e4, 1e5, 3e5, 1e6)  # of the soft maximum over patterns
_ITERATIONS = 1000  # at each sharpness, fewer once an iteration gains less than _GAIN/sharpness
_GAIN = 1e-5
_NEVER = -1e30  # stands for ln 0, but has a gradient


@dataclass(frozen=True, kw_only=True, repr=False)
class Dense(ShortRepr):
    """Dense noise: the lower triangular C with the least mean error times sensitivity.

        minimise  ‖AC⁻¹‖_F·sensitivity  over lower triangular C

    It needs no memory, but row t costs t + 1 rows of normals. Use it for few steps and as a benchmark. The largest
    column norm is 1; with one participation all are 1. If an example may take part in every step, C is diagonal.

    A dual bound proves that the squared product is within 1e-5 (relative) of the optimum for one participation, and
    within 5e-3 for several (1e-4 for most, up to five). The sensitivity is `MatrixStrategy`'s: exact for one and two
    participations, an upper bound for more. C is optimal for that bound, because ε is computed from it.

    Args:
        workload: The sums that the optimizer computes from the gradients.

    >>> strategy = Dense().optimize(steps=16)
    >>> round(strategy.mean_error(), 6), round(strategy.column_norm, 12)
    (1.689404, 1.0)
    >>> twice = {"max_participations": 2, "min_separation": 4}
    >>> best = Dense().optimize(steps=16, **twice)
    >>> round(best.mean_error() * best.sensitivity(**twice), 3)
    2.636
    >>> round(strategy.mean_error() * strategy.sensitivity(**twice), 3)
    2.892
    """

    workload: Workload = PrefixSums()  # noqa: RUF009

    def __post_init__(self) -> None:
        check_workload(self.workload)

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> MatrixStrategy:
        """Return the optimum for this many steps and this pattern; results are cached.

        Several participations take 1,000 to 5,000 evaluations of O(steps³ + max_participations·steps²): on one core
        seconds for 50 steps, a minute or two for 200.

        Raises:
            RuntimeError: If the result is not proved to be near the optimum.
        """
        check_participation(steps, max_participations, min_separation)
        seconds = steps**2 * max_participations / 1500 if max_participations > 1 else (steps / 700) ** 3  # on one core
        if seconds > 20:
            warnings.warn(
                f"The first search of Dense() for {max_participations} participations in {steps} steps takes about "
                f"{seconds:.0f} s. BufferedToeplitz(buffers=4) is nearly as good and takes less than one.",
                stacklevel=2,
            )
        if max_participations == 1:
            return MatrixStrategy(diagonals=optimal_dense(steps, self.workload))
        return MatrixStrategy(diagonals=optimal_overlap(steps, self.workload, max_participations, min_separation))


@cached_on_disk("dense", version=1)
def optimal_dense(steps: int, workload: Workload) -> Array:
    """Return the diagonals [steps, steps] for one participation, by the dual, a concave function of v_t > 0.

        min_X tr(AᵀA X⁻¹) + Σ v_t (X_tt - 1)  =  2·tr(R) - Σ v_t,   R = (V^½ AᵀA V^½)^½,
        reached at  X = CᵀC = V^-½ R V^-½,  whose diagonal is that of R over v

    L-BFGS runs in ln v. If A⁻¹ has two diagonals, the inverse of V^½AᵀAV^½ is tridiagonal and an iteration costs its
    eigenvectors, O(steps²). With momentum or a schedule it costs O(steps³).
    """
    square_root = _square_root(workload, steps)
    log_weights = np.zeros(steps)
    for _ in range(5):  # the fixed point v ← diag R gives the weights their size
        log_weights = np.log(_diagonal(*square_root(log_weights)))
    sizes = np.exp(0.5 * log_weights)  # gives all variables a similar effect
    sizes /= np.linalg.norm(sizes)
    total = float(np.exp(log_weights).sum())

    def negative_dual(variables: Series) -> tuple[float, Series]:
        roots, vectors = square_root(variables / sizes)
        weights = np.exp(variables / sizes)
        slope = (weights - _diagonal(roots, vectors)) / sizes
        return float(weights.sum() - 2 * roots.sum()) / total, slope / total

    options = {"maxcor": 20, "maxiter": 500, "maxfun": 500, "ftol": 1e-15, "gtol": 1e-6}
    found = lbfgs(negative_dual, log_weights * sizes, **options)
    log_weights = found.x / sizes
    roots, vectors = square_root(log_weights)
    bound = float(2 * roots.sum() - np.exp(log_weights).sum())
    inverse_root = np.exp(-0.5 * log_weights)
    matrix = _lower_factor(np.sqrt(roots)[:, None] * vectors.T * inverse_root)
    strategy = MatrixStrategy.from_matrix(matrix / np.linalg.norm(matrix, axis=0))
    gap = steps * strategy.mean_error(workload) ** 2 / bound - 1
    if not gap < _GAP:
        raise RuntimeError(f"The search for steps={steps} ended {gap:.1e} above its bound. Use Banded or fewer steps.")
    return strategy.diagonals


def _square_root(workload: Workload, steps: int) -> Callable[[Series], tuple[Series, Matrix]]:
    """Return the function ln v → (roots, Q) with (V^½AᵀAV^½)^½ = Q·diag(roots)·Qᵀ."""
    from scipy import linalg

    inverse = workload.inverse_diagonals(steps)
    if len(inverse) > 2 or not workload.is_toeplitz:
        matrix = workload_matrix(workload, steps)

        def by_matrix(log_weights: Series) -> tuple[Series, Matrix]:
            # The rounding of AᵀA would hide the small roots, and a schedule spreads roots over many sizes.
            _, roots, transposed = linalg.svd(matrix * np.exp(0.5 * log_weights), check_finite=False)
            return roots, transposed.T

        return by_matrix
    diagonal, beside = inverse[0] ** 2, inverse[1, :-1] * inverse[0, :-1]  # of A⁻¹A⁻ᵀ
    diagonal[1:] += inverse[1, :-1] ** 2

    def by_inverse(log_weights: Series) -> tuple[Series, Matrix]:
        inverse_root = np.exp(-0.5 * log_weights)
        values, vectors = linalg.eigh_tridiagonal(
            diagonal * inverse_root**2, beside * inverse_root[1:] * inverse_root[:-1], lapack_driver="stemr"
        )
        return values**-0.5, vectors

    return by_inverse


@cached_on_disk("dense-overlap", version=1)
def optimal_overlap(steps: int, workload: Workload, max_participations: int, min_separation: int) -> Array:
    """Return the diagonals [steps, steps] for several participations, by descent on a smoothed sensitivity.

        minimise  ln tr(AᵀA X⁻¹) + U(X),   X = CᵀC,   U(X) = max over Q of  Σ_su Q_su·|X_su|  = sensitivity²

    Q runs over the patterns of `MatrixStrategy.sensitivity`, and U = 1 at the optimum. Increasingly sharp soft maxima
    replace the maximum; their gradient is an average W of patterns Q. √(x² + δ²) replaces |x|. L-BFGS runs in C. With
    Y = W·X/√(X² + δ²), every other X' has U(X') ≥ Σ W_su·|X'_su| ≥ Σ Y_su·X'_su, and therefore

        tr(AᵀA X'⁻¹)·U(X')  ≥  (tr (AYAᵀ)^½)²

    which bounds the squared product from below. With a participation in every step, X = diag ‖column of A‖ is the
    optimum: W is 1 everywhere, and X⁻¹AᵀAX⁻¹ holds the cosines between columns of A.
    """
    pattern = {"max_participations": max_participations, "min_separation": min_separation}
    sums = workload_matrix(workload, steps)
    if max_participations == steps:
        norms = np.sqrt(np.linalg.norm(sums, axis=0))
        return (norms / norms.max())[None]
    starts: tuple[Strategy, ...] = (
        BandedInverse(bands=min(max(min_separation, 2), 32, steps), workload=workload).optimize(steps=steps, **pattern),
        MatrixStrategy(diagonals=optimal_dense(steps, workload)),
    )
    start = min(starts, key=lambda strategy: strategy.mean_error(workload) * strategy.sensitivity(**pattern))
    matrix = start.strategy_matrix() / start.sensitivity(**pattern)
    best, least, bound, gap = MatrixStrategy.from_matrix(matrix), np.inf, 0.0, np.inf
    for sharpness in _SHARPNESS:
        overlap = _Overlap(sums=torch.from_numpy(sums), sharpness=sharpness, **pattern)
        matrix = _descended(overlap, matrix)
        strategy = MatrixStrategy.from_matrix(matrix)
        product = steps * (strategy.mean_error(workload) * strategy.sensitivity(**pattern)) ** 2
        if product < least:
            best, least = strategy, product
        bound = max(bound, overlap.bound(matrix))
        gap = least / bound - 1 if bound > 0 else np.inf
        if gap < _GOOD_GAP_OF_SEVERAL:
            break
    if not gap < _GAP_OF_SEVERAL:
        raise RuntimeError(
            f"The search for steps={steps}, max_participations={max_participations}, min_separation={min_separation} "
            f"ended {gap:.1e} above its bound. Use fewer steps, or Banded(bands={min_separation})."
        )
    return best.diagonals / best.column_norm


def _descended(overlap: _Overlap, matrix: Matrix) -> Matrix:
    """Run L-BFGS from this C and return the result with a positive diagonal."""
    steps, free = len(matrix), np.tril_indices(len(matrix))
    inverse = np.linalg.inv(matrix)  # the sizes (X⁻¹AᵀAX⁻¹)_ss^-½ give all columns a similar effect
    sizes = np.linalg.norm(overlap.sums.numpy() @ inverse @ inverse.T, axis=0)[free[1]] ** -1.0
    sizes *= np.abs(matrix[free]).max() / sizes.max()

    def value_and_slope(entries: Series) -> tuple[float, Series]:
        value, slope, _ = overlap.value(_filled(entries * sizes, steps))
        return value, slope[free] * sizes

    limits = {"maxiter": _ITERATIONS, "maxfun": _ITERATIONS, "ftol": _GAIN / overlap.sharpness, "gtol": 1e-9}
    found = lbfgs(value_and_slope, matrix[free] / sizes, maxcor=30, **limits)
    matrix = _filled(found.x * sizes, steps)
    return matrix * np.sign(np.diag(matrix))[:, None]


@dataclass(frozen=True, kw_only=True)
class _Overlap:
    """ln ‖AC⁻¹‖_F² + soft sensitivity², with its gradient and dual matrix."""

    sums: torch.Tensor  # A, float64 [steps, steps]
    max_participations: int
    min_separation: int
    sharpness: float

    def value(self, matrix: Matrix) -> tuple[float, Matrix, torch.Tensor]:
        """Return the value, its gradient in C, and Y of the bound."""
        lower = torch.from_numpy(matrix)
        noise = torch.linalg.solve_triangular(lower, self.sums, upper=False, left=False)
        error = noise.square().sum()
        by_error = torch.linalg.solve_triangular(lower.mT, noise.mT @ noise, upper=True, left=False)
        gram = lower.mT @ lower
        smooth = (gram.square() + self.sharpness**-2).sqrt()
        smooth.diagonal().copy_(gram.diagonal())
        products = smooth.requires_grad_()
        energy = soft_worst_pattern(products, self.max_participations, self.min_separation, self.sharpness)
        (weights,) = torch.autograd.grad(energy, products)
        weights = (weights + weights.mT) / 2
        dual = weights * gram / products.detach()
        slope = 2 * (lower @ dual - by_error / error)
        return float(error.log()) + float(energy.detach()), slope.numpy(), dual

    def bound(self, matrix: Matrix) -> float:
        """Return the lower bound on ‖AC⁻¹‖_F²·sensitivity² of all C that Y, or Y moved to its diagonal, proves."""
        _, _, dual = self.value(matrix)
        alone, bound = torch.diag(dual.diagonal()), 0.0
        for share in (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1.0):
            values = torch.linalg.eigvalsh(self.sums @ torch.lerp(dual, alone, share) @ self.sums.mT)
            if values[0] >= 0:
                bound = max(bound, float(values.sqrt().sum()) ** 2)
        return bound


def soft_worst_pattern(
    products: torch.Tensor, max_participations: int, min_separation: int, sharpness: float
) -> torch.Tensor:
    """Return the square of `MatrixStrategy.sensitivity` with soft maxima ln Σ exp(sharpness·x) / sharpness.

    `products` is |column_s · column_u| as [steps, steps]; only u ≥ s is read. The gradient there is an average of the
    patterns of the hard maximum, in which a pair s < u counts twice. The result is never below the hard maximum.
    """
    steps = len(products)
    scaled, at = sharpness * products, torch.arange(steps)
    later = at - at[:, None] >= min_separation
    alone, none = scaled.diagonal(), scaled.new_zeros(steps, 1)
    # best[s] is for patterns that start at s; onward[s, u] sums products of s with columns from u + min_separation on.
    best, onward = alone, torch.zeros_like(scaled)
    for count in range(1, max_participations):
        sums = torch.where(later, scaled + onward, _NEVER)
        best = alone + torch.logsumexp(torch.cat([2 * sums + best, none], dim=1), dim=1)
        if count + 1 < max_participations:
            rest = torch.logcumsumexp(torch.cat([none, sums.flip(1)], dim=1), dim=1).flip(1)[:, :-1]
            onward = torch.nn.functional.pad(rest[:, min_separation:], (0, min(min_separation, steps)))
    return torch.logsumexp(best, dim=0) / sharpness


def _diagonal(roots: Series, vectors: Matrix) -> Series:
    """Return the diagonal of Q·diag(roots)·Qᵀ without BLAS, whose threads would compete with LAPACK's."""
    return np.asarray(np.einsum("ij,ij,j->i", vectors, vectors, roots))


def _lower_factor(half: Matrix) -> Matrix:
    """Return the lower triangular C with CᵀC = halfᵀhalf, by QR, which avoids rounding the product first."""
    upper = np.asarray(np.linalg.qr(half[:, ::-1], mode="r"))
    lower = np.tril(upper[::-1, ::-1])
    return np.asarray(lower * np.sign(np.diag(lower))[:, None], dtype=np.float64)


def _filled(entries: Series, steps: int) -> Matrix:
    matrix = np.zeros((steps, steps))
    matrix[np.tril_indices(steps)] = entries
    return matrix
