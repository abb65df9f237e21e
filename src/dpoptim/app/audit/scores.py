"""What the attack makes of a game's releases: whitened values, residuals, and a score per canary.

In units of the clip norm, the releases along a canary's coordinate are y = x + std·κ·C⁻¹z. Here x is its direction at
the steps that drew it, and κ is the largest column norm of C. So w = Cy/(κ·std) contains unit normals, and a step that
draws the canary adds v = (its column of C)/(κ·std). A released square has the same form, with its own C, std and x.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse
from scipy.special import ndtri

from dpoptim.app.audit.game import GameResult
from dpoptim.app.audit.statistics import Floats
from dpoptim.noise import Strategy
from dpoptim.privacy import Adjacency, CyclicPoisson, IndependentMoments, PrivacyPlan


def whitening(strategy: Strategy, stddev: float) -> Any:
    """The matrix C/(κ·std), which is sparse if C is diagonal, because such a plan may have many steps."""
    if strategy.bands == 1:
        return sparse.diags_array(1.0 / (strategy.row_norms() * strategy.column_norm * stddev), format="csr")
    return np.asarray(strategy.strategy_matrix()) / (strategy.column_norm * stddev)


def whiten(matrix: Any, table: Floats) -> Floats:
    """Multiply values by step, [steps, canaries], by a whitening matrix; a game may have played fewer steps."""
    return np.asarray(matrix[: len(table), : len(table)] @ table)


def square_residuals(plan: PrivacyPlan, game: GameResult) -> Floats | None:
    """The residuals of the released square, or None if no square is noised."""
    stddev = plan.noise_stddevs().square
    if not stddev or game.square is None:
        return None
    release = plan.release
    of_average = isinstance(release, IndependentMoments) and release.squares == "of_average"
    # A canary that is drawn alone along its coordinate adds ζ²/B to an average of squares, (ζ/B)² to a squared average.
    one = plan.clip_norm**2 / (plan.batch_size**2 if of_average else plan.batch_size)
    matrix = whitening(plan.square_strategy, stddev)
    return whiten(matrix, game.square - game.drawn * game.directions**2 * one)


def scores(plan: PrivacyPlan, matrix: Any, game: GameResult, whitened: Floats) -> Floats:
    """ln P[w | in] − ln P[w | out] of each canary; where batches are secret, over all possible draws."""
    replaces = plan.adjacency is Adjacency.REPLACE
    if not plan.sampling.is_random:
        added = whiten(matrix, game.drawn.astype(np.float64))
        along = (whitened * added).sum(axis=0)
        return 2.0 * along if replaces else along - (added**2).sum(axis=0) / 2
    # Few canaries are drawn at a step, so the releases show the noise. If it is weak, a sharper attack fits.
    level = min(1.0, max(0.05, float(np.median(np.abs(whitened))) / float(ndtri(0.75))))
    along, squares = matrix.T @ whitened / level**2, (matrix**2).sum(axis=0)[:, None] / level**2
    terms = _log_mixture(plan.sampling_prob, along - squares / 2)
    if replaces:
        terms -= _log_mixture(plan.sampling_prob, -along - squares / 2)
    if isinstance(plan.sampling, CyclicPoisson):  # groups are not secret; a canary that is never drawn may be in any
        turns = np.arange(len(terms))[:, None] % plan.sampling.bands
        terms *= turns == game.drawn.argmax(axis=0) % plan.sampling.bands
    return np.asarray(terms.sum(axis=0))


def _log_mixture(rate: float, exponents: Floats) -> Floats:
    """ln(1 − q + q·e^x)."""
    if rate >= 1.0:
        return exponents
    return np.logaddexp(np.log1p(-rate), np.log(rate) + exponents)
