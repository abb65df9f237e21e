"""Bounds exceed the true ε no more often than they may, and come close to it."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.special import chdtri, ndtr, ndtri

from dpoptim import PrivacyPlan
from dpoptim.app.audit.checks import errors_check
from dpoptim.app.audit.statistics import (
    Guesses,
    TradeOff,
    contradicted_noise,
    count_chance,
    gaussian_bound,
    guess,
    guessing_bound,
    guessing_chance,
    trade_off_of,
    upper_limit,
)
from dpoptim.privacy.accounting import GaussianRun, gaussian_epsilon, gaussian_noise_multiplier


def gaussian_scores(apart: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log likelihood ratios of draws from N(apart, 1) if in, and from N(0, 1) if out."""
    generator = np.random.default_rng(seed)
    included = generator.random(count) < 0.5
    seen = generator.normal(size=count) + apart * included
    return apart * seen - apart**2 / 2, included


def guesses_of(canaries: int, count: int, right: int) -> Guesses:
    return Guesses(canaries=canaries, count=count, right=right, only_in=False)


def chance(found: Guesses, *, epsilon: float, delta: float) -> float:
    return guessing_chance(found, epsilons=np.array([epsilon]), deltas=np.array([delta]))


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
        allowed = right + 1 > (5 - right) * math.exp(epsilon)
        assert chance(guesses_of(5, 5, right), epsilon=epsilon, delta=0.0) == pytest.approx(exact if allowed else 1.0)


def likeliest(coins: int, right: int, *, epsilon: float, delta: float) -> float:
    """The exact maximum, by a linear program, over private mechanisms whose guesses depend on their rightness alone."""
    factor, places = math.exp(epsilon), coins + 1
    rows, limits = [], []
    for count in range(places):  # variables: the chance of each count, then how far each ratio exceeds e^epsilon
        for lower, share, other in ((count - 1, count, coins - count + 1), (count + 1, coins - count, count + 1)):
            row = np.zeros(3 * places)
            row[count] = share / coins
            if 0 <= lower <= coins:
                row[lower] = -factor * other / coins
            row[places + 2 * count + (lower > count)] = -1.0
            rows.append(row)
            limits.append(0.0)
    rows.append(np.repeat([0.0, 1.0], [places, 2 * places]))
    limits.append(delta)
    goal = -(np.arange(3 * places) >= right).astype(float) * (np.arange(3 * places) < places)
    sums = np.repeat([[1.0, 0.0]], [places, 2 * places], axis=1)
    return -linprog(goal, A_ub=np.array(rows), b_ub=limits, A_eq=sums, b_eq=[1.0]).fun


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-3), (2.0, 1e-2), (2.0, 1e-4), (4.0, 1e-5)])
def test_no_mechanism_allows_more_right_guesses(epsilon, delta):
    for coins in (3, 12, 40):
        for right in range(1, coins + 1):
            bound = chance(guesses_of(coins, coins, right), epsilon=epsilon, delta=delta)
            most = likeliest(coins, right, epsilon=epsilon, delta=delta)
            assert most <= bound + 1e-9
            if bound < 0.1:
                assert bound < 1.5 * most  # so a bound that is half as large would be wrong


def test_guesses_of_in_reveal_half_as_much():
    both, one = (dataclasses.replace(guesses_of(1000, 50, 50), only_in=only_in) for only_in in (False, True))
    rest = count_chance(50, 50, 1 / (1 + math.exp(-1.0)), only_more=True)
    halves = [float(chance(found, epsilon=1.0, delta=1e-4) - rest) for found in (both, one)]
    assert halves[0] == pytest.approx(2 * halves[1])


def test_attack_guesses_where_it_is_sure():
    scores, included = np.array([0.1, -9.0, 5.0, 0.2, -6.0]), np.array([True, False, True, False, True])
    scores, included = np.tile(scores, 500), np.tile(included, 500)
    assert guess(scores, included, only_in=False) == guesses_of(2500, 500, 500)  # the scores of -9
    assert guess(scores, included, only_in=True) == Guesses(canaries=2500, count=200, right=200, only_in=True)


def audits(apart: float, canaries: int, games: int, seed: int) -> list[Guesses]:
    trials = (gaussian_scores(apart, canaries, seed * games + game) for game in range(games))
    return [guess(*trial, only_in=False) for trial in trials]


@pytest.mark.parametrize("epsilon", [4.0, 8.0])
def test_bounds_are_below_the_truth_and_close_to_it(epsilon):
    noise = gaussian_noise_multiplier(epsilon, 1e-6)
    games = audits(1 / noise, 5000, 10, 1)
    at_delta = guessing_bound(games, delta=1e-6, confidence=0.99)
    least = contradicted_noise(GaussianRun(sensitivity=1.0), games, noise_multiplier=noise, confidence=0.99)
    assert 0.3 * epsilon < at_delta < gaussian_epsilon(least, 1e-6) < epsilon
    assert gaussian_epsilon(least, 1e-6) > 0.6 * epsilon
    scores, included = gaussian_scores(1 / noise, 50_000, 1)
    assert 0.9 * epsilon < gaussian_bound(scores, included, delta=1e-6, confidence=0.99) < epsilon


@pytest.mark.parametrize("epsilon", [4.0, 8.0])
def test_weaker_noise_is_contradicted_without_assumptions(epsilon):
    noise = gaussian_noise_multiplier(epsilon, 1e-6)
    for weaker, passes in ((1.0, True), (0.7, False)):
        games = audits(1 / (weaker * noise), 5000, 10, 2)
        found = contradicted_noise(GaussianRun(sensitivity=1.0), games, noise_multiplier=noise, confidence=0.99)
        assert (found > noise) is passes


def test_bounds_are_wrong_no_more_often_than_allowed():
    """At confidence 0.9, in 100 trials of a Gaussian mechanism."""
    truth = gaussian_epsilon(1.0, 1e-3)
    above = {"curve": 0, "guessing": 0, "gaussian": 0}
    for seed in range(100):
        games = audits(1.0, 100, 10, seed)
        above["guessing"] += guessing_bound(games, delta=1e-3, confidence=0.9) > truth
        run = GaussianRun(sensitivity=1.0)
        above["curve"] += contradicted_noise(run, games, noise_multiplier=1.0, confidence=0.9) < 1.0
        above["gaussian"] += gaussian_bound(*gaussian_scores(1.0, 1000, seed), delta=1e-3, confidence=0.9) > truth
    assert max(above.values()) <= 10 + 10


def test_random_scores_prove_nothing():
    generator = np.random.default_rng(0)
    scores, included = generator.normal(size=2000), generator.random(2000) < 0.5
    games = [guess(scores, included, only_in=False)]
    assert guessing_bound(games, delta=1e-6, confidence=0.99) == 0.0
    run = GaussianRun(sensitivity=1.0)
    assert gaussian_epsilon(contradicted_noise(run, games, noise_multiplier=1.0, confidence=0.99), 1e-6) < 0.3
    assert gaussian_bound(scores, included, delta=1e-6, confidence=0.99) < 0.1


def test_perfect_scores_prove_as_much_as_their_number_allows():
    games = [guess(included - 0.5, included, only_in=False) for included in [np.arange(2500) % 2 == 0] * 3]
    found = guessing_bound(games, delta=0.0, confidence=0.99)
    # All 500 right have probability q^500 in each of three games.
    each = math.exp(-chdtri(6, 0.01) / 6)
    assert found == pytest.approx(-math.log(each ** (-1 / 500) - 1), abs=1e-5)


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
