"""Banded inverses against golden values, explicit matrices, brute force, and their limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import check_grad

from dpoptim.noise import (
    BandedInverse,
    BandedToeplitz,
    Independent,
    SquareRoot,
    StrategySpec,
    inverse_sqrt_series,
)
from dpoptim.noise.search.objective import SearchObjective
from dpoptim.noise.strategies.banded_inverse import BandedInverseStrategy, _log_error, _prefix_and_coefs
from tests.noise.explicit import (
    banded_inverse,
    brute_force_sensitivity,
    fresh_normals,
    make,
    patterns,
    products_bound,
    rows,
    scaled_error,
)


def test_golden_errors_of_three_participations() -> None:
    strategy = BandedInverse(bands=128).optimize(steps=2000, max_participations=3, min_separation=128)
    assert strategy.inverse_bands == 128
    assert scaled_error(strategy, 3, 128) == pytest.approx(7.19, abs=0.005)
    assert scaled_error(strategy, 3, 128, objective="max") == pytest.approx(8.55, abs=0.005)


def test_all_bands_come_near_the_best_of_all() -> None:
    """The best Toeplitz matrix of 64 steps, its inverse log-convex or not, is hardly better, and never worse."""
    best = scaled_error(BandedToeplitz(bands=64).optimize(steps=64))
    assert best < scaled_error(BandedInverse(bands=64).optimize(steps=64)) < best * 1.0005


@given(strategy=st.integers(1, 11).flatmap(banded_inverse))
@settings(max_examples=60, deadline=None)
def test_errors_and_norms_are_those_of_the_matrices(strategy: BandedInverseStrategy) -> None:
    steps, matrix, inverse = strategy.steps, strategy.strategy_matrix(), strategy.noising_matrix()
    np.testing.assert_allclose(matrix @ inverse, np.eye(steps), atol=1e-12)
    assert np.array_equal(inverse, np.triu(inverse, 1 - strategy.inverse_bands))
    noise = np.linalg.norm(np.tril(np.ones((steps, steps))) @ inverse, axis=1)
    assert strategy.mean_error() == pytest.approx(np.sqrt((noise**2).mean()), rel=1e-11)
    assert strategy.max_error() == pytest.approx(noise.max(), rel=1e-11)
    assert strategy.column_norm == pytest.approx(np.linalg.norm(matrix[:, 0]), rel=1e-12)
    np.testing.assert_allclose(strategy.row_norms(), np.linalg.norm(inverse, axis=1), rtol=1e-12)


@given(
    strategy=st.integers(1, 9).flatmap(banded_inverse),
    max_participations=st.integers(1, 4),
    min_separation=st.integers(1, 6),
)
@settings(max_examples=80, deadline=None)
def test_sensitivity_is_exact(strategy: BandedInverseStrategy, max_participations: int, min_separation: int) -> None:
    max_participations = min(max_participations, (strategy.steps - 1) // min_separation + 1)
    assert strategy.sensitivity_is_exact
    found = strategy.sensitivity(max_participations=max_participations, min_separation=min_separation)
    pattern = (strategy.strategy_matrix(), max_participations, min_separation)
    assert found == pytest.approx(brute_force_sensitivity(*pattern), rel=1e-12)
    assert found == pytest.approx(products_bound(*pattern), rel=1e-12)


@given(strategy=st.integers(1, 11).flatmap(banded_inverse))
@settings(max_examples=30, deadline=None)
def test_strategy_times_rows_gives_back_the_normals(strategy: BandedInverseStrategy) -> None:
    stream = make(strategy, 9, dtype=torch.float64)
    assert stream.memory_bytes == 0
    back = torch.from_numpy(strategy.strategy_matrix()) @ rows(stream, strategy.steps)
    torch.testing.assert_close(back, fresh_normals(strategy.steps, 9), rtol=0, atol=1e-10)


def test_late_rows_need_the_last_bands_alone() -> None:
    strategy = BandedInverse(bands=3).optimize(steps=100_000)
    row = make(strategy, 4, dtype=torch.float64).row(99_999)
    plain = make(Independent().optimize(steps=100_000), 4, dtype=torch.float64)
    expected = sum(coef * plain.row(99_999 - lag) for lag, coef in enumerate(strategy.inverse_coefs))
    torch.testing.assert_close(row, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("steps", "bands", "pattern"), [(30, 8, (1, 1)), (31, 31, (3, 7)), (12, 5, (12, 1))])
def test_gradient_of_the_search(steps: int, bands: int, pattern: tuple[int, int]) -> None:
    at = np.linspace(0.6, 0.1, bands - 1)
    goal = SearchObjective(steps=steps, max_participations=pattern[0], min_separation=pattern[1])
    assert check_grad(lambda x: _log_error(x, goal)[0], lambda x: _log_error(x, goal)[1], at) < 1e-5
    _, coefs = _prefix_and_coefs(at)
    strategy = BandedInverseStrategy(steps=steps, inverse_coefs=tuple(coefs.tolist()))
    expected = np.linalg.norm(np.cumsum(strategy.noising_coefs) * np.sqrt(np.arange(steps, 0, -1) / steps))
    totals = sum(
        np.eye(steps, k=-lag) @ strategy.strategy_matrix()[:, 0]
        for lag in range(0, pattern[0] * pattern[1], pattern[1])
    )
    assert _log_error(at, goal)[0] == pytest.approx(2 * np.log(expected * np.linalg.norm(totals)), rel=1e-12)


@given(pattern=patterns(60), bands=st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_best_is_no_worse_than_the_start_and_exact(pattern: tuple[int, int, int], bands: int) -> None:
    steps, max_participations, min_separation = pattern
    bands = min(bands, steps)
    best, start = (
        BandedInverse(bands=bands, optimized=optimized).optimize(
            steps=steps, max_participations=max_participations, min_separation=min_separation
        )
        for optimized in (True, False)
    )
    assert best.sensitivity_is_exact
    assert start.sensitivity_is_exact
    assert best.inverse_bands <= bands
    found = scaled_error(best, max_participations, min_separation)
    assert found <= scaled_error(start, max_participations, min_separation) * (1 + 1e-12)
    independent = scaled_error(Independent().optimize(steps=steps), max_participations, min_separation)
    assert found <= independent * (1 + 1e-6)


@pytest.mark.parametrize(("steps", "bands", "pattern"), [(50, 3, (1, 1)), (200, 20, (3, 50)), (300, 8, (2, 100))])
def test_search_ends_in_a_minimum(steps: int, bands: int, pattern: tuple[int, int]) -> None:
    best = BandedInverse(bands=bands).optimize(steps=steps, max_participations=pattern[0], min_separation=pattern[1])
    lowest = scaled_error(best, *pattern)
    falls = -np.diff(np.log(np.cumsum(best.inverse_coefs)))
    bends = np.maximum(-np.diff(falls, append=0.0), 0.0)
    generator = np.random.default_rng(0)
    for size in (1e-1, 1e-2):
        for _ in range(10):
            changed = bends * np.exp(size * generator.normal(size=len(bends)))
            changed += size * 1e-2 * generator.random(len(bends)) / np.arange(1, len(bends) + 1) ** 2
            _, coefs = _prefix_and_coefs(np.cumsum(changed[::-1])[::-1])
            other = BandedInverseStrategy(steps=steps, inverse_coefs=tuple(coefs.tolist()))
            assert scaled_error(other, *pattern) > lowest * (1 - 1e-7)


def test_limits() -> None:
    for optimized in (True, False):
        one = BandedInverse(bands=1, optimized=optimized).optimize(steps=9)
        assert one.strategy_coefs == Independent().optimize(steps=9).strategy_coefs
    full, root = BandedInverse(bands=300, optimized=False).optimize(steps=300), SquareRoot().optimize(steps=300)
    np.testing.assert_allclose(full.strategy_coefs, root.strategy_coefs, rtol=1e-12)
    assert full.noising_coefs.tolist() == inverse_sqrt_series(300).tolist()
    everywhere = BandedInverse(bands=5).optimize(steps=9, max_participations=9, min_separation=1)
    assert everywhere.inverse_coefs == (1.0,)


@pytest.mark.parametrize(("steps", "bands"), [(3000, 2), (5000, 64), (10_000, 9000), (30_000, 3000)])
def test_plain_truncation_is_exact_at_any_length(steps: int, bands: int) -> None:
    """Also where the series division is by FFT, whose rounding must not look like a rise."""
    strategy = BandedInverse(bands=bands, optimized=False).optimize(steps=steps)
    assert strategy.inverse_coefs == tuple(inverse_sqrt_series(bands).tolist())
    assert strategy.sensitivity_is_exact


def test_coefficients_that_truly_increase_are_refused() -> None:
    for coefs in ((1.0, 0.5), (1.0, 0.0, -0.5), (1.0, -1.1)):
        strategy = BandedInverseStrategy(steps=6, inverse_coefs=coefs)
        assert not strategy.sensitivity_is_exact
        with pytest.raises(ValueError, match="strategy_coefs"):
            strategy.sensitivity(max_participations=1, min_separation=1)


def test_strategies_are_values() -> None:
    spec: StrategySpec = BandedInverse(bands=4)
    assert spec.optimize(steps=50) == spec.optimize(steps=50)
    a = BandedInverseStrategy(steps=5, inverse_coefs=(1.0, -0.5, 0.0))
    b = BandedInverseStrategy(steps=5, inverse_coefs=(1, -0.5))
    assert a == b
    assert hash(a) == hash(b)
    assert a != BandedInverseStrategy(steps=5, inverse_coefs=(1.0, -0.4))
    assert a != BandedInverseStrategy(steps=6, inverse_coefs=(1.0, -0.5))
    with pytest.raises(ValueError, match="read-only"):
        a.noising_coefs[0] = 2.0


def test_the_default_is_what_its_docstring_says_and_serves_short_runs_too() -> None:
    default = scaled_error(BandedInverse().optimize(steps=2000))
    assert BandedInverse() == BandedInverse(bands=32)
    assert 1.10 < default / 3.2702 < 1.11  # of BufferedToeplitz(buffers=6)
    for optimized in (True, False):
        short = BandedInverse(optimized=optimized).optimize(steps=7)
        assert short == BandedInverse(bands=7, optimized=optimized).optimize(steps=7)
    assert BandedInverse().optimize(steps=1).noising_coefs.tolist() == [1.0]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="bands=0"):
        BandedInverse(bands=0)
    spec = BandedInverse(bands=4)
    with pytest.raises(ValueError, match="steps=0"):
        spec.optimize(steps=0)
    with pytest.raises(ValueError, match="max_participations=0"):
        spec.optimize(steps=10, max_participations=0)
    with pytest.raises(ValueError, match="min_separation=0"):
        spec.optimize(steps=10, min_separation=0)
    with pytest.raises(ValueError, match=r"max_participations=3 at min_separation=5 .*use max_participations=2"):
        BandedInverse(bands=4, optimized=False).optimize(steps=10, max_participations=3, min_separation=5)
    for coefs in ((), (0.0,), (-1.0, 0.5), (1.0, float("nan")), (1.0, float("inf"))):
        with pytest.raises(ValueError, match="inverse_coefs"):
            BandedInverseStrategy(steps=5, inverse_coefs=coefs)
    with pytest.raises(ValueError, match="3 bands for steps=2"):
        BandedInverseStrategy(steps=2, inverse_coefs=(1.0, -0.5, -0.1))
