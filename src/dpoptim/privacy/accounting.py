"""ε and δ of a whole run: descriptions of runs, and the accountants that read them."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from dpoptim.arguments import check_delta, check_number
from dpoptim.privacy.adjacency import Adjacency
from dpoptim.privacy.sampled_gaussian import DEFAULT_RESOLUTION, grid_interval, one_step, smallest_interval

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

ACCOUNTING_VERSION = 1
"""Part of every cache key. Increase it with every change that may alter an ε."""

_MIN_PLD_DELTA = 1e-12  # below this δ the rounding of the Fourier transform matters
_RDP_ORDERS = [1 + i / 10 for i in range(1, 100)] + list(range(11, 65)) + [2**i for i in range(7, 15)]
_SQRT2 = math.sqrt(2.0)


@dataclass(frozen=True, kw_only=True)
class GaussianRun:
    """A run that is one Gaussian mechanism: every participation counts, and sampling does not amplify.

    `sensitivity` is the ℓ₂ change of the whole noised sequence, relative to the noise of noise multiplier 1: the
    strategy's sensitivity over its column norm, times the adjacency's factor.

    >>> round(epsilon(GaussianRun(sensitivity=math.sqrt(3.0)), noise_multiplier=0.134466, delta=1e-7), 3)
    149.093
    """

    sensitivity: float


@dataclass(frozen=True, kw_only=True)
class PoissonRun:
    """An adaptive composition of Gaussian steps, each on a secret Poisson sample.

    `steps` counts at how many steps one example may be drawn: all of them under `Poisson`, one in `bands` under
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
    """A `PoissonRun` whose samples above `max_batch_size` are cut to a uniformly random subset.

    Condition on the other drawn examples O. If |O| < max, nothing changes. Otherwise let K be the subset of O that
    would be kept without our example; K is uniform for any |O|. With probability p = q·max/(|O|+1) our example
    replaces one member of K, which moves the sum by at most 2 clip norms from K's in either neighbour. So one step is a
    public coin between the sampled Gaussian with sensitivity 1, and a `REPLACE` pair of sensitivity 2 with the rate
    E[p | |O| ≥ max] (arXiv 2508.15089).

    Guarantee: needs a public number of examples, because both probabilities depend on it.
    """

    sampling_prob: float
    steps: int
    adjacency: Adjacency
    num_examples: int
    max_batch_size: int


SampledRun = PoissonRun | TruncatedPoissonRun
Run = GaussianRun | SampledRun


def epsilon(run: Run, *, noise_multiplier: float, delta: float, resolution: float = DEFAULT_RESOLUTION) -> float:
    """Return the ε of a run at a given δ.

    A `GaussianRun` has a closed form (Balle and Wang 2018). Poisson runs compose privacy loss distributions, rounded
    so that ε is never understated.

    Args:
        run: The run, as a description.
        noise_multiplier: σ, relative to one participation; 0 gives ∞.
        delta: δ in (0, 1), at least 1e-12 for Poisson runs.
        resolution: Grid points per spread of one step.

    Guarantee: an upper bound, and exact for a `GaussianRun`.
    """
    check_number("noise_multiplier", noise_multiplier, low=0.0)
    check_delta(delta)
    if noise_multiplier == 0.0:
        return math.inf
    if isinstance(run, GaussianRun):
        return gaussian_epsilon(noise_multiplier / run.sensitivity, delta)
    return _pld_epsilon(run, noise_multiplier, delta, resolution)


@functools.lru_cache(maxsize=256)
def _pld_epsilon(run: SampledRun, noise_multiplier: float, delta: float, resolution: float) -> float:
    check_pld_delta(delta)
    interval = grid_interval(noise_multiplier, run.sampling_prob, run.adjacency, steps=run.steps, resolution=resolution)
    step = step_distribution(run, noise_multiplier, interval)
    return float(step.self_compose(run.steps).get_epsilon_for_delta(delta))


def check_pld_delta(delta: float) -> None:
    """Refuse a δ at which privacy loss distributions are not accurate."""
    if delta < _MIN_PLD_DELTA:
        raise ValueError(
            f"Privacy loss distributions are not accurate at delta={delta!r} < {_MIN_PLD_DELTA}. Use a larger delta, "
            "or rdp_epsilon for an upper bound."
        )


def step_distribution(run: SampledRun, noise_multiplier: float, interval: float) -> PrivacyLossDistribution:
    """Return the privacy loss distribution of one step on a grid of at least the given interval."""
    rate = run.sampling_prob
    if isinstance(run, PoissonRun):
        return one_step(noise_multiplier, rate, run.adjacency, interval)
    from scipy.stats import binom

    cut_prob = float(binom.sf(run.max_batch_size - 1, run.num_examples - 1, rate))
    if cut_prob == 0.0:
        return one_step(noise_multiplier, rate, run.adjacency, interval)
    full = float(binom.sf(run.max_batch_size, run.num_examples, rate))
    cut_rate = min(1.0, full * run.max_batch_size / (cut_prob * run.num_examples))
    interval = max(interval, smallest_interval(noise_multiplier / 2, cut_rate, Adjacency.REPLACE))
    cut = one_step(noise_multiplier / 2, cut_rate, Adjacency.REPLACE, interval)
    return cut.compute_mixture(one_step(noise_multiplier, rate, run.adjacency, interval), min(1.0, cut_prob))


def rdp_epsilon(run: Run, *, noise_multiplier: float, delta: float) -> float:
    """Return a second upper bound on ε, by Rényi divergences: a different proof and different code.

    ε is the minimum over orders α of the conversion of steps·D_α (Mironov 2017; Canonne, Kamath and Steinke 2020).
    `has_rdp_bound` returns whether it covers a run.

    >>> run = PoissonRun(sampling_prob=0.01, steps=100, adjacency=Adjacency.ZERO_OUT)
    >>> rdp_epsilon(run, noise_multiplier=1.0, delta=1e-5) > epsilon(run, noise_multiplier=1.0, delta=1e-5)
    True
    """
    check_number("noise_multiplier", noise_multiplier, low=0.0)
    check_delta(delta)
    if not has_rdp_bound(run):
        raise ValueError(f"No Rényi bound is implemented for {run!r}. Use epsilon().")
    if noise_multiplier == 0.0:
        return math.inf
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(_RDP_ORDERS, NeighboringRelation.ADD_OR_REMOVE_ONE)
    if isinstance(run, GaussianRun):
        accountant.compose(GaussianDpEvent(noise_multiplier / run.sensitivity))
    else:
        event = PoissonSampledDpEvent(run.sampling_prob, GaussianDpEvent(noise_multiplier))
        with _quiet_absl():
            accountant.compose(event, run.steps)
    return float(accountant.get_epsilon(delta))


def has_rdp_bound(run: Run) -> bool:
    """Return whether `rdp_epsilon` covers this run; under `REPLACE` its Poisson bound is too small."""
    return isinstance(run, GaussianRun) or (isinstance(run, PoissonRun) and run.adjacency is not Adjacency.REPLACE)


@contextlib.contextmanager
def _quiet_absl() -> Iterator[None]:
    """Silence the warning for each Rényi order whose series does not converge; such orders are left out."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def describe_accountant(run: Run) -> str:
    """Return the name and version of the accountant that `epsilon` uses for a run."""
    if isinstance(run, GaussianRun):
        name = "Gaussian mechanism, closed form (Balle and Wang 2018), exact"
    else:
        truncated = ", truncated samples (arXiv 2508.15089)" if isinstance(run, TruncatedPoissonRun) else ""
        name = (
            f"privacy loss distributions of the Poisson-sampled Gaussian{truncated}, pessimistic, "
            f"dp-accounting {version('dp-accounting')}"
        )
    return f"{name}; accounting version {ACCOUNTING_VERSION}"


def gaussian_log_delta(noise_multiplier: float, epsilon: float) -> float:
    """Return ln δ(ε) of one Gaussian release with sensitivity 1 and standard deviation `noise_multiplier`.

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) with μ = 1/σ (Balle and Wang 2018, exact). With x = ε/μ − μ/2 and
    y = ε/μ + μ/2, y² − x² = 2ε and δ = ½ e^{−x²/2} (erfcx(x/√2) − erfcx(y/√2)), in which no large terms cancel. This
    is stable from ε = 1e-6 to 1e5 and for very small δ.

    >>> round(math.exp(gaussian_log_delta(1.0, 1.0)), 6)
    0.126937
    """
    from scipy.special import erfcx, ndtr

    if noise_multiplier == 0.0:
        return 0.0
    shift = 1.0 / noise_multiplier
    if shift == 0.0:
        return -math.inf
    x = epsilon / shift - shift / 2
    y = epsilon / shift + shift / 2
    if x < 0.0:
        delta = float(ndtr(-x)) - 0.5 * math.exp(-x * x / 2) * float(erfcx(y / _SQRT2))
        return math.log(delta) if delta > 0.0 else -math.inf
    difference = float(erfcx(x / _SQRT2)) - float(erfcx(y / _SQRT2))
    return math.log(0.5 * difference) - x * x / 2 if difference > 0.0 else -math.inf


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Return the smallest ε ≥ 0 at which a Gaussian release of sensitivity 1 is (ε, δ)-private.

    The root of ln δ(ε) = ln δ lies below μ²/2 + μ√(2 ln 1/δ), because δ(ε) ≤ Φ(−x) ≤ e^{−x²/2}. Noise multiplier 0
    gives ∞.

    >>> round(gaussian_epsilon(1.0 / math.sqrt(3.0), 1e-7), 4)
    10.0453
    """
    from scipy.optimize import brentq

    if noise_multiplier == 0.0:
        return math.inf
    log_delta = math.log(delta)
    if gaussian_log_delta(noise_multiplier, 0.0) <= log_delta:
        return 0.0
    shift = 1.0 / noise_multiplier
    upper = shift * shift / 2 + shift * math.sqrt(-2.0 * log_delta)

    def excess(epsilon: float) -> float:
        return gaussian_log_delta(noise_multiplier, epsilon) - log_delta

    return float(brentq(excess, 0.0, upper, xtol=1e-300, rtol=1e-14, maxiter=500))


def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """Return the smallest σ, up to 1e-12, at which a Gaussian release of sensitivity 1 is (ε, δ)-private.

    Guarantee: `gaussian_epsilon` of the result never exceeds `epsilon`.
    """
    from scipy.optimize import brentq

    if epsilon == math.inf:
        return 0.0
    log_delta = math.log(delta)

    def excess(log_multiplier: float) -> float:
        return max(gaussian_log_delta(math.exp(log_multiplier), epsilon), -1e9) - log_delta

    low, high = 0.0, 0.0
    while excess(low) <= 0.0:
        low -= 1.0
    while excess(high) > 0.0:
        high += 1.0
    multiplier = math.exp(brentq(excess, low, high, xtol=1e-13, rtol=1e-14, maxiter=500))
    while gaussian_epsilon(multiplier, delta) > epsilon:
        multiplier *= 1.0 + 1e-12
    return multiplier
