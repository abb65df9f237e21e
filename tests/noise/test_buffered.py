"""Buffered strategies against golden values, explicit matrices, brute force, and their own recurrence."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import check_grad

from dpoptim.noise import Independent, NoiseKey, NoiseStream, Strategy, StrategySpec, normals
from dpoptim.noise import buffered as module
from dpoptim.noise.buffered import (
    BufferedToeplitz,
    BufferedToeplitzStrategy,
    correlate,
    inverse_buffers,
    optimized_buffers,
    participation_energy,
)
from dpoptim.noise.stream import NormalSource

KEY = NoiseKey.from_bytes(bytes(range(32)))
STEPS = 12
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def plain(steps: int = STEPS) -> BufferedToeplitzStrategy:
    return BufferedToeplitzStrategy(steps=steps, decays=(0.98, 0.7, 0.0), weights=(0.2, 0.3, 0.1))


@st.composite
def strategies(draw: st.DrawFn) -> BufferedToeplitzStrategy:
    count = draw(st.integers(0, 4))
    decays = draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=count, max_size=count))
    shares = draw(st.lists(st.floats(1e-3, 1), min_size=count, max_size=count))
    total = draw(st.floats(0.01, 0.999))
    weights = tuple(total * share / sum(shares) for share in shares)
    return BufferedToeplitzStrategy(steps=draw(st.integers(1, 11)), decays=tuple(decays), weights=weights)


def scaled_errors(strategy: Strategy, max_participations: int, min_separation: int) -> tuple[float, float]:
    sensitivity = strategy.sensitivity(max_participations=max_participations, min_separation=min_separation)
    return strategy.mean_error() * sensitivity, strategy.max_error() * sensitivity


def brute_force_sensitivity(matrix: np.ndarray, max_participations: int, min_separation: int) -> float:
    gram = np.abs(matrix.T @ matrix)
    return max(
        float(np.sqrt(gram[np.ix_(pattern, pattern)].sum()))
        for size in range(1, max_participations + 1)
        for pattern in combinations(range(len(matrix)), size)
        if all(b - a >= min_separation for a, b in pairwise(pattern))
    )


def make(strategy: BufferedToeplitzStrategy, numel: int = 33, dtype: torch.dtype = torch.float32) -> NoiseStream:
    return strategy.stream(KEY, stream="gradient", name="weight", numel=numel, dtype=dtype)


def rows(stream: NoiseStream, count: int = STEPS) -> torch.Tensor:
    return torch.stack([stream.row(step) for step in range(count)])


def fresh_normals(steps: int, numel: int = 33) -> torch.Tensor:
    return torch.stack(
        [normals(KEY, stream="gradient", name="weight", step=step, count=numel) for step in range(steps)]
    )


@pytest.mark.parametrize(("objective", "mean", "largest"), [("max", 7.18, 7.70), ("mean", 7.018, 7.931)])
def test_golden_errors_of_three_participations(objective: module.Objective, mean: float, largest: float) -> None:
    spec = BufferedToeplitz(buffers=2, objective=objective)
    strategy = spec.optimize(steps=2000, max_participations=3, min_separation=128)
    assert strategy.buffers == 2
    found = scaled_errors(strategy, 3, 128)
    assert found == (pytest.approx(mean, abs=0.005), pytest.approx(largest, abs=0.005))


def test_one_participation_comes_near_the_best_of_all() -> None:
    """Four buffers reach what the best full Toeplitz matrix has, 3.27010, to one part in 10,000."""
    mean, _ = scaled_errors(BufferedToeplitz(buffers=4).optimize(steps=2000), 1, 1)
    assert 3.27009 < mean < 3.2704


@pytest.mark.parametrize(("buffers", "seconds"), [(2, 2.0), (4, 5.0)])
def test_search_is_quick(buffers: int, seconds: float) -> None:
    optimized_buffers.cache_clear()
    start = time.process_time()
    BufferedToeplitz(buffers=buffers).optimize(steps=2000, max_participations=3, min_separation=128)
    assert time.process_time() - start < seconds  # 0.1 and 0.5 s on an idle core


@given(strategy=strategies())
@settings(max_examples=60, deadline=None)
def test_errors_and_norms_are_those_of_the_matrices(strategy: BufferedToeplitzStrategy) -> None:
    steps, matrix, inverse = strategy.steps, strategy.strategy_matrix(), strategy.noising_matrix()
    lags = np.arange(steps)[:, None] - np.arange(steps)
    expected = np.eye(steps)
    for decay, weight in zip(strategy.decays, strategy.weights, strict=True):
        expected += np.where(lags > 0, weight * decay ** np.maximum(lags - 1, 0), 0.0)
    np.testing.assert_allclose(matrix, expected, atol=1e-14)
    np.testing.assert_allclose(matrix @ inverse, np.eye(steps), atol=1e-12)
    noise = np.linalg.norm(np.tril(np.ones((steps, steps))) @ inverse, axis=1)
    assert strategy.mean_error() == pytest.approx(np.sqrt((noise**2).mean()), rel=1e-11)
    assert strategy.max_error() == pytest.approx(noise.max(), rel=1e-11)
    assert strategy.column_norm == pytest.approx(np.linalg.norm(matrix[:, 0]), rel=1e-12)
    np.testing.assert_allclose(strategy.row_norms(), np.linalg.norm(inverse, axis=1), rtol=1e-12)


@given(strategy=strategies(), max_participations=st.integers(1, 4), min_separation=st.integers(1, 6))
@settings(max_examples=80, deadline=None)
def test_sensitivity_is_exact(strategy: BufferedToeplitzStrategy, max_participations: int, min_separation: int) -> None:
    max_participations = min(max_participations, (strategy.steps - 1) // min_separation + 1)
    assert strategy.sensitivity_is_exact
    exact = brute_force_sensitivity(strategy.strategy_matrix(), max_participations, min_separation)
    found = strategy.sensitivity(max_participations=max_participations, min_separation=min_separation)
    assert found == pytest.approx(exact, rel=1e-12)
    coefs = strategy.strategy_matrix()[:, 0]
    assert participation_energy(coefs, max_participations, min_separation)[0] == pytest.approx(exact**2, rel=1e-12)


@given(strategy=strategies())
@settings(max_examples=30, deadline=None)
def test_streamed_rows_are_those_of_the_matrices(strategy: BufferedToeplitzStrategy) -> None:
    streamed, z = rows(make(strategy, dtype=torch.float64), strategy.steps), fresh_normals(strategy.steps)
    back = torch.from_numpy(strategy.strategy_matrix()) @ streamed
    torch.testing.assert_close(back, z, rtol=0, atol=1e-10)
    torch.testing.assert_close(streamed, torch.from_numpy(strategy.noising_matrix()) @ z, rtol=0, atol=1e-10)


def test_long_streams_stay_exact() -> None:
    strategy = BufferedToeplitz(buffers=3).optimize(steps=600, max_participations=3, min_separation=128)
    z = fresh_normals(600, 5)
    expected = torch.from_numpy(strategy.noising_matrix()) @ z
    torch.testing.assert_close(rows(make(strategy, 5, torch.float64), 600), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(rows(make(strategy, 5), 600).double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(rows(make(strategy, 5, torch.bfloat16), 600).double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_order_of_steps_gives_the_same_bits(dtype: torch.dtype) -> None:
    whole = rows(make(plain(), dtype=dtype))
    for restart in (1, 4, STEPS - 1):
        resumed = make(plain(), dtype=dtype)
        for step in range(restart, STEPS):
            assert torch.equal(resumed.row(step), whole[step])
    stream = make(plain(), dtype=dtype)
    for step in (3, 3, 0, 11, 10, 11, 2, 3, 4, 8, 0, 0, 1):
        row = stream.row(step)
        assert torch.equal(row, whole[step])
        row.mul_(0)


def test_shards_and_chunks_do_not_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows(make(plain(), numel=50))
    for start, numel in ((0, 7), (7, 20), (27, 23), (50, 0)):
        shard = plain().stream(KEY, stream="gradient", name="weight", numel=numel, start=start)
        assert torch.equal(rows(shard), whole[:, start : start + numel])
    monkeypatch.setattr(module, "_CHUNK", 7)
    assert torch.equal(rows(make(plain(), numel=50)), whole)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_devices_agree_bit_for_bit(dtype: torch.dtype, device: str) -> None:
    there = rows(plain().stream(KEY, stream="gradient", name="weight", numel=1001, dtype=dtype, device=device))
    assert there.device.type == device
    assert torch.equal(there.cpu(), rows(make(plain(), numel=1001, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numpy_and_torch_advance_alike(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1003, dtype=dtype, generator=generator)
    buffers = torch.randn(3, 1003, dtype=dtype, generator=generator)
    other_row, other_buffers = row.clone(), buffers.clone()
    module._advance(np, row.numpy(), buffers.numpy(), plain().decays, plain().weights)
    module._advance(torch, other_row, other_buffers, plain().decays, plain().weights)
    assert torch.equal(row, other_row)
    assert torch.equal(buffers, other_buffers)


def test_memory_is_one_row_a_buffer() -> None:
    assert make(plain(100_000)).memory_bytes == 3 * 33 * 4
    assert make(plain(), dtype=torch.float64).memory_bytes == 3 * 33 * 8
    assert make(plain(), dtype=torch.bfloat16).memory_bytes == 3 * 33 * 4  # the buffers stay float32
    assert make(BufferedToeplitzStrategy(steps=9, decays=(), weights=())).memory_bytes == 0


@given(strategy=strategies())
@settings(max_examples=60, deadline=None)
def test_inverse_has_as_many_buffers(strategy: BufferedToeplitzStrategy) -> None:
    decays, weights = inverse_buffers(strategy.decays, strategy.weights)
    assert len(decays) == strategy.buffers
    assert (weights <= 0).all()
    assert (np.abs(decays) < 1).all()
    at = 0.37
    series = 1 + at * np.sum(np.asarray(strategy.weights) / (1 - at * np.asarray(strategy.decays)))
    assert 1 + at * np.sum(weights / (1 - at * decays)) == pytest.approx(1 / series, rel=1e-12)


def test_inverse_is_accurate_for_crowded_decays() -> None:
    decays = 1 - 1e-5 * np.arange(1, 9)
    strategy = BufferedToeplitzStrategy(steps=300, decays=tuple(decays), weights=(0.05,) * 8)
    product = strategy.strategy_matrix() @ strategy.noising_coefs
    np.testing.assert_allclose(product, np.eye(1, 300)[0], atol=1e-13)


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("steps", "pattern"), [(30, (1, 1)), (31, (3, 7)), (40, (40, 1)), (25, (2, 24))])
def test_gradient_of_the_search(steps: int, pattern: tuple[int, int], objective: module.Objective) -> None:
    decays, weights = np.array([0.9, 0.4]), np.array([0.2, 0.3])

    def value_and_slopes(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, pull = module._log_error(x[:2], x[2:], steps, *pattern, objective)
        powers = x[:2, None] ** np.arange(steps - 1)
        by_decay = x[2:] * ((powers[:, :-1] * np.arange(1, steps - 1)) @ pull[2:])
        return value, np.concatenate([by_decay, powers @ pull[1:]])

    at = np.concatenate([decays, weights])
    assert check_grad(lambda x: value_and_slopes(x)[0], lambda x: value_and_slopes(x)[1], at) < 1e-5
    strategy = BufferedToeplitzStrategy(steps=steps, decays=tuple(decays), weights=tuple(weights))
    expected = scaled_errors(strategy, *pattern)[objective == "max"]
    assert value_and_slopes(at)[0] == pytest.approx(2 * np.log(expected), rel=1e-12)


def test_correlation_and_comb_are_their_sums() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(2, 13))
    expected = [sum(a[i] * b[i - lag] for i in range(lag, 13)) for lag in range(13)]
    np.testing.assert_allclose(correlate(a, b), expected, atol=1e-13)
    for count, lag in ((1, 1), (2, 5), (13, 1), (3, 4), (2, 12)):
        sums = [sum(a[t - i * lag] for i in range(count) if t >= i * lag) for t in range(13)]
        np.testing.assert_allclose(module._comb(a, count, lag), sums, atol=1e-13)


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("steps", "buffers", "pattern"), [(50, 1, (1, 1)), (300, 2, (4, 60)), (1000, 3, (1, 1))])
def test_search_ends_in_a_minimum(
    steps: int, buffers: int, pattern: tuple[int, int], objective: module.Objective
) -> None:
    spec = BufferedToeplitz(buffers=buffers, objective=objective)
    best = spec.optimize(steps=steps, max_participations=pattern[0], min_separation=pattern[1])
    assert best.buffers == buffers
    lowest = scaled_errors(best, *pattern)[objective == "max"]
    generator = np.random.default_rng(0)
    for size in (1e-1, 1e-2, 1e-3):
        for _ in range(5):
            decays = 1 - (1 - np.array(best.decays)) * np.exp(size * generator.normal(size=buffers))
            weights = np.array(best.weights) * np.exp(size * generator.normal(size=buffers))
            other = BufferedToeplitzStrategy(steps=steps, decays=tuple(decays), weights=tuple(weights))
            assert scaled_errors(other, *pattern)[objective == "max"] > lowest


@given(steps=st.integers(1, 60), max_participations=st.integers(1, 8), min_separation=st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_more_buffers_are_never_worse(steps: int, max_participations: int, min_separation: int) -> None:
    pattern = (min(max_participations, (steps - 1) // min_separation + 1), min_separation)
    errors = [scaled_errors(Independent().optimize(steps=steps), *pattern)[0]]
    for buffers in (1, 2, 3):
        spec = BufferedToeplitz(buffers=buffers)
        strategy = spec.optimize(steps=steps, max_participations=pattern[0], min_separation=pattern[1])
        assert strategy.buffers <= buffers
        assert strategy.sensitivity_is_exact
        errors.append(scaled_errors(strategy, *pattern)[0])
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(errors))


def test_limits_are_independent_noise() -> None:
    for strategy in (
        BufferedToeplitz(buffers=2).optimize(steps=1),
        BufferedToeplitz(buffers=2).optimize(steps=12, max_participations=12, min_separation=1),
    ):
        assert strategy.buffers == 0
        assert strategy.strategy_coefs == (1.0,)
        assert torch.equal(rows(make(strategy, dtype=torch.float64), strategy.steps), fresh_normals(strategy.steps))
    two = BufferedToeplitz(buffers=3).optimize(steps=2)
    assert two.strategy_coefs[1] == pytest.approx(0.30585, abs=1e-5)


def test_strategies_are_values() -> None:
    spec: StrategySpec = BufferedToeplitz(buffers=2)
    assert spec.optimize(steps=50) is spec.optimize(steps=50)
    a = BufferedToeplitzStrategy(steps=5, decays=(0.5, 0.9), weights=(0.3, 0.1))
    b = BufferedToeplitzStrategy(steps=5, decays=(0.9, 0.5), weights=(0.1, 0.3))
    assert a == b
    assert hash(a) == hash(b)
    assert a != BufferedToeplitzStrategy(steps=5, decays=(0.9, 0.5), weights=(0.1, 0.2))
    assert a != BufferedToeplitzStrategy(steps=6, decays=(0.9, 0.5), weights=(0.1, 0.3))
    assert a.noising_coefs is a.noising_coefs
    with pytest.raises(ValueError, match="read-only"):
        a.noising_coefs[0] = 2.0


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="buffers=0"):
        BufferedToeplitz(buffers=0)
    with pytest.raises(ValueError, match="objective='median'"):
        BufferedToeplitz(buffers=1, objective="median")  # type: ignore[arg-type]
    spec = BufferedToeplitz(buffers=1)
    with pytest.raises(ValueError, match="steps=0"):
        spec.optimize(steps=0)
    with pytest.raises(ValueError, match="max_participations=0"):
        spec.optimize(steps=10, max_participations=0)
    with pytest.raises(ValueError, match="min_separation=0"):
        spec.optimize(steps=10, min_separation=0)
    with pytest.raises(ValueError, match=r"max_participations=3 at min_separation=5 .*use max_participations=2"):
        spec.optimize(steps=10, max_participations=3, min_separation=5)
    for decays, weights, message in (
        ((1.0,), (0.5,), "decays"),
        ((-0.1,), (0.5,), "decays"),
        ((float("nan"),), (0.5,), "decays"),
        ((0.5,), (1.1,), "weights"),
        ((0.5,), (0.0,), "weights"),
        ((0.5, 0.4), (1.5, -0.6), "weights"),
        ((0.5,), (0.2, 0.3), "weights"),
    ):
        with pytest.raises(ValueError, match=f"^{message}="):
            BufferedToeplitzStrategy(steps=5, decays=decays, weights=weights)
    for step in (-1, STEPS):
        with pytest.raises(ValueError, match=f"step={step} .*steps={STEPS}"):
            make(plain()).row(step)


def test_level_of_the_rows() -> None:
    strategy, numel = plain(), 20_000
    energies = (rows(make(strategy, numel)).double() ** 2).mean(1).numpy() / strategy.row_norms() ** 2

    def is_right(level: float) -> bool:
        return bool((np.abs(level**2 * energies - 1) < 4.5 * np.sqrt(2 / numel)).all())

    assert is_right(1.0)
    assert not any(is_right(level) for level in (0.9, 0.95, 1.05, 1.1))


def test_source_is_checked() -> None:
    with pytest.raises(ValueError, match="numel=-1"):
        make(plain(), numel=-1)
    source = NormalSource(key=KEY, stream="gradient", name="weight", numel=2)
    stream = module.BufferedStream(source, decays=[], weights=[], steps=3)
    assert torch.equal(stream.row(1), source.normals(1, dtype=torch.float32))
