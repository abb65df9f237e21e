"""The checks of a game: errors, batches, clipping and noise, each against the plan.

Residuals are the releases without canaries and without C. If the noise follows the plan, they are independent unit
normals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kstest

from dpoptim.app.audit.game import GameResult
from dpoptim.app.audit.statistics import (
    UNLIKELY,
    Bools,
    Floats,
    TradeOff,
    correlation_chance,
    count_chance,
    squares_chance,
    upper_limit,
)
from dpoptim.privacy import CyclicPoisson, Poisson, PrivacyPlan

_ROUNDING = 0.03  # of gradients in bf16
_LAGS = 8
_MAX_PAIRED_STEPS = 2000  # steps that are compared in pairs
_THRESHOLDS = tuple(range(-8, 9))  # of the scores, which are log likelihood ratios; fixed before anything is seen


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question of an audit: its name, whether it passed (None: it could not be checked), and what was found."""

    name: str
    passed: bool | None
    found: str


def errors_check(allowed: TradeOff, scores: Floats, included: Bools, *, confidence: float) -> Check:
    """Check that the attack errs as often as the plan requires; each canary is a separate trial."""
    inside, outside = scores[included], scores[~included]
    error = (1.0 - confidence) / (2 * len(_THRESHOLDS))
    closest, contradicted = math.inf, 0
    for threshold in _THRESHOLDS:
        missed, wrong = int((inside <= threshold).sum()), int((outside > threshold).sum())
        least = allowed.least_missed(upper_limit(wrong, len(outside), error))
        contradicted += bool(upper_limit(missed, len(inside), error) < least)
        expected = float(allowed.least_missed(wrong / len(outside)))
        if min(missed, wrong) >= 500 and expected > 0:  # enough errors of both kinds for a meaningful ratio
            closest = min(closest, missed / len(inside) / expected)
    found = f"fewer errors than the plan allows at {contradicted} of {len(_THRESHOLDS)} thresholds"
    if not contradicted:
        found = "at least as many as the plan requires at every threshold"
        if math.isfinite(closest):
            found += f"; at the closest {closest:.3f} times as many (chance explains 0.9 or more)"
    return Check(name="the attack's errors", passed=not contradicted, found=found)


def gradients_check(distance: float | None) -> Check:
    """Check how far a release without noise is from a model's gradients, each taken and clipped by itself."""
    found = "not compared: random numbers are drawn, users are protected, or the clip norm is not fixed"
    if distance is not None:
        found = f"differs by {distance:.2%} from the sum of one example at a time (up to {_ROUNDING:.0%} is rounding)"
    passed = None if distance is None else distance <= _ROUNDING
    return Check(name="gradients of the model", passed=passed, found=found)


def sampling_violation(plan: PrivacyPlan, game: GameResult) -> str | None:
    """How the batches differ from the plan, or None: their sizes, how often examples are drawn, and how far apart."""
    often = int(np.bincount(np.concatenate(game.batches)).max())
    return (_random_violation if plan.sampling.is_random else _shuffled_violation)(plan, game, often)


def _shuffled_violation(plan: PrivacyPlan, game: GameResult, often: int) -> str | None:
    """Check exactly what the proof assumes."""
    if any(len(batch) != plan.batch_size or len(np.unique(batch)) != len(batch) for batch in game.batches):
        return f"a batch does not have {plan.batch_size:,} different examples"
    if often > plan.max_participations:
        return f"an example participates in {often:,} steps; the plan allows {plan.max_participations:,}"
    last = np.full(plan.num_examples, -plan.min_separation)
    for step, batch in enumerate(game.batches):
        if (gap := int((step - last[batch]).min())) < plan.min_separation:
            return f"an example participates again after {gap:,} steps; the plan requires {plan.min_separation:,}"
        last[batch] = step
    return None


def _random_violation(plan: PrivacyPlan, game: GameResult, often: int) -> str | None:
    rate = plan.sampling_prob
    groups = plan.sampling.bands if isinstance(plan.sampling, CyclicPoisson) else 1
    limit = plan.sampling.max_batch_size if isinstance(plan.sampling, Poisson) else None
    sizes = np.array([len(batch) for batch in game.batches])
    members = plan.num_examples // groups  # a group has this many members, or one more
    if limit is not None and int(sizes.max()) > limit:
        return f"a batch has {sizes.max():,} examples; the plan allows {limit:,}"
    chances = np.maximum(*(count_chance(sizes, n, rate, only_more=limit is not None) for n in (members, members + 1)))
    if chances.min() * len(sizes) < UNLIKELY:
        return f"a batch has {sizes[chances.argmin()]:,} examples; {rate * members:,.0f} are expected"
    turns = -(-plan.steps // groups)
    if float(count_chance(often, turns, rate, only_more=True)) * plan.num_examples < UNLIKELY:
        return f"an example is drawn in {often:,} of {turns:,} steps; the probability is {rate:.3g} at each"
    is_plain = isinstance(plan.sampling, Poisson) and limit is None
    if is_plain and float(count_chance(int(sizes.sum()), plan.num_examples * plan.steps, rate)) < UNLIKELY:
        return f"batches have {sizes.mean():,.1f} examples on average; {rate * members:,.1f} are expected"
    if np.sum([game.drawn[group::groups].any(axis=0) for group in range(groups)], axis=0).max() > 1:
        return "an example is drawn at the turns of two groups"
    if (shared := _shared_violation(game, groups, rate)) is not None or limit is not None:
        return shared
    if spread_chance(sizes, members, rate) < UNLIKELY:
        return f"batch sizes vary by {sizes.std():,.2f}; {math.sqrt(members * rate * (1 - rate)):,.2f} is expected"
    draws = np.bincount(np.concatenate(game.batches), minlength=plan.num_examples)
    if plan.steps % groups == 0 and spread_chance(draws, turns, rate) < UNLIKELY:
        expected = math.sqrt(turns * rate * (1 - rate))
        return f"how often an example is drawn varies by {draws.std():,.3f}; {expected:,.3f} is expected"
    return None


def spread_chance(counts: NDArray[np.int64], of: int, rate: float) -> float:
    """The chance that independent binomial counts vary so much or so little; 1 if there are too few to tell.

    The sum of squared deviations is approximated by a χ² distribution with the same mean and variance.
    """
    variance = of * rate * (1 - rate)
    if len(counts) * variance * min(1.0, variance) < 100:
        return 1.0
    shrink = 2.0 / (2.0 + (1 - 6 * rate * (1 - rate)) / variance)
    total = float(((counts - of * rate) ** 2).sum()) / variance
    return float(squares_chance(np.array(total * shrink), len(counts) * shrink))


def are_alike(one: list[NDArray[np.int64]], other: list[NDArray[np.int64]]) -> bool:
    """Whether two games drew the same batches, enough of them to exclude chance."""
    is_alike = all(np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(one, other, strict=False))
    return is_alike and sum(map(len, one)) >= 100


def _shared_violation(game: GameResult, groups: int, rate: float) -> str | None:
    """Two steps draw independently, which limits how many canaries they share."""
    drawn = game.drawn[:: -(-len(game.drawn) // _MAX_PAIRED_STEPS)]
    both = drawn.astype(np.float32) @ drawn.T.astype(np.float32)
    np.fill_diagonal(both, 0)
    most, canaries = round(float(both.max())), drawn.shape[1]
    if float(count_chance(most, canaries, rate**2 / groups, only_more=True)) * both.size < UNLIKELY:
        expected = canaries * rate**2 / groups
        return f"two steps share {most:,} of {canaries:,} canaries; {expected:,.1f} are expected"
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class NoiseSample:
    """What is kept of one noise stream in one game."""

    squares: Floats  # [steps]: sum of squared residuals
    repeated: float  # the least chance of a correlation between two places, times the number of places compared
    first: Floats  # [canaries]: residuals of the first step
    sample: Floats  # residuals of many places


def measure_noise(residuals: Floats) -> NoiseSample:
    """Summarize residuals [steps, canaries]."""
    steps, canaries = residuals.shape
    places = np.arange(max(steps, canaries))
    stride = max(1, steps // canaries)
    return NoiseSample(
        squares=(residuals**2).sum(axis=1),
        repeated=min(_between_steps(residuals), _between_lags(residuals), _between_coordinates(residuals)) * 3,
        first=residuals[0],
        sample=residuals[places * stride % steps, places % canaries],
    )


def _between_steps(residuals: Floats) -> float:
    """Compare each step's noise with every other's."""
    some = residuals[:: -(-len(residuals) // _MAX_PAIRED_STEPS)]
    if len(some) < 2:
        return 1.0
    products = some @ some.T
    np.fill_diagonal(products, 0.0)
    pairs = len(some) * (len(some) - 1) // 2
    return correlation_chance(float(np.abs(products).max()), residuals.shape[1]) * pairs


def _between_lags(residuals: Floats) -> float:
    """Compare all steps with those a few steps before, to find a weak correlation that all of them have."""
    steps, canaries = residuals.shape
    lags = range(1, min(_LAGS, steps - 1) + 1)
    found = [
        correlation_chance(float((residuals[lag:] * residuals[:-lag]).sum()), (steps - lag) * canaries) for lag in lags
    ]
    return min(found, default=1.0) * max(1, len(lags))


def _between_coordinates(residuals: Floats) -> float:
    """Compare each canary's noise with that of the canary k places further, at the same steps, for every k."""
    steps, canaries = residuals.shape
    total = np.zeros(canaries + 1)
    for start in range(0, steps, 64):
        spectrum = np.fft.rfft(residuals[start : start + 64], n=2 * canaries, axis=1)
        total += (np.abs(spectrum) ** 2).sum(axis=0)
    sums = np.fft.irfft(total, n=2 * canaries)[1:canaries]
    counts = steps * (canaries - np.arange(1, canaries))
    chances = [correlation_chance(value, count) for value, count in zip(sums.tolist(), counts.tolist(), strict=True)]
    return min(chances, default=1.0) * max(1, len(chances))


def noise_checks(games: list[NoiseSample], *, which: str = "") -> list[Check]:
    """Check level, independence and distribution of one noise stream; `which` prefixes the names."""
    steps, canaries = len(games[0].squares), sum(len(game.first) for game in games)
    squares = np.sum([game.squares for game in games], axis=0)
    level = math.sqrt(squares.sum() / (steps * canaries))
    by_step = np.sqrt(squares / canaries)
    worst = float(by_step[np.abs(np.log(np.maximum(by_step, 1e-9))).argmax()])
    overall = float(squares_chance(np.array(squares.sum()), steps * canaries))
    at_a_step = float(squares_chance(squares, canaries).min()) * steps
    repeated = min(game.repeated for game in games) * len(games)
    sample = np.concatenate([game.sample for game in games])
    distance, chance = kstest(sample, "norm", method="asymp")  # Kolmogorov and Smirnov
    normality = f"the distance from the normal distribution, {distance:.4f},"
    return [
        Check(
            name=f"{which}noise level",
            passed=min(overall, at_a_step) >= UNLIKELY,
            found=f"{level:.5f} times the plan's, at the worst step {worst:.4f} times",
        ),
        chance_check(f"{which}noise never repeats", "the largest correlation between steps or coordinates", repeated),
        chance_check(f"{which}noise is Gaussian", normality, float(chance)),
    ]


def chance_check(name: str, what: str, chance: float) -> Check:
    """A check that passes unless `what` is too unlikely."""
    found = f"{what} is as large by chance with probability {min(1.0, chance):.2g}"
    return Check(name=name, passed=chance >= UNLIKELY, found=found)
