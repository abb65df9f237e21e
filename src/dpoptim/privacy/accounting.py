"""ε and δ of a whole run: frozen descriptions of what is run, and the accountants that consume them."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from dpoptim.privacy import gaussian
from dpoptim.privacy.adjacency import Adjacency
from dpoptim.privacy.sampled_gaussian import DEFAULT_RESOLUTION, grid_interval, one_step, smallest_interval

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

ACCOUNTING_VERSION = 1
"""Raised whenever a change may alter any ε; part of every cache key."""

MIN_PLD_DELTA = 1e-12
"""Below this δ the rounding of the Fourier transform is no longer negligible."""

_RDP_ORDERS = [1 + i / 10 for i in range(1, 100)] + list(range(11, 65)) + [2**i for i in range(7, 15)]


@dataclass(frozen=True, kw_only=True)
class GaussianRun:
    """A run that is one Gaussian mechanism: every participation is counted, sampling does not amplify.

    `sensitivity` is the ℓ₂ change of the whole noised sequence, over the noise that one unit of noise
    multiplier gives: sensitivity of the strategy over its column norm, times the adjacency's factor.

    >>> round(epsilon(GaussianRun(sensitivity=math.sqrt(3.0)), noise_multiplier=0.134466, delta=1e-7), 3)
    149.093
    """

    sensitivity: float


@dataclass(frozen=True, kw_only=True)
class PoissonRun:
    """Gaussian steps, composed adaptively, each on a secret Poisson sample of rate `sampling_prob`.

    `steps` counts those at which one example may be drawn: all of them under `Poisson`, one in `bands` under
    `CyclicPoisson`, where a step is a block of rows.

    >>> run = PoissonRun(sampling_prob=0.01, steps=100, adjacency=Adjacency.ZERO_OUT)
    >>> round(epsilon(run, noise_multiplier=1.0, delta=1e-5), 2)
    0.72
    """

    sampling_prob: float
    steps: int
    adjacency: Adjacency


@dataclass(frozen=True, kw_only=True)
class TruncatedPoissonRun:
    """As `PoissonRun`, but a sample above `max_batch_size` is cut to a uniformly random subset of it.

    Condition on the other examples O that were drawn. If |O| < max, nothing changes. Otherwise write K for
    the subset of O that would be kept without our example; K is uniform whatever |O| is. With probability p =
    q·max/(|O|+1) our example takes the place of one member of K, which moves the sum by at most 2 clip norms
    from K's in either neighbour. So one step is a public coin between the sampled Gaussian with sensitivity 1
    and a `REPLACE` pair of sensitivity 2 with the rate E[p | |O| ≥ max] (arXiv 2508.15089).

    Guarantee: needs a public number of examples, since both probabilities depend on it.
    """

    sampling_prob: float
    steps: int
    adjacency: Adjacency
    num_examples: int
    max_batch_size: int


Run = GaussianRun | PoissonRun | TruncatedPoissonRun


def _check(noise_multiplier: float, delta: float) -> None:
    if not (noise_multiplier >= 0.0 and math.isfinite(noise_multiplier)):
        raise ValueError(f"noise_multiplier must be a finite number ≥ 0, got {noise_multiplier!r}")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta!r}; try 1/num_examples or less")


def epsilon(run: Run, *, noise_multiplier: float, delta: float, resolution: float = DEFAULT_RESOLUTION) -> float:
    """The ε of a run at a given δ, an upper bound that is exact for `GaussianRun`.

    `GaussianRun` is in closed form (Balle and Wang 2018). Poisson runs compose privacy loss distributions,
    rounded so as never to understate ε; `resolution` is grid points per spread of one step.

    Edge cases: noise multiplier 0 gives ∞. Poisson runs need δ ≥ 1e-12, for the sake of the Fourier
    transform.

    >>> epsilon(GaussianRun(sensitivity=1.0), noise_multiplier=0.0, delta=1e-5)
    inf
    """
    _check(noise_multiplier, delta)
    if noise_multiplier == 0.0:
        return math.inf
    if isinstance(run, GaussianRun):
        return gaussian.gaussian_epsilon(noise_multiplier / run.sensitivity, delta)
    return _pld_epsilon(run, noise_multiplier, delta, resolution)


@functools.lru_cache(maxsize=256)
def _pld_epsilon(
    run: PoissonRun | TruncatedPoissonRun, noise_multiplier: float, delta: float, resolution: float
) -> float:
    if delta < MIN_PLD_DELTA:
        raise ValueError(
            f"delta={delta!r} is below {MIN_PLD_DELTA}, where privacy loss distributions lose their accuracy; use a "
            "larger delta, or rdp_epsilon for an upper bound"
        )
    adjacency, rate = run.adjacency, run.sampling_prob
    interval = grid_interval(noise_multiplier, rate, adjacency, steps=run.steps, resolution=resolution)
    if isinstance(run, PoissonRun):
        step = one_step(noise_multiplier, rate, adjacency, interval)
    else:
        step = _truncated_step(run, noise_multiplier, interval)
    return float(step.self_compose(run.steps).get_epsilon_for_delta(delta))


def _truncated_step(run: TruncatedPoissonRun, noise_multiplier: float, interval: float) -> PrivacyLossDistribution:
    from scipy.stats import binom  # slow to import, and few runs cut their samples

    rate = run.sampling_prob
    cut_prob = float(binom.sf(run.max_batch_size - 1, run.num_examples - 1, rate))
    if cut_prob == 0.0:
        return one_step(noise_multiplier, rate, run.adjacency, interval)
    full = float(binom.sf(run.max_batch_size, run.num_examples, rate))
    cut_rate = min(1.0, full * run.max_batch_size / (cut_prob * run.num_examples))
    interval = max(interval, smallest_interval(noise_multiplier / 2, cut_rate, Adjacency.REPLACE))
    cut = one_step(noise_multiplier / 2, cut_rate, Adjacency.REPLACE, interval)
    return cut.compute_mixture(one_step(noise_multiplier, rate, run.adjacency, interval), min(1.0, cut_prob))


@contextlib.contextmanager
def _quiet_absl() -> Iterator[None]:
    """Hush the warning for each Rényi order whose series does not converge: it is simply left out."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def rdp_epsilon(run: Run, *, noise_multiplier: float, delta: float) -> float:
    """A second opinion on ε, by Rényi divergences: another proof and other code, never below the truth.

    ε = min over orders α of the conversion of steps·D_α (Mironov 2017; Canonne, Kamath and Steinke 2020).

    Edge cases: refused for Poisson runs under `REPLACE`, where no Rényi bound is implemented, and for
    truncated samples.

    >>> run = PoissonRun(sampling_prob=0.01, steps=100, adjacency=Adjacency.ZERO_OUT)
    >>> rdp_epsilon(run, noise_multiplier=1.0, delta=1e-5) > epsilon(run, noise_multiplier=1.0, delta=1e-5)
    True
    """
    _check(noise_multiplier, delta)
    if isinstance(run, TruncatedPoissonRun):
        raise ValueError("no Rényi bound is implemented for truncated Poisson samples; use epsilon()")
    if noise_multiplier == 0.0:
        return math.inf
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(_RDP_ORDERS, NeighboringRelation.ADD_OR_REMOVE_ONE)
    if isinstance(run, GaussianRun):
        accountant.compose(GaussianDpEvent(noise_multiplier / run.sensitivity))
    elif run.adjacency is Adjacency.REPLACE:
        raise ValueError(
            "no Rényi bound is implemented for Poisson samples under Adjacency.REPLACE "
            "(the add/remove value is too small there); use epsilon()"
        )
    else:
        event = PoissonSampledDpEvent(run.sampling_prob, GaussianDpEvent(noise_multiplier))
        with _quiet_absl():
            accountant.compose(event, run.steps)
    return float(accountant.get_epsilon(delta))


def has_second_opinion(run: Run) -> bool:
    """Whether `rdp_epsilon` covers this run.

    >>> has_second_opinion(PoissonRun(sampling_prob=0.1, steps=1, adjacency=Adjacency.REPLACE))
    False
    """
    return isinstance(run, GaussianRun) or (isinstance(run, PoissonRun) and run.adjacency is not Adjacency.REPLACE)


def describe_accountant(run: Run) -> str:
    """Name and version of the accountant that `epsilon` uses for a run.

    >>> describe_accountant(GaussianRun(sensitivity=1.0))
    'Gaussian mechanism, closed form (Balle and Wang 2018), exact; accounting version 1'
    """
    if isinstance(run, GaussianRun):
        name = "Gaussian mechanism, closed form (Balle and Wang 2018), exact"
    else:
        truncated = ", truncated samples (arXiv 2508.15089)" if isinstance(run, TruncatedPoissonRun) else ""
        name = (
            f"privacy loss distributions of the Poisson-sampled Gaussian{truncated}, pessimistic, "
            f"dp-accounting {version('dp-accounting')}"
        )
    return f"{name}; accounting version {ACCOUNTING_VERSION}"
