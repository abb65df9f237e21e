"""ε of several runs together: closed forms, dp-accounting's own composition, limits and refusals."""

from __future__ import annotations

import math

import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant

from dpoptim import BandedToeplitz
from dpoptim.privacy import (
    Adjacency,
    CyclicPoisson,
    IndependentMoments,
    NoiselessSquare,
    Poisson,
    PrivacyPlan,
    Shuffled,
    gaussian_epsilon,
)
from dpoptim.privacy.composition import calibrate_runs, epsilon_of_runs

DELTA = 1e-6


def shuffled(multiplier=2.0, **changes):
    return PrivacyPlan(**{
        "num_examples": 1000, "batch_size": 100, "steps": 30, "noise_multiplier": multiplier, "sampling": Shuffled(),
        **changes,
    })  # fmt: skip


def poisson(multiplier=1.0, **changes):
    return shuffled(multiplier, **{"sampling": Poisson(), **changes})


@pytest.mark.parametrize("count", [1, 5])
def test_identical_gaussian_runs_are_one_with_less_noise(count):
    assert epsilon_of_runs([shuffled()] * count, delta=DELTA) == pytest.approx(
        shuffled(2.0 / math.sqrt(count)).epsilon(delta=DELTA), rel=1e-12
    )


def test_gaussian_runs_add_their_squared_shifts():
    """Three participations at σ = 2 and σ = 5, and two (fewer steps) at σ = 1."""
    plans = [shuffled(2.0), shuffled(5.0), shuffled(1.0, steps=20)]
    squared = 3 / 4 + 3 / 25 + 2 / 1
    assert epsilon_of_runs(plans, delta=DELTA) == pytest.approx(gaussian_epsilon(squared**-0.5, DELTA), rel=1e-12)
    wrong = gaussian_epsilon(1.1 / squared**0.5, DELTA)
    assert abs(epsilon_of_runs(plans, delta=DELTA) - wrong) > 0.1


PLANS = {
    "shuffled": shuffled(),
    "replace": shuffled(adjacency=Adjacency.REPLACE),
    "correlated": shuffled(noise=BandedToeplitz(bands=4)),
    "squares": shuffled(release=IndependentMoments()),
    "poisson": poisson(),
    "poisson, add/remove": poisson(adjacency=Adjacency.ADD_REMOVE),
    "poisson, replace": poisson(adjacency=Adjacency.REPLACE),
    "truncated": poisson(sampling=Poisson(max_batch_size=130)),
    "cyclic": poisson(sampling=CyclicPoisson(bands=4), noise=BandedToeplitz(bands=4)),
}


@pytest.mark.parametrize("name", PLANS)
def test_one_run_has_its_own_epsilon_and_more_runs_have_more(name):
    plan = PLANS[name]
    found = [epsilon_of_runs([plan] * count, delta=DELTA) for count in (1, 2, 4)]
    assert found[0] == pytest.approx(plan.epsilon(delta=DELTA), rel=1e-12)
    assert found[0] < found[1] < found[2]
    assert found[2] < 4 * found[0]


def event_of(plan):
    step = PoissonSampledDpEvent(plan.sampling_prob, GaussianDpEvent(plan.noise_multiplier))
    return SelfComposedDpEvent(step, plan.steps)


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_two_kinds_of_poisson_runs_against_dp_accounting(adjacency):
    relation = {
        Adjacency.ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
        Adjacency.ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
        Adjacency.REPLACE: NeighboringRelation.REPLACE_ONE,
    }[adjacency]
    plans = [poisson(1.5, adjacency=adjacency, steps=20), poisson(2.5, adjacency=adjacency, steps=25)]
    accountant = PLDAccountant(relation, value_discretization_interval=2e-3)
    accountant.compose(ComposedDpEvent([event_of(plan) for plan in plans]))
    expected = accountant.get_epsilon(DELTA)
    found = epsilon_of_runs(plans, delta=DELTA)
    assert found == pytest.approx(expected, rel=3e-3)
    assert found > max(plan.epsilon(delta=DELTA) for plan in plans)
    # The second run twice is clearly different.
    assert abs(epsilon_of_runs([*plans, plans[1]], delta=DELTA) - expected) > 0.02 * expected


def test_gaussian_and_poisson_runs_together_against_dp_accounting():
    plans = [shuffled(4.0), poisson(2.0, steps=20)]
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-3)
    accountant.compose(ComposedDpEvent([GaussianDpEvent(4.0 / math.sqrt(3.0)), event_of(plans[1])]))
    assert epsilon_of_runs(plans, delta=DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=3e-3)


def test_replace_mixes_at_the_right_distance():
    """A Poisson run that hardly ever draws leaves the Gaussian's ε, of twice the sensitivity."""
    whole = shuffled(4.0, adjacency=Adjacency.REPLACE, num_examples=10_000)
    rare = poisson(50.0, adjacency=Adjacency.REPLACE, num_examples=10_000, batch_size=1, steps=1)
    alone = gaussian_epsilon(2.0, DELTA)
    assert whole.epsilon(delta=DELTA) == pytest.approx(alone, rel=1e-9)
    assert epsilon_of_runs([whole, rare], delta=DELTA) == pytest.approx(alone, rel=2e-3)


def test_truncated_samples_compose_with_others():
    cut, plain = PLANS["truncated"], poisson(2.0)
    found = epsilon_of_runs([cut, plain], delta=DELTA)
    uncut = epsilon_of_runs([poisson(1.0), plain], delta=DELTA)
    assert uncut <= found * (1 + 1e-6)
    assert max(cut.epsilon(delta=DELTA), plain.epsilon(delta=DELTA)) < found
    assert found < cut.epsilon(delta=DELTA) + plain.epsilon(delta=DELTA)


def test_the_order_of_runs_does_not_matter():
    plans = [poisson(1.5), poisson(3.0), shuffled(4.0)]
    assert epsilon_of_runs(plans, delta=DELTA) == pytest.approx(epsilon_of_runs(plans[::-1], delta=DELTA), rel=1e-6)


@pytest.mark.parametrize(("plan", "times"), [(shuffled(None), 6), (poisson(None), 1), (poisson(None), 6)])
def test_runs_calibrated_together_keep_to_their_epsilon(plan, times):
    found = calibrate_runs(plan, times, epsilon=1.5, delta=DELTA)
    assert 1.4999 <= epsilon_of_runs([found] * times, delta=DELTA) <= 1.5
    assert found.noise_multiplier is not None
    less = found.replace(noise_multiplier=0.99 * found.noise_multiplier)
    assert epsilon_of_runs([less] * times, delta=DELTA) > 1.5


def test_edges():
    assert epsilon_of_runs([], delta=DELTA) == 0.0
    assert epsilon_of_runs([shuffled(), shuffled(0.0)], delta=DELTA) == math.inf
    baseline = shuffled().with_release(NoiselessSquare())
    assert epsilon_of_runs([shuffled(), baseline], delta=DELTA) == math.inf
    with pytest.raises(ValueError, match="noise_multiplier is not set"):
        epsilon_of_runs([shuffled(), shuffled(None)], delta=DELTA)
    with pytest.raises(ValueError, match="the same adjacency, got replace, zero_out"):
        epsilon_of_runs([shuffled(), shuffled(adjacency=Adjacency.REPLACE)], delta=DELTA)
    with pytest.raises(ValueError, match="delta"):
        epsilon_of_runs([shuffled()], delta=0.0)
    with pytest.raises(ValueError, match="1e-12"):
        epsilon_of_runs([poisson(), poisson(2.0)], delta=1e-20)
    with pytest.raises(ValueError, match="not private"):
        calibrate_runs(baseline, 2, epsilon=1.0, delta=DELTA)
    with pytest.raises(ValueError, match="times"):
        calibrate_runs(poisson(None), 0, epsilon=1.0, delta=DELTA)
