"""The audit of a plan: games of canaries, lower bounds on ε, and whether draws, clipping and noise are as planned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.app.audit.bounds import gaussian_bound, guessing_bound
from dpoptim.app.audit.canaries import MakeOptimizer, Observed, play
from dpoptim.app.audit.chance import UNLIKELY, correlation_chance
from dpoptim.app.audit.check import Check
from dpoptim.app.audit.draws_check import wrong_draws
from dpoptim.app.audit.evidence import gradient_whitening, scores, square_residuals, whitened_gradient
from dpoptim.app.audit.noise_check import Noise, keys_check, measured, noise_checks
from dpoptim.app.audit.tradeoff import TradeOff, errors_check, trade_off_of
from dpoptim.noise import Independent
from dpoptim.privacy import Gradient, PrivacyPlan
from dpoptim.privacy.accounting import GaussianRun
from dpoptim.privacy.format_epsilon import format_epsilon

CANARIES = 10_000
CONFIDENCE = 0.99
MOST_CANARIES = 1_000_000
_MOST_VALUES = 50_000_000  # released values of one game that are kept, 8 bytes each
_MOST_STEPS = 1_000_000  # of all games
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
        return all(check.passed is not False for check in self.checks)

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
    if isinstance(canaries, bool) or not isinstance(canaries, int) or not 100 <= canaries <= MOST_CANARIES:
        raise ValueError(
            f"canaries={canaries!r} must be a whole number from 100, since fewer show nothing, to {MOST_CANARIES:,}"
        )
    if not 0.5 <= confidence < 1.0:
        raise ValueError(f"confidence={confidence!r} must be at least 0.5, and below 1")
    games, size, found = games_needed(plan, canaries), _in_one_game(plan, canaries), _Found(plan)
    if games * plan.steps > _MOST_STEPS:
        raise ValueError(
            f"canaries={canaries:,} take {games:,} trainings of {plan.steps:,} steps each, and an audit takes at most "
            f"{_MOST_STEPS:,} steps in all; ask for fewer canaries, or audit a plan of fewer steps"
        )
    for game in range(games):
        own = 2 * (seed * games + game)
        found.add(play(plan, make_optimizer, canaries=size, seed=own, after_step=after_step))
    another = play(plan, make_optimizer, canaries=size, seed=2 * seed * games + 1, steps=1)  # under another key
    scored, included = np.concatenate(found.scores), np.concatenate(found.included)
    epsilon, delta, allowed = plan.epsilon(), plan.delta, trade_off_of(plan)
    assert delta is not None  # checked
    each = 1.0 - (1.0 - confidence) / 3  # of three bounds
    guessed = guessing_bound(scored, included, delta=delta, confidence=each)
    as_gaussian = None
    if isinstance(plan.run, GaussianRun):
        as_gaussian = gaussian_bound(scored, included, delta=delta, confidence=each)
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
            errors_check(allowed, scored, included, confidence=each),
            found.draws_check(),
            found.clipping_check(),
            *noise_checks(found.gradients),
            keys_check(found.gradients[0].first, whitened_gradient(found.whitening, another).residuals[0]),
            *found.square_checks(),
        ],
        scores=scored,
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
    return Check(name="the claim stands", passed=most <= claim, found=f"{said}; claimed {format_epsilon(claim)}")


class _Found:
    """What is kept of the games."""

    def __init__(self, plan: PrivacyPlan) -> None:
        self._plan, self.whitening = plan, gradient_whitening(plan)
        self.scores: list[NDArray[np.float64]] = []
        self.included: list[NDArray[np.bool_]] = []
        self.gradients: list[Noise] = []
        self._squares: list[Noise] = []
        self._wrong_draws: list[str] = []
        self._moved = self._meant = 0.0  # along what canaries are meant to add, in squared standard deviations
        self._of_streams, self._values = 0.0, 0

    def add(self, observed: Observed) -> None:
        plan = self._plan
        gradient = whitened_gradient(self.whitening, observed)
        self.scores.append(scores(plan, self.whitening, observed, gradient.released))
        self.included.append(observed.included)
        if (wrong := wrong_draws(plan, observed)) is not None:
            self._wrong_draws.append(wrong)
        residuals = gradient.residuals
        self.gradients.append(measured(residuals))
        self._meant += float((gradient.meant**2).sum())
        self._moved += float((gradient.meant * gradient.released).sum())
        squares = square_residuals(plan, observed)
        if squares is not None:
            self._squares.append(measured(squares))
            self._of_streams += float((squares * residuals).sum())
            self._values += squares.size

    def draws_check(self) -> Check:
        said = "how often, how far apart, how many at once"
        return Check(
            name="batches are drawn as planned",
            passed=not self._wrong_draws,
            found=self._wrong_draws[0] if self._wrong_draws else said,
        )

    def clipping_check(self) -> Check:
        if not self._meant:
            return Check(name="clipping", passed=None, found="no canary was drawn")
        length, chance = self._moved / self._meant, 5.0 / math.sqrt(self._meant)
        return Check(
            name="clipping",
            passed=abs(length - 1.0) <= chance,
            found=f"a long gradient moves the sum by {length:.4f} clip norms (chance: 1 ± {chance:.4f})",
        )

    def square_checks(self) -> list[Check]:
        if not self._squares:
            return []
        chance = correlation_chance(self._of_streams, self._values)
        own = Check(
            name="square: it has noise of its own",
            passed=chance >= UNLIKELY,
            found=f"its correlation with the gradient's is as large by chance with probability {chance:.2g}",
        )
        return [*noise_checks(self._squares, which="square: "), own]
