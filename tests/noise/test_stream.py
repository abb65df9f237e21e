"""Streamed rows are the rows of C⁻¹z, and the same bits whatever the road to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from dpoptim.noise import (
    BandedToeplitz,
    ConvolvedStream,
    Independent,
    NoiseKey,
    NoiseStream,
    RecurrentStream,
    SquareRoot,
    ToeplitzStrategy,
    normals,
)
from dpoptim.noise import stream as stream_module

KEY = NoiseKey.from_bytes(bytes(range(32)))
STEPS = 12
STRATEGIES = {
    "independent": Independent().optimize(steps=STEPS),
    "square root": SquareRoot().optimize(steps=STEPS),
    "two bands": BandedToeplitz(bands=2).optimize(steps=STEPS),
    "five bands": BandedToeplitz(bands=5).optimize(steps=STEPS),
    "one band short": BandedToeplitz(bands=STEPS - 1).optimize(steps=STEPS),
    "all bands": BandedToeplitz(bands=STEPS).optimize(steps=STEPS),
    "diagonal of 2": ToeplitzStrategy(steps=STEPS, strategy_coefs=(2.0, 1.0, 0.5)),
    "twice the identity": ToeplitzStrategy(steps=STEPS, strategy_coefs=(2.0,)),
}
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def make(
    strategy: ToeplitzStrategy,
    numel: int = 33,
    start: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> NoiseStream:
    return strategy.stream(KEY, stream="gradient", name="weight", numel=numel, start=start, dtype=dtype, device=device)


def rows(stream: NoiseStream, count: int = STEPS) -> torch.Tensor:
    return torch.stack([stream.row(step) for step in range(count)])


def fresh_normals(numel: int = 33) -> torch.Tensor:
    made = [normals(KEY, stream="gradient", name="weight", step=step, count=numel) for step in range(STEPS)]
    return torch.stack(made)


@every_strategy
def test_strategy_times_rows_gives_back_the_normals(strategy: ToeplitzStrategy) -> None:
    streamed = rows(make(strategy, dtype=torch.float64))
    back = torch.from_numpy(strategy.strategy_matrix()) @ streamed
    torch.testing.assert_close(back, fresh_normals(), rtol=0, atol=1e-10)
    expected = torch.from_numpy(strategy.noising_matrix()) @ fresh_normals()
    torch.testing.assert_close(streamed, expected, rtol=0, atol=1e-10)


@every_strategy
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.01)])
def test_narrow_dtypes_follow_float64(strategy: ToeplitzStrategy, dtype: torch.dtype, tolerance: float) -> None:
    streamed = rows(make(strategy, dtype=dtype))
    assert streamed.dtype == dtype
    torch.testing.assert_close(streamed.double(), rows(make(strategy, dtype=torch.float64)), rtol=0, atol=tolerance)


@every_strategy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_restart_continues_bit_for_bit(strategy: ToeplitzStrategy, dtype: torch.dtype) -> None:
    whole = rows(make(strategy, dtype=dtype))
    for restart in (1, 4, 7, STEPS - 1):
        resumed = make(strategy, dtype=dtype)
        for step in range(restart, STEPS):
            assert torch.equal(resumed.row(step), whole[step])


@every_strategy
def test_any_order_of_steps_gives_the_same_bits(strategy: ToeplitzStrategy) -> None:
    whole, stream = rows(make(strategy)), make(strategy)
    for step in (3, 3, 0, 11, 10, 11, 2, 3, 4, 8, 8, 7, 0, 0, 1):
        assert torch.equal(stream.row(step), whole[step])


@every_strategy
def test_changing_a_row_in_place_changes_nothing_later(strategy: ToeplitzStrategy) -> None:
    whole, stream = rows(make(strategy)), make(strategy)
    for step in range(STEPS):
        for _ in range(2):
            row = stream.row(step)
            assert torch.equal(row, whole[step])
            row.mul_(0)


@every_strategy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_are_slices(strategy: ToeplitzStrategy, dtype: torch.dtype) -> None:
    whole = rows(make(strategy, numel=50, dtype=dtype))
    for start, numel in ((0, 7), (7, 20), (27, 23), (50, 0)):
        shard = rows(make(strategy, numel=numel, start=start, dtype=dtype))
        assert torch.equal(shard, whole[:, start : start + numel])


@every_strategy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_chunks_do_not_change_the_bits(
    strategy: ToeplitzStrategy, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows(make(strategy, dtype=dtype))
    monkeypatch.setattr(stream_module, "_CHUNK", 7)
    monkeypatch.setattr(stream_module, "_DEVICE_CHUNK", 10)
    assert torch.equal(rows(make(strategy, dtype=dtype)), whole)


@every_strategy
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_devices_agree_bit_for_bit(strategy: ToeplitzStrategy, dtype: torch.dtype, device: str) -> None:
    there = rows(make(strategy, numel=1001, dtype=dtype, device=device))
    assert there.device.type == device
    assert torch.equal(there.cpu(), rows(make(strategy, numel=1001, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numpy_and_torch_substitute_alike(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(1003, dtype=dtype, generator=generator)
    past = torch.randn(9, 1003, dtype=dtype, generator=generator)
    coefs = torch.randn(9, dtype=torch.float64, generator=generator).tolist()
    by_numpy, by_torch = total.numpy().copy(), total.clone()
    stream_module._add_products(np, by_numpy, list(past.numpy()), coefs)
    stream_module._add_products(torch, by_torch, list(past), coefs)
    assert np.array_equal(by_numpy, by_torch.numpy())


def test_independent_rows_are_the_normals() -> None:
    streamed = rows(make(STRATEGIES["independent"], dtype=torch.float64))
    assert torch.equal(streamed, fresh_normals())


def test_one_band_by_either_stream_is_independent() -> None:
    source = stream_module.NormalSource(key=KEY, stream="gradient", name="weight", numel=33)
    recurrent = rows(RecurrentStream(source, strategy_coefs=[1.0], steps=STEPS))
    convolved = rows(ConvolvedStream(source, noising_coefs=[1.0], steps=STEPS))
    assert torch.equal(recurrent, convolved)
    assert torch.equal(recurrent, fresh_normals().float())


def test_memory() -> None:
    assert make(STRATEGIES["independent"]).memory_bytes == 0
    assert make(STRATEGIES["square root"]).memory_bytes == 0
    assert make(STRATEGIES["five bands"]).memory_bytes == 4 * 33 * 4
    assert make(STRATEGIES["five bands"], dtype=torch.bfloat16).memory_bytes == 4 * 33 * 2


def level_is_right(streamed: torch.Tensor, row_norms: np.ndarray) -> bool:
    """Chi-square of each row's energy over the known variance, and of all rows together."""
    energies = (streamed.double() ** 2).sum(1).numpy() / row_norms**2
    numel = streamed.shape[1]
    tails = [2 * min(stats.chi2.cdf(e, numel), stats.chi2.sf(e, numel)) for e in energies]
    return min(tails) > 1e-5


@every_strategy
def test_rows_have_the_stated_level(strategy: ToeplitzStrategy) -> None:
    streamed = rows(make(strategy, numel=20_000))
    assert level_is_right(streamed, strategy.row_norms())
    for wrong in (0.9, 0.97, 1.03, 1.1):
        assert not level_is_right(wrong * streamed, strategy.row_norms())


def test_prefix_sums_have_the_stated_error() -> None:
    strategy = BandedToeplitz(bands=8).optimize(steps=64)
    sums = rows(make(strategy, numel=20_000, dtype=torch.float64), count=64).cumsum(0)
    assert float((sums**2).mean().sqrt()) == pytest.approx(strategy.mean_error(), rel=0.01)
    assert float((sums[-1] ** 2).mean().sqrt()) == pytest.approx(strategy.max_error(), rel=0.02)


@every_strategy
@pytest.mark.parametrize("step", [-1, STEPS, STEPS + 100])
def test_steps_beyond_the_strategy_are_refused(strategy: ToeplitzStrategy, step: int) -> None:
    with pytest.raises(ValueError, match=f"step={step} .*steps={STEPS}"):
        make(strategy).row(step)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"numel": -1}, "numel=-1"), ({"start": -2}, "start=-2"), ({"dtype": torch.int32}, "dtype=torch.int32")],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(STRATEGIES["five bands"], **arguments)  # type: ignore[arg-type]
