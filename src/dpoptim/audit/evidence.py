"""What a game tells: a score a canary, as the best attack gives it, and how the noise compares with the plan's.

In units of the clip norm, the releases along a canary's coordinate are y = x + std·κ·C⁻¹z, with x the direction ±1 or
0 at the steps that drew it and κ the largest column norm of C. So w = Cy/(κ·std) has unit normals in it, and a step
that draws the canary adds v = (its column of C)/(κ·std).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpoptim.audit.canaries import Observed
from dpoptim.noise import Independent
from dpoptim.privacy import Adjacency, CyclicPoisson, PrivacyPlan

Floats = NDArray[np.float64]

_CHUNK = 500  # canaries at a time, so that few of their [steps, canaries] tables are there at once
_LAGS = 8


class Evidence(NamedTuple):
    """Scores, and sums over all residuals (w less what the canaries add) from which the noise is judged."""

    scores: Floats  # [canaries], the logarithm of how much likelier the releases are with the canary in
    residual_squares: float
    residual_count: int
    lagged: Floats  # [lags], sums of products of residuals so many steps apart
    sample: Floats  # some residuals, each of another place
    signal: float  # Σ w·(what is expected), and
    expected_signal: float  # the same of what is expected


def evidence_of(plan: PrivacyPlan, observed: Observed) -> Evidence:
    """All that is needed of one game; `observed` may be forgotten afterwards."""
    columns = _columns(plan)
    replaces = plan.adjacency is Adjacency.REPLACE
    directions = np.where(observed.included, 1.0, -1.0 if replaces else 0.0)
    scores, lagged = [], np.zeros(min(_LAGS, plan.steps - 1))
    squares = signal = expected_signal = 0.0
    samples = []
    for start in range(0, len(directions), _CHUNK):
        part = slice(start, start + _CHUNK)
        drawn = observed.drawn[:, part]
        whitened = _whitened(plan, observed.values[:, part].astype(np.float64))
        added = _times(columns, drawn.astype(np.float64))
        scores.append(_scores(plan, columns, whitened, drawn, added))
        expected = added * directions[part]
        residual = whitened - expected
        squares += float((residual**2).sum())
        signal += float((whitened * expected).sum())
        expected_signal += float((expected**2).sum())
        lagged += [float((residual[lag:] * residual[:-lag]).sum()) for lag in range(1, len(lagged) + 1)]
        samples.append(residual[np.arange(residual.shape[1]) % plan.steps, np.arange(residual.shape[1])])
    return Evidence(
        scores=np.concatenate(scores),
        residual_squares=squares,
        residual_count=observed.values.size,
        lagged=lagged,
        sample=np.concatenate(samples),
        signal=signal,
        expected_signal=expected_signal,
    )


def together(games: list[Evidence]) -> Evidence:
    """The evidence of several independent games."""
    return Evidence(
        scores=np.concatenate([game.scores for game in games]),
        residual_squares=sum(game.residual_squares for game in games),
        residual_count=sum(game.residual_count for game in games),
        lagged=np.sum([game.lagged for game in games], axis=0),
        sample=np.concatenate([game.sample for game in games]),
        signal=sum(game.signal for game in games),
        expected_signal=sum(game.expected_signal for game in games),
    )


def _level(plan: PrivacyPlan) -> float:
    """std of the noise on the sum, in clip norms."""
    return plan.noise_stddevs().gradient_sum / plan.clip_norm


def _columns(plan: PrivacyPlan) -> Floats | float:
    """All v, [steps, steps]; a number where C is the identity."""
    if isinstance(plan.noise, Independent):
        return 1.0 / _level(plan)
    return np.asarray(plan.strategy.strategy_matrix()) / (plan.strategy.column_norm * _level(plan))


def _times(columns: Floats | float, table: Floats) -> Floats:
    return columns * table if isinstance(columns, float) else columns @ table


def _whitened(plan: PrivacyPlan, values: Floats) -> Floats:
    return _times(_columns(plan), values)


def _scores(
    plan: PrivacyPlan, columns: Floats | float, whitened: Floats, drawn: NDArray[np.bool_], added: Floats
) -> Floats:
    """ln P[w | in] − ln P[w | out]; where batches are secret, over all draws that may have been."""
    replaces = plan.adjacency is Adjacency.REPLACE
    if not plan.sampling.is_random:
        along = (whitened * added).sum(axis=0)
        return 2.0 * along if replaces else along - (added**2).sum(axis=0) / 2
    along = columns * whitened if isinstance(columns, float) else columns.T @ whitened
    squares = columns**2 if isinstance(columns, float) else (columns**2).sum(axis=0)[:, None]
    rate = plan.sampling_prob
    terms = _log_mixture(rate, along - squares / 2)
    if replaces:
        terms -= _log_mixture(rate, -along - squares / 2)
    return np.where(_may_be_drawn(plan, drawn), terms, 0.0).sum(axis=0)


def _log_mixture(rate: float, exponents: Floats) -> Floats:
    """ln(1 − q + q·e^x)."""
    if rate >= 1.0:
        return exponents
    return np.logaddexp(np.log1p(-rate), np.log(rate) + exponents)


def _may_be_drawn(plan: PrivacyPlan, drawn: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The steps of a canary's group, which is no secret; for one that is never drawn, any group does."""
    if not isinstance(plan.sampling, CyclicPoisson):
        return np.ones_like(drawn)
    groups = drawn.argmax(axis=0) % plan.sampling.bands
    return (np.arange(plan.steps) % plan.sampling.bands)[:, None] == groups
