"""What is kept between steps: dithered 16-bit rows leave the noise Gaussian plus something independent of the data."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from dpoptim.kernels import threads as parallel
from dpoptim.noise import MatrixStrategy, NoiseMemory, NormalSource, Strategy, ToeplitzStrategy, normals
from dpoptim.noise.memory import RowMemory
from dpoptim.noise.strategies.buffered import BufferedToeplitzStrategy
from tests.noise.explicit import KEY, fresh_normals, make, rows

STEPS = 8
SHORT = NoiseMemory(bits=16)


def banded_matrix() -> MatrixStrategy:
    diagonals = np.random.default_rng(0).uniform(-0.2, 0.2, size=(4, STEPS))
    diagonals[0] = np.linspace(0.5, 2, STEPS)
    diagonals[1] = np.linspace(0.8, 0.6, STEPS)
    return MatrixStrategy(diagonals=diagonals)


STRATEGIES: dict[str, Strategy] = {
    "toeplitz": ToeplitzStrategy(steps=STEPS, strategy_coefs=(1.0, 0.5, 0.375, 0.3125)),
    "toeplitz, diagonal of 3": ToeplitzStrategy(steps=STEPS, strategy_coefs=(3.0, 1.5, 0.5)),
    "matrix": banded_matrix(),
    "one buffer": BufferedToeplitzStrategy(steps=STEPS, decays=(0.8,), weights=(0.4,)),
}
TWO_BUFFERS = BufferedToeplitzStrategy(steps=STEPS, decays=(0.95, 0.5), weights=(0.1, 0.3))
one_kept_row_a_step = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
every_strategy = pytest.mark.parametrize(
    "strategy", [*STRATEGIES.values(), TWO_BUFFERS], ids=[*STRATEGIES, "two buffers"]
)


def grid_of(stddev: float) -> float:
    """The even grid of 16 bits that spans at least 16 standard deviations, its step a power of two."""
    return 2.0 ** math.ceil(math.log2(16 * stddev / 2**15))


def grid_and_errors(strategy: Strategy, numel: int) -> tuple[float, np.ndarray, np.ndarray]:
    """The grid, the rows y, and the errors e of the kept rows, solved from  Cy - z = -Σ_{i≥1} C[t, t-i]·e_{t-i}."""
    streamed = rows(make(strategy, numel, dtype=torch.float64, memory=SHORT), STEPS)
    matrix = strategy.strategy_matrix()
    residual = matrix @ streamed.numpy() - fresh_normals(STEPS, numel).numpy()
    errors = np.linalg.solve(np.tril(matrix[1:, :-1]), -residual[1:])
    assert np.abs(residual[0]).max() < 1e-12  # the first row is exact
    kept = strategy._buffer_norms[0] if isinstance(strategy, BufferedToeplitzStrategy) else strategy.row_norms().max()
    return grid_of(kept), streamed.numpy()[:-1], errors


def is_dithered(errors: np.ndarray, kept: np.ndarray, grid: float) -> bool:
    """Whether errors [steps, numel] are uniform on a cell of the grid and independent of what was kept, by a
    Kolmogorov-Smirnov test and correlations at 4.5 standard deviations: with the rows, their sizes, their places
    in the cell, the errors of the neighbouring elements and those of the step before.
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


@one_kept_row_a_step
def test_rows_are_off_by_the_errors_of_the_kept_ones_alone(strategy: Strategy) -> None:
    grid, kept, errors = grid_and_errors(strategy, 2000)
    assert 0.49 * grid < np.abs(errors).max() <= grid / 2 * (1 + 1e-9)
    assert grid <= 2**-10 * np.abs(kept).std() * 2  # a few parts in 10,000 of the noise


@one_kept_row_a_step
def test_errors_are_uniform_and_independent_of_the_rows(strategy: Strategy) -> None:
    grid, kept, errors = grid_and_errors(strategy, 30_000)
    assert is_dithered(errors, kept, grid)


def test_rounding_without_dither_is_told_apart() -> None:
    """The same test refuses float32 rows rounded to bfloat16 or float16, rows rounded to the same even grid, and
    the right errors scaled by 3 %."""
    grid, kept, errors = grid_and_errors(STRATEGIES["toeplitz"], 30_000)
    float32 = torch.from_numpy(kept).float()
    for dtype in (torch.bfloat16, torch.float16):
        rounded = (float32.to(dtype).double() - float32.double()).numpy()
        for size in (grid, 2 * float(np.abs(rounded).max()), math.sqrt(12) * float(rounded.std())):
            assert not is_dithered(rounded, float32.double().numpy(), size)
    assert not is_dithered(np.round(kept / grid) * grid - kept, kept, grid)
    assert not is_dithered(1.03 * errors, kept, grid)
    assert not is_dithered(errors + 1e-3 * kept * grid + 0.01 * grid, kept, grid)


def test_float32_rows_are_kept_alike() -> None:
    source = NormalSource.of_tensor(KEY, "weight", numel=30_000)
    row = torch.stack([source.normals(step, dtype=torch.float32) for step in range(6)])
    store, read = RowMemory(source, SHORT, count=1, stddev=1.0, part="ring"), []
    for step in range(6):
        store.write(0, row[step], step=step)
        read.append(store.read(0, step=step).double())
        assert store.read(0, step=step).dtype == torch.float32
    errors = (torch.stack(read) - row.double()).numpy()
    assert np.abs(errors).max() <= grid_of(1.0) / 2 * (1 + 1e-3)
    assert is_dithered(errors, row.double().numpy(), grid_of(1.0))


def test_read_with_another_step_s_dither_is_not_the_row() -> None:
    source = NormalSource.of_tensor(KEY, "weight", numel=1000, dtype=torch.float64)
    row, store = source.normals(0, dtype=torch.float64), RowMemory(source, SHORT, count=2, stddev=1.0, part="ring")
    store.write(0, row, step=5)
    store.write(1, row, step=5)
    errors = [store.read(0, step=5) - row, store.read(1, step=5) - row, store.read(0, step=6) - row]
    assert [float(error.abs().max()) <= grid_of(1.0) / 2 for error in errors] == [True, True, False]
    assert abs(float(torch.corrcoef(torch.stack(errors[:2]))[0, 1])) < 0.15  # each index has a dither of its own


def test_what_lies_beyond_the_grid_is_clamped() -> None:
    source = NormalSource.of_tensor(KEY, "weight", numel=4)
    store = RowMemory(source, SHORT, count=1, stddev=1.0, part="ring")
    store.write(0, torch.tensor([1e6, -1e6, 15.9, -15.9]), step=0)
    found = store.read(0, step=0)
    assert found[:2].abs().max() < 16.01
    torch.testing.assert_close(found[2:], torch.tensor([15.9, -15.9]), rtol=0, atol=grid_of(1.0))


def test_two_buffers_stay_within_their_grids() -> None:
    streamed = rows(make(TWO_BUFFERS, 2000, dtype=torch.float64, memory=SHORT), STEPS)
    residual = torch.from_numpy(TWO_BUFFERS.strategy_matrix()) @ streamed - fresh_normals(STEPS, 2000)
    bounds = np.zeros(STEPS)
    for decay, weight, norm in zip(TWO_BUFFERS.decays, TWO_BUFFERS.weights, TWO_BUFFERS._buffer_norms, strict=True):
        bounds[1:] += weight * np.cumsum(decay ** np.arange(STEPS - 1)) * grid_of(norm) / 2
    found = residual.abs().max(dim=1).values.numpy()
    assert (found <= bounds * (1 + 1e-9) + 1e-13).all()
    assert (found[1:] > 0.3 * bounds[1:]).all()


@every_strategy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory", [NoiseMemory(), SHORT], ids=["32 bits", "16 bits"])
def test_the_same_bits_on_any_road(
    strategy: Strategy, dtype: torch.dtype, memory: NoiseMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows(make(strategy, 50, dtype=dtype, memory=memory), STEPS)
    for restart in (1, 4, STEPS - 1):
        resumed = make(strategy, 50, dtype=dtype, memory=memory)
        for step in range(restart, STEPS):
            assert torch.equal(resumed.row(step), whole[step])
    stream = make(strategy, 50, dtype=dtype, memory=memory)
    for step in (3, 3, 0, 7, 6, 7, 2, 3, 4, 4, 0, 0, 1):
        row = stream.row(step)
        assert torch.equal(row, whole[step])
        row.mul_(0)  # what is kept is not what is handed out
    for start, numel in ((0, 7), (7, 20), (27, 23), (50, 0)):
        shard = rows(make(strategy, numel, start, dtype=dtype, memory=memory), STEPS)
        assert torch.equal(shard, whole[:, start : start + numel])
    for chunk in (1, 7, 16):
        monkeypatch.setattr(parallel, "CHUNK", chunk)
        assert torch.equal(rows(make(strategy, 50, dtype=dtype, memory=memory), STEPS), whole)


@every_strategy
@pytest.mark.parametrize("bits", [32, 16])
def test_rows_made_on_the_host_are_the_same(strategy: Strategy, bits: int) -> None:
    there = make(strategy, memory=NoiseMemory(bits=bits, on_host=True))
    assert torch.equal(rows(there, STEPS), rows(make(strategy, memory=NoiseMemory(bits=bits)), STEPS))
    assert there.memory_bytes == strategy.memory_bytes(33, memory=NoiseMemory(bits=bits))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_strategy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [32, 16])
@pytest.mark.parametrize("on_host", [False, True], ids=["on the device", "on the host"])
def test_a_device_gives_the_same_bits(strategy: Strategy, dtype: torch.dtype, bits: int, on_host: bool) -> None:
    memory = NoiseMemory(bits=bits, on_host=on_host)
    there = rows(make(strategy, 5001, 3, dtype, "cuda", memory), STEPS)
    assert there.device.type == "cuda"
    assert torch.equal(there.cpu(), rows(make(strategy, 5001, 3, dtype, "cpu", NoiseMemory(bits=bits)), STEPS))


@every_strategy
def test_half_the_bits_are_half_the_memory_and_hardly_less_exact(strategy: Strategy) -> None:
    short, long = make(strategy, memory=SHORT), make(strategy)
    assert 2 * short.memory_bytes == long.memory_bytes
    difference = rows(short, STEPS) - rows(long, STEPS)
    assert 0 < float(difference.abs().max()) < 5e-3 * strategy.row_norms().max()


Rounding = Callable[[torch.Tensor], torch.Tensor]


def loss_over_the_stated_one(rounding: Rounding, coefs: tuple[float, ...], numel: int) -> float:
    """‖z' - z‖²/‖CΔ‖², where z' is the noise that explains the output if the data were the neighbour's."""
    z = [normals(KEY, stream="gradient", name="weight", step=step, count=numel) for step in range(STEPS)]

    def past(y: list[torch.Tensor], step: int) -> torch.Tensor:
        """Σ_{i≥1} c_i R(y_{t-i})."""
        total = torch.zeros(numel, dtype=torch.float64)
        for lag in range(1, min(step, len(coefs) - 1) + 1):
            total += coefs[lag] * rounding(y[step - lag])
        return total

    y: list[torch.Tensor] = []
    for step in range(STEPS):
        y.append((z[step] - past(y, step)) / coefs[0])
    seen = [y[0] + 1 / math.sqrt(numel), *y[1:]]  # y' = o - x', which differs by Δ at the first step
    moved = sum(float((coefs[0] * seen[t] + past(seen, t) - z[t]).square().sum()) for t in range(STEPS))
    return moved / sum(coef**2 for coef in coefs)


@pytest.mark.parametrize(
    ("coefs", "at_least"), [((1.0, 0.5, 0.375, 0.3125), 1.3), ((1.0, 0.9, 0.8, 0.7), 1.6)], ids=["root", "slow"]
)
def test_why_rows_are_not_kept_in_bfloat16(coefs: tuple[float, ...], at_least: float) -> None:
    """Plain rounding of kept rows understates ε, the more the more parameters there are.

    The mechanism releases o = x + y, where y_t = (z_t - Σ_{i≥1} c_i R(y_{t-i}))/c_0 and R is what the store rounds.
    Who tries the data x' runs this backwards: y' = o - x', z'_t = c_0 y'_t + Σ_{i≥1} c_i R(y'_{t-i}). Going from y to
    z has a Jacobian of constant determinant, so that the privacy loss is (‖z'‖² - ‖z‖²)/2, whose size ‖z' - z‖ sets.
    With R the identity it is ‖CΔ‖, which the accountant is told. Here Δ has norm 1, spread over 200,000 coordinates:
    1/450 in each, less than bfloat16 can tell at 1. So R(y + Δ) - R(y) is mostly 0 and now and then a whole unit in
    the last place, with a mean square of Δ·unit instead of Δ²: the loss is larger than stated, without bound as
    coordinates are added. In float32 the unit is far below Δ. A secret dither makes the error independent of y,
    which adds noise instead (`test_errors_are_uniform_and_independent_of_the_rows`).
    """
    roundings: dict[str, Rounding] = {
        "exact": lambda row: row,
        "float32": lambda row: row.float().double(),
        "bfloat16": lambda row: row.float().bfloat16().double(),
    }
    found = {name: loss_over_the_stated_one(rounding, coefs, 200_000) for name, rounding in roundings.items()}
    assert found["exact"] == pytest.approx(1.0, rel=1e-9)
    assert found["float32"] == pytest.approx(1.0, rel=0.01)
    assert found["bfloat16"] > at_least
    fewer = loss_over_the_stated_one(roundings["bfloat16"], coefs, 20_000)
    assert fewer < found["bfloat16"]
