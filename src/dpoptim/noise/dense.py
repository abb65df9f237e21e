"""The best strategy of all for prefix sums and one participation: a full lower triangular matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import linalg, optimize

from dpoptim.noise.matrix import MatrixStrategy
from dpoptim.noise.series import Series
from dpoptim.noise.toeplitz import Matrix, _check_participation, check_steps

_GAP = 1e-7  # how far the squared error may be above the dual's bound, relatively


@dataclass(frozen=True, kw_only=True)
class Dense:
    """The lower triangular C of least mean error among those with unit columns.

        minimise  ‖AC⁻¹‖_F  over lower triangular C  with  ‖column of C‖ = 1

    Its rows need no memory, but row t costs t + 1 rows of normals: it is for few steps, and as the mark to
    measure others by.

    Guarantee: the squared error is within 1e-7 (relative) of the optimum, which a dual bound proves.

    >>> strategy = Dense().optimize(steps=16)
    >>> round(strategy.mean_error(), 6), round(strategy.column_norm, 12)
    (1.689404, 1.0)
    """

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> MatrixStrategy:
        """The optimum for this many steps; a second call is answered from memory.

        Edge cases: several participations are refused, as the optimum for them is not computed here. With
        orthogonal columns wherever two participations may meet, it would be `Banded(bands=min_separation)`.
        """
        check_steps(steps)
        _check_participation(steps, max_participations, min_separation)
        if max_participations > 1:
            raise ValueError(
                f"max_participations={max_participations}: Dense() is optimal for one participation; use "
                f"Banded(bands={min(min_separation, steps)}), whose participations at min_separation="
                f"{min_separation} do not overlap, or optimize for one and ask .sensitivity(...) for its bound"
            )
        return optimal_dense(steps)


@lru_cache(maxsize=16)
def optimal_dense(steps: int) -> MatrixStrategy:
    """The optimum by its dual, a concave function of one weight v_t > 0 for each column.

        min_X tr(AᵀA X⁻¹) + Σ v_t (X_tt - 1)  =  2·tr(R) - Σ v_t,   R = (V^½ AᵀA V^½)^½,
        reached at  X = CᵀC = V^-½ R V^-½,  whose diagonal is that of R over v

    L-BFGS in ln v. The inverse of V^½AᵀAV^½ is tridiagonal, so that a step costs its eigenvectors, O(steps²).

    >>> optimal_dense(1).strategy_matrix().tolist()
    [[1.0]]
    """
    diagonal = np.full(steps, 2.0)
    diagonal[0] = 1.0  # (AᵀA)⁻¹ is 2 on the diagonal, but 1 at its first place, and -1 beside it

    def square_root(log_weights: Series) -> tuple[Series, Matrix]:
        """R = Q·diag(roots)·Qᵀ."""
        inverse_root = np.exp(-0.5 * log_weights)
        values, vectors = linalg.eigh_tridiagonal(
            diagonal * inverse_root**2, -inverse_root[1:] * inverse_root[:-1], lapack_driver="stemr"
        )
        return values**-0.5, vectors

    def negative_dual(log_weights: Series) -> tuple[float, Series]:
        roots, vectors = square_root(log_weights)
        weights = np.exp(log_weights)
        return float(weights.sum() - 2 * roots.sum()), weights - _diagonal(roots, vectors)

    # One step of the fixed point v ← diag R, from v = 1, gives the weights their size.
    roots, vectors = square_root(np.zeros(steps))
    found = optimize.minimize(
        negative_dual,
        np.log(_diagonal(roots, vectors)),
        jac=True,
        method="L-BFGS-B",
        options={"maxcor": 20, "maxiter": 500, "maxfun": 500, "ftol": 1e-14, "gtol": 1e-7},
    )
    roots, vectors = square_root(found.x)
    inverse_root = np.exp(-0.5 * found.x)
    gram = (inverse_root[:, None] * ((vectors * roots) @ vectors.T)) * inverse_root
    lower = np.linalg.cholesky(gram[::-1, ::-1])[::-1, ::-1].T  # gram = CᵀC with C lower triangular
    strategy = MatrixStrategy.from_matrix(np.tril(lower) / np.linalg.norm(np.tril(lower), axis=0))
    gap = steps * strategy.mean_error() ** 2 / -float(found.fun) - 1
    if not gap < _GAP:
        raise RuntimeError(f"the search for steps={steps} ended {gap:.1e} above its bound; use another number of steps")
    return strategy


def _diagonal(roots: Series, vectors: Matrix) -> Series:
    """The diagonal of Q·diag(roots)·Qᵀ; no BLAS, whose threads would fight with those of LAPACK."""
    return np.asarray(np.einsum("ij,ij,j->i", vectors, vectors, roots))
