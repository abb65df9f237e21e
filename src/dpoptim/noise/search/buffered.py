"""The best buffered Toeplitz strategy (BLT): correlated noise with a memory of a few rows, for any number of steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dpoptim.arguments import check_choice, set_whole
from dpoptim.disk_cache import Array, cached_on_disk
from dpoptim.noise.search.objective import Objective, SearchObjective, check_workload, lbfgs
from dpoptim.noise.search.workloads import PrefixSums, Workload
from dpoptim.noise.series import Series, noising_series, powers
from dpoptim.noise.strategies.toeplitz import BufferedToeplitzStrategy
from dpoptim.short_repr import ShortRepr

_GRID = 64  # candidate decays for one more buffer
_SAME_DECAY = 1e-4  # buffers whose decays differ by less, relative to 1 - decay, are merged


@dataclass(frozen=True, kw_only=True, repr=False)
class BufferedToeplitz(ShortRepr):
    """Buffered linear Toeplitz noise (BLT): nearly as good as dense C, with the memory of a few rows.

        minimise  error·sensitivity  over  c_0 = 1,  c_i = Σ_j weights[j]·decays[j]^(i-1)

    With three buffers the error is 1.001 times that of six in 2,000 steps, 1.0002 times with three participations 128
    or 830 steps apart, and 1.008 times in 20,000 steps. With two it is 1.015, 1.026 and 1.05 times.

    Args:
        buffers: The largest number of buffers, which is the number of stored rows. A buffer that would not lower
            the error is left out; with no buffers the noise is independent.
        objective: Whether to minimise the mean or the max error of the workload.
        workload: The sums that the optimizer computes from the gradients.

    Guarantee: the coefficients are non-negative and non-increasing, so the sensitivity is exact.

    >>> strategy = BufferedToeplitz(buffers=2).optimize(steps=100)
    >>> strategy.kept_rows, strategy.sensitivity_is_exact
    (2, True)
    >>> round(strategy.mean_error() * strategy.column_norm, 3)  # 2.371 for the square root
    2.321
    """

    buffers: int = field(default=3, metadata={"shown": True})
    objective: Objective = "mean"
    workload: Workload = PrefixSums()  # noqa: RUF009

    def __post_init__(self) -> None:
        set_whole(self, "buffers", hint="Use Independent() for noise without memory.")
        check_choice("objective", self.objective, ("mean", "max"))
        check_workload(self.workload)

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> BufferedToeplitzStrategy:
        """Return the best buffers for this many steps and this pattern; results are cached."""
        pattern = {"max_participations": max_participations, "min_separation": min_separation}
        search = SearchObjective(steps=steps, **pattern, workload=self.workload, objective=self.objective)
        decays, weights = optimized_buffers(search, self.buffers)
        return BufferedToeplitzStrategy(steps=steps, decays=tuple(decays.tolist()), weights=tuple(weights.tolist()))


@cached_on_disk("buffered-toeplitz", version=1)
def optimized_buffers(search: SearchObjective, buffers: int) -> Array:
    """Return the decays and weights of the best buffers, float64 [2, buffers].

    The search adds one buffer at a time to the best strategy with one fewer, then moves all of them by L-BFGS. So more
    buffers are never worse. Where no decay helps, the result has fewer buffers.
    """
    if buffers == 0:
        return np.empty((2, 0))
    fewer = optimized_buffers(search, buffers - 1)
    decays, weights = fewer
    lowest, pull = _log_error(decays, weights, search)
    more = _with_another(decays, weights, lowest, pull[1:], search)
    if more is None:
        return fewer
    decays, weights = _merged(*_refined(*more, search))
    return np.stack([decays, weights]) if _log_error(decays, weights, search)[0] < lowest else fewer


def _with_another(
    decays: Series, weights: Series, lowest: float, pull: Series, search: SearchObjective
) -> tuple[Series, Series] | None:
    """Add the most promising buffer; return None if none lowers the error. `pull` is dL/dc_{i≥1}."""
    grid = 1.0 - np.geomspace(0.1 / search.steps, 1.0, _GRID)
    unit = np.sqrt(1.0 - grid**2)  # the weight that gives each a norm of about 1
    slopes = unit * (powers(grid, len(pull)) @ pull)
    at = int(np.argmin(slopes))
    if not slopes[at] < -1e-9:
        return None
    all_decays, weight = np.append(decays, grid[at]), 0.5 * min(unit[at], 1.0 - weights.sum())
    for _ in range(30):
        all_weights = np.append(weights, weight)
        if _log_error(all_decays, all_weights, search)[0] < lowest:
            return all_decays, all_weights
        weight /= 2
    return None


def _refined(decays: Series, weights: Series, search: SearchObjective) -> tuple[Series, Series]:
    """Find a local minimum by L-BFGS over the logits of the decays, and of the weights with 1 - Σ weights."""
    count = len(decays)

    def buffers(logits: Series) -> tuple[Series, Series]:
        decays = np.clip(1.0 / (1.0 + np.exp(-logits[:count])), 0.0, 1.0 - 1e-12)
        shares = np.exp(logits[count:] - max(0.0, logits[count:].max()))
        rest = np.exp(-max(0.0, logits[count:].max()))
        return decays, shares / (rest + shares.sum())

    def value_and_slope(logits: Series) -> tuple[float, Series]:
        decays, weights = buffers(logits)
        value, pull = _log_error(decays, weights, search)
        terms, lags = powers(decays, len(pull) - 1), np.arange(1, len(pull) - 1)
        by_weight = terms @ pull[1:]
        by_decay = weights * ((terms[:, :-1] * lags) @ pull[2:])
        return value, np.concatenate([by_decay * decays * (1 - decays), weights * (by_weight - weights @ by_weight)])

    decays = np.maximum(decays, 0.2)  # nearer to 0 the logit's gradient is too small to move it
    start = np.concatenate([np.log(decays / (1 - decays)), np.log(weights / (1 - weights.sum()))])
    bounds = [(-30.0, 30.0)] * (2 * count)
    options = {"maxcor": 30, "maxiter": 1000, "maxfun": 2000, "ftol": 1e-15, "gtol": 1e-9}
    return buffers(lbfgs(value_and_slope, start, bounds=bounds, **options).x)


def _merged(decays: Series, weights: Series) -> tuple[Series, Series]:
    """Sort the buffers, merge those with the same decay and drop those without weight."""
    order = [j for j in np.argsort(-decays, kind="stable") if weights[j] > 1e-12]
    kept: list[tuple[float, float]] = []
    for decay, weight in zip(decays[order], weights[order], strict=True):
        if kept and kept[-1][0] - decay < _SAME_DECAY * (1 - decay):
            last, before = kept.pop()
            decay, weight = (last * before + decay * weight) / (before + weight), before + weight
        kept.append((float(decay), float(weight)))
    return np.array([decay for decay, _ in kept]), np.array([weight for _, weight in kept])


def _log_error(decays: Series, weights: Series, search: SearchObjective) -> tuple[float, Series]:
    """Return the objective and its gradient in the coefficients c_0 .. c_{steps-1}."""
    coefs = np.concatenate([[1.0], weights @ powers(decays, search.steps - 1)])
    return search.by_strategy(coefs, noising_series(decays, weights, search.steps))
