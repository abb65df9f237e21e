"""The search for buffers: golden errors, its gradient, that it ends in a minimum, and its limits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.optimize import check_grad

from dpoptim.noise import BufferedToeplitz, Independent
from dpoptim.noise.search.buffered_search import _log_error, _merged
from dpoptim.noise.search.objective import Objective, SearchObjective
from dpoptim.noise.strategies.buffered import BufferedToeplitzStrategy
from tests.noise.explicit import fresh_normals, make, patterns, rows, scaled_error


@pytest.mark.parametrize(("objective", "mean", "largest"), [("max", 7.18, 7.70), ("mean", 7.018, 7.931)])
def test_golden_errors_of_three_participations(objective: Objective, mean: float, largest: float) -> None:
    spec = BufferedToeplitz(buffers=2, objective=objective)
    strategy = spec.optimize(steps=2000, max_participations=3, min_separation=128)
    assert strategy.buffers == 2
    assert scaled_error(strategy, 3, 128) == pytest.approx(mean, abs=0.005)
    assert scaled_error(strategy, 3, 128, objective="max") == pytest.approx(largest, abs=0.005)


def test_one_participation_comes_near_the_best_of_all() -> None:
    """Four buffers reach what the best full Toeplitz matrix has, 3.27010, to one part in 10,000."""
    assert 3.27009 < scaled_error(BufferedToeplitz(buffers=4).optimize(steps=2000)) < 3.2704


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("steps", "pattern"), [(30, (1, 1)), (31, (3, 7)), (40, (40, 1)), (25, (2, 24))])
def test_gradient_of_the_search(steps: int, pattern: tuple[int, int], objective: Objective) -> None:
    decays, weights = np.array([0.9, 0.4]), np.array([0.2, 0.3])
    goal = SearchObjective(steps=steps, max_participations=pattern[0], min_separation=pattern[1], objective=objective)

    def value_and_slopes(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, pull = _log_error(x[:2], x[2:], goal)
        powers = x[:2, None] ** np.arange(steps - 1)
        by_decay = x[2:] * ((powers[:, :-1] * np.arange(1, steps - 1)) @ pull[2:])
        return value, np.concatenate([by_decay, powers @ pull[1:]])

    at = np.concatenate([decays, weights])
    assert check_grad(lambda x: value_and_slopes(x)[0], lambda x: value_and_slopes(x)[1], at) < 1e-5
    strategy = BufferedToeplitzStrategy(steps=steps, decays=tuple(decays), weights=tuple(weights))
    expected = scaled_error(strategy, *pattern, objective=objective)
    assert value_and_slopes(at)[0] == pytest.approx(2 * np.log(expected), rel=1e-12)


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("steps", "buffers", "pattern"), [(50, 1, (1, 1)), (300, 2, (4, 60)), (1000, 3, (1, 1))])
def test_search_ends_in_a_minimum(steps: int, buffers: int, pattern: tuple[int, int], objective: Objective) -> None:
    spec = BufferedToeplitz(buffers=buffers, objective=objective)
    best = spec.optimize(steps=steps, max_participations=pattern[0], min_separation=pattern[1])
    assert best.buffers == buffers
    lowest = scaled_error(best, *pattern, objective=objective)
    generator = np.random.default_rng(0)
    for size in (1e-1, 1e-2, 1e-3):
        for _ in range(5):
            decays = 1 - (1 - np.array(best.decays)) * np.exp(size * generator.normal(size=buffers))
            weights = np.array(best.weights) * np.exp(size * generator.normal(size=buffers))
            other = BufferedToeplitzStrategy(steps=steps, decays=tuple(decays), weights=tuple(weights))
            assert scaled_error(other, *pattern, objective=objective) > lowest


@given(pattern=patterns(60))
@settings(max_examples=40, deadline=None)
def test_more_buffers_are_never_worse(pattern: tuple[int, int, int]) -> None:
    steps, max_participations, min_separation = pattern
    errors = [scaled_error(Independent().optimize(steps=steps), max_participations, min_separation)]
    for buffers in (1, 2, 3):
        strategy = BufferedToeplitz(buffers=buffers).optimize(
            steps=steps, max_participations=max_participations, min_separation=min_separation
        )
        assert strategy.buffers <= buffers
        assert strategy.sensitivity_is_exact
        errors.append(scaled_error(strategy, max_participations, min_separation))
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(errors))


def test_limits_are_independent_noise() -> None:
    for strategy in (
        BufferedToeplitz(buffers=2).optimize(steps=1),
        BufferedToeplitz(buffers=2).optimize(steps=12, max_participations=12, min_separation=1),
    ):
        assert strategy.buffers == 0
        assert strategy.strategy_coefs == (1.0,)
        assert torch.equal(rows(make(strategy, dtype=torch.float64), strategy.steps), fresh_normals(strategy.steps))
    two = BufferedToeplitz(buffers=3).optimize(steps=2)
    assert two.strategy_coefs[1] == pytest.approx(0.30585, abs=1e-5)


def test_buffers_of_one_decay_are_merged_and_those_of_no_weight_left_out() -> None:
    decays, weights = _merged(np.array([0.5, 0.9, 0.2, 0.5 + 1e-7]), np.array([0.1, 0.2, 1e-15, 0.3]))
    np.testing.assert_allclose(decays, [0.9, 0.5 + 0.75e-7], rtol=1e-12)
    np.testing.assert_allclose(weights, [0.2, 0.4], rtol=1e-12)
