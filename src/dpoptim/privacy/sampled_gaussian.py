"""Privacy loss distributions of the Poisson-sampled Gaussian mechanism.

Discretization (pessimistic "connect the dots") and composition (FFT) are Google's dp-accounting. This file computes the
hockey-stick curve δ(ε) of one step for all grid points at once; dp-accounting does so point by point, which takes
minutes. It also chooses the grid by the spread of one step.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpoptim.privacy.adjacency import Adjacency

if TYPE_CHECKING:  # slow to import, so functions import it
    from dp_accounting.pld.pld_pmf import PLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Floats = NDArray[np.float64]

_TAIL_MASS = 0.5 * math.exp(-50.0)
_MAX_GRID_POINTS = 200_000
MAX_COMPOSED_POINTS = 2_000_000
DEFAULT_RESOLUTION = 32.0


class Direction(enum.Enum):
    """The two distributions of a divergence, with noise density μ, sampling probability q and sensitivity 1.

    Attributes:
        REMOVE: q·μ(x+1) + (1−q)·μ(x) against μ(x).
        ADD: μ(x) against q·μ(x−1) + (1−q)·μ(x).
        REPLACE: q·μ(x+1) + (1−q)·μ(x) against q·μ(x−1) + (1−q)·μ(x), which lie 2 apart.
    """

    REMOVE = "remove"
    ADD = "add"
    REPLACE = "replace"


def _log_mix(loss: Floats, sampling_prob: float) -> Floats:
    """Return ln(1 + (e^loss − 1)/q), the unsampled loss that gives this sampled loss; −∞ if there is none."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        exact = np.log1p(np.maximum(np.expm1(np.minimum(loss, 40.0)) / sampling_prob, -1.0))
    return np.where(loss > 40.0, loss - math.log(sampling_prob), exact)


def hockey_stick(epsilons: Floats, noise_multiplier: float, sampling_prob: float, direction: Direction) -> Floats:
    """Return δ(ε) of one Poisson-sampled Gaussian step, for an array of ε of either sign.

    The privacy loss decreases in x, so δ(ε) = U(x*) − e^ε L(x*), where U and L are the two distribution functions and
    x* is the point at which the loss equals ε. REMOVE losses are never below ln(1−q), where δ = 1 − e^ε. ADD losses
    are never above −ln(1−q), where δ = 0.

    >>> float(hockey_stick(np.array([1.0]), 1.0, 1.0, Direction.REMOVE)[0].round(6))
    0.126937
    """
    from scipy.special import log_ndtr, ndtr

    epsilons = np.asarray(epsilons, dtype=np.float64)
    q, std = sampling_prob, noise_multiplier
    variance = std * std
    if direction is Direction.REMOVE:
        cut = -0.5 - variance * _log_mix(epsilons, q)
    elif direction is Direction.ADD:
        cut = 0.5 + variance * _log_mix(-epsilons, q)
    elif q == 1.0:
        cut = -epsilons * variance / 2
    else:
        # x = σ²(asinh(−α sinh(ε/2)) − ε/2) with α = e^{1/(2σ²)}(1−q)/q, in logarithms because α overflows.
        half = np.abs(epsilons) / 2
        log_alpha = 0.5 / variance + math.log1p(-q) - math.log(q)
        with np.errstate(divide="ignore"):
            log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2.0) + log_alpha
        asinh = np.logaddexp(0.5 * np.logaddexp(0.0, 2 * log_sinh), log_sinh)
        cut = -np.sign(epsilons) * variance * (asinh + half)
    upper = ndtr(cut / std)
    log_lower = log_ndtr(cut / std)
    if direction is not Direction.ADD:
        upper = (1 - q) * upper + q * ndtr((cut + 1) / std)
    if direction is not Direction.REMOVE:
        log_rest = math.log1p(-q) if q < 1.0 else -math.inf
        log_lower = np.logaddexp(log_rest + log_lower, math.log(q) + log_ndtr((cut - 1) / std))
    with np.errstate(over="ignore", invalid="ignore"):
        deltas = upper - np.exp(epsilons + log_lower)
    if direction is Direction.REMOVE and q < 1.0:
        below = epsilons <= math.log1p(-q)
        deltas = np.where(below, -np.expm1(np.minimum(epsilons, 0.0)), deltas)
    if direction is Direction.ADD and q < 1.0:
        deltas = np.where(epsilons >= -math.log1p(-q), 0.0, deltas)
    return np.clip(np.nan_to_num(deltas, nan=0.0), 0.0, 1.0)


def _loss_range(noise_multiplier: float, sampling_prob: float, direction: Direction) -> tuple[float, float]:
    """Return an interval of privacy losses that contains all but e⁻⁵⁰ of the noise."""
    from scipy.special import ndtri

    q, variance = sampling_prob, noise_multiplier**2
    reach = noise_multiplier * -float(ndtri(_TAIL_MASS))
    log_rest = math.log1p(-q) if q < 1.0 else -math.inf

    def removed(x: float) -> float:
        return float(np.logaddexp(log_rest, math.log(q) - (0.5 + x) / variance))

    if direction is Direction.REMOVE:
        return removed(reach), removed(-reach - 1)
    if direction is Direction.ADD:
        return -removed(-reach - 1), -removed(reach)
    return removed(reach) - removed(-reach), removed(-reach - 1) - removed(reach + 1)


def _pmf(noise_multiplier: float, sampling_prob: float, direction: Direction, interval: float) -> PLDPmf:
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap

    low, high = _loss_range(noise_multiplier, sampling_prob, direction)
    first, last = math.floor(low / interval), math.ceil(high / interval)
    grid: Floats = np.arange(first, last + 1).astype(np.float64) * interval
    # δ(ε) never increases, but rounding may make it increase by an ulp.
    deltas = np.minimum.accumulate(hockey_stick(grid, noise_multiplier, sampling_prob, direction))
    try:
        return create_pmf_pessimistic_connect_dots_fixed_gap(interval, first, last, deltas)
    except OverflowError:
        raise ValueError(
            f"noise_multiplier={noise_multiplier:g} is too small to account for. Use more noise."
        ) from None


def smallest_interval(noise_multiplier: float, sampling_prob: float, adjacency: Adjacency) -> float:
    """Return the finest grid on which the losses of one step fit in memory."""
    direction = Direction.REPLACE if adjacency is Adjacency.REPLACE else Direction.REMOVE
    low, high = _loss_range(noise_multiplier, sampling_prob, direction)
    return (high - low) / _MAX_GRID_POINTS


def grid_interval(
    noise_multiplier: float,
    sampling_prob: float,
    adjacency: Adjacency,
    *,
    steps: int = 1,
    resolution: float = DEFAULT_RESOLUTION,
) -> float:
    """Return the interval of the grid of losses: one step's spread over `resolution`, or more to fit in memory.

    One step's loss has a standard deviation of about q·√(e^{1/σ²} − 1), and at most 1/σ. Splitting a loss over its two
    grid neighbours adds at most h²/4 to its variance, a second-order error.

    Guarantee: every interval gives an upper bound on ε; a finer one gives a tighter bound.
    """
    inverse_variance = noise_multiplier**-2
    spread = math.sqrt(inverse_variance)
    if inverse_variance < 600.0:
        spread = min(spread, sampling_prob * math.sqrt(math.expm1(inverse_variance)))
    mean_loss = steps * sampling_prob * inverse_variance / 2  # an upper bound, by convexity
    factor = adjacency.sensitivity_factor
    coarsest = max(
        smallest_interval(noise_multiplier, sampling_prob, adjacency),
        factor**2 * mean_loss / MAX_COMPOSED_POINTS,
    )
    return max(factor * min(spread, 0.064) / resolution, coarsest * max(1.0, DEFAULT_RESOLUTION / resolution))


def one_step(
    noise_multiplier: float, sampling_prob: float, adjacency: Adjacency, interval: float
) -> PrivacyLossDistribution:
    """Return the privacy loss distribution of one Poisson-sampled Gaussian step on a grid of the given interval.

    `noise_multiplier` is the noise over the clip norm for every adjacency: `REPLACE` puts the neighbours at −1 and +1.
    """
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    def pmf(direction: Direction) -> PLDPmf:
        return _pmf(noise_multiplier, sampling_prob, direction, interval)

    if adjacency is Adjacency.REPLACE:
        return PrivacyLossDistribution(pmf(Direction.REPLACE))
    return PrivacyLossDistribution(pmf(Direction.REMOVE), pmf(Direction.ADD))
