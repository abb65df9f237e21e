"""Independent noise and the square root against golden values and their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from dpoptim.noise import BandedToeplitz, Independent, SquareRoot


@pytest.mark.parametrize(("steps", "largest", "mean"), [(64, 2.388848, 2.229676), (2000, 3.485678, 3.322963)])
def test_square_root_golden_errors(steps: int, largest: float, mean: float) -> None:
    strategy = SquareRoot().optimize(steps=steps)
    assert strategy.max_error() * strategy.column_norm == pytest.approx(largest, abs=5e-7)
    assert strategy.mean_error() * strategy.column_norm == pytest.approx(mean, abs=5e-7)


def test_square_root_golden_coefficients() -> None:
    strategy = SquareRoot().optimize(steps=5)
    assert strategy.strategy_coefs == (1, 1 / 2, 3 / 8, 5 / 16, 35 / 128)
    np.testing.assert_allclose(strategy.noising_coefs, [1, -1 / 2, -1 / 8, -1 / 16, -5 / 128], rtol=1e-14)


@pytest.mark.parametrize("steps", [1, 2, 50])
def test_square_root_squared_is_the_prefix_sums(steps: int) -> None:
    matrix = SquareRoot().optimize(steps=steps).strategy_matrix()
    np.testing.assert_allclose(matrix @ matrix, np.tril(np.ones((steps, steps))), atol=1e-13)


def test_independent_golden_error_and_ratio() -> None:
    independent = Independent().optimize(steps=2000)
    banded = BandedToeplitz(bands=128).optimize(steps=2000)
    assert independent.mean_error() == pytest.approx(31.6307, abs=5e-5)
    assert independent.max_error() == pytest.approx(np.sqrt(2000))
    ratio = banded.mean_error() * banded.column_norm / independent.mean_error()
    assert ratio == pytest.approx(0.134466, abs=5e-7)


def test_independent_is_the_identity() -> None:
    strategy = Independent().optimize(steps=7, max_participations=3, min_separation=2)
    np.testing.assert_array_equal(strategy.strategy_matrix(), np.eye(7))
    np.testing.assert_array_equal(strategy.noising_matrix(), np.eye(7))
    assert strategy.sensitivity(max_participations=3, min_separation=2) == pytest.approx(np.sqrt(3), rel=1e-15)


def test_three_participations_at_separation_128() -> None:
    """Known to be 7.49 and 7.86."""
    root = SquareRoot().optimize(steps=2000)
    sensitivity = root.sensitivity(max_participations=3, min_separation=128)
    assert root.mean_error() * sensitivity == pytest.approx(7.49, abs=0.005)
    assert root.max_error() * sensitivity == pytest.approx(7.86, abs=0.005)


def test_specs_are_values() -> None:
    assert len({BandedToeplitz(bands=2), BandedToeplitz(bands=2), Independent(), SquareRoot()}) == 3
