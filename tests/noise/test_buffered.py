"""Buffered strategies against explicit matrices, brute force, and their own recurrence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpoptim.kernels import threads as parallel
from dpoptim.noise import BufferedToeplitz, StrategySpec
from dpoptim.noise.strategies.buffered import BufferedToeplitzStrategy
from tests.noise.explicit import (
    DEVICES,
    KEY,
    brute_force_sensitivity,
    buffered,
    fresh_normals,
    make,
    products_bound,
    rows,
)

STEPS = 12


def plain(steps: int = STEPS) -> BufferedToeplitzStrategy:
    return BufferedToeplitzStrategy(steps=steps, decays=(0.98, 0.7, 0.0), weights=(0.2, 0.3, 0.1))


@given(strategy=st.integers(1, 11).flatmap(buffered))
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


@given(
    strategy=st.integers(1, 9).flatmap(buffered), max_participations=st.integers(1, 4), min_separation=st.integers(1, 6)
)
@settings(max_examples=80, deadline=None)
def test_sensitivity_is_exact(strategy: BufferedToeplitzStrategy, max_participations: int, min_separation: int) -> None:
    assert strategy.sensitivity_is_exact
    found = strategy.sensitivity(max_participations=max_participations, min_separation=min_separation)
    pattern = (strategy.strategy_matrix(), max_participations, min_separation)
    assert found == pytest.approx(brute_force_sensitivity(*pattern), rel=1e-12)
    assert found == pytest.approx(products_bound(*pattern), rel=1e-12)


@given(strategy=st.integers(1, 11).flatmap(buffered))
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
    torch.testing.assert_close(rows(make(strategy, 5, dtype=torch.float64), 600), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(rows(make(strategy, 5), 600).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_order_of_steps_gives_the_same_bits(dtype: torch.dtype) -> None:
    whole = rows(make(plain(), dtype=dtype), STEPS)
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
    whole = rows(make(plain(), numel=50), STEPS)
    for start, numel in ((0, 7), (7, 20), (27, 23), (50, 0)):
        assert torch.equal(rows(make(plain(), numel=numel, start=start), STEPS), whole[:, start : start + numel])
    monkeypatch.setattr(parallel, "CHUNK", 7)
    assert torch.equal(rows(make(plain(), numel=50), STEPS), whole)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_devices_agree_bit_for_bit(dtype: torch.dtype, device: str) -> None:
    there = rows(make(plain(), numel=1001, dtype=dtype, device=device), STEPS)
    assert there.device.type == device
    assert torch.equal(there.cpu(), rows(make(plain(), numel=1001, dtype=dtype), STEPS))


def test_memory_is_one_row_a_buffer() -> None:
    assert make(plain(100_000)).memory_bytes == 3 * 33 * 4
    assert make(plain(), dtype=torch.float64).memory_bytes == 3 * 33 * 8
    assert make(BufferedToeplitzStrategy(steps=9, decays=(), weights=())).memory_bytes == 0


@given(strategy=st.integers(1, 9).flatmap(buffered))
@settings(max_examples=40, deadline=None)
def test_buffer_norms_are_the_largest_of_the_buffers(strategy: BufferedToeplitzStrategy) -> None:
    """Rows of D·C⁻¹, with D the decaying sums that a buffer is."""
    lags = np.arange(strategy.steps)[:, None] - np.arange(strategy.steps)
    for decay, norm in zip(strategy.decays, strategy._buffer_norms, strict=True):
        sums = np.where(lags >= 0, decay ** np.maximum(lags, 0), 0.0) @ strategy.noising_matrix()
        assert norm == pytest.approx(np.linalg.norm(sums, axis=1).max(), rel=1e-10)


def test_strategies_are_values() -> None:
    spec: StrategySpec = BufferedToeplitz(buffers=2)
    assert spec.optimize(steps=50) == spec.optimize(steps=50)
    a = BufferedToeplitzStrategy(steps=5, decays=(0.5, 0.9), weights=(0.3, 0.1))
    b = BufferedToeplitzStrategy(steps=5, decays=(0.9, 0.5), weights=(0.1, 0.3))
    assert a == b
    assert hash(a) == hash(b)
    assert a != BufferedToeplitzStrategy(steps=5, decays=(0.9, 0.5), weights=(0.1, 0.2))
    assert a != BufferedToeplitzStrategy(steps=6, decays=(0.9, 0.5), weights=(0.1, 0.3))
    assert a.noising_coefs is a.noising_coefs
    with pytest.raises(ValueError, match="read-only"):
        a.noising_coefs[0] = 2.0


@pytest.mark.parametrize(
    ("decays", "weights", "named"),
    [
        ((1.0,), (0.5,), "decays"),
        ((-0.1,), (0.5,), "decays"),
        ((float("nan"),), (0.5,), "decays"),
        ((float("inf"),), (0.5,), "decays"),
        ((0.5,), (1.1,), "weights"),
        ((0.5,), (0.0,), "weights"),
        ((0.5,), (float("nan"),), "weights"),
        ((0.5,), (float("inf"),), "weights"),
        ((0.5, 0.4), (1.5, -0.6), "weights"),
        ((0.5,), (0.2, 0.3), "weights"),
    ],
)
def test_bad_buffers_are_named(decays: tuple[float, ...], weights: tuple[float, ...], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}="):
        BufferedToeplitzStrategy(steps=5, decays=decays, weights=weights)


def test_the_default_is_near_what_twice_its_memory_would_give() -> None:
    assert BufferedToeplitz() == BufferedToeplitz(buffers=3)
    for steps, pattern, most in ((2000, (1, 1), 1.0015), (2000, (3, 128), 1.0003), (20_000, (1, 1), 1.008)):
        given = dict(zip(("max_participations", "min_separation"), pattern, strict=True))
        fewer, default, more = (
            strategy.mean_error() * strategy.sensitivity(**given)
            for strategy in (BufferedToeplitz(buffers=b).optimize(steps=steps, **given) for b in (2, 3, 6))
        )
        assert more <= default < most * more
        assert fewer > 1.01 * default


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"^buffers=0"):
        BufferedToeplitz(buffers=0)
    with pytest.raises(ValueError, match=r"^objective='median'"):
        BufferedToeplitz(buffers=1, objective="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^steps=0"):
        BufferedToeplitzStrategy(steps=0, decays=(0.5,), weights=(0.5,))
    with pytest.raises(ValueError, match="numel=-1"):
        make(plain(), numel=-1)
    for step in (-1, STEPS):
        with pytest.raises(ValueError, match=f"step={step} .*steps={STEPS}"):
            make(plain()).row(step)


def test_level_of_the_rows() -> None:
    strategy, numel = plain(), 20_000
    energies = (rows(make(strategy, numel), STEPS).double() ** 2).mean(1).numpy() / strategy.row_norms() ** 2

    def is_right(level: float) -> bool:
        return bool((np.abs(level**2 * energies - 1) < 4.5 * np.sqrt(2 / numel)).all())

    assert is_right(1.0)
    assert not any(is_right(level) for level in (0.9, 0.95, 1.05, 1.1))


def test_no_buffers_are_independent_noise() -> None:
    strategy = BufferedToeplitzStrategy(steps=5, decays=(), weights=())
    assert torch.equal(rows(make(strategy, dtype=torch.float64), 5), fresh_normals(5))
    assert strategy.stream(KEY, stream="gradient", name="weight", numel=2).memory_bytes == 0
