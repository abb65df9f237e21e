"""Workloads against plain loops of their recurrences, explicit matrices and finite differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from dpoptim.noise import DecayedSums, PrefixSums, Workload
from dpoptim.noise.search.objective import mean_square, workload_matrix
from dpoptim.noise.search.workloads import toeplitz_errors
from tests.noise.explicit import matrix_by_recurrence, workloads

NAN, INF = math.nan, math.inf


@st.composite
def workloads_and_steps(draw: st.DrawFn, max_steps: int = 9) -> tuple[Workload, int]:
    steps = draw(st.integers(1, max_steps))
    return draw(workloads(steps)), steps


def noising_matrix(coefs: np.ndarray) -> np.ndarray:
    return np.asarray(toeplitz(coefs, np.zeros(len(coefs))))


def random_coefs(steps: int, seed: int) -> np.ndarray:
    coefs = np.random.default_rng(seed).uniform(-1, 1, size=steps)
    coefs[0] = 1.0
    return coefs


@given(case=workloads_and_steps())
@settings(max_examples=100, deadline=None)
def test_matrix_inverse_and_coefficients_are_those_of_the_recurrence(case: tuple[Workload, int]) -> None:
    workload, steps = case
    expected = matrix_by_recurrence(workload, steps)
    np.testing.assert_allclose(workload_matrix(workload, steps), expected, rtol=1e-10, atol=1e-13 * expected.max())
    inverse = np.zeros((steps, steps))
    for lag, diagonal in enumerate(workload.inverse_diagonals(steps)):
        assert not diagonal[max(steps - lag, 0) :].any()  # nothing outside of the matrix
        if lag < steps:
            inverse += np.diag(diagonal[: steps - lag], -lag)
    size = np.abs(inverse) @ np.abs(expected)  # the rounding of each sum is relative to its terms
    assert (np.abs(inverse @ expected - np.eye(steps)) <= 1e-13 * (1 + size)).all()
    assert workload.is_toeplitz == (not isinstance(getattr(workload, "learning_rate", 1.0), tuple))
    if workload.is_toeplitz:
        rebuilt = workload.row_scales(steps)[:, None] * noising_matrix(workload.coefs(steps))
        np.testing.assert_allclose(rebuilt, expected, rtol=1e-10, atol=1e-13 * expected.max())


@given(case=workloads_and_steps(), seed=st.integers(0, 2**16))
@settings(max_examples=100, deadline=None)
def test_toeplitz_errors_are_those_of_the_matrices(case: tuple[Workload, int], seed: int) -> None:
    workload, steps = case
    coefs = random_coefs(steps, seed)
    noise = matrix_by_recurrence(workload, steps) @ noising_matrix(coefs)
    np.testing.assert_allclose(toeplitz_errors(workload, coefs), (noise**2).sum(axis=1), rtol=1e-9)
    value, _ = mean_square(workload, coefs)
    assert value == pytest.approx((noise**2).sum() / steps, rel=1e-9)


@given(case=workloads_and_steps(), seed=st.integers(0, 2**16))
@settings(max_examples=100, deadline=None)
def test_gradient_of_the_mean_square(case: tuple[Workload, int], seed: int) -> None:
    """A quadratic form is its second-order expansion, so central differences are exact."""
    workload, steps = case
    coefs, direction = random_coefs(steps, seed), random_coefs(steps, seed + 1)
    rescaled = not workload.is_toeplitz or bool((workload.row_scales(steps) != 1).any())
    for last_row in (False, True):
        if last_row and rescaled:
            with pytest.raises(ValueError, match="objective='max' is not available for workload="):
                mean_square(workload, coefs, last_row=True)
            continue
        value, slope = mean_square(workload, coefs, last_row=last_row)
        above, below = (mean_square(workload, coefs + h * direction, last_row=last_row)[0] for h in (1.0, -1.0))
        assert (above - below) / 2 == pytest.approx(slope @ direction, rel=1e-9, abs=1e-11 * (above + below))
        if last_row:
            assert value == pytest.approx(toeplitz_errors(workload, coefs).max(), rel=1e-9)


@pytest.mark.parametrize("workload", [PrefixSums(momentum=0.9, weight_decay=0.01), DecayedSums(beta=0.999)])
def test_long_workloads_agree_with_their_schedules_and_matrices(workload: Workload) -> None:
    steps, coefs = 300, np.concatenate([[1.0], -0.4 * np.arange(1, 300) ** -1.5])
    noise = workload_matrix(workload, steps) @ noising_matrix(coefs)
    np.testing.assert_allclose(toeplitz_errors(workload, coefs), (noise**2).sum(axis=1), rtol=1e-10)
    if isinstance(workload, PrefixSums):
        constant = PrefixSums(momentum=0.9, weight_decay=0.01, learning_rate=(1.0,) * steps)
        np.testing.assert_allclose(workload_matrix(constant, steps), workload_matrix(workload, steps), rtol=1e-12)
        np.testing.assert_allclose(toeplitz_errors(constant, coefs), toeplitz_errors(workload, coefs), rtol=1e-10)
        (found, slope), (expected, expected_slope) = (mean_square(kind, coefs) for kind in (constant, workload))
        assert found == pytest.approx(expected, rel=1e-9)
        np.testing.assert_allclose(slope, expected_slope, rtol=1e-9)


def test_debiasing_starts_at_the_value_itself() -> None:
    for beta in (0.0, 0.3, 0.999, 1 - 1e-12):
        matrix = workload_matrix(DecayedSums(beta=beta), 6)
        np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=1e-12)
        np.testing.assert_allclose(matrix[0, 0], 1.0, rtol=1e-15)
    np.testing.assert_array_equal(workload_matrix(DecayedSums(beta=0.0), 4), np.eye(4))


def test_workloads_are_values() -> None:
    assert PrefixSums(learning_rate=[2.0, 1.0]) == PrefixSums(learning_rate=(2.0, 1.0))  # type: ignore[arg-type]
    as_array = PrefixSums(learning_rate=np.array([2.0, 1.0]))  # type: ignore[arg-type]
    assert as_array == PrefixSums(learning_rate=(2.0, 1.0))
    assert not as_array.is_toeplitz
    assert len({PrefixSums(), PrefixSums(), DecayedSums(beta=0.9), DecayedSums(beta=0.9, debiased=False)}) == 3
    for workload in (PrefixSums(), PrefixSums(momentum=0.5, learning_rate=(1.0, 2.0)), DecayedSums(beta=0.9)):
        assert eval(repr(workload)) == workload  # the key of the disk cache


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (PrefixSums, "momentum", [1.0, 1.5, -0.1, NAN]),
        (PrefixSums, "learning_rate", [0.0, -1.0, NAN, INF, (), (1.0, 0.0), (1.0, -2.0), (1.0, NAN)]),
        (PrefixSums, "weight_decay", [-0.1, NAN, 1.0]),
        (DecayedSums, "beta", [1.0, 1.1, -0.1, NAN]),
    ],
)
def test_bad_workloads_are_refused(kind: Any, name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name):
            kind(**{name: value})


def test_weight_decay_is_limited_by_the_largest_learning_rate() -> None:
    with pytest.raises(ValueError, match=r"weight_decay=0\.2"):
        PrefixSums(weight_decay=0.2, learning_rate=(1.0, 5.0))


def test_a_schedule_needs_one_rate_per_step() -> None:
    workload = PrefixSums(learning_rate=(1.0, 0.5, 0.1))
    for method in (workload.coefs, workload.inverse_diagonals):
        with pytest.raises(ValueError, match="one learning_rate per step, got 3 for 4 steps"):
            method(4)
