"""Bounds exceed the true ε no more often than they may, and come close to it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from dpoptim import PrivacyPlan
from dpoptim.app.audit.checks import errors_check
from dpoptim.app.audit.statistics import (
    TradeOff,
    gaussian_bound,
    guessing_bound,
    guessing_chance,
    trade_off_of,
    upper_limit,
)
from dpoptim.privacy.accounting import gaussian_epsilon


def gaussian_scores(apart: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log likelihood ratios of draws from N(apart, 1) if in, and from N(0, 1) if out."""
    generator = np.random.default_rng(seed)
    included = generator.random(count) < 0.5
    seen = generator.normal(size=count) + apart * included
    return apart * seen - apart**2 / 2, included


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 3.0])
def test_guessing_chance_is_attained_by_randomized_response(epsilon):
    """The mechanism that reveals each coin with probability 1/(1 + e^-epsilon) attains the bound."""
    truly = 1 / (1 + math.exp(-epsilon))
    for right in range(1, 6):
        exact = sum(
            math.prod(truly if hit else 1 - truly for hit in outcome)
            for outcome in itertools.product([True, False], repeat=5)
            if sum(outcome) >= right
        )
        assert guessing_chance(5, 5, right, epsilon=epsilon, delta=0.0) == pytest.approx(exact, rel=1e-12)


def test_delta_makes_right_guesses_likelier():
    few = guessing_chance(100, 100, 80, epsilon=1.0, delta=0.0)
    more = guessing_chance(100, 100, 80, epsilon=1.0, delta=1e-4)
    # A mechanism may reveal everything with probability delta.
    assert few < more <= 1.0
    assert more >= few + 1e-4
    assert guessing_chance(100, 100, 80, epsilon=1.0, delta=0.5) == 1.0


@pytest.mark.parametrize("apart", [0.5, 1.5, 3.0])
def test_bounds_are_below_the_truth_and_close_to_it(apart):
    scores, included = gaussian_scores(apart, 40_000, 1)
    truth = gaussian_epsilon(1 / apart, 1e-5)
    guessed = guessing_bound(scores, included, delta=1e-5, confidence=0.99)
    as_gaussian = gaussian_bound(scores, included, delta=1e-5, confidence=0.99)
    assert 0.2 * truth < guessed < truth
    assert 0.9 * truth < as_gaussian < truth


def test_bounds_are_wrong_no_more_often_than_allowed():
    """At confidence 0.9, in 100 trials of a Gaussian mechanism."""
    truth = gaussian_epsilon(1.0, 1e-3)
    above = {"guessing": 0, "gaussian": 0}
    for seed in range(100):
        scores, included = gaussian_scores(1.0, 1000, seed)
        above["guessing"] += guessing_bound(scores, included, delta=1e-3, confidence=0.9) > truth
        above["gaussian"] += gaussian_bound(scores, included, delta=1e-3, confidence=0.9) > truth
    assert max(above.values()) <= 10 + 10


def test_random_scores_prove_nothing():
    generator = np.random.default_rng(0)
    included = generator.random(2000) < 0.5
    assert guessing_bound(generator.normal(size=2000), included, delta=1e-6, confidence=0.99) == 0.0
    assert gaussian_bound(generator.normal(size=2000), included, delta=1e-6, confidence=0.99) < 0.1


def test_perfect_scores_prove_as_much_as_their_number_allows():
    included = np.arange(2000) % 2 == 0
    found = guessing_bound(included.astype(float), included, delta=0.0, confidence=0.99)
    # All 2000 right have probability q^2000 = 0.01/9 (nine numbers of guesses are tried).
    assert found == pytest.approx(-math.log((0.01 / 9) ** (-1 / 2000) - 1), abs=1e-5)


def test_trade_off_of_a_gaussian_run():
    plan = PrivacyPlan(num_examples=100, batch_size=10, steps=10, noise_multiplier=1.0, delta=1e-6)
    wrong = np.array([1e-3, 0.02, 0.3, 0.8])
    exact = ndtr(ndtri(1 - wrong) - 1.0)
    found = trade_off_of(plan).least_missed(wrong)
    assert (found <= exact).all()
    assert found == pytest.approx(exact, rel=0.02)


def test_trade_off_of_one_pair():
    allowed = TradeOff(epsilons=np.array([math.log(4)]), deltas=np.array([0.1]))
    assert allowed.least_missed(np.array([0.0, 0.1, 0.9])) == pytest.approx([0.9, 0.5, 0.0])


@pytest.mark.parametrize(("apart", "passes"), [(0.9, True), (1.0, True), (1.2, False)])
def test_errors_are_compared_with_the_whole_curve(apart, passes):
    plan = PrivacyPlan(num_examples=100, batch_size=10, steps=10, noise_multiplier=1.0, delta=1e-6)
    scores, included = gaussian_scores(apart, 20_000, 3)
    assert errors_check(trade_off_of(plan), scores, included, confidence=0.99).passed is passes


def test_upper_limit_is_exact():
    limit = upper_limit(3, 50, 0.05)
    below = sum(math.comb(50, k) * limit**k * (1 - limit) ** (50 - k) for k in range(4))
    assert below == pytest.approx(0.05)
    assert upper_limit(50, 50, 0.05) == 1.0
