"""Strategies against golden values, explicit matrices and brute force over participation patterns."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import check_grad

from dpoptim.noise import BandedToeplitz, Independent, SquareRoot, StrategySpec, ToeplitzStrategy, sqrt_series
from dpoptim.noise.toeplitz import _log_error, optimized_bands

SPECS: list[StrategySpec] = [Independent(), SquareRoot(), BandedToeplitz(bands=1), BandedToeplitz(bands=5)]


def non_increasing(max_bands: int) -> st.SearchStrategy[list[float]]:
    steps_down = st.lists(st.floats(0, 1), max_size=max_bands - 1)
    return steps_down.map(lambda ratios: np.cumprod([1.0, *ratios]).tolist())


@pytest.mark.parametrize(("steps", "largest", "mean"), [(64, 2.388848, 2.229676), (2000, 3.485678, 3.322963)])
def test_square_root_golden_errors(steps: int, largest: float, mean: float) -> None:
    strategy = SquareRoot().optimize(steps=steps)
    assert strategy.max_error() * strategy.column_norm == pytest.approx(largest, abs=5e-7)
    assert strategy.mean_error() * strategy.column_norm == pytest.approx(mean, abs=5e-7)


@pytest.mark.parametrize(("steps", "bands", "mean"), [(256, 16, 3.637574), (2000, 128, 4.253252)])
def test_banded_toeplitz_golden_errors(steps: int, bands: int, mean: float) -> None:
    strategy = BandedToeplitz(bands=bands).optimize(steps=steps)
    assert strategy.bands == bands
    assert strategy.mean_error() * strategy.column_norm == pytest.approx(mean, abs=5e-7)


def test_independent_golden_error_and_ratio() -> None:
    independent = Independent().optimize(steps=2000)
    banded = BandedToeplitz(bands=128).optimize(steps=2000)
    assert independent.mean_error() == pytest.approx(31.6307, abs=5e-5)
    assert independent.max_error() == pytest.approx(np.sqrt(2000))
    ratio = banded.mean_error() * banded.column_norm / independent.mean_error()
    assert ratio == pytest.approx(0.134466, abs=5e-7)


def test_three_participations_at_separation_128() -> None:
    """The square root's are known to be 7.49 and 7.86; three that do not overlap are √3 times one."""
    root, banded = SquareRoot().optimize(steps=2000), BandedToeplitz(bands=128).optimize(steps=2000)
    sensitivity = root.sensitivity(max_participations=3, min_separation=128)
    assert root.mean_error() * sensitivity == pytest.approx(7.49, abs=0.005)
    assert root.max_error() * sensitivity == pytest.approx(7.86, abs=0.005)
    sensitivity = banded.sensitivity(max_participations=3, min_separation=128)
    assert banded.mean_error() * sensitivity == pytest.approx(np.sqrt(3) * 4.253252, abs=1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("steps", [5, 6, 40])
def test_errors_and_norms_are_those_of_the_matrices(spec: StrategySpec, steps: int) -> None:
    strategy = spec.optimize(steps=steps)
    matrix, inverse = strategy.strategy_matrix(), strategy.noising_matrix()
    assert matrix.shape == inverse.shape == (steps, steps)
    assert matrix.dtype == inverse.dtype == np.float64
    np.testing.assert_allclose(matrix @ inverse, np.eye(steps), atol=1e-12)
    np.testing.assert_allclose(np.triu(matrix, 1), 0)
    noise = np.linalg.norm(np.tril(np.ones((steps, steps))) @ inverse, axis=1)
    assert strategy.mean_error() == pytest.approx(np.sqrt((noise**2).mean()), rel=1e-12)
    assert strategy.max_error() == pytest.approx(noise.max(), rel=1e-12)
    assert strategy.column_norm == pytest.approx(np.linalg.norm(matrix, axis=0).max(), rel=1e-12)
    np.testing.assert_allclose(strategy.row_norms(), np.linalg.norm(inverse, axis=1), rtol=1e-12)
    single = strategy.sensitivity(max_participations=1, min_separation=1)
    assert single == pytest.approx(strategy.column_norm, rel=1e-12)


def brute_force_sensitivity(matrix: np.ndarray, max_participations: int, min_separation: int) -> float:
    """The largest sqrt(Σ_ij |G_ij|) over all patterns, G the products of columns.

    It bounds ‖Σ_i u_i column_i‖ over all unit vectors u_i, and is reached where G is non-negative.
    """
    gram = np.abs(matrix.T @ matrix)
    return max(
        float(np.sqrt(gram[np.ix_(pattern, pattern)].sum()))
        for size in range(1, max_participations + 1)
        for pattern in combinations(range(len(matrix)), size)
        if all(b - a >= min_separation for a, b in pairwise(pattern))
    )


@given(
    coefs=non_increasing(9),
    steps=st.integers(9, 11),
    max_participations=st.integers(1, 4),
    min_separation=st.integers(1, 6),
)
@settings(max_examples=120, deadline=None)
def test_sensitivity_is_exact(coefs: list[float], steps: int, max_participations: int, min_separation: int) -> None:
    max_participations = min(max_participations, (steps - 1) // min_separation + 1)
    strategy = ToeplitzStrategy(steps=steps, strategy_coefs=tuple(coefs))
    assert strategy.sensitivity_is_exact
    exact = brute_force_sensitivity(strategy.strategy_matrix(), max_participations, min_separation)
    found = strategy.sensitivity(max_participations=max_participations, min_separation=min_separation)
    assert found == pytest.approx(exact, rel=1e-12)


def test_sensitivity_closed_forms() -> None:
    independent = Independent().optimize(steps=2000)
    assert independent.sensitivity(max_participations=3, min_separation=830) == pytest.approx(np.sqrt(3))
    banded = BandedToeplitz(bands=128).optimize(steps=2000)
    apart = banded.sensitivity(max_participations=3, min_separation=830)
    assert apart == pytest.approx(np.sqrt(3) * banded.column_norm, rel=1e-12)
    assert banded.sensitivity(max_participations=3, min_separation=64) > apart


@pytest.mark.parametrize("coefs", [(1.0, 0.2, 0.5), (1.0, -0.1), (1.0, 1.1), (1.0, 0.0, 0.1)])
def test_sensitivity_of_other_coefficients_is_refused(coefs: tuple[float, ...]) -> None:
    strategy = ToeplitzStrategy(steps=5, strategy_coefs=coefs)
    assert not strategy.sensitivity_is_exact
    with pytest.raises(ValueError, match="strategy_coefs"):
        strategy.sensitivity(max_participations=1, min_separation=1)


@pytest.mark.parametrize(
    ("max_participations", "min_separation", "message"),
    [
        (0, 1, "max_participations=0"),
        (1, 0, "min_separation=0"),
        (3, 5, "max_participations=3.*use max_participations=2"),
        (11, 1, "max_participations=11.*use max_participations=10"),
    ],
)
def test_patterns_that_cannot_be_are_refused(max_participations: int, min_separation: int, message: str) -> None:
    strategy = SquareRoot().optimize(steps=10)
    with pytest.raises(ValueError, match=message):
        strategy.sensitivity(max_participations=max_participations, min_separation=min_separation)


@pytest.mark.parametrize(("steps", "bands"), [(8, 8), (30, 7), (200, 40)])
def test_gradient_of_the_search(steps: int, bands: int) -> None:
    at = sqrt_series(bands)[1:] * 0.9
    error = check_grad(lambda x: _log_error(x, steps)[0], lambda x: _log_error(x, steps)[1], at)
    assert error < 1e-5
    strategy = ToeplitzStrategy(steps=steps, strategy_coefs=(1.0, *at.tolist()))
    expected = 2 * np.log(strategy.mean_error() * strategy.column_norm)
    assert _log_error(at, steps)[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("steps", "bands"), [(2, 2), (8, 3), (8, 8), (64, 63), (300, 100), (1000, 2), (3000, 5)])
def test_banded_toeplitz_is_a_minimum(steps: int, bands: int) -> None:
    best = BandedToeplitz(bands=bands).optimize(steps=steps)
    lowest = best.mean_error() * best.column_norm
    generator = np.random.default_rng(0)
    for size in (1e-1, 1e-2, 1e-3):
        for _ in range(5):
            tail = np.array(best.strategy_coefs[1:]) * (1 + size * generator.normal(size=bands - 1))
            other = ToeplitzStrategy(steps=steps, strategy_coefs=(1.0, *tail.tolist()))
            assert other.mean_error() * other.column_norm > lowest
    assert best.sensitivity_is_exact


def test_search_is_quick() -> None:
    optimized_bands.cache_clear()
    start = time.perf_counter()
    BandedToeplitz(bands=128).optimize(steps=2000)
    assert time.perf_counter() - start < 2.0  # 0.02 to 0.1 s on an idle core


def test_more_bands_are_never_worse() -> None:
    errors = []
    for bands in (1, 2, 4, 8, 16, 32, 64):
        strategy = BandedToeplitz(bands=bands).optimize(steps=64)
        errors.append(strategy.mean_error() * strategy.column_norm)
    assert errors == sorted(errors, reverse=True)
    root = SquareRoot().optimize(steps=64)
    assert errors[-1] < root.mean_error() * root.column_norm


def test_one_band_is_independent() -> None:
    assert BandedToeplitz(bands=1).optimize(steps=9) == Independent().optimize(steps=9)


def test_strategies_are_values() -> None:
    a = ToeplitzStrategy(steps=5, strategy_coefs=(1.0, 0.5, 0.0, 0.0))
    b = ToeplitzStrategy(steps=5, strategy_coefs=(1, 0.5))
    assert a == b
    assert hash(a) == hash(b)
    assert a.noising_coefs is a.noising_coefs
    assert a == b
    assert a != ToeplitzStrategy(steps=6, strategy_coefs=(1.0, 0.5))
    assert len({BandedToeplitz(bands=2), BandedToeplitz(bands=2), Independent(), SquareRoot()}) == 3
    with pytest.raises(ValueError, match="read-only"):
        a.noising_coefs[0] = 2.0


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_bad_steps_are_named(spec: StrategySpec) -> None:
    with pytest.raises(ValueError, match="steps=0"):
        spec.optimize(steps=0)


def test_bad_bands_and_coefficients_are_named() -> None:
    with pytest.raises(ValueError, match="bands=0"):
        BandedToeplitz(bands=0)
    with pytest.raises(ValueError, match="bands=11 exceeds steps=10"):
        BandedToeplitz(bands=11).optimize(steps=10)
    for coefs in ((), (0.0,), (-1.0, 0.5), (1.0, float("nan")), (0.0, 1.0)):
        with pytest.raises(ValueError, match="strategy_coefs"):
            ToeplitzStrategy(steps=5, strategy_coefs=coefs)
    with pytest.raises(ValueError, match="3 bands for steps=2"):
        ToeplitzStrategy(steps=2, strategy_coefs=(1.0, 0.5, 0.3))
