"""The audit of a plan or a loop: games with canaries, lower bounds on ε, and checks of batches, clipping and noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.app.audit.checks import (
    Check,
    NoiseSample,
    are_alike,
    chance_check,
    errors_check,
    gradients_check,
    measure_noise,
    noise_checks,
    sampling_violation,
)
from dpoptim.app.audit.game import Game, GameResult, MakeOptimizer, canaries_alone
from dpoptim.app.audit.scores import scores, square_residuals, whiten, whitening
from dpoptim.app.audit.statistics import (
    Bools,
    Floats,
    TradeOff,
    contradicted_noise,
    correlation_chance,
    gaussian_bound,
    guess,
    guessing_bound,
    trade_off_of,
)
from dpoptim.app.audit.training import (
    Training,
    beside_model,
    distance_from_single_examples,
    distance_from_single_gradients,
)
from dpoptim.arguments import check_number, check_whole
from dpoptim.noise import Independent
from dpoptim.privacy import AdaptiveClipNorm, FixedClipNorm, Gradient, GroupClipNorms, PrivacyPlan, accounting
from dpoptim.privacy.accounting import GaussianRun
from dpoptim.privacy.statement import format_epsilon

MAX_CANARIES = 1_000_000
LEAST_GAMES = 10  # a mechanism that reveals much with probability 1 in 100 cannot do so in each of them
_QUIET = 1e-6  # a noise multiplier that hides nothing
_UNCLIPPED = 1e6  # clip norms, so that clipping hides no factor of a loss
_MAX_VALUES = 50_000_000  # released values kept from one game, 8 bytes each
_MAX_CORRELATED_STEPS = 8_000  # C is stored as a dense matrix


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanAudit:
    """What the games showed.

    Two bounds assume only that each game flips fair coins and draws new randomness. `delta_bound` bounds ε at
    the plan's δ alone. `epsilon_bound` uses all δ at once: the games are not as private as the same plan with more
    noise, which has this ε. `gaussian_bound`, which is None where sampling is secret, also assumes that in and out
    differ as two Gaussians.

    Guarantee: if the plan's claim holds, each bound exceeds it with probability at most (1 − confidence)/3. A bound
    below the claim proves nothing: other examples, or more of them, might show more.
    """

    epsilon: float
    delta: float
    confidence: float
    canaries: int
    games: int
    epsilon_bound: float
    delta_bound: float
    gaussian_bound: float | None
    allowed: TradeOff
    checks: list[Check]
    scores: Floats
    included: Bools

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    def as_values(self) -> dict[str, Any]:
        """Plain values, without the scores."""
        names = ("passed", "epsilon", "delta", "confidence", "canaries", "games")
        bounds = ("epsilon_bound", "delta_bound", "gaussian_bound")
        values = {name: getattr(self, name) for name in (*names, *bounds)}
        return {**values, "checks": [asdict(check) for check in self.checks]}


def games_needed(plan: PrivacyPlan, canaries: int, *, least: int = LEAST_GAMES, beside: bool = False) -> int:
    """Return how many games that many canaries need: a game has one per example, or per two `beside` a model."""
    return max(least, -(-canaries // _most_canaries(plan, beside=beside)))


def default_canaries(plan: PrivacyPlan, *, least: int = LEAST_GAMES, beside: bool = False) -> int:
    """Return the canaries of `least` games, with 10,000 in each or as many as fit."""
    return max(100, least * min(10_000, _most_canaries(plan, beside=beside)))


def _most_canaries(plan: PrivacyPlan, *, beside: bool) -> int:
    return max(1, min(plan.num_examples // (1 + beside), _MAX_VALUES // plan.steps))


def audit_plan(
    plan: PrivacyPlan,
    make_optimizer: MakeOptimizer,
    *,
    canaries: int | None = None,
    confidence: float = 0.99,
    seed: int = 0,
    games: int = LEAST_GAMES,
    training: Training | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> PlanAudit:
    """Play games until there are enough canaries, and check the plan's claim.

    If a plan also releases squares, only their noise is checked; the bounds hold for the gradient.

    Args:
        plan: What to attack; it needs noise and a delta.
        make_optimizer: Makes the optimizer from a model and the plan.
        canaries: In all games, 100 to a million; more tighten the bounds. Defaults to `default_canaries(plan)`.
        confidence: Of the bounds.
        seed: Determines coins, batches and noise.
        games: The least number of games. About ten games with fewer canaries each give the tightest bounds.
        training: A model with its loss and records, which is trained beside the canaries. Defaults to canaries alone.
        after_step: Called in each optimizer step.

    Raises:
        ValueError: The plan cannot be audited, an argument is out of range, or the training diverges.
    """
    given: dict[str, Any] = {"canaries": canaries, "confidence": confidence, "seed": seed, "games": games}
    if training is None:
        return _audit(plan, canaries_alone(plan, make_optimizer), None, **given, after_step=after_step)
    compare = partial(distance_from_single_gradients, training=training, make_optimizer=make_optimizer)
    return _audit(plan, beside_model(training, make_optimizer), compare, **given, after_step=after_step)


def audit_loop(
    plan: PrivacyPlan,
    train: Callable[[Game], Any],
    *,
    canaries: int | None = None,
    confidence: float = 0.99,
    seed: int = 0,
    games: int = LEAST_GAMES,
    after_step: Callable[[], None] = lambda: None,
) -> PlanAudit:
    """Attack your own training loop: `train` is called once per game, and four times for one step.

    The game gives `train` the loader, and puts canaries beside the model and into the losses. Model, loss, records,
    optimizer and loop are yours. Create the model inside `train`, so that each call starts with new weights.

    Args:
        plan: The plan that the loop follows; it needs noise and a delta.
        train: Trains once. It calls `game.private_loader`, `game.model`, `game.optimizer` and `game.insert`.
        canaries: As in `audit_plan`; at most half of the examples or users of each game.
        confidence: As in `audit_plan`.
        seed: Determines coins, batches and noise, but not what `train` itself draws.
        games: As in `audit_plan`; each is a whole training.
        after_step: Called in each optimizer step.

    Raises:
        ValueError: As in `audit_plan`, or the loop does not play the game: it makes fewer steps than planned, takes
            batches from elsewhere, or leaves the canaries out.

    >>> import torch
    >>> import dpoptim
    >>> def train(game):
    ...     loader = game.private_loader([torch.full((2,), i / 100) for i in range(400)])
    ...     model = game.model(torch.nn.Linear(2, 1))
    ...     optimizer = game.optimizer(dpoptim.dp_sgd, model, lr=0.1)
    ...     for batch in loader:
    ...         losses = model(batch)[:, 0] ** 2
    ...         game.insert(losses).sum().backward()
    ...         optimizer.step()
    >>> plan = dpoptim.PrivacyPlan(num_examples=400, batch_size=100, steps=4).calibrate(epsilon=8.0, delta=1e-4)
    >>> found = audit_loop(plan, train, games=2)
    >>> found.passed, 1.0 < found.epsilon_bound < found.epsilon
    (True, True)
    """
    given: dict[str, Any] = {"canaries": canaries, "confidence": confidence, "seed": seed, "games": games}
    return _audit(plan, train, partial(distance_from_single_examples, train=train), **given, after_step=after_step)


def _audit(
    plan: PrivacyPlan,
    train: Callable[[Game], Any],
    compare: Callable[..., float | None] | None,
    *,
    canaries: int | None,
    confidence: float,
    seed: int,
    games: int,
    after_step: Callable[[], None],
) -> PlanAudit:
    """Play games with a loop; `compare` measures how far a model's gradients are from those of single examples."""
    if not plan.is_private:
        raise ValueError("the plan makes no guarantee (no noise, or a square without noise); there is nothing to audit")
    if plan.delta is None:
        raise ValueError("the plan has no delta; calibrate it, or set delta")
    if plan.steps > _MAX_CORRELATED_STEPS and not isinstance(plan.noise, Independent):
        limit = f"{_MAX_CORRELATED_STEPS:,} steps of correlated noise"
        raise ValueError(f"Expected at most {limit}, got {plan.steps:,}. Audit a shorter plan with the same noise.")
    beside = compare is not None
    check_number("games", check_whole("games", games), low=1, high=100)
    canaries = default_canaries(plan, least=games, beside=beside) if canaries is None else canaries
    check_number("canaries", check_whole("canaries", canaries), low=100, high=MAX_CANARIES)
    check_number("confidence", confidence, low=0.5, below=1)
    games, found = games_needed(plan, canaries, least=games, beside=beside), _Findings(plan)
    size = -(-canaries // games)
    for game in range(games):
        own = 2 * (seed * games + game)
        found.add(Game(plan, canaries=size, seed=own, observe=lambda released, scale: after_step()).play(train))
    of_model = []
    if compare is not None:
        quiet = plan.replace(noise_multiplier=_QUIET)
        larger: Any = {"clip_norm": plan.clip_norm * _UNCLIPPED, "clipping": FixedClipNorm()}
        unclipped = quiet.replace(**larger, noise_multiplier=_QUIET / _UNCLIPPED)
        distances = [compare(each, seed=2 * seed * games) for each in (quiet, unclipped)]
        known = [distance for distance in distances if distance is not None]
        of_model.append(gradients_check(float(np.max(known)) if len(known) == 2 else None))
    scored, included = np.concatenate(found.scores), np.concatenate(found.included)
    allowed = trade_off_of(plan)
    each = 1.0 - (1.0 - confidence) / 3  # the first two, which hold together, the third, and the errors share the error
    is_gaussian = isinstance(plan.run, GaussianRun)
    guesses = [guess(*parts, only_in=not is_gaussian) for parts in zip(found.scores, found.included, strict=True)]
    planned = plan.noise_multiplier
    assert planned is not None
    noise = contradicted_noise(plan.run, guesses, noise_multiplier=planned, confidence=each)
    spent = accounting.epsilon(plan.run, noise_multiplier=noise, delta=plan.delta) if noise < math.inf else 0.0
    at_delta = guessing_bound(guesses, delta=plan.delta, confidence=each)
    as_gaussian = gaussian_bound(scored, included, delta=plan.delta, confidence=each) if is_gaussian else None
    return PlanAudit(
        epsilon=plan.epsilon(),
        delta=plan.delta,
        confidence=confidence,
        canaries=len(included),
        games=games,
        epsilon_bound=spent,
        delta_bound=at_delta,
        gaussian_bound=as_gaussian,
        allowed=allowed,
        checks=[
            _claim_check(plan, spent, at_delta, as_gaussian, contradicted=noise <= planned),
            errors_check(allowed, scored, included, confidence=each),
            *of_model,
            *found.checks(),
        ],
        scores=scored,
        included=included,
    )


def _claim_check(
    plan: PrivacyPlan, spent: float, at_delta: float, as_gaussian: float | None, *, contradicted: bool
) -> Check:
    claim = plan.epsilon()
    found = f"at least {spent:.3f} is spent, {at_delta:.3f} by this delta alone"
    if as_gaussian is not None:
        found += f", {as_gaussian:.3f} if the noise is Gaussian"
    if not isinstance(plan.release, Gradient):
        found += " (the gradient only: its square is not attacked)"
    if isinstance(plan.clipping, AdaptiveClipNorm | GroupClipNorms):
        found += " (of the whole gradient: its groups, or the count of clipped examples, are not attacked)"
    if plan.counts is not None:
        found += " (in training only: the counts of columns are not attacked)"
    passed = not contradicted and max(spent, as_gaussian or 0.0) <= claim
    return Check(name="the claim stands", passed=passed, found=f"{found}; claimed {format_epsilon(claim)}")


class _Findings:
    """What is kept of the games."""

    def __init__(self, plan: PrivacyPlan) -> None:
        self._plan = plan
        self._whitening = whitening(plan.strategy, plan.noise_stddevs().gradient_sum / plan.clip_norm)
        self.scores: list[Floats] = []
        self.included: list[Bools] = []
        self._gradients: list[NoiseSample] = []
        self._squares: list[NoiseSample] = []
        self._violations: list[str] = []
        self._first_batches: list[list[NDArray[np.int64]]] = []  # of the first two games
        self._moved = self._expected = 0.0  # along what canaries should add, in squared standard deviations
        self._shared, self._values = 0.0, 0  # products of both streams' residuals, and how many

    def _whitened(self, game: GameResult) -> tuple[Floats, Floats]:
        """The released gradients, and what canaries should add to them; the difference should be unit normals."""
        return whiten(self._whitening, game.gradient), whiten(self._whitening, game.drawn * game.directions)

    def add(self, game: GameResult) -> None:
        released, expected = self._whitened(game)
        self.scores.append(scores(self._plan, self._whitening, game, released))
        self.included.append(game.directions > 0)
        if (violation := sampling_violation(self._plan, game)) is not None:
            self._violations.append(violation)
        if len(self._first_batches) < 2:
            self._first_batches.append(game.batches)
        self._gradients.append(measure_noise(released - expected))
        self._expected += float((expected**2).sum())
        self._moved += float((expected * released).sum())
        squares = square_residuals(self._plan, game)
        if squares is not None:
            self._squares.append(measure_noise(squares))
            self._shared += float((squares * (released - expected)).sum())
            self._values += squares.size

    def checks(self) -> list[Check]:
        """Check batches, clipping and noise; each game has its own key."""
        if self._plan.sampling.is_random and len(self._first_batches) > 1 and are_alike(*self._first_batches):
            self._violations.append("two keys draw the same batches")
        drawn = next(iter(self._violations), "batch sizes, and how often and how far apart examples are drawn")
        different_keys = Check(name="different keys make different noise", passed=None, found="needs two games")
        if len(self._gradients) > 1:
            first, second = (game.first for game in self._gradients[:2])
            repeated = correlation_chance(float(first @ second), len(first))
            different_keys = chance_check(different_keys.name, "the correlation of first steps", repeated)
        clipping = Check(name="clipping", passed=None, found="no canary was drawn")
        if self._expected:
            length, tolerance = self._moved / self._expected, 5.0 / math.sqrt(self._expected)
            moved = f"a long gradient moves the sum by {length:.4f} clip norms (expected: 1 ± {tolerance:.4f})"
            clipping = Check(name="clipping", passed=abs(length - 1.0) <= tolerance, found=moved)
        checks = [
            Check(name="batches are drawn as planned", passed=not self._violations, found=drawn),
            clipping,
            *noise_checks(self._gradients),
            different_keys,
        ]
        if self._squares:
            shared = correlation_chance(self._shared, self._values)
            checks += noise_checks(self._squares, which="square: ")
            checks.append(chance_check("square: its noise is separate", "its correlation with the gradient's", shared))
        return checks
