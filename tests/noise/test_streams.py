"""Streamed rows are the rows of C⁻¹z, with the same bits in any order, shard or chunk, and dithered memory is safe."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from dpoptim.kernels import threads
from dpoptim.kernels.inverse_root import LazyInverseRoot
from dpoptim.noise import (
    BandedToeplitz,
    BufferedToeplitzStrategy,
    ConvolvedStream,
    MatrixStrategy,
    NoiseMemory,
    NormalSource,
    RecurrentStream,
    Strategy,
    TensorPart,
    ToeplitzStrategy,
)
from dpoptim.noise.streams import RowMemory, add_product
from tests.noise.explicit import KEY, STEPS, STRATEGIES, WITH_PAST, fresh_normals, make, normals, rows

normals_module = importlib.import_module("dpoptim.noise.normals")
SHORT = NoiseMemory(bits=16)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
# Strategies without past do not use `bits`; the others see every dtype and every number of bits.
SETTINGS = [(name, torch.float32, 32) for name in STRATEGIES] + [
    (name, dtype, 16) for name, dtype in zip(WITH_PAST, [torch.float32, torch.float64] * len(WITH_PAST), strict=False)
]
SETTINGS += [(name, torch.float64, 32) for name in ("square root", "five bands", "two buffers", "matrix of four bands")]


@every_strategy
def test_rows_are_those_of_the_noising_matrix(strategy: Strategy) -> None:
    streamed, z = rows(make(strategy, dtype=torch.float64), STEPS), fresh_normals(STEPS)
    torch.testing.assert_close(torch.from_numpy(strategy.noising_matrix()) @ z, streamed, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.from_numpy(strategy.strategy_matrix()) @ streamed, z, rtol=0, atol=1e-10)
    narrow = rows(make(strategy), STEPS)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), streamed, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "dtype", "bits"), SETTINGS)
def test_rows_have_the_same_bits_on_every_path(
    name: str, dtype: torch.dtype, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, memory = STRATEGIES[name], NoiseMemory(bits=bits)

    def stream(numel: int = 50, start: int = 0, memory: NoiseMemory = memory):
        return make(strategy, numel, start, dtype, memory=memory)

    whole = rows(stream(), STEPS)
    for restart in (1, 4, STEPS - 1):
        resumed = stream()
        for step in range(restart, STEPS):
            assert torch.equal(resumed.row(step), whole[step])
    jumping = stream()
    for step in (3, 3, 0, 11, 10, 11, 2, 3, 4, 8, 8, 7, 0, 0, 1):
        row = jumping.row(step)
        assert torch.equal(row, whole[step])
        row.mul_(0)  # changing a returned row must not change later ones
    for start, numel in ((0, 7), (7, 20), (27, 23), (50, 0)):
        assert torch.equal(rows(stream(numel, start), STEPS), whole[:, start : start + numel])
    host = stream(memory=NoiseMemory(bits=bits, on_host=True))
    assert torch.equal(rows(host, STEPS), whole)
    monkeypatch.setattr(threads, "CHUNK", 7)
    monkeypatch.setattr(normals_module, "_DEVICE_CHUNK", 10)
    assert torch.equal(rows(stream(), STEPS), whole)


@every_strategy
@pytest.mark.parametrize("scaled", [False, True])
def test_a_row_is_added_divided_by_the_scale(strategy: Strategy, scaled: bool) -> None:
    parts = [TensorPart(name="a", numel=7), TensorPart(name="b", numel=5)]
    stream = strategy.stream(KEY, parts, stream="gradient", dtype=torch.float64)
    row, sums = stream.row(3).clone(), torch.arange(12.0, dtype=torch.float64)
    lazy = LazyInverseRoot(torch.full((5,), 4.0, dtype=torch.float64), 0.5, 1.0, 2.0)
    stored = torch.full((7,), 0.5, dtype=torch.float64)
    scale: list[Tensor | LazyInverseRoot] | None = [stored, lazy] if scaled else None
    divided_by = torch.cat([torch.full((7,), 0.5), torch.full((5,), 0.25)]).double() if scaled else 1.0
    expected = (sums + 0.3 * row / divided_by) / 8
    stream.add_to(sums, 3, stddev=0.3, scale=scale, divisor=8)
    torch.testing.assert_close(sums, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("name", ["independent", "square root", "five bands", "two buffers", "full matrix"])
def test_concatenated_tensors_get_the_noise_they_get_alone(name: str, bits: int) -> None:
    strategy, memory = STRATEGIES[name], NoiseMemory(bits=bits)
    parts = [TensorPart(name="a", numel=33), TensorPart(name="none", numel=0), TensorPart(name="b", numel=70, start=5)]
    whole = strategy.stream(KEY, parts, stream="gradient", memory=memory)
    alone = [strategy.stream(KEY, [part], stream="gradient", memory=memory) for part in parts]
    for step in range(STEPS):
        assert torch.equal(whole.row(step), torch.cat([stream.row(step) for stream in alone]))
    assert whole.memory_bytes == sum(stream.memory_bytes for stream in alone)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("on_host", [False, True], ids=["on the device", "on the host"])
@pytest.mark.parametrize(("name", "dtype", "bits"), SETTINGS)
def test_a_device_gives_the_same_bits(name: str, dtype: torch.dtype, bits: int, on_host: bool) -> None:
    strategy, memory = STRATEGIES[name], NoiseMemory(bits=bits, on_host=on_host)
    there = rows(make(strategy, 5001, 3, dtype, "cuda", memory), STEPS)
    assert there.device.type == "cuda"
    assert torch.equal(there.cpu(), rows(make(strategy, 5001, 3, dtype, "cpu", NoiseMemory(bits=bits)), STEPS))


@every_dtype
def test_numpy_and_torch_add_products_alike(dtype: torch.dtype) -> None:
    """The CPU uses numpy and a device uses torch: a fused multiply-add would round differently."""
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(1003, dtype=dtype, generator=generator)
    past = torch.randn(9, 1003, dtype=dtype, generator=generator)
    coefs = torch.randn(9, dtype=torch.float64, generator=generator).tolist()
    expected = total.clone()
    for row, coef in zip(past, coefs, strict=True):
        expected += torch.mul(row, coef)
        add_product(total, row, coef, torch.empty_like(row))
    assert torch.equal(total, expected)


def test_one_band_is_independent_in_either_stream() -> None:
    source = NormalSource.of_tensor(KEY, "weight", numel=33)
    recurrent = RecurrentStream(source, strategy_row=lambda step: [1.0], bands=1, steps=STEPS, row_norm=1.0)
    convolved = ConvolvedStream(source, noising_row=lambda step: [1.0], steps=STEPS)
    for stream in (recurrent, convolved, make(STRATEGIES["independent"]), make(STRATEGIES["no buffers"])):
        assert torch.equal(rows(stream, STEPS), fresh_normals(STEPS).float())


def test_streams_and_names_have_independent_noise() -> None:
    strategy = STRATEGIES["five bands"]
    made = [
        rows(strategy.stream(KEY, [TensorPart(name=name, numel=2000)], stream=stream, dtype=torch.float64), STEPS)
        for stream in ("gradient", "square")
        for name in ("weight", "bias")
    ]
    for index, one in enumerate(made):
        for other in made[:index]:
            correlation = float((one * other).sum() / (one.norm() * other.norm()))
            assert abs(correlation) < 5 / np.sqrt(2000)


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
    for wrong in (0.97, 1.03):
        assert not level_is_right(wrong * streamed, strategy.row_norms())


def test_prefix_sums_have_the_stated_error() -> None:
    strategy = BandedToeplitz(bands=8).optimize(steps=64)
    sums = rows(make(strategy, numel=20_000, dtype=torch.float64), 64).cumsum(0)
    assert float((sums**2).mean().sqrt()) == pytest.approx(strategy.mean_error(), rel=0.01)
    assert float((sums[-1] ** 2).mean().sqrt()) == pytest.approx(strategy.max_error(), rel=0.02)


@pytest.mark.parametrize("name", ["independent", "five bands", "two buffers", "full matrix"])
def test_bad_steps_and_tensors_are_refused(name: str) -> None:
    for step in (-1, STEPS):
        with pytest.raises(ValueError, match=rf"step in \[0, {STEPS}\), got {step}"):
            make(STRATEGIES[name]).row(step)
    for dtype in (torch.bfloat16, torch.float16, torch.int32):
        with pytest.raises(ValueError, match=f"{dtype} would reveal"):
            make(STRATEGIES[name], dtype=dtype)
    for arguments, named in (((-1, 0), "numel"), ((3, -2), "start")):
        with pytest.raises(ValueError, match=named):
            make(STRATEGIES[name], *arguments)


@pytest.mark.parametrize("after_the_write", [False, True])
@pytest.mark.parametrize(("name", "bits"), [("five bands", 16), ("matrix of four bands", 32), ("two buffers", 16)])
def test_an_interrupted_row_is_made_again(name, bits, after_the_write, monkeypatch):
    """Out of memory or Ctrl-C while the past is written: noise on a half-written past would be too small."""

    def made():
        return make(STRATEGIES[name], memory=NoiseMemory(bits=bits))

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


# Dithered rows of 16 bits: the noise stays Gaussian plus something independent of the data.


def matrix_with_past() -> MatrixStrategy:
    diagonals = np.random.default_rng(0).uniform(-0.2, 0.2, size=(4, STEPS))
    diagonals[0] = np.linspace(0.5, 2, STEPS)
    diagonals[1] = np.linspace(0.8, 0.6, STEPS)
    return MatrixStrategy(diagonals=diagonals)


DITHERED: dict[str, Strategy] = {
    "toeplitz": ToeplitzStrategy(steps=STEPS, strategy_coefs=(1.0, 0.5, 0.375, 0.3125)),
    "diagonal of 3": STRATEGIES["diagonal of 3"],
    "matrix": matrix_with_past(),
    "one buffer": STRATEGIES["one buffer"],
}


def grid_of(stddev: float) -> float:
    """Return the 16-bit grid that spans at least 16 standard deviations, a power of two."""
    return 2.0 ** math.ceil(math.log2(16 * stddev / 2**15))


def buffer_norm(strategy: BufferedToeplitzStrategy, decay: float) -> float:
    """Return the largest standard deviation of a buffer: of the rows of D·C⁻¹, where D are decaying sums."""
    lags = np.arange(strategy.steps)[:, None] - np.arange(strategy.steps)
    sums = np.where(lags >= 0, decay ** np.maximum(lags, 0), 0.0) @ strategy.noising_matrix()
    return float(np.linalg.norm(sums, axis=1).max())


def grid_and_errors(strategy: Strategy, numel: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the grid, the rows y, and the errors e of stored rows, solved from Cy - z = -Σ_{i≥1} C[t, t-i]·e_{t-i}."""
    streamed = rows(make(strategy, numel, dtype=torch.float64, memory=SHORT), STEPS)
    matrix = strategy.strategy_matrix()
    residual = matrix @ streamed.numpy() - fresh_normals(STEPS, numel).numpy()
    errors = np.linalg.solve(np.tril(matrix[1:, :-1]), -residual[1:])
    assert np.abs(residual[0]).max() < 1e-12  # the first row is exact
    if isinstance(strategy, BufferedToeplitzStrategy):
        return grid_of(buffer_norm(strategy, strategy.decays[0])), streamed.numpy()[:-1], errors
    return grid_of(strategy.row_norms().max()), streamed.numpy()[:-1], errors


def is_dithered(errors: np.ndarray, kept: np.ndarray, grid: float) -> bool:
    """Test whether errors [steps, numel] are uniform on a grid cell and independent of the stored values.

    A Kolmogorov-Smirnov test, and correlations at 4.5 standard deviations with the rows, their sizes, their places in
    the cell, the errors of neighbouring elements and those of the step before.
    """
    unit = errors / grid
    place = (kept / grid + 0.5) % 1 - 0.5
    pairs = [
        (unit, kept),
        (unit, np.abs(kept)),
        (np.abs(unit), np.abs(kept)),
        (unit, place),
        (np.abs(unit), np.abs(place)),
        (unit[:, 1:], unit[:, :-1]),
        (unit[1:], unit[:-1]),
        (unit[:-1], kept[1:]),
    ]
    uniform = stats.kstest(unit.ravel(), stats.uniform(-0.5, 1).cdf).pvalue > 1e-4
    uncorrelated = [abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * math.sqrt(a.size) < 4.5 for a, b in pairs]
    return bool(uniform) and all(uncorrelated)


@pytest.mark.parametrize("name", DITHERED)
def test_errors_of_stored_rows_are_uniform_and_independent(name: str) -> None:
    grid, kept, errors = grid_and_errors(DITHERED[name], 20_000)
    assert 0.49 * grid < np.abs(errors).max() <= grid / 2 * (1 + 1e-9)
    assert grid <= 2**-10 * np.abs(kept).std() * 2  # a few parts in 10,000 of the noise
    assert is_dithered(errors, kept, grid)


def test_rounding_without_dither_is_detected() -> None:
    """The same test rejects rows rounded to bfloat16, float16 or the even grid, and errors that are 3 % too large."""
    grid, kept, errors = grid_and_errors(DITHERED["toeplitz"], 20_000)
    float32 = torch.from_numpy(kept).float()
    for dtype in (torch.bfloat16, torch.float16):
        rounded = (float32.to(dtype).double() - float32.double()).numpy()
        for size in (grid, 2 * float(np.abs(rounded).max()), math.sqrt(12) * float(rounded.std())):
            assert not is_dithered(rounded, float32.double().numpy(), size)
    assert not is_dithered(np.round(kept / grid) * grid - kept, kept, grid)
    assert not is_dithered(1.03 * errors, kept, grid)
    assert not is_dithered(errors + 1e-3 * kept * grid + 0.01 * grid, kept, grid)


def test_float32_rows_are_dithered_too() -> None:
    source = NormalSource.of_tensor(KEY, "weight", numel=30_000)
    row = torch.stack([source.normals(step, dtype=torch.float32) for step in range(6)])
    store, read = RowMemory(source, SHORT, count=1, stddev=1.0, part="ring"), []
    for step in range(6):
        store.write(row[step], step=step)
        read.append(store.read(step=step).double())
        assert store.read(step=step).dtype == torch.float32
    errors = (torch.stack(read) - row.double()).numpy()
    assert np.abs(errors).max() <= grid_of(1.0) / 2 * (1 + 1e-3)
    assert is_dithered(errors, row.double().numpy(), grid_of(1.0))


def test_each_step_has_its_own_dither() -> None:
    source = NormalSource.of_tensor(KEY, "weight", numel=1000, dtype=torch.float64)
    row, store = source.normals(0, dtype=torch.float64), RowMemory(source, SHORT, count=2, stddev=1.0, part="ring")
    store.write(row, step=5)
    store.write(row, step=6)
    errors = [store.read(step=5) - row, store.read(step=6) - row, store.read(step=7) - row]
    assert [float(error.abs().max()) <= grid_of(1.0) / 2 for error in errors] == [True, True, False]
    assert abs(float(torch.corrcoef(torch.stack(errors[:2]))[0, 1])) < 0.15


def test_values_beyond_the_grid_are_clamped() -> None:
    source = NormalSource.of_tensor(KEY, "weight", numel=4)
    store = RowMemory(source, SHORT, count=1, stddev=1.0, part="ring")
    store.write(torch.tensor([1e6, -1e6, 15.9, -15.9]), step=0)
    found = store.read(step=0)
    assert found[:2].abs().max() < 16.01
    torch.testing.assert_close(found[2:], torch.tensor([15.9, -15.9]), rtol=0, atol=grid_of(1.0))


def test_several_buffers_stay_within_their_grids() -> None:
    strategy = BufferedToeplitzStrategy(steps=STEPS, decays=(0.95, 0.5), weights=(0.1, 0.3))
    streamed = rows(make(strategy, 2000, dtype=torch.float64, memory=SHORT), STEPS)
    residual = torch.from_numpy(strategy.strategy_matrix()) @ streamed - fresh_normals(STEPS, 2000)
    bounds = np.zeros(STEPS)
    for decay, weight in zip(strategy.decays, strategy.weights, strict=True):
        grid = grid_of(buffer_norm(strategy, decay))
        bounds[1:] += weight * np.cumsum(decay ** np.arange(STEPS - 1)) * grid / 2
    found = residual.abs().max(dim=1).values.numpy()
    assert (found <= bounds * (1 + 1e-9) + 1e-13).all()
    assert (found[1:] > 0.2 * bounds[1:]).all()


Rounding = Callable[[torch.Tensor], torch.Tensor]


def loss_over_the_stated_one(rounding: Rounding, coefs: tuple[float, ...], numel: int, steps: int = 8) -> float:
    """Return ‖z' - z‖²/‖CΔ‖², where z' is the noise that explains the output under the neighbour's data."""
    z = [normals(KEY, stream="gradient", name="weight", step=step, count=numel) for step in range(steps)]

    def past(y: list[torch.Tensor], step: int) -> torch.Tensor:
        """Return Σ_{i≥1} c_i R(y_{t-i})."""
        total = torch.zeros(numel, dtype=torch.float64)
        for lag in range(1, min(step, len(coefs) - 1) + 1):
            total += coefs[lag] * rounding(y[step - lag])
        return total

    y: list[torch.Tensor] = []
    for step in range(steps):
        y.append((z[step] - past(y, step)) / coefs[0])
    seen = [y[0] + 1 / math.sqrt(numel), *y[1:]]  # y' = o - x' differs by Δ at the first step
    moved = sum(float((coefs[0] * seen[t] + past(seen, t) - z[t]).square().sum()) for t in range(steps))
    return moved / sum(coef**2 for coef in coefs)


def test_rows_stored_in_bfloat16_would_understate_epsilon() -> None:
    """Plain rounding of stored rows understates ε, the more so the more parameters there are.

    The mechanism releases o = x + y, where y_t = (z_t - Σ_{i≥1} c_i R(y_{t-i}))/c_0 and R rounds. An adversary who
    tries the data x' runs this backwards: y' = o - x', z'_t = c_0 y'_t + Σ_{i≥1} c_i R(y'_{t-i}). The map from y to z
    has a Jacobian of constant determinant, so the privacy loss is (‖z'‖² - ‖z‖²)/2, whose size depends on ‖z' - z‖. If
    R is the identity, that is ‖CΔ‖, as the accountant assumes. Here Δ has norm 1 over 200,000 coordinates: 1/450 in
    each, less than bfloat16 can represent next to 1. So R(y + Δ) - R(y) is mostly 0 and sometimes a whole unit, with
    mean square Δ·unit instead of Δ². In float32 the unit is far below Δ. A secret dither makes the error independent
    of y, which only adds noise.
    """
    coefs = (1.0, 0.9, 0.8, 0.7)
    roundings: dict[str, Rounding] = {
        "exact": lambda row: row,
        "float32": lambda row: row.float().double(),
        "bfloat16": lambda row: row.float().bfloat16().double(),
    }
    found = {name: loss_over_the_stated_one(rounding, coefs, 200_000) for name, rounding in roundings.items()}
    assert found["exact"] == pytest.approx(1.0, rel=1e-9)
    assert found["float32"] == pytest.approx(1.0, rel=0.01)
    assert found["bfloat16"] > 1.6
    assert loss_over_the_stated_one(roundings["bfloat16"], coefs, 20_000) < found["bfloat16"]
