"""Streamed rows are the rows of C⁻¹z, and the same bits whatever the road to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dpoptim.kernels import threads as parallel
from dpoptim.noise import (
    Banded,
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    ConvolvedStream,
    Independent,
    MatrixStrategy,
    NormalSource,
    RecurrentStream,
    SquareRoot,
    Strategy,
    ToeplitzStrategy,
)
from dpoptim.noise import source as source_module
from dpoptim.noise.memory import NoiseMemory, RowMemory, add_product
from dpoptim.noise.source import TensorPart
from tests.noise.explicit import DEVICES, KEY, fresh_normals, make, rows

STEPS = 12


def random_matrix(bands: int) -> MatrixStrategy:
    diagonals = np.random.default_rng(bands).uniform(-0.5, 0.5, size=(bands, STEPS))
    diagonals[0] = np.linspace(0.5, 2, STEPS)
    return MatrixStrategy(diagonals=diagonals)


STRATEGIES: dict[str, Strategy] = {
    "independent": Independent().optimize(steps=STEPS),
    "square root": SquareRoot().optimize(steps=STEPS),
    "two bands": BandedToeplitz(bands=2).optimize(steps=STEPS),
    "five bands": BandedToeplitz(bands=5).optimize(steps=STEPS),
    "one band short": BandedToeplitz(bands=STEPS - 1).optimize(steps=STEPS),
    "all bands": BandedToeplitz(bands=STEPS).optimize(steps=STEPS),
    "diagonal of 2": ToeplitzStrategy(steps=STEPS, strategy_coefs=(2.0, 1.0, 0.5)),
    "twice the identity": ToeplitzStrategy(steps=STEPS, strategy_coefs=(2.0,)),
    "two buffers": BufferedToeplitz(buffers=2).optimize(steps=STEPS),
    "banded inverse": BandedInverse(bands=3).optimize(steps=STEPS),
    "matrix of three bands": random_matrix(3),
    "full matrix": random_matrix(STEPS),
}
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@every_strategy
def test_strategy_times_rows_gives_back_the_normals(strategy: Strategy) -> None:
    streamed = rows(make(strategy, dtype=torch.float64), STEPS)
    back = torch.from_numpy(strategy.strategy_matrix()) @ streamed
    torch.testing.assert_close(back, fresh_normals(STEPS), rtol=0, atol=1e-10)
    expected = torch.from_numpy(strategy.noising_matrix()) @ fresh_normals(STEPS)
    torch.testing.assert_close(streamed, expected, rtol=0, atol=1e-10)


@every_strategy
def test_float32_follows_float64(strategy: Strategy) -> None:
    streamed = rows(make(strategy), STEPS)
    assert streamed.dtype == torch.float32
    expected = rows(make(strategy, dtype=torch.float64), STEPS)
    torch.testing.assert_close(streamed.double(), expected, rtol=0, atol=1e-5)


@every_strategy
@every_dtype
def test_restart_continues_bit_for_bit(strategy: Strategy, dtype: torch.dtype) -> None:
    whole = rows(make(strategy, dtype=dtype), STEPS)
    for restart in (1, 4, 7, STEPS - 1):
        resumed = make(strategy, dtype=dtype)
        for step in range(restart, STEPS):
            assert torch.equal(resumed.row(step), whole[step])


@every_strategy
def test_any_order_of_steps_gives_the_same_bits(strategy: Strategy) -> None:
    whole, stream = rows(make(strategy), STEPS), make(strategy)
    for step in (3, 3, 0, 11, 10, 11, 2, 3, 4, 8, 8, 7, 0, 0, 1):
        assert torch.equal(stream.row(step), whole[step])


@every_strategy
def test_changing_a_row_in_place_changes_nothing_later(strategy: Strategy) -> None:
    whole, stream = rows(make(strategy), STEPS), make(strategy)
    for step in range(STEPS):
        for _ in range(2):
            row = stream.row(step)
            assert torch.equal(row, whole[step])
            row.mul_(0)


@every_strategy
@every_dtype
def test_shards_are_slices(strategy: Strategy, dtype: torch.dtype) -> None:
    whole = rows(make(strategy, numel=50, dtype=dtype), STEPS)
    for start, numel in ((0, 7), (7, 20), (27, 23), (50, 0)):
        shard = rows(make(strategy, numel=numel, start=start, dtype=dtype), STEPS)
        assert torch.equal(shard, whole[:, start : start + numel])


@every_strategy
@every_dtype
def test_chunks_do_not_change_the_bits(strategy: Strategy, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows(make(strategy, dtype=dtype), STEPS)
    monkeypatch.setattr(parallel, "CHUNK", 7)
    monkeypatch.setattr(source_module, "_CHUNK", 10)
    assert torch.equal(rows(make(strategy, dtype=dtype), STEPS), whole)


@every_strategy
@pytest.mark.parametrize("device", DEVICES)
@every_dtype
def test_devices_agree_bit_for_bit(strategy: Strategy, dtype: torch.dtype, device: str) -> None:
    there = rows(make(strategy, numel=1001, dtype=dtype, device=device), STEPS)
    assert there.device.type == device
    assert torch.equal(there.cpu(), rows(make(strategy, numel=1001, dtype=dtype), STEPS))


@every_dtype
def test_numpy_and_torch_add_products_alike(dtype: torch.dtype) -> None:
    """The processor's rows are numpy's, a device's torch's: a fused multiply-add would round otherwise."""
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(1003, dtype=dtype, generator=generator)
    past = torch.randn(9, 1003, dtype=dtype, generator=generator)
    coefs = torch.randn(9, dtype=torch.float64, generator=generator).tolist()
    expected = total.clone()
    for row, coef in zip(past, coefs, strict=True):
        expected += torch.mul(row, coef)
        add_product(total, row, coef, torch.empty_like(row))
    assert torch.equal(total, expected)


def test_independent_rows_are_the_normals() -> None:
    streamed = rows(make(STRATEGIES["independent"], dtype=torch.float64), STEPS)
    assert torch.equal(streamed, fresh_normals(STEPS))


def test_one_band_by_either_stream_is_independent() -> None:
    source = NormalSource.of_tensor(KEY, "weight", numel=33)
    recurrent = RecurrentStream(source, strategy_row=lambda step: [1.0], bands=1, steps=STEPS, row_norm=1.0)
    convolved = ConvolvedStream(source, noising_row=lambda step: [1.0], steps=STEPS)
    assert torch.equal(rows(recurrent, STEPS), rows(convolved, STEPS))
    assert torch.equal(rows(recurrent, STEPS), fresh_normals(STEPS).float())


def test_streams_and_names_have_noise_of_their_own() -> None:
    strategy = STRATEGIES["five bands"]
    made = [
        rows(strategy.stream(KEY, stream=stream, name=name, numel=2000, dtype=torch.float64), STEPS)
        for stream in ("gradient", "square")
        for name in ("weight", "bias")
    ]
    for index, one in enumerate(made):
        for other in made[:index]:
            correlation = float((one * other).sum() / (one.norm() * other.norm()))
            assert abs(correlation) < 5 / np.sqrt(2000)


def test_memory() -> None:
    assert make(STRATEGIES["independent"]).memory_bytes == 0
    assert make(STRATEGIES["square root"]).memory_bytes == 0
    assert make(STRATEGIES["five bands"]).memory_bytes == 4 * 33 * 4
    assert make(STRATEGIES["five bands"], dtype=torch.float64).memory_bytes == 4 * 33 * 8


def level_is_right(streamed: torch.Tensor, row_norms: np.ndarray) -> bool:
    """Chi-square of each row's energy over the known variance."""
    energies = (streamed.double() ** 2).sum(1).numpy() / row_norms**2
    numel = streamed.shape[1]
    tails = [2 * min(stats.chi2.cdf(e, numel), stats.chi2.sf(e, numel)) for e in energies]
    return min(tails) > 1e-5


@every_strategy
def test_rows_have_the_stated_level(strategy: Strategy) -> None:
    streamed = rows(make(strategy, numel=20_000), STEPS)
    assert level_is_right(streamed, strategy.row_norms())
    for wrong in (0.9, 0.97, 1.03, 1.1):
        assert not level_is_right(wrong * streamed, strategy.row_norms())


def test_prefix_sums_have_the_stated_error() -> None:
    strategy = BandedToeplitz(bands=8).optimize(steps=64)
    sums = rows(make(strategy, numel=20_000, dtype=torch.float64), 64).cumsum(0)
    assert float((sums**2).mean().sqrt()) == pytest.approx(strategy.mean_error(), rel=0.01)
    assert float((sums[-1] ** 2).mean().sqrt()) == pytest.approx(strategy.max_error(), rel=0.02)


@every_strategy
@pytest.mark.parametrize("step", [-1, STEPS, STEPS + 100])
def test_steps_beyond_the_strategy_are_refused(strategy: Strategy, step: int) -> None:
    with pytest.raises(ValueError, match=f"step={step} .*steps={STEPS}"):
        make(strategy).row(step)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"numel": -1}, "numel=-1"), ({"start": -2}, "start=-2"), ({"dtype": torch.int32}, "dtype=torch.int32")],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(STRATEGIES["five bands"], **arguments)


@every_strategy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_noise_is_refused(strategy: Strategy, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"dtype={dtype}: noise in fewer bits than float32 .*use float32"):
        make(strategy, dtype=dtype)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("spec", [BandedToeplitz(bands=4), Banded(bands=3), BufferedToeplitz(buffers=2)], ids=repr)
@pytest.mark.parametrize("after_the_write", [False, True])
def test_an_interrupted_row_is_made_anew(spec, bits, after_the_write, monkeypatch):
    """Out of memory or Ctrl-C while the past is written: noise on a half-written past would be too small."""
    strategy = spec.optimize(steps=STEPS)

    def made():
        memory = NoiseMemory(bits=bits)
        return strategy.stream(KEY, stream="gradient", name="weight", numel=33, memory=memory)

    whole, stream, write = rows(made(), STEPS), made(), RowMemory.write
    for step in range(5):
        stream.row(step)

    def interrupted(self, *args, **kwargs):
        if after_the_write:
            write(self, *args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RowMemory, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.row(5)
    assert torch.equal(torch.stack([stream.row(step) for step in range(5, STEPS)]), whole[5:])


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("device", DEVICES)
@every_strategy
def test_many_tensors_end_to_end_are_each_as_alone(strategy: Strategy, bits: int, device: str) -> None:
    """Neither neighbours in the row nor the order of tensors change an element's noise."""
    parts = [TensorPart(name="a", numel=33), TensorPart(name="none", numel=0), TensorPart(name="b", numel=70, start=5)]
    memory = NoiseMemory(bits=bits)
    whole = strategy.stream_of(KEY, parts, stream="gradient", device=device, memory=memory)
    alone = [
        strategy.stream(KEY, stream="gradient", name=part.name, numel=part.numel, start=part.start, memory=memory)
        for part in parts
    ]
    for step in range(STEPS):
        assert torch.equal(whole.row(step).cpu(), torch.cat([stream.row(step) for stream in alone]))
    assert whole.memory_bytes == sum(stream.memory_bytes for stream in alone)
