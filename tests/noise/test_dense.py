"""The dense optimum against golden values, conditions of optimality, other strategies and brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpoptim.noise import (
    Banded,
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    DecayedSums,
    Independent,
    MatrixStrategy,
    PrefixSums,
    SquareRoot,
    Strategy,
    Workload,
)
from dpoptim.noise.search.dense import Dense, _Overlap, soft_worst_pattern
from dpoptim.noise.search.objective import workload_matrix
from tests.noise.explicit import brute_force_sensitivity, scaled_error

PATTERNS = [(10, 2, 3), (8, 3, 1), pytest.param(11, 4, 2, marks=pytest.mark.slow)]
every_pattern = pytest.mark.parametrize(("steps", "times", "apart"), PATTERNS)


def workloads(steps: int) -> dict[str, Workload]:
    rates = tuple(np.geomspace(1.0, 0.01, steps).tolist())
    return {
        "prefix": PrefixSums(),
        "momentum": PrefixSums(momentum=0.9),
        "all": PrefixSums(momentum=0.9, weight_decay=0.01, learning_rate=rates),
        "adam": DecayedSums(beta=0.999),
        "biased": DecayedSums(beta=0.9, debiased=False),
    }


every_workload = pytest.mark.parametrize("kind", list(workloads(1)))


@pytest.mark.parametrize(("steps", "mean"), [(16, 1.689404), (256, 2.524414)])
def test_golden_errors(steps: int, mean: float) -> None:
    strategy = Dense().optimize(steps=steps)
    assert strategy.mean_error() == pytest.approx(mean, abs=5e-7)
    np.testing.assert_allclose(np.linalg.norm(strategy.strategy_matrix(), axis=0), 1.0, rtol=1e-12)
    assert strategy.sensitivity_is_exact


@every_workload
@pytest.mark.parametrize("steps", [1, 3, 60])
def test_conditions_of_optimality(steps: int, kind: str) -> None:
    """Every C with unit columns has ‖AC⁻¹‖_F²·tr Y ≥ (tr (AYAᵀ)^½)² for Y diagonal; at the optimum Y = X⁻¹AᵀAX⁻¹."""
    workload = workloads(steps)[kind]
    strategy = Dense(workload=workload).optimize(steps=steps)
    matrix, sums = strategy.strategy_matrix(), workload_matrix(workload, steps)
    noise = sums @ np.linalg.inv(matrix)
    assert strategy.mean_error(workload) == pytest.approx(np.linalg.norm(noise) / np.sqrt(steps), rel=1e-9)
    np.testing.assert_allclose(np.linalg.norm(matrix, axis=0), 1.0, rtol=1e-12)
    inverse = np.linalg.inv(matrix.T @ matrix)
    weights = np.diag(inverse @ sums.T @ sums @ inverse)
    roots = np.linalg.svd(sums * np.sqrt(weights), compute_uv=False)
    bound = roots.sum() / np.sqrt(weights.sum() * steps)
    assert bound * (1 - 1e-9) < strategy.mean_error(workload) < bound * (1 + 1e-7)


def test_better_than_every_toeplitz_and_any_neighbour() -> None:
    best = Dense().optimize(steps=12)
    toeplitz = BandedToeplitz(bands=12).optimize(steps=12)
    assert best.mean_error() < toeplitz.mean_error() * toeplitz.column_norm
    generator, sums = np.random.default_rng(0), np.tril(np.ones((12, 12)))
    for size in (1e-1, 1e-2, 1e-3):
        for _ in range(5):
            other = best.strategy_matrix() * (1 + size * generator.normal(size=(12, 12)))
            other /= np.linalg.norm(other, axis=0)
            assert np.linalg.norm(sums @ np.linalg.inv(other)) / np.sqrt(12) > best.mean_error()


@every_pattern
def test_several_participations_by_brute_force(steps: int, times: int, apart: int) -> None:
    strategy = Dense().optimize(steps=steps, max_participations=times, min_separation=apart)
    found = strategy.sensitivity(max_participations=times, min_separation=apart)
    assert found == pytest.approx(brute_force_sensitivity(strategy.strategy_matrix(), times, apart), rel=1e-4)
    assert strategy.column_norm == pytest.approx(1.0, rel=1e-12)


@every_pattern
def test_several_participations_are_proved_to_be_the_best(steps: int, times: int, apart: int) -> None:
    """The dual matrix Y bounds the product of every strategy, whose sensitivity² is at least tr(XY)."""
    best = Dense().optimize(steps=steps, max_participations=times, min_separation=apart)
    matrix = best.strategy_matrix() / best.sensitivity(max_participations=times, min_separation=apart)
    sums = torch.from_numpy(workload_matrix(PrefixSums(), steps))
    overlap = _Overlap(sums=sums, max_participations=times, min_separation=apart, sharpness=1e3)
    dual = overlap.value(matrix)[2].numpy()
    generator = np.random.default_rng(1)
    others = [np.tril(generator.normal(size=(steps, steps))) for _ in range(20)]
    others += [matrix * (1 + size * generator.normal(size=matrix.shape)) for size in (0.3, 0.1, 0.03, 0.01, 0.003)]
    for other in others:
        other = other * np.sign(np.diag(other))[:, None]
        rival = MatrixStrategy.from_matrix(other)
        sensitivity = rival.sensitivity(max_participations=times, min_separation=apart)
        assert sensitivity**2 >= np.sum(other.T @ other * dual)
        assert rival.mean_error() * sensitivity > scaled_error(best, times, apart) * (1 - 5e-4)
    squared = steps * scaled_error(best, times, apart) ** 2
    assert overlap.bound(matrix) < squared


@pytest.mark.parametrize("kind", ["all", "adam"])
def test_several_participations_for_a_workload(kind: str) -> None:
    steps, times, apart = 8, 2, 4
    workload, pattern = workloads(steps)[kind], {"max_participations": times, "min_separation": apart}
    best = scaled_error(Dense(workload=workload).optimize(steps=steps, **pattern), times, apart, workload=workload)
    rivals: list[Strategy] = [
        Dense(workload=workload).optimize(steps=steps),
        Dense().optimize(steps=steps, **pattern),
        Banded(bands=apart, workload=workload).optimize(steps=steps),
        BandedInverse(bands=apart, workload=workload).optimize(steps=steps, **pattern),
        Independent().optimize(steps=steps),
    ]
    assert all(best < scaled_error(rival, times, apart, workload=workload) * (1 + 5e-4) for rival in rivals)
    assert best < 0.999 * scaled_error(rivals[0], times, apart, workload=workload)


@pytest.mark.parametrize(
    ("steps", "times", "apart"),
    [(16, 2, 6), pytest.param(15, 5, 2, marks=pytest.mark.slow), pytest.param(200, 3, 50, marks=pytest.mark.slow)],
)
def test_several_participations_beat_every_other_strategy(steps: int, times: int, apart: int) -> None:
    pattern = {"max_participations": times, "min_separation": apart}
    best = Dense().optimize(steps=steps, **pattern)
    rivals: list[Strategy] = [
        BufferedToeplitz(buffers=4).optimize(steps=steps, **pattern),
        BandedInverse(bands=apart).optimize(steps=steps, **pattern),
        Banded(bands=apart).optimize(steps=steps),
        BandedToeplitz(bands=apart).optimize(steps=steps),
        SquareRoot().optimize(steps=steps),
        Dense().optimize(steps=steps),
    ]
    assert scaled_error(best, times, apart) < min(scaled_error(rival, times, apart) for rival in rivals)


@every_workload
def test_participation_in_every_step(kind: str) -> None:
    """Nothing to correlate: with X = diag x the product is Σ a_s²/x_s · Σ x_s, least at x_s = a_s = ‖column of A‖."""
    steps = 9
    workload, pattern = workloads(steps)[kind], {"max_participations": 9, "min_separation": 1}
    strategy = Dense(workload=workload).optimize(steps=steps, **pattern)
    norms = np.linalg.norm(workload_matrix(workload, steps), axis=0)
    assert strategy.bands == 1
    assert scaled_error(strategy, 9, 1, workload=workload) == pytest.approx(norms.sum() / np.sqrt(steps), rel=1e-12)
    generator = np.random.default_rng(2)
    for _ in range(20):
        other = strategy.strategy_matrix() + 0.02 * np.tril(generator.normal(size=(steps, steps)))
        rival = MatrixStrategy.from_matrix(other)
        assert scaled_error(rival, 9, 1, workload=workload) > scaled_error(strategy, 9, 1, workload=workload)


@pytest.mark.parametrize(("times", "apart"), [(1, 1), (2, 1), (2, 5), (3, 2), (4, 3), (10, 1)])
def test_soft_sensitivity_converges_to_the_hard_one(times: int, apart: int) -> None:
    matrix = np.tril(np.random.default_rng(5).normal(size=(10, 10)))
    strategy = MatrixStrategy.from_matrix(matrix * np.sign(np.diag(matrix))[:, None])
    hard = strategy.sensitivity(max_participations=times, min_separation=apart) ** 2
    products = torch.from_numpy(np.abs(matrix.T @ matrix))
    for sharpness in (1.0, 10.0, 1e3, 1e5):
        soft = float(soft_worst_pattern(products, times, apart, sharpness))
        assert hard * (1 - 1e-12) <= soft < hard + 60 / sharpness


@every_pattern
def test_gradient_of_the_smoothed_product(steps: int, times: int, apart: int) -> None:
    generator = np.random.default_rng(7)
    at = np.tril(0.2 * generator.normal(size=(steps, steps))) + np.eye(steps)
    along = np.tril(generator.normal(size=(steps, steps)))
    sums = torch.from_numpy(workload_matrix(PrefixSums(momentum=0.5), steps))
    overlap = _Overlap(sums=sums, max_participations=times, min_separation=apart, sharpness=10.0)
    slope = overlap.value(at)[1]
    difference = overlap.value(at + 1e-6 * along)[0] - overlap.value(at - 1e-6 * along)[0]
    assert np.sum(slope * along) == pytest.approx(difference / 2e-6, rel=1e-6)
