"""The dense optimum against golden values, the conditions of optimality and its rivals."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from dpoptim.noise import BandedToeplitz, NoiseKey, normals
from dpoptim.noise.dense import Dense, optimal_dense


@pytest.mark.parametrize(("steps", "mean"), [(16, 1.689404), (256, 2.524414)])
def test_golden_errors(steps: int, mean: float) -> None:
    strategy = Dense().optimize(steps=steps)
    assert strategy.mean_error() == pytest.approx(mean, abs=5e-7)
    np.testing.assert_allclose(np.linalg.norm(strategy.strategy_matrix(), axis=0), 1.0, rtol=1e-12)
    assert strategy.sensitivity_is_exact


@pytest.mark.parametrize("steps", [1, 2, 3, 17, 100])
def test_conditions_of_optimality(steps: int) -> None:
    """The problem is convex in X = CᵀC: at the optimum the gradient X⁻¹AᵀAX⁻¹ is diagonal."""
    matrix, workload = Dense().optimize(steps=steps).strategy_matrix(), np.tril(np.ones((steps, steps)))
    inverse = np.linalg.inv(matrix.T @ matrix)
    gradient = inverse @ workload.T @ workload @ inverse
    np.testing.assert_allclose(gradient, np.diag(np.diag(gradient)), atol=1e-4 * gradient.max())
    assert (np.diag(gradient) > 0).all()


def test_better_than_every_toeplitz_and_any_neighbour() -> None:
    best = Dense().optimize(steps=12)
    toeplitz = BandedToeplitz(bands=12).optimize(steps=12)
    assert best.mean_error() < toeplitz.mean_error() * toeplitz.column_norm
    generator, workload = np.random.default_rng(0), np.tril(np.ones((12, 12)))
    for size in (1e-1, 1e-2, 1e-3):
        for _ in range(5):
            other = best.strategy_matrix() * (1 + size * generator.normal(size=(12, 12)))
            other /= np.linalg.norm(other, axis=0)
            assert np.linalg.norm(workload @ np.linalg.inv(other)) / np.sqrt(12) > best.mean_error()


def test_rows_are_made_without_memory() -> None:
    strategy, key = Dense().optimize(steps=20), NoiseKey.from_bytes(bytes(32))
    stream = strategy.stream(key, stream="gradient", name="weight", numel=9, dtype=torch.float64)
    streamed = torch.stack([stream.row(step) for step in range(20)])
    fresh = torch.stack([normals(key, stream="gradient", name="weight", step=step, count=9) for step in range(20)])
    back = torch.from_numpy(strategy.strategy_matrix()) @ streamed
    torch.testing.assert_close(back, fresh, rtol=0, atol=1e-10)
    assert stream.memory_bytes == 0


@pytest.mark.slow
def test_search_is_quick() -> None:
    optimal_dense.cache_clear()
    start = time.perf_counter()
    strategy = Dense().optimize(steps=1000)
    assert time.perf_counter() - start < 10.0  # 3 s on one idle core
    assert strategy.mean_error() == pytest.approx(2.948045, abs=5e-7)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="steps=0"):
        Dense().optimize(steps=0)
    with pytest.raises(ValueError, match=r"max_participations=2.*Banded\(bands=4\)"):
        Dense().optimize(steps=16, max_participations=2, min_separation=4)
    with pytest.raises(ValueError, match="max_participations=0"):
        Dense().optimize(steps=16, max_participations=0)
    with pytest.raises(ValueError, match="min_separation=0"):
        Dense().optimize(steps=16, min_separation=0)
    assert Dense() == Dense()
