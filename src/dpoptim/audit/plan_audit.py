"""The audit of a plan: games of canaries, lower bounds on ε, and whether noise and clipping are as planned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import kolmogorov, ndtr

from dpoptim.audit.bounds import gaussian_bound, guessing_bound
from dpoptim.audit.canaries import MakeOptimizer, play
from dpoptim.audit.check import Check
from dpoptim.audit.evidence import Evidence, evidence_of, together
from dpoptim.audit.tradeoff import TradeOff, errors_check, trade_off_of
from dpoptim.noise import Independent
from dpoptim.privacy import Gradient, PrivacyPlan
from dpoptim.privacy.accounting import GaussianRun
from dpoptim.privacy.shown import rounded_up

CANARIES = 10_000
CONFIDENCE = 0.99
_ALLOWED = 4.5  # standard deviations that a check may be off: by chance once in 150,000 times
_MOST_VALUES = 400_000_000  # released values of one game that are kept, 4 bytes each
_MOST_CORRELATED_STEPS = 8_000  # C is taken as a whole matrix


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanAudit:
    """What the games showed.

    Guarantee: if the plan's claim holds, `epsilon_bound` exceeds it with probability at most 1 − confidence, whatever
    the implementation does with the canaries; `gaussian_bound`, which is None where sampling is secret, assumes besides
    that in and out differ as two Gaussians do. A bound below the claim proves nothing: other examples, or more of them,
    might show more.
    """

    epsilon: float
    delta: float
    confidence: float
    canaries: int
    games: int
    epsilon_bound: float
    gaussian_bound: float | None
    allowed: TradeOff
    checks: list[Check]
    scores: NDArray[np.float64]
    included: NDArray[np.bool_]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_values(self) -> dict[str, Any]:
        """Plain values, without the scores."""
        return {
            "passed": self.passed,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "confidence": self.confidence,
            "canaries": self.canaries,
            "games": self.games,
            "epsilon_bound": self.epsilon_bound,
            "gaussian_bound": self.gaussian_bound,
            "checks": [check.as_values() for check in self.checks],
        }


def games_needed(plan: PrivacyPlan, canaries: int) -> int:
    """How many trainings hold so many canaries: a dataset has no more of them than examples."""
    return -(-canaries // _in_one_game(plan, canaries))


def _in_one_game(plan: PrivacyPlan, canaries: int) -> int:
    return max(1, min(canaries, plan.num_examples, _MOST_VALUES // plan.steps))


def audit_plan(
    plan: PrivacyPlan,
    make_optimizer: MakeOptimizer,
    *,
    canaries: int = CANARIES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
    after_step: Callable[[], None] = lambda: None,
) -> PlanAudit:
    """Play until there are `canaries` of them, and judge.

    Edge cases: one ValueError line for a plan that promises nothing, and for correlated noise over more than 8,000
    steps. Squares that a plan releases too are not attacked: the bounds are then those of the gradient alone.

    >>> from functools import partial
    >>> from dpoptim.optim import dp_sgd
    >>> plan = PrivacyPlan(num_examples=500, batch_size=50, steps=10).calibrate(epsilon=4.0, delta=1e-4)
    >>> found = audit_plan(plan, partial(dp_sgd, lr=0.1), canaries=500)
    >>> found.passed, found.epsilon_bound < found.gaussian_bound < found.epsilon
    (True, True)
    """
    check_auditable(plan)
    if isinstance(canaries, bool) or not isinstance(canaries, int) or canaries < 100:
        raise ValueError(f"canaries={canaries!r} must be a whole number, 100 at least: fewer show nothing")
    if not 0.5 <= confidence < 1.0:
        raise ValueError(f"confidence={confidence!r} must lie between 0.5 and 1, and below 1")
    games, found, coins = games_needed(plan, canaries), [], []
    for game in range(games):
        observed = play(
            plan,
            make_optimizer,
            canaries=_in_one_game(plan, canaries),
            seed=seed * games + game,
            after_step=after_step,
        )
        found.append(evidence_of(plan, observed))
        coins.append(observed.included)
    evidence, included = together(found), np.concatenate(coins)
    epsilon, delta = plan.epsilon(), plan.delta
    assert delta is not None  # checked
    guessed = guessing_bound(evidence.scores, included, delta=delta, confidence=confidence)
    allowed = trade_off_of(plan)
    as_gaussian = None
    if isinstance(plan.run, GaussianRun):
        as_gaussian = gaussian_bound(evidence.scores, included, delta=delta, confidence=confidence)
    return PlanAudit(
        epsilon=epsilon,
        delta=delta,
        confidence=confidence,
        canaries=len(included),
        games=games,
        epsilon_bound=guessed,
        gaussian_bound=as_gaussian,
        allowed=allowed,
        checks=[
            _claim(plan, guessed, as_gaussian),
            errors_check(allowed, evidence.scores, included, confidence=confidence),
            *_mechanism(evidence),
        ],
        scores=evidence.scores,
        included=included,
    )


def check_auditable(plan: PrivacyPlan) -> None:
    """Refuse, in one line, a plan that there is nothing to audit of, or too much."""
    if not plan.is_private:
        raise ValueError("the plan promises nothing (no noise, or a square without noise): there is nothing to audit")
    if plan.delta is None:
        raise ValueError("the plan has no delta; calibrate it, or set delta")
    if plan.steps > _MOST_CORRELATED_STEPS and not isinstance(plan.noise, Independent):
        raise ValueError(
            f"the plan has {plan.steps:,} steps of correlated noise, and an audit takes at most "
            f"{_MOST_CORRELATED_STEPS:,}; audit a plan of fewer steps with the same noise"
        )


def _claim(plan: PrivacyPlan, guessed: float, as_gaussian: float | None) -> Check:
    most = max(guessed, as_gaussian or 0.0)
    claim = plan.epsilon()
    said = f"at least {guessed:.3f} is spent"
    if as_gaussian is not None:
        said += f", {as_gaussian:.3f} if the noise is Gaussian"
    if not isinstance(plan.release, Gradient):
        said += " (the gradient alone: its square is not attacked)"
    return Check(name="the claim stands", passed=most <= claim, found=f"{said}; claimed {rounded_up(claim)}")


def _mechanism(evidence: Evidence) -> list[Check]:
    """Noise and clipping, measured in what was released."""
    count = evidence.residual_count
    level, level_limit = math.sqrt(evidence.residual_squares / count), _ALLOWED / math.sqrt(2 * count)
    checks = [
        Check(
            name="noise level",
            passed=abs(level - 1.0) <= level_limit,
            found=f"{level:.5f} times the plan's (chance: 1 ± {level_limit:.5f})",
        )
    ]
    if evidence.expected_signal > 0:
        length = evidence.signal / evidence.expected_signal
        length_limit = _ALLOWED / math.sqrt(evidence.expected_signal)
        checks.append(
            Check(
                name="clipping",
                passed=abs(length - 1.0) <= length_limit,
                found=f"canaries of 1,000,000 clip norms move the sum by {length:.4f} (chance: 1 ± {length_limit:.4f})",
            )
        )
    if len(evidence.lagged):
        correlation, limit = (
            float(np.abs(evidence.lagged).max()) / evidence.residual_squares,
            _ALLOWED / math.sqrt(count),
        )
        checks.append(
            Check(
                name="noise of other steps is other noise",
                passed=correlation <= limit,
                found=f"largest correlation up to {len(evidence.lagged)} steps apart {correlation:.5f} "
                f"(chance: {limit:.5f})",
            )
        )
    distance = _distance_from_normal(evidence.sample)
    chance = float(kolmogorov(distance * math.sqrt(len(evidence.sample))))
    checks.append(
        Check(
            name="noise is Gaussian",
            passed=chance >= 1e-5,
            found=f"largest distance from the normal distribution {distance:.4f} (by chance as large with probability "
            f"{chance:.2g})",
        )
    )
    return checks


def _distance_from_normal(sample: NDArray[np.float64]) -> float:
    """Kolmogorov and Smirnov's: between the sample's distribution function and Φ."""
    expected = ndtr(np.sort(sample))
    places = np.arange(len(sample) + 1) / len(sample)
    return float(max(np.abs(expected - places[1:]).max(), np.abs(expected - places[:-1]).max()))
