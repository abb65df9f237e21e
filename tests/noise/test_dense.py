"""The dense optimum against golden values, the conditions of optimality, its rivals and brute force over patterns."""

from __future__ import annotations

from itertools import combinations, pairwise, product

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
    NoiseKey,
    PrefixSums,
    SquareRoot,
    Strategy,
    Workload,
    normals,
)
from dpoptim.noise.search.dense import Dense, _Overlap, soft_worst_pattern

PATTERNS = [(10, 2, 3), (9, 3, 1), (11, 4, 2)]
every_pattern = pytest.mark.parametrize(("steps", "times", "apart"), PATTERNS)


def workloads(steps: int) -> dict[str, Workload]:
    rates = tuple(np.geomspace(1.0, 0.01, steps).tolist())
    return {
        "prefix": PrefixSums(),
        "momentum": PrefixSums(momentum=0.9),
        "decay": PrefixSums(weight_decay=0.1),
        "schedule": PrefixSums(learning_rate=rates),
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
@pytest.mark.parametrize("steps", [1, 2, 3, 17, 100])
def test_conditions_of_optimality(steps: int, kind: str) -> None:
    """Every C with unit columns has ‖AC⁻¹‖_F²·tr Y ≥ (tr (AYAᵀ)^½)² for Y diagonal; at the optimum Y = X⁻¹AᵀAX⁻¹."""
    workload = workloads(steps)[kind]
    strategy = Dense(workload=workload).optimize(steps=steps)
    matrix, sums = strategy.strategy_matrix(), workload.matrix(steps)
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


def patterns(steps: int, times: int, apart: int) -> list[tuple[int, ...]]:
    return [
        pattern
        for size in range(1, times + 1)
        for pattern in combinations(range(steps), size)
        if all(b - a >= apart for a, b in pairwise(pattern))
    ]


def largest(matrix: np.ndarray, times: int, apart: int) -> float:
    """The largest ‖Σ ±column‖ over all patterns and signs."""
    return max(
        float(np.linalg.norm(matrix[:, pattern] @ signs))
        for pattern in patterns(len(matrix), times, apart)
        for signs in product((1.0, -1.0), repeat=len(pattern))
        if signs[0] > 0
    )


def relative_error(strategy: Strategy, times: int, apart: int, workload: Workload | None = None) -> float:
    error = strategy.mean_error() if workload is None else strategy.mean_error(workload)
    return error * strategy.sensitivity(max_participations=times, min_separation=apart)


@every_pattern
def test_several_participations_by_brute_force(steps: int, times: int, apart: int) -> None:
    strategy = Dense().optimize(steps=steps, max_participations=times, min_separation=apart)
    found = strategy.sensitivity(max_participations=times, min_separation=apart)
    assert found == pytest.approx(largest(strategy.strategy_matrix(), times, apart), rel=1e-4)
    assert strategy.column_norm == pytest.approx(1.0, rel=1e-12)


@every_pattern
def test_several_participations_are_proved_to_be_the_best(steps: int, times: int, apart: int) -> None:
    """The dual matrix Y bounds the product of every strategy, whose sensitivity² is at least tr(XY)."""
    best = Dense().optimize(steps=steps, max_participations=times, min_separation=apart)
    matrix = best.strategy_matrix() / best.sensitivity(max_participations=times, min_separation=apart)
    sums = torch.from_numpy(PrefixSums().matrix(steps))
    goal = _Overlap(sums=sums, max_participations=times, min_separation=apart, sharpness=1e3)
    dual = goal.value(matrix)[2].numpy()
    generator = np.random.default_rng(1)
    others = [np.tril(generator.normal(size=(steps, steps))) for _ in range(20)]
    others += [matrix * (1 + size * generator.normal(size=matrix.shape)) for size in (0.3, 0.1, 0.03, 0.01, 0.003)]
    for other in others:
        other = other * np.sign(np.diag(other))[:, None]
        rival = MatrixStrategy.from_matrix(other)
        sensitivity = rival.sensitivity(max_participations=times, min_separation=apart)
        assert sensitivity**2 >= np.sum(other.T @ other * dual)
        assert rival.mean_error() * sensitivity > relative_error(best, times, apart) * (1 - 5e-4)
    squared = steps * relative_error(best, times, apart) ** 2
    assert goal.bound(matrix) < squared


@pytest.mark.parametrize("kind", ["all", "adam"])
def test_several_participations_for_a_workload(kind: str) -> None:
    steps, times, apart = 10, 2, 4
    workload, pattern = workloads(steps)[kind], {"max_participations": times, "min_separation": apart}
    best = relative_error(Dense(workload=workload).optimize(steps=steps, **pattern), times, apart, workload)
    rivals: list[Strategy] = [
        Dense(workload=workload).optimize(steps=steps),
        Dense().optimize(steps=steps, **pattern),
        Banded(bands=apart, workload=workload).optimize(steps=steps),
        BandedInverse(bands=apart, workload=workload).optimize(steps=steps, **pattern),
        Independent().optimize(steps=steps),
    ]
    assert all(best < relative_error(rival, times, apart, workload) * (1 + 5e-4) for rival in rivals)
    assert best < 0.999 * relative_error(rivals[0], times, apart, workload)


@pytest.mark.parametrize(
    ("steps", "times", "apart"), [(24, 2, 8), (15, 5, 2), pytest.param(200, 3, 50, marks=pytest.mark.slow)]
)
def test_several_participations_beat_every_rival(steps: int, times: int, apart: int) -> None:
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
    assert relative_error(best, times, apart) < min(relative_error(rival, times, apart) for rival in rivals)


@every_workload
def test_present_in_every_step(kind: str) -> None:
    """Nothing to correlate: with X = diag x the product is Σ a_s²/x_s · Σ x_s, least at x_s = a_s = ‖column of A‖."""
    steps = 9
    workload, pattern = workloads(steps)[kind], {"max_participations": 9, "min_separation": 1}
    strategy = Dense(workload=workload).optimize(steps=steps, **pattern)
    norms = np.linalg.norm(workload.matrix(steps), axis=0)
    assert strategy.bands == 1
    assert relative_error(strategy, 9, 1, workload) == pytest.approx(norms.sum() / np.sqrt(steps), rel=1e-12)
    generator = np.random.default_rng(2)
    for _ in range(20):
        other = strategy.strategy_matrix() + 0.02 * np.tril(generator.normal(size=(steps, steps)))
        rival = MatrixStrategy.from_matrix(other)
        assert relative_error(rival, 9, 1, workload) > relative_error(strategy, 9, 1, workload)


@pytest.mark.parametrize(("times", "apart"), [(1, 1), (2, 1), (2, 5), (3, 2), (4, 3), (10, 1)])
def test_the_soft_sensitivity_comes_down_to_the_hard_one(times: int, apart: int) -> None:
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
    sums = torch.from_numpy(PrefixSums(momentum=0.5).matrix(steps))
    goal = _Overlap(sums=sums, max_participations=times, min_separation=apart, sharpness=10.0)
    slope = goal.value(at)[1]
    difference = goal.value(at + 1e-6 * along)[0] - goal.value(at - 1e-6 * along)[0]
    assert np.sum(slope * along) == pytest.approx(difference / 2e-6, rel=1e-6)


def test_rows_are_made_without_memory() -> None:
    strategy, key = Dense().optimize(steps=20), NoiseKey.from_bytes(bytes(32))
    stream = strategy.stream(key, stream="gradient", name="weight", numel=9, dtype=torch.float64)
    streamed = torch.stack([stream.row(step) for step in range(20)])
    fresh = torch.stack([normals(key, stream="gradient", name="weight", step=step, count=9) for step in range(20)])
    back = torch.from_numpy(strategy.strategy_matrix()) @ streamed
    torch.testing.assert_close(back, fresh, rtol=0, atol=1e-10)
    assert stream.memory_bytes == 0


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="steps=0"):
        Dense().optimize(steps=0)
    with pytest.raises(ValueError, match=r"max_participations=5 at min_separation=4.*use max_participations=4"):
        Dense().optimize(steps=16, max_participations=5, min_separation=4)
    with pytest.raises(ValueError, match="max_participations=0"):
        Dense().optimize(steps=16, max_participations=0)
    with pytest.raises(ValueError, match="min_separation=0"):
        Dense().optimize(steps=16, min_separation=0)
    with pytest.raises(ValueError, match="learning_rate has 2 values for steps=3"):
        Dense(workload=PrefixSums(learning_rate=(1.0, 1.0))).optimize(steps=3)
    assert Dense() == Dense(workload=PrefixSums()) != Dense(workload=PrefixSums(momentum=0.9))
