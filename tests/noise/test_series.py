"""Power series against closed forms and matrices; sums of exponentials and their inverses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz
from scipy.signal import lfilter

from dpoptim.noise import (
    BufferedToeplitzStrategy,
    divide,
    inverse_series,
    multiply,
    series,
    sqrt_series,
)
from dpoptim.noise.search.banded_inverse import inverse_sqrt_series
from dpoptim.noise.search.objective import correlate
from dpoptim.noise.series import noising_series, powers
from tests.noise.explicit import buffered

coefs = st.lists(st.floats(-1, 1, allow_nan=False), min_size=1, max_size=12)


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


def test_fft_and_newton_agree_with_direct_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, n = np.random.default_rng(0), 3000
    a, b = generator.normal(size=n), np.concatenate([[1.0], 0.3 * generator.normal(size=n - 1) / n])
    product, quotient = multiply(a, b, n), divide(a, b, n)
    monkeypatch.setattr(series, "_DIRECT_PRODUCTS", 0)
    np.testing.assert_allclose(multiply(a, b, n), product, atol=1e-11)
    np.testing.assert_allclose(divide(a, b, n), quotient, atol=1e-11)
    np.testing.assert_allclose(inverse_series(sqrt_series(n), n), inverse_sqrt_series(n), atol=1e-11)


def test_one_coefficient_rounds_like_a_filter() -> None:
    series = np.random.default_rng(0).normal(size=100)
    for coef in (1.0, 3.0, -0.7):
        assert np.array_equal(divide(series, [coef], 100), lfilter([1.0], [coef], series))


@pytest.mark.parametrize("n", [1, 2, 13, 1000])
def test_correlation_is_its_sum(n: int) -> None:
    a, b = np.random.default_rng(0).normal(size=(2, n))
    expected = [a[lag:] @ b[: n - lag] for lag in range(n)]
    np.testing.assert_allclose(correlate(a, b), expected, atol=1e-11)
    change = np.random.default_rng(1).normal(size=n)  # it is also the transpose of the product with b
    assert correlate(a, b) @ change == pytest.approx(a @ multiply(b, change, n), rel=1e-9, abs=1e-9)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"denominator\[0\]"):
        inverse_series([0.0, 1.0], 3)
    with pytest.raises(ValueError, match="n to be"):
        sqrt_series(0)
    with pytest.raises(ValueError, match="Expected a to be"):
        multiply([], [1.0], 3)
    with pytest.raises(ValueError, match="Expected b to be"):
        multiply([1.0], [[1.0]], 3)


@given(strategy=buffered(11))
@settings(max_examples=40, deadline=None)
def test_noising_series_inverts_buffers(strategy: BufferedToeplitzStrategy) -> None:
    series, at = noising_series(strategy.decays, strategy.weights, 100), 0.37
    value = 1 + at * np.sum(np.asarray(strategy.weights) / (1 - at * np.asarray(strategy.decays)))
    assert np.sum(series * at ** np.arange(100)) == pytest.approx(1 / value, rel=1e-12)


def test_inverse_is_accurate_for_crowded_decays() -> None:
    decays = 1 - 1e-5 * np.arange(1, 9)
    coefs = np.concatenate([[1.0], np.full(8, 0.05) @ powers(decays, 299)])
    product = multiply(coefs, noising_series(decays, [0.05] * 8, 300), 300)
    np.testing.assert_allclose(product, np.eye(1, 300)[0], atol=1e-13)


@given(
    bases=st.lists(st.floats(-1, 1), max_size=4),
    count=st.sampled_from([0, 1, 2, 255, 256, 257, 512, 1000]),
)
@settings(max_examples=40, deadline=None)
def test_powers_are_powers(bases: list[float], count: int) -> None:
    found = powers(bases, count)
    assert found.shape == (len(bases), count)
    expected = np.asarray(bases, dtype=np.float64)[:, None] ** np.arange(count)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("steps", [1, 2, 700])
def test_no_buffers_are_the_identity(steps: int) -> None:
    assert noising_series([], [], steps).tolist() == np.eye(1, steps)[0].tolist()
