"""Games pass if everything follows the plan, and fail if something is broken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dpoptim
from dpoptim import (
    Adjacency,
    BandedToeplitz,
    BufferedToeplitz,
    CyclicPoisson,
    Poisson,
    PrivacyPlan,
    Shuffled,
    SquareRoot,
)
from dpoptim.app.audit import PlanAudit, audit_plan, games_needed
from dpoptim.app.audit.checks import measure_noise, noise_checks, sampling_violation, spread_chance
from dpoptim.app.audit.game import Game, GameResult, canaries_alone
from dpoptim.integrations.named_settings import make_optimizer, release_of
from dpoptim.privacy import Sampling

PLAN: dict[str, Any] = {"num_examples": 1000, "batch_size": 100, "steps": 20}


def maker(variant: str, damage: Any = lambda optimizer: None) -> Any:
    def make(model: Any, plan: PrivacyPlan, **options: Any) -> Any:
        own: dict[str, Any] = {"betas": (0.9, 0.99), "eps": None, "eps_scale": None, "weight_decay": 0.0}
        optimizer = make_optimizer(variant, model, plan, learning_rate=0.1, **own, **options)
        damage(optimizer)
        return optimizer

    return make


def plan_of(variant: str = "dp_sgd", **changes: Any) -> PrivacyPlan:
    plan = PrivacyPlan(**{**PLAN, "release": release_of(variant), **changes})
    return plan.calibrate(epsilon=6.0, delta=1e-4)


CASES: list[Any] = [
    ("dp_sgd", {}),
    ("dp_sgd", {"adjacency": Adjacency.REPLACE, "noise": BufferedToeplitz(buffers=2), "clip_norm": 0.01}),
    ("scale_then_privatize", {"sampling": CyclicPoisson(bands=4), "noise": BandedToeplitz(bands=4)}),
    ("independent_moments", {}),
    ("joint_moments", {"adjacency": Adjacency.REPLACE}),
    ("dp_sgd", {"unit": "user", "records_per_user": 3}),
    pytest.param("dp_sgd", {"unit": "user", "records_per_user": 1, "sampling": Poisson()}, marks=pytest.mark.slow),
    pytest.param("bias_correction", {"sampling": Poisson(), "adjacency": Adjacency.REPLACE}, marks=pytest.mark.slow),
    pytest.param("scale_then_privatize", {"noise": BandedToeplitz(bands=4)}, marks=pytest.mark.slow),
    pytest.param("post_processing", {"sampling": Poisson()}, marks=pytest.mark.slow),
    pytest.param("dp_sgd", {"sampling": Poisson(), "adjacency": Adjacency.ADD_REMOVE}, marks=pytest.mark.slow),
    pytest.param("dp_sgd", {"sampling": Poisson(max_batch_size=120)}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("variant", "changes"), CASES)
def test_correct_training_passes(variant, changes):
    plan = plan_of(variant, **changes)
    found = audit_plan(plan, maker(variant), canaries=2000)
    assert found.passed, [check for check in found.checks if not check.passed]
    assert found.games == games_needed(plan, 2000) == 10
    assert found.canaries == 2000
    assert 0.0 <= found.epsilon_bound < found.epsilon
    assert (found.gaussian_bound is None) == plan.sampling.is_random
    assert found.gaussian_bound is None or found.gaussian_bound > 2.5


def test_one_step_passes():
    found = audit_plan(plan_of(steps=1), maker("dp_sgd"), canaries=1000)
    assert found.passed, [check for check in found.checks if not check.passed]


def test_guesses_prove_a_bound():
    plan = PrivacyPlan(**PLAN).calibrate(epsilon=12.0, delta=1e-6)
    found = audit_plan(plan, maker("dp_sgd"), canaries=3000)
    assert found.gaussian_bound is not None
    assert 1.0 < found.epsilon_bound < found.gaussian_bound < found.epsilon


def noise_by(change: Any) -> Any:
    """Replace row t of the gradient's noise by `change` of the true rows and t."""

    def damage(optimizer: Any) -> None:
        for rows in optimizer.mechanism._noise["gradient"]:
            rows.row = lambda step, true=rows.row: change(true, step)

    return damage


def weaker(factor: float) -> Any:
    return noise_by(lambda true, step: factor * true(step))


def copied_half(true: Any, step: int) -> Any:
    """Give the second table the noise of the first."""
    row = true(step)
    half = len(row) // 2
    return torch.cat([row[:half], row[:half]]) if len(row) % 2 == 0 else row


def longer_clips(optimizer: Any) -> None:
    optimizer.mechanism._sums.clip_norm *= 1.5


def one_by_one(optimizer: Any) -> None:
    """Clip the records of a user one by one, so that a user with three adds three clip norms."""
    sums = optimizer.mechanism._sums

    def leave(batch: Any) -> torch.Tensor:
        counts, sums.rows_of_users = sums.rows_of_users, None
        batch.examples = len(counts)
        return torch.ones(sum(counts), dtype=torch.float64)

    sums._group_by_user = leave


def independent_instead(optimizer: Any) -> None:
    """Use a different strategy than the plan's, with the same noise level at each step."""
    strategy = dpoptim.Independent().optimize(steps=PLAN["steps"])
    optimizer.mechanism._strategies = {"gradient": strategy}
    optimizer.mechanism._begin_run("other")


def one_key_for_all(optimizer: Any) -> None:
    optimizer.mechanism.key = dpoptim.NoiseKey.from_bytes(bytes(32))
    optimizer.mechanism._begin_run("audit")


LEVEL, AGAIN, KEYS = "noise level", "noise never repeats", "different keys make different noise"
DAMAGE: list[Any] = [
    (weaker(0.7), {}, {"the claim stands", "the attack's errors", LEVEL}),
    (weaker(0.97), {}, {LEVEL}),
    pytest.param(weaker(0.7), {"sampling": Poisson()}, {"the attack's errors", LEVEL}, marks=pytest.mark.slow),
    (noise_by(lambda true, step: true(step) * (step != 13)), {}, {LEVEL}),
    (noise_by(lambda true, step: true(step % 10)), {}, {AGAIN}),
    (noise_by(copied_half), {}, {AGAIN}),
    (noise_by(lambda true, step: (torch.special.ndtr(true(step)) - 0.5) * 12**0.5), {}, {"noise is Gaussian"}),
    (independent_instead, {"noise": BandedToeplitz(bands=4)}, {AGAIN}),
    (one_key_for_all, {}, {KEYS}),
    (one_by_one, {"unit": "user", "records_per_user": 3}, {"the claim stands", "the attack's errors", "clipping"}),
    (longer_clips, {}, {"the claim stands", "the attack's errors", "clipping"}),
]


@pytest.mark.parametrize(("damage", "changes", "least"), DAMAGE)
def test_broken_noise_and_clipping_fail(damage, changes, least):
    plan = plan_of(**changes)
    found = audit_plan(plan, maker("dp_sgd", damage), canaries=3000)
    assert not found.passed
    assert least <= failures(found)


def failures(found: PlanAudit) -> set[str]:
    return {check.name for check in found.checks if check.passed is False}


def silent_squares(optimizer: Any) -> None:
    optimizer.mechanism._stddevs["square"] = 0.0


def one_stream_for_both(optimizer: Any) -> None:
    optimizer.mechanism._noise["square"] = optimizer.mechanism._noise["gradient"]


@pytest.mark.parametrize(
    ("damage", "least"),
    [(silent_squares, {"square: noise level"}), (one_stream_for_both, {"square: its noise is separate"})],
)
@pytest.mark.parametrize("variant", ["independent_moments", "joint_moments"])
def test_broken_noise_of_squares_fails(variant, damage, least):
    plan = plan_of(variant)
    found = audit_plan(plan, maker(variant, damage), canaries=1000)
    assert least <= failures(found)
    assert all(name.startswith("square: ") for name in failures(found))


def at_random(true: Any, step: int) -> Any:
    return np.random.default_rng(step).choice(PLAN["num_examples"], PLAN["batch_size"], replace=False)


def in_order(true: Any, step: int) -> Any:
    """Batches of random sizes, from passes in random order."""
    passes = np.concatenate([np.random.default_rng(number).permutation(PLAN["num_examples"]) for number in range(3)])
    start = sum(len(true(before)) for before in range(step))
    return np.unique(passes[start : start + len(true(step))])


DRAWS: list[tuple[Sampling, Any, str]] = [
    (Shuffled(), at_random, "participates"),
    (Shuffled(), lambda true, step: true(step)[1:], "does not have 100 different examples"),
    (Shuffled(), lambda true, step: true(step % 3), "participates in 7 steps; the plan allows 2"),
    (Shuffled(), lambda true, step: true(step if step < 10 else (29 - step)), "participates again after 1 steps"),
    (Poisson(), lambda true, step: np.unique(np.append(true(step), [7])), "is drawn in 20 of 20 steps"),
    (Poisson(), lambda true, step: true(step // 2), "two steps share"),
    (Poisson(), lambda true, step: np.arange(100) + 50 * step % 900, "two steps share"),
    (Poisson(), lambda true, step: np.unique(np.append(true(step), np.arange(12))), "is drawn in"),
    (Poisson(), lambda true, step: true(step)[:80], "on average"),
    (Poisson(), lambda true, step: np.arange(300) if step == 3 else true(step), "a batch has 300 examples"),
    (Poisson(), at_random, "batch sizes vary by 0.00; 9.49 is expected"),
    (Poisson(), in_order, "how often an example is drawn varies by 0."),
    (Poisson(max_batch_size=120), lambda true, step: np.arange(130), "the plan allows 120"),
    (CyclicPoisson(bands=4), lambda true, step: true(0), "turns of two groups"),
    (CyclicPoisson(bands=4), lambda true, step: true(step % 4), "two steps share"),
]


def change_batches(monkeypatch: pytest.MonkeyPatch, sampling: Sampling, change: Any) -> None:
    kind, indices = type(sampling), type(sampling).indices

    def other(self: Any, key: Any, step: int, **sizes: Any) -> Any:
        return np.asarray(change(lambda at: indices(self, key, at, **sizes), step))

    monkeypatch.setattr(kind, "indices", other)
    monkeypatch.setattr(kind, "largest_batch", lambda self, batch_size: 10**6)  # the mechanism checks it


def play(plan: PrivacyPlan) -> GameResult:
    return Game(plan, canaries=1000, seed=0).play(canaries_alone(plan, maker("dp_sgd")))


@pytest.mark.parametrize(("sampling", "change", "words"), DRAWS)
def test_wrong_batches_are_reported(monkeypatch, sampling, change, words):
    plan = PrivacyPlan(**PLAN, sampling=sampling, noise_multiplier=1.0, delta=1e-4)
    assert sampling_violation(plan, play(plan)) is None
    change_batches(monkeypatch, sampling, change)
    assert words in (sampling_violation(plan, play(plan)) or "")


def test_batches_that_do_not_depend_on_the_key_fail(monkeypatch):
    whole, key = Poisson.indices, dpoptim.NoiseKey.generate()
    monkeypatch.setattr(Poisson, "indices", lambda self, own, step, **sizes: whole(self, key, step, **sizes))
    found = audit_plan(plan_of(sampling=Poisson()), maker("dp_sgd"), canaries=1000, games=2)
    assert failures(found) == {"batches are drawn as planned"}
    assert "two keys draw the same batches" in str(found.checks)


def test_one_game_compares_no_keys():
    found = audit_plan(plan_of(), maker("dp_sgd"), canaries=500, games=1)
    (check,) = (check for check in found.checks if "different keys" in check.name)
    assert (check.passed, check.found) == (None, "needs two games")


@pytest.mark.parametrize(("rate", "of", "number"), [(0.1, 1000, 50), (0.02, 60, 5000)])
def test_spread_of_binomial_counts(rate, of, number):
    generator = np.random.default_rng(0)
    chances = np.array([spread_chance(generator.binomial(of, rate, number), of, rate) for _ in range(2000)])
    for level in (0.1, 0.01):
        assert abs((chances < level).mean() - level) < 4 * (level / len(chances)) ** 0.5
    assert spread_chance(np.full(number, round(of * rate)), of, rate) < 1e-9
    assert spread_chance(np.tile([0, 3 * round(of * rate)], number // 2), of, rate) < 1e-9
    assert spread_chance(np.zeros(1, dtype=np.int64), of, rate) == 1.0


def test_audit_with_wrong_batches_fails(monkeypatch):
    sampling, change, words = DRAWS[0]
    plan = plan_of(sampling=sampling)
    change_batches(monkeypatch, sampling, change)
    found = audit_plan(plan, maker("dp_sgd"), canaries=1000)
    assert [check.name for check in found.checks if words in check.found] == ["batches are drawn as planned"]
    assert "batches are drawn as planned" in failures(found)


def test_diverging_training_is_refused():
    def nowhere(true: Any, step: int) -> Any:
        return true(step) / (step != 3)

    with pytest.raises(ValueError, match="diverged at step 4; use a different plan"):
        audit_plan(plan_of(), maker("dp_sgd", noise_by(nowhere)), canaries=1000)


def test_correlation_checks_rarely_fail_by_chance():
    generator = np.random.default_rng(0)
    games = [measure_noise(generator.normal(size=(20, 400))) for _ in range(150)]
    repeated = np.array([game.repeated for game in games])
    assert (repeated < 0.05).mean() <= 0.05
    assert all(check.passed for game in games for check in noise_checks([game]))


def test_same_seed_gives_the_same_audit():
    plan = plan_of(steps=5)
    first, again, other = (audit_plan(plan, maker("dp_sgd"), canaries=200, seed=seed) for seed in (0, 0, 1))
    assert (first.scores == again.scores).all()
    assert not (first.scores == other.scores).all()


@pytest.mark.parametrize(
    ("plan", "changes", "words"),
    [
        (PrivacyPlan(**PLAN, noise_multiplier=0.0, delta=1e-5), {}, "nothing to audit"),
        (PrivacyPlan(**PLAN, noise_multiplier=1.0), {}, "no delta"),
        (PrivacyPlan(**{**PLAN, "steps": 9000}, noise=SquareRoot(), noise_multiplier=1.0, delta=1e-5), {}, "8,000"),
        (PrivacyPlan(**PLAN, noise_multiplier=1.0, delta=1e-5), {"canaries": 99}, "Expected canaries >= 100"),
        (PrivacyPlan(**PLAN, noise_multiplier=1.0, delta=1e-5), {"confidence": 1.0}, "Expected confidence >= 0.5"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(plan, changes, words):
    with pytest.raises(ValueError, match=words):
        audit_plan(plan, maker("dp_sgd"), **changes)
