"""The games find nothing where all is well, and find what is broken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dpoptim
from dpoptim import Adjacency, BandedToeplitz, BufferedToeplitz, CyclicPoisson, Poisson, PrivacyPlan, SquareRoot
from dpoptim.audit import audit_plan, games_needed
from dpoptim.training.recipes.plans import make_optimizer, release_of

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


CASES: list[tuple[str, dict[str, Any]]] = [
    ("dp_sgd", {}),
    ("dp_sgd", {"adjacency": Adjacency.REPLACE, "noise": BufferedToeplitz(buffers=2), "clip_norm": 0.01}),
    ("scale_then_privatize", {"noise": BandedToeplitz(bands=4)}),
    ("scale_then_privatize", {"sampling": CyclicPoisson(bands=4), "noise": BandedToeplitz(bands=4)}),
    ("post_processing", {"sampling": Poisson()}),
    ("bias_correction", {"sampling": Poisson(), "adjacency": Adjacency.REPLACE}),
    ("dp_sgd", {"sampling": Poisson(), "adjacency": Adjacency.ADD_REMOVE}),
    ("dp_sgd", {"sampling": Poisson(max_batch_size=120)}),
    ("independent_moments", {}),
    ("joint_moments", {"adjacency": Adjacency.REPLACE}),
]


@pytest.mark.parametrize(("variant", "changes"), CASES)
def test_nothing_is_found_where_all_is_well(variant, changes):
    plan = plan_of(variant, **changes)
    found = audit_plan(plan, maker(variant), canaries=3000)
    assert found.passed, [check for check in found.checks if not check.passed]
    assert found.games == games_needed(plan, 3000) == 3
    assert found.canaries == 3000
    assert 0.0 <= found.epsilon_bound < found.epsilon
    assert (found.gaussian_bound is None) == plan.sampling.is_random
    assert found.gaussian_bound is None or found.gaussian_bound > 3.0


def less_noise(optimizer: Any) -> None:
    optimizer.release._stddevs["gradient"] *= 0.7


def slightly_less_noise(optimizer: Any) -> None:
    optimizer.release._stddevs["gradient"] *= 0.97


def same_noise_again(optimizer: Any) -> None:
    """Every step has the noise of step 0."""
    for rows in optimizer.release._noise["gradient"]:
        first = rows.row(0).clone()
        rows.row = lambda step, first=first: first


def longer_clips(optimizer: Any) -> None:
    optimizer.release._sums.clip_norm *= 1.5


def uniform_noise(optimizer: Any) -> None:
    for rows in optimizer.release._noise["gradient"]:
        row = rows.row
        rows.row = lambda step, row=row: (torch.special.ndtr(row(step)) - 0.5) * 12**0.5


def independent_instead(optimizer: Any) -> None:
    """Noise of another strategy than the plan's, as strong at each step."""
    strategy = dpoptim.Independent().optimize(steps=PLAN["steps"])
    optimizer.release._strategies = {"gradient": strategy}
    optimizer.release._begin_run("other")


DAMAGE: list[tuple[Any, dict[str, Any], set[str]]] = [
    (less_noise, {}, {"the claim stands", "the attack's errors", "noise level"}),
    (slightly_less_noise, {}, {"noise level"}),
    (less_noise, {"sampling": Poisson()}, {"the attack's errors", "noise level"}),
    (same_noise_again, {}, {"noise of other steps is other noise"}),
    (longer_clips, {}, {"the claim stands", "the attack's errors", "clipping"}),
    (uniform_noise, {}, {"noise is Gaussian"}),
    (independent_instead, {"noise": BandedToeplitz(bands=4)}, {"noise of other steps is other noise"}),
]


@pytest.mark.parametrize(("damage", "changes", "least"), DAMAGE)
def test_what_is_broken_is_found(damage, changes, least):
    plan = plan_of(**changes)
    found = audit_plan(plan, maker("dp_sgd", damage), canaries=6000)
    assert not found.passed
    assert least <= {check.name for check in found.checks if not check.passed}


def test_a_seed_repeats_an_audit_and_another_does_not():
    plan = plan_of(steps=5)
    first, again, other = (audit_plan(plan, maker("dp_sgd"), canaries=200, seed=seed) for seed in (0, 0, 1))
    assert (first.scores == again.scores).all()
    assert not (first.scores == other.scores).all()


def test_values_are_plain():
    values = audit_plan(plan_of(steps=5), maker("dp_sgd"), canaries=200).as_values()
    assert values["passed"] is True
    assert values["canaries"] == 200
    assert {check["name"] for check in values["checks"]} >= {"the claim stands", "noise level"}


@pytest.mark.parametrize(
    ("plan", "changes", "said"),
    [
        (PrivacyPlan(**PLAN, noise_multiplier=0.0, delta=1e-5), {}, "nothing to audit"),
        (PrivacyPlan(**PLAN, noise_multiplier=1.0), {}, "no delta"),
        (PrivacyPlan(**{**PLAN, "steps": 9000}, noise=SquareRoot(), noise_multiplier=1.0, delta=1e-5), {}, "8,000"),
        (PrivacyPlan(**PLAN, noise_multiplier=1.0, delta=1e-5), {"canaries": 99}, "canaries=99"),
        (PrivacyPlan(**PLAN, noise_multiplier=1.0, delta=1e-5), {"confidence": 1.0}, "confidence=1.0"),
    ],
)  # fmt: skip
def test_what_cannot_be_audited_is_refused(plan, changes, said):
    with pytest.raises(ValueError, match=said):
        audit_plan(plan, maker("dp_sgd"), **changes)
