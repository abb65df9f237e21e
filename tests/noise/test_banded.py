"""The banded optimum against golden values, numerical gradients, optimality conditions and its limits."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpoptim.noise import BandedToeplitz, Independent, NoiseKey
from dpoptim.noise.banded import Banded, log_error, optimal_banded
from dpoptim.noise.dense import Dense


def relative_errors(steps: int, bands: int) -> tuple[float, float]:
    toeplitz = BandedToeplitz(bands=bands).optimize(steps=steps)
    return Banded(bands=bands).optimize(steps=steps).mean_error(), toeplitz.mean_error() * toeplitz.column_norm


def test_golden_error() -> None:
    strategy = Banded(bands=8).optimize(steps=64)
    assert strategy.mean_error() == pytest.approx(2.620517, abs=5e-7)
    assert strategy.bands == 8
    np.testing.assert_allclose(np.linalg.norm(strategy.strategy_matrix(), axis=0), 1.0, rtol=1e-12)


@pytest.mark.slow
def test_two_thousand_steps_in_a_minute() -> None:
    optimal_banded.cache_clear()
    start = time.perf_counter()
    strategy = Banded(bands=128).optimize(steps=2000)
    assert time.perf_counter() - start < 60.0  # 25 s on one idle core
    assert strategy.mean_error() == pytest.approx(4.177726, abs=1e-6)
    for participations in (1, 3):
        pattern = {"max_participations": participations, "min_separation": 128}
        assert strategy.sensitivity(**pattern) == pytest.approx(np.sqrt(participations), rel=1e-12)
        assert strategy.is_exact_for(**pattern)


@given(
    shape=st.integers(2, 90).flatmap(lambda steps: st.tuples(st.just(steps), st.integers(1, min(steps, 50)))),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=25, deadline=None)
def test_objective_and_its_gradient(shape: tuple[int, int], seed: int) -> None:
    """Against autograd through the explicit matrices."""
    steps, bands = shape
    generator = torch.Generator().manual_seed(seed)
    inside = torch.arange(bands)[:, None] + torch.arange(steps) < steps
    at = 0.3 * torch.rand(bands, steps, dtype=torch.float64, generator=generator)
    at[0] += 1.0
    at = (at * inside).requires_grad_()
    matrix = sum(torch.diag(at[lag, : steps - lag], -lag) for lag in range(bands))
    assert isinstance(matrix, torch.Tensor)
    matrix = matrix / matrix.norm(dim=0)
    prefix = torch.linalg.inv(matrix).cumsum(dim=0)
    expected = (prefix**2).sum().log()
    (gradient,) = torch.autograd.grad(expected, at)
    found, slope = log_error(at.detach())
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(slope * inside, gradient, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("steps", "bands"), [(2, 2), (9, 3), (64, 8), (40, 35), (100, 2)])
def test_conditions_of_optimality(steps: int, bands: int) -> None:
    """The problem is convex in X = CᵀC: the optimum is where X⁻¹AᵀAX⁻¹ vanishes on the band, but for its diagonal."""
    matrix, workload = Banded(bands=bands).optimize(steps=steps).strategy_matrix(), np.tril(np.ones((steps, steps)))
    inverse = np.linalg.inv(matrix.T @ matrix)
    gradient = inverse @ workload.T @ workload @ inverse
    for lag in range(1, bands):
        assert np.abs(np.diagonal(gradient, lag)).max() < 1e-3 * np.diagonal(gradient).max()
    assert not np.tril(matrix, -bands).any()


def test_between_toeplitz_and_dense() -> None:
    errors = [Banded(bands=bands).optimize(steps=32).mean_error() for bands in (1, 2, 4, 8, 16, 31, 32)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == Dense().optimize(steps=32).mean_error()
    assert errors[-2] == pytest.approx(errors[-1], rel=1e-2)
    for steps, bands in ((32, 2), (32, 8), (150, 20)):
        banded, toeplitz = relative_errors(steps, bands)
        assert 0.95 * toeplitz < banded < toeplitz


def test_participations_that_do_not_overlap() -> None:
    strategy = Banded(bands=8).optimize(steps=64)
    for separation in (8, 9, 20):
        pattern = {"max_participations": 3, "min_separation": separation}
        assert strategy.sensitivity(**pattern) == pytest.approx(np.sqrt(3), rel=1e-12)
        assert strategy.is_exact_for(**pattern)
    assert strategy.sensitivity(max_participations=3, min_separation=7) > 1.01 * np.sqrt(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_band_is_independent(dtype: torch.dtype) -> None:
    one, independent = Banded(bands=1).optimize(steps=9), Independent().optimize(steps=9)
    np.testing.assert_array_equal(one.strategy_matrix(), independent.strategy_matrix())
    assert one.mean_error() == pytest.approx(independent.mean_error(), rel=1e-12)
    assert one.sensitivity_is_exact
    key = NoiseKey.from_bytes(bytes(32))
    ours = one.stream(key, stream="gradient", name="weight", numel=7, dtype=dtype)
    theirs = independent.stream(key, stream="gradient", name="weight", numel=7, dtype=dtype)
    assert all(torch.equal(ours.row(step), theirs.row(step)) for step in range(9))


def test_the_number_of_threads_is_left_alone() -> None:
    threads = torch.get_num_threads()
    optimal_banded.cache_clear()
    Banded(bands=3).optimize(steps=7)
    assert torch.get_num_threads() == threads


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="bands=0"):
        Banded(bands=0)
    with pytest.raises(ValueError, match="bands=9 exceeds steps=8"):
        Banded(bands=9).optimize(steps=8)
    with pytest.raises(ValueError, match="steps=0"):
        Banded(bands=1).optimize(steps=0)
