"""The best banded Toeplitz strategy: golden values, its search, and that it is a minimum."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import check_grad

from dpoptim.noise import (
    BandedToeplitz,
    DecayedSums,
    Independent,
    PrefixSums,
    SquareRoot,
    ToeplitzStrategy,
    Workload,
    inverse_series,
    sqrt_series,
)
from dpoptim.noise.search.banded_toeplitz import _falling
from dpoptim.noise.search.objective import SearchObjective
from tests.noise.explicit import scaled_error


@pytest.mark.parametrize(("steps", "bands", "mean"), [(256, 16, 3.637574), (2000, 128, 4.253252)])
def test_golden_errors(steps: int, bands: int, mean: float) -> None:
    strategy = BandedToeplitz(bands=bands).optimize(steps=steps)
    assert strategy.bands == bands
    assert strategy.mean_error() * strategy.column_norm == pytest.approx(mean, abs=5e-7)


def test_three_participations_at_separation_128() -> None:
    """Three that do not overlap are √3 times one."""
    banded = BandedToeplitz(bands=128).optimize(steps=2000, max_participations=3, min_separation=128)
    assert scaled_error(banded, 3, 128) == pytest.approx(np.sqrt(3) * 4.253252, abs=1e-6)


@pytest.mark.parametrize(("steps", "bands"), [(8, 8), (30, 7), (200, 40)])
def test_gradient_of_the_search(steps: int, bands: int) -> None:
    goal, at = SearchObjective(steps=steps), sqrt_series(bands)[1:] * 0.9

    def value_and_slope(tail: np.ndarray) -> tuple[float, np.ndarray]:
        coefs = np.concatenate([[1.0], tail, np.zeros(steps - bands)])
        value, slope = goal.by_strategy(coefs, inverse_series(coefs, steps))
        return value, slope[1:bands]

    assert check_grad(lambda x: value_and_slope(x)[0], lambda x: value_and_slope(x)[1], at) < 1e-5
    strategy = ToeplitzStrategy(steps=steps, strategy_coefs=(1.0, *at.tolist()))
    expected = 2 * np.log(strategy.mean_error() * strategy.column_norm)
    assert value_and_slope(at)[0] == pytest.approx(expected, rel=1e-12)


@given(ratios=st.lists(st.floats(0, 1), min_size=1, max_size=8), seed=st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_gradient_in_the_ratios(ratios: list[float], seed: int) -> None:
    """c is linear in each ratio, so that its differences are exact."""
    at, pull = np.array(ratios), np.random.default_rng(seed).normal(size=len(ratios))
    tail, back = _falling(at)
    np.testing.assert_allclose(tail, np.cumprod(at), rtol=1e-14)
    for index, found in enumerate(back(pull)):
        unit = np.eye(len(at))[index]
        assert found == pytest.approx(pull @ (_falling(at + unit)[0] - tail), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("steps", "bands"), [(2, 2), (8, 3), (8, 8), (64, 63), (300, 100), (1000, 2), (3000, 5)])
def test_search_ends_in_a_minimum(steps: int, bands: int) -> None:
    best = BandedToeplitz(bands=bands).optimize(steps=steps)
    lowest = best.mean_error() * best.column_norm
    generator = np.random.default_rng(0)
    for size in (1e-1, 1e-2, 1e-3):
        for _ in range(5):
            tail = np.array(best.strategy_coefs[1:]) * (1 + size * generator.normal(size=bands - 1))
            other = ToeplitzStrategy(steps=steps, strategy_coefs=(1.0, *tail.tolist()))
            assert other.mean_error() * other.column_norm > lowest
    assert best.sensitivity_is_exact


@pytest.mark.parametrize("workload", [PrefixSums(), PrefixSums(momentum=0.9), DecayedSums(beta=0.9)], ids=repr)
def test_more_bands_are_never_worse(workload: Workload) -> None:
    errors = []
    for bands in (1, 2, 4, 8, 16, 32, 64):
        strategy = BandedToeplitz(bands=bands, workload=workload).optimize(steps=64)
        errors.append(scaled_error(strategy, workload=workload))
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(errors))
    root = SquareRoot().optimize(steps=64)
    assert errors[-1] < scaled_error(root, workload=workload)


def test_one_band_is_independent() -> None:
    assert BandedToeplitz(bands=1).optimize(steps=9) == Independent().optimize(steps=9)


def test_equal_specs_give_equal_strategies() -> None:
    made = [BandedToeplitz(bands=4).optimize(steps=30) for _ in range(2)]
    assert made[0] == made[1]
    assert made[0] != BandedToeplitz(bands=4, workload=DecayedSums(beta=0.9)).optimize(steps=30)
