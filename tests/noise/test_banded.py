"""The banded optimum against golden values, numerical gradients, optimality conditions and its limits."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpoptim.noise import (
    BandedToeplitz,
    DecayedSums,
    Independent,
    MatrixStrategy,
    NoiseKey,
    PrefixSums,
    Workload,
)
from dpoptim.noise.search.banded import Banded, log_error, optimal_banded
from dpoptim.noise.search.dense import Dense

search = inspect.unwrap(optimal_banded)  # without the memory of earlier results


def workloads(steps: int) -> dict[str, Workload]:
    rates = tuple(np.linspace(1.0, 0.2, steps).tolist())
    return {
        "prefix": PrefixSums(),
        "momentum": PrefixSums(momentum=0.9),
        "decay": PrefixSums(momentum=0.5, weight_decay=0.05),
        "schedule": PrefixSums(learning_rate=rates),
        "all": PrefixSums(momentum=0.8, weight_decay=0.1, learning_rate=rates),
        "adam": DecayedSums(beta=0.9),
        "biased": DecayedSums(beta=0.95, debiased=False),
        "no past": DecayedSums(beta=0.0),
    }


KINDS = list(workloads(1))
every_workload = pytest.mark.parametrize("kind", KINDS)


def relative_errors(steps: int, bands: int) -> tuple[float, float]:
    toeplitz = BandedToeplitz(bands=bands).optimize(steps=steps)
    return Banded(bands=bands).optimize(steps=steps).mean_error(), toeplitz.mean_error() * toeplitz.column_norm


def test_golden_error() -> None:
    strategy = Banded(bands=8).optimize(steps=64)
    assert strategy.mean_error() == pytest.approx(2.620517, abs=5e-7)
    assert strategy.bands == 8
    np.testing.assert_allclose(np.linalg.norm(strategy.strategy_matrix(), axis=0), 1.0, rtol=1e-12)


@pytest.mark.slow
def test_two_thousand_steps() -> None:
    strategy = MatrixStrategy(diagonals=search(2000, 128, PrefixSums()))
    assert strategy.mean_error() == pytest.approx(4.177726, abs=1e-6)
    for participations in (1, 3):
        pattern = {"max_participations": participations, "min_separation": 128}
        assert strategy.sensitivity(**pattern) == pytest.approx(np.sqrt(participations), rel=1e-12)
        assert strategy.is_exact_for(**pattern)


@given(
    shape=st.integers(2, 90).flatmap(lambda steps: st.tuples(st.just(steps), st.integers(1, min(steps, 50)))),
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(KINDS),
)
@settings(max_examples=60, deadline=None)
def test_objective_and_its_gradient(shape: tuple[int, int], seed: int, kind: str) -> None:
    """Against autograd through the explicit matrices."""
    steps, bands = shape
    workload = workloads(steps)[kind]
    generator = torch.Generator().manual_seed(seed)
    inside = torch.arange(bands)[:, None] + torch.arange(steps) < steps
    at = 0.3 * torch.rand(bands, steps, dtype=torch.float64, generator=generator)
    at[0] += 1.0
    at = (at * inside).requires_grad_()
    matrix = sum(torch.diag(at[lag, : steps - lag], -lag) for lag in range(bands))
    assert isinstance(matrix, torch.Tensor)
    matrix = matrix / matrix.norm(dim=0)
    noise = torch.from_numpy(workload.matrix(steps)) @ torch.linalg.inv(matrix)
    expected = (noise**2).sum().log()
    (gradient,) = torch.autograd.grad(expected, at)
    found, slope = log_error(at.detach(), torch.from_numpy(workload.inverse_diagonals(steps)))
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(slope * inside, gradient, rtol=1e-7, atol=1e-9)


@every_workload
def test_gradient_by_finite_differences(kind: str) -> None:
    steps, bands = 40, 5
    inverse = torch.from_numpy(workloads(steps)[kind].inverse_diagonals(steps))
    generator = torch.Generator().manual_seed(3)
    inside = torch.arange(bands)[:, None] + torch.arange(steps) < steps
    at = (0.3 * torch.rand(bands, steps, dtype=torch.float64, generator=generator) + torch.eye(bands, 1)) * inside
    along = torch.randn(bands, steps, dtype=torch.float64, generator=generator) * inside
    _, slope = log_error(at, inverse)
    above, _ = log_error(at + 1e-5 * along, inverse)
    below, _ = log_error(at - 1e-5 * along, inverse)
    assert float((slope * along).sum()) == pytest.approx(float(above - below) / 2e-5, rel=1e-6, abs=1e-9)


def proven_error(matrix: np.ndarray, workload: Workload, bands: int) -> float:
    """A mean error that no banded C with unit columns goes below, by the dual of the problem, which is convex in CᵀC.

    For every Y ≥ 0 that vanishes within the band but for its diagonal, X = CᵀC has tr(XY) = tr Y, and so
    ‖AC⁻¹‖_F²·tr Y ≥ (tr (AYAᵀ)^½)². At the optimum Y = X⁻¹AᵀAX⁻¹ makes them equal.
    """
    steps, sums = len(matrix), workload.matrix(len(matrix))
    inverse = np.linalg.inv(matrix.T @ matrix)
    dual = inverse @ sums.T @ sums @ inverse
    lag = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
    dual[(lag > 0) & (lag < bands)] = 0.0
    values = np.linalg.eigvalsh(sums @ dual @ sums.T)
    assert values[0] > 0
    return float(np.sqrt(values).sum() / np.sqrt(np.trace(dual) * steps))


@pytest.mark.parametrize(("steps", "bands"), [(2, 2), (9, 3), (64, 8), (40, 35), (100, 2)])
def test_conditions_of_optimality(steps: int, bands: int) -> None:
    strategy = Banded(bands=bands).optimize(steps=steps)
    bound = proven_error(strategy.strategy_matrix(), PrefixSums(), bands)
    assert bound * (1 - 1e-9) <= strategy.mean_error() < bound * (1 + 1e-7)
    assert not np.tril(strategy.strategy_matrix(), -bands).any()


@every_workload
def test_the_best_for_each_workload(kind: str) -> None:
    steps, bands = 40, 6
    workload = workloads(steps)[kind]
    strategy = Banded(bands=bands, workload=workload).optimize(steps=steps)
    matrix = strategy.strategy_matrix()
    noise = workload.matrix(steps) @ np.linalg.inv(matrix)
    assert strategy.mean_error(workload) == pytest.approx(np.sqrt((noise**2).sum() / steps), rel=1e-10)
    assert strategy.max_error(workload) == pytest.approx(np.linalg.norm(noise, axis=1).max(), rel=1e-10)
    np.testing.assert_allclose(np.linalg.norm(matrix, axis=0), 1.0, rtol=1e-12)
    assert not np.tril(matrix, -bands).any()
    bound = proven_error(matrix, workload, bands)
    assert bound * (1 - 1e-9) <= strategy.mean_error(workload) < bound * (1 + 1e-6)
    rivals = [Banded(bands=bands).optimize(steps=steps).mean_error(workload), np.inf]
    toeplitz = BandedToeplitz(bands=bands, workload=workload).optimize(steps=steps)
    rivals += [toeplitz.mean_error(workload) * toeplitz.column_norm]
    assert strategy.mean_error(workload) <= min(rivals) * (1 + 1e-9)
    dense = Dense(workload=workload).optimize(steps=steps)
    assert dense.mean_error(workload) <= strategy.mean_error(workload) * (1 + 1e-9)
    whole = Banded(bands=steps, workload=workload).optimize(steps=steps)
    assert whole == dense


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
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
    search(7, 3, PrefixSums())
    assert torch.get_num_threads() == threads


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="bands=0"):
        Banded(bands=0)
    with pytest.raises(ValueError, match="bands=9 exceeds steps=8"):
        Banded(bands=9).optimize(steps=8)
    with pytest.raises(ValueError, match="steps=0"):
        Banded(bands=1).optimize(steps=0)
    with pytest.raises(ValueError, match="learning_rate has 3 values for steps=8"):
        Banded(bands=2, workload=PrefixSums(learning_rate=(1.0, 1.0, 1.0))).optimize(steps=8)
    assert Banded(bands=2) != Banded(bands=2, workload=PrefixSums(momentum=0.9))


def test_a_second_call_and_a_second_program_are_answered_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPOPTIM_CACHE_DIR", str(tmp_path))
    workload = PrefixSums(momentum=0.123)
    first = Banded(bands=3, workload=workload).optimize(steps=11)
    assert Banded(bands=3, workload=workload).optimize(steps=11) == first
    names = {path.name.rsplit("-", 1)[0] for path in tmp_path.iterdir()}
    assert names == {"banded", "banded-toeplitz"}
