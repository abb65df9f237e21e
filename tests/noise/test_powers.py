"""Sums of decaying exponentials: their powers, and the buffers of their inverses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpoptim.noise import multiply
from dpoptim.noise.powers import inverse_buffers, noising_series, powers
from dpoptim.noise.strategies.buffered import BufferedToeplitzStrategy
from tests.noise.explicit import buffered


@given(strategy=buffered(11))
@settings(max_examples=60, deadline=None)
def test_inverse_has_as_many_buffers(strategy: BufferedToeplitzStrategy) -> None:
    decays, weights = inverse_buffers(strategy.decays, strategy.weights)
    assert len(decays) == strategy.buffers
    assert (weights <= 0).all()
    assert (np.abs(decays) < 1 + 1e-14).all()  # decays within rounding of 1 may round to it
    at = 0.37
    series = 1 + at * np.sum(np.asarray(strategy.weights) / (1 - at * np.asarray(strategy.decays)))
    assert 1 + at * np.sum(weights / (1 - at * decays)) == pytest.approx(1 / series, rel=1e-12)


def test_inverse_is_accurate_for_crowded_decays() -> None:
    decays = 1 - 1e-5 * np.arange(1, 9)
    coefs = np.concatenate([[1.0], np.full(8, 0.05) @ powers(decays, 299)])
    product = multiply(coefs, noising_series(decays, [0.05] * 8, 300), 300)
    np.testing.assert_allclose(product, np.eye(1, 300)[0], atol=1e-13)


@given(
    bases=st.lists(st.floats(-1, 1), max_size=4),
    count=st.sampled_from([0, 1, 2, 255, 256, 257, 512, 1000]),
)
@settings(max_examples=60, deadline=None)
def test_powers_are_powers(bases: list[float], count: int) -> None:
    found = powers(bases, count)
    assert found.shape == (len(bases), count)
    expected = np.asarray(bases, dtype=np.float64)[:, None] ** np.arange(count)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("steps", [1, 2, 700])
def test_no_buffers_are_the_identity(steps: int) -> None:
    assert noising_series([], [], steps).tolist() == np.eye(1, steps)[0].tolist()
