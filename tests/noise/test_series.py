"""Power series against their closed forms and against matrices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from dpoptim.noise import divide, inverse_series, inverse_sqrt_series, multiply, series, sqrt_series
from dpoptim.noise.series import correlate

coefs = st.lists(st.floats(-1, 1, allow_nan=False), min_size=1, max_size=12)


def test_square_root_of_the_prefix_workload() -> None:
    assert sqrt_series(5).tolist() == [1, 1 / 2, 3 / 8, 5 / 16, 35 / 128]
    assert inverse_sqrt_series(5).tolist() == [1, -1 / 2, -1 / 8, -1 / 16, -5 / 128]
    assert sqrt_series(1).tolist() == inverse_sqrt_series(1).tolist() == [1.0]


@pytest.mark.parametrize("n", [1, 2, 100, 5000])
def test_square_root_squared_is_the_workload(n: int) -> None:
    root, inverse = sqrt_series(n), inverse_sqrt_series(n)
    np.testing.assert_allclose(multiply(root, root, n), np.ones(n), atol=1e-12)
    np.testing.assert_allclose(multiply(root, inverse, n), np.eye(1, n)[0], atol=1e-12)
    np.testing.assert_allclose(inverse_series(root, n), inverse, atol=1e-12)


@given(a=coefs, b=coefs, n=st.integers(1, 30))
@settings(deadline=None)
def test_multiply_and_divide_are_those_of_toeplitz_matrices(a: list[float], b: list[float], n: int) -> None:
    def matrix(column: list[float]) -> np.ndarray:
        full = np.zeros(n)
        full[: min(n, len(column))] = column[:n]
        return toeplitz(full, np.zeros(n))

    np.testing.assert_allclose(multiply(a, b, n), (matrix(a) @ matrix(b))[:, 0], atol=1e-12)
    denominator = [2.0 * len(b), *b]
    expected = np.linalg.solve(matrix(denominator), matrix(a)[:, 0])
    np.testing.assert_allclose(divide(a, denominator, n), expected, atol=1e-12)


def test_long_ways_agree_with_the_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, n = np.random.default_rng(0), 3000
    a, b = generator.normal(size=n), np.concatenate([[1.0], 0.3 * generator.normal(size=n - 1) / n])
    product, quotient = multiply(a, b, n), divide(a, b, n)
    monkeypatch.setattr(series, "_DIRECT_PRODUCTS", 0)
    np.testing.assert_allclose(multiply(a, b, n), product, atol=1e-11)
    np.testing.assert_allclose(divide(a, b, n), quotient, atol=1e-11)
    np.testing.assert_allclose(inverse_series(sqrt_series(n), n), inverse_sqrt_series(n), atol=1e-11)


@pytest.mark.parametrize("n", [1, 2, 13, 1000])
def test_correlation_is_its_sum(n: int) -> None:
    a, b = np.random.default_rng(0).normal(size=(2, n))
    expected = [a[lag:] @ b[: n - lag] for lag in range(n)]
    np.testing.assert_allclose(correlate(a, b), expected, atol=1e-11)
    change = np.random.default_rng(1).normal(size=n)  # and the transpose of the product with b
    assert correlate(a, b) @ change == pytest.approx(a @ multiply(b, change, n), rel=1e-9, abs=1e-9)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"denominator\[0\]"):
        inverse_series([0.0, 1.0], 3)
    with pytest.raises(ValueError, match="n=0"):
        sqrt_series(0)
    with pytest.raises(ValueError, match="a has shape"):
        multiply([], [1.0], 3)
    with pytest.raises(ValueError, match="b has shape"):
        multiply([1.0], [[1.0]], 3)
