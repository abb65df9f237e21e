"""The search for the best buffers of a buffered Toeplitz strategy."""

from __future__ import annotations

import numpy as np
from scipy import optimize

from dpoptim.noise.powers import noising_series, powers
from dpoptim.noise.search.disk_cache import Array, remembered
from dpoptim.noise.search.objective import SearchObjective
from dpoptim.noise.series import Series

_GRID = 64  # decays tried for a further buffer
_SAME_DECAY = 1e-4  # buffers whose decays differ by less, in parts of 1 - decay, are one


@remembered("buffered-toeplitz", version=1)
def optimized_buffers(goal: SearchObjective, buffers: int) -> Array:
    """The best buffers, found one after another: the best with one fewer, one more put in, all moved by L-BFGS.

    The further buffer gets the decay at which a little weight lowers the error most, and weight as long as it
    does. So more buffers are never worse; where no decay helps, the strategy with fewer is what is returned.

    Decays and weights come as float64 [2, buffers].

    >>> optimized_buffers(SearchObjective(steps=20, max_participations=20), 1).shape  # in each step: nothing to correlate
    (2, 0)
    """
    if buffers == 0:
        return np.empty((2, 0))
    fewer = optimized_buffers(goal, buffers - 1)
    decays, weights = fewer
    lowest, pull = _log_error(decays, weights, goal)
    more = _with_another(decays, weights, lowest, pull[1:], goal)
    if more is None:
        return fewer
    decays, weights = _merged(*_refined(*more, goal))
    return np.stack([decays, weights]) if _log_error(decays, weights, goal)[0] < lowest else fewer


def _with_another(
    decays: Series, weights: Series, lowest: float, pull: Series, goal: SearchObjective
) -> tuple[Series, Series] | None:
    """The buffers and the one more that promises most; None where none lowers the error. `pull` is dL/dc_{i≥1}."""
    grid = 1.0 - np.geomspace(0.1 / goal.steps, 1.0, _GRID)
    unit = np.sqrt(1.0 - grid**2)  # the weight that gives each a norm of about 1
    slopes = unit * (powers(grid, len(pull)) @ pull)
    at = int(np.argmin(slopes))
    if not slopes[at] < -1e-9:
        return None
    all_decays, weight = np.append(decays, grid[at]), 0.5 * min(unit[at], 1.0 - weights.sum())
    for _ in range(30):
        all_weights = np.append(weights, weight)
        if _log_error(all_decays, all_weights, goal)[0] < lowest:
            return all_decays, all_weights
        weight /= 2
    return None


def _refined(decays: Series, weights: Series, goal: SearchObjective) -> tuple[Series, Series]:
    """A local minimum by L-BFGS over the logits of the decays, and of the weights beside 1 - Σ weights.

    Any logits are decays in (0, 1) and positive weights that sum to less than 1, so nothing must be refused.
    """
    count = len(decays)

    def buffers(logits: Series) -> tuple[Series, Series]:
        decays = np.clip(1.0 / (1.0 + np.exp(-logits[:count])), 0.0, 1.0 - 1e-12)
        shares = np.exp(logits[count:] - max(0.0, logits[count:].max()))
        rest = np.exp(-max(0.0, logits[count:].max()))
        return decays, shares / (rest + shares.sum())

    def value_and_slope(logits: Series) -> tuple[float, Series]:
        decays, weights = buffers(logits)
        value, pull = _log_error(decays, weights, goal)
        terms, lags = powers(decays, len(pull) - 1), np.arange(1, len(pull) - 1)
        by_weight = terms @ pull[1:]
        by_decay = weights * ((terms[:, :-1] * lags) @ pull[2:])
        return value, np.concatenate([by_decay * decays * (1 - decays), weights * (by_weight - weights @ by_weight)])

    decays = np.maximum(decays, 0.2)  # nearer to 0 the logit's gradient is too small to move it
    start = np.concatenate([np.log(decays / (1 - decays)), np.log(weights / (1 - weights.sum()))])
    found = optimize.minimize(
        value_and_slope,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(-30.0, 30.0)] * (2 * count),
        options={"maxcor": 30, "maxiter": 1000, "maxfun": 2000, "ftol": 1e-15, "gtol": 1e-9},
    )
    return buffers(found.x)


def _merged(decays: Series, weights: Series) -> tuple[Series, Series]:
    """The same buffers in order, those of one decay made one, and those of no weight left out."""
    order = [j for j in np.argsort(-decays, kind="stable") if weights[j] > 1e-12]
    kept: list[tuple[float, float]] = []
    for decay, weight in zip(decays[order], weights[order], strict=True):
        if kept and kept[-1][0] - decay < _SAME_DECAY * (1 - decay):
            last, before = kept.pop()
            decay, weight = (last * before + decay * weight) / (before + weight), before + weight
        kept.append((float(decay), float(weight)))
    return np.array([decay for decay, _ in kept]), np.array([weight for _, weight in kept])


def _log_error(decays: Series, weights: Series, goal: SearchObjective) -> tuple[float, Series]:
    """The goal, and its gradient in each of the coefficients c_0 .. c_{steps-1}."""
    coefs = np.concatenate([[1.0], weights @ powers(decays, goal.steps - 1)])
    return goal.by_strategy(coefs, noising_series(decays, weights, goal.steps))
