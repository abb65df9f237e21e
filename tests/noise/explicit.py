"""Reference values for the tests of strategies, and one table of strategies for all of them."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np
import torch
from hypothesis import strategies as st

from dpoptim.noise import (
    BandedInverse,
    BandedInverseStrategy,
    BandedToeplitz,
    BufferedToeplitz,
    BufferedToeplitzStrategy,
    DecayedSums,
    Independent,
    MatrixStrategy,
    NoiseKey,
    NoiseMemory,
    NoiseStream,
    NormalSource,
    PrefixSums,
    SquareRoot,
    Strategy,
    TensorPart,
    ToeplitzStrategy,
    Workload,
)

KEY = NoiseKey.from_bytes(bytes(range(32)))
STEPS = 12


def random_matrix(steps: int, bands: int, seed: int, *, negative: bool = False) -> MatrixStrategy:
    generator = np.random.default_rng(seed)
    diagonals = generator.uniform(-1 if negative else 0, 1, size=(bands, steps))
    diagonals[0] = generator.uniform(0.5, 2, size=steps)
    return MatrixStrategy(diagonals=diagonals)


STRATEGIES: dict[str, Strategy] = {
    "independent": Independent().optimize(steps=STEPS),
    "twice the identity": ToeplitzStrategy(steps=STEPS, strategy_coefs=(2.0,)),
    "square root": SquareRoot().optimize(steps=STEPS),
    "two bands": BandedToeplitz(bands=2).optimize(steps=STEPS),
    "five bands": BandedToeplitz(bands=5).optimize(steps=STEPS),
    "one band short": BandedToeplitz(bands=STEPS - 1).optimize(steps=STEPS),
    "diagonal of 3": ToeplitzStrategy(steps=STEPS, strategy_coefs=(3.0, 1.5, 0.5)),
    "no buffers": BufferedToeplitzStrategy(steps=STEPS, decays=(), weights=()),
    "one buffer": BufferedToeplitzStrategy(steps=STEPS, decays=(0.8,), weights=(0.4,)),
    "two buffers": BufferedToeplitz(buffers=2).optimize(steps=STEPS),
    "banded inverse": BandedInverse(bands=3).optimize(steps=STEPS),
    "diagonal matrix": random_matrix(STEPS, 1, 0),
    "matrix of four bands": random_matrix(STEPS, 4, 2, negative=True),
    "full matrix": random_matrix(STEPS, STEPS, 4, negative=True),
}
WITH_PAST = {name: strategy for name, strategy in STRATEGIES.items() if strategy.kept_rows}


def matrix_by_recurrence(workload: Workload, steps: int) -> np.ndarray:
    """Return A column by column: the recurrence of the workload's docstring for a gradient of 1 at one step."""
    matrix = np.zeros((steps, steps))
    for column in range(steps):
        first, second = 0.0, 0.0
        for step in range(steps):
            gradient = float(step == column)
            if isinstance(workload, PrefixSums):
                rates = workload.learning_rate
                rate = rates[step] if isinstance(rates, tuple) else rates
                first = workload.momentum * first + gradient
                second = (1 - rate * workload.weight_decay) * second + rate * first
                matrix[step, column] = second
            else:
                first = workload.beta * first + (1 - workload.beta) * gradient
                matrix[step, column] = first / (1 - workload.beta ** (step + 1)) if workload.debiased else first
    return matrix


@lru_cache(maxsize=16)
def _signed_patterns(steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all vectors of -1, 0, 1, the number of their non-zeros and the least distance of two of them."""
    signs = np.array(list(product((-1.0, 0.0, 1.0), repeat=steps)))
    present = signs != 0
    gaps = np.full(len(signs), 1000)  # one participation has no gap
    for lag in range(steps - 1, 0, -1):
        gaps[(present[:, lag:] & present[:, :-lag]).any(axis=1)] = lag
    return signs, present.sum(axis=1), gaps


def brute_force_sensitivity(matrix: np.ndarray, max_participations: int, min_separation: int) -> float:
    """Return the largest ‖Σ ±column‖ over all patterns and signs."""
    signs, counts, gaps = _signed_patterns(len(matrix))
    allowed = signs[(counts <= max_participations) & (gaps >= min_separation)]
    return float(np.linalg.norm(allowed @ matrix.T, axis=1).max())


def products_bound(matrix: np.ndarray, max_participations: int, min_separation: int) -> float:
    """Return the largest sqrt(Σ |G_ij|) over all patterns, where G are the products of columns.

    It bounds ‖Σ_i u_i column_i‖ over all unit vectors u_i, and is attained if G is non-negative.
    """
    signs, counts, gaps = _signed_patterns(len(matrix))
    patterns = np.abs(signs[(counts <= max_participations) & (gaps >= min_separation)])
    return float(np.sqrt(((patterns @ np.abs(matrix.T @ matrix)) * patterns).sum(axis=1).max()))


def scaled_error(
    strategy: Strategy,
    max_participations: int = 1,
    min_separation: int = 1,
    *,
    workload: Workload = PrefixSums(),  # noqa: B008
    objective: str = "mean",
) -> float:
    """Return error times sensitivity, which the specs minimise."""
    error = strategy.max_error(workload) if objective == "max" else strategy.mean_error(workload)
    return error * strategy.sensitivity(max_participations=max_participations, min_separation=min_separation)


def make(
    strategy: Strategy,
    numel: int = 33,
    start: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    memory: NoiseMemory = NoiseMemory(),  # noqa: B008
) -> NoiseStream:
    part = TensorPart(name="weight", numel=numel, start=start)
    return strategy.stream(KEY, [part], stream="gradient", dtype=dtype, device=device, memory=memory)


def rows(stream: NoiseStream, count: int) -> torch.Tensor:
    return torch.stack([stream.row(step) for step in range(count)])


def normals(
    key: NoiseKey,
    *,
    stream: str,
    name: str,
    step: int,
    start: int = 0,
    count: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> torch.Tensor:
    """Return elements [start, start + count) of the normals of a tensor, by the plain functions on every device."""
    source = NormalSource.of_tensor(key, name, numel=count, start=start, stream=stream, dtype=dtype, device=device)
    return source._plain(step, dtype, 0, count)


def fresh_normals(steps: int, numel: int = 33) -> torch.Tensor:
    """Return z as float64 [steps, numel]."""
    return torch.stack(
        [normals(KEY, stream="gradient", name="weight", step=step, count=numel) for step in range(steps)]
    )


@st.composite
def patterns(draw: st.DrawFn, max_steps: int, max_participations: int = 9) -> tuple[int, int, int]:
    """Draw a number of steps, participations and a separation that fit together."""
    steps, min_separation = draw(st.integers(1, max_steps)), draw(st.integers(1, 8))
    return steps, draw(st.integers(1, min(max_participations, (steps - 1) // min_separation + 1))), min_separation


def toeplitz_workloads() -> st.SearchStrategy[Workload]:
    sums = st.builds(
        lambda momentum, decay, rate: PrefixSums(momentum=momentum, weight_decay=decay / rate, learning_rate=rate),
        st.sampled_from([0.0, 0.5, 0.9]) | st.floats(0, 0.99),
        st.just(0.0) | st.floats(0, 0.99),
        st.just(1.0) | st.floats(0.01, 10),
    )
    averages = st.builds(DecayedSums, beta=st.just(0.0) | st.floats(0, 0.999), debiased=st.booleans())
    return st.just(PrefixSums()) | sums | averages


@st.composite
def schedules(draw: st.DrawFn, steps: int) -> PrefixSums:
    rates = draw(st.lists(st.floats(0.01, 10), min_size=steps, max_size=steps))
    decay = draw(st.just(0.0) | st.floats(0, 0.99)) / max(rates)
    return PrefixSums(momentum=draw(st.floats(0, 0.99)), weight_decay=decay, learning_rate=tuple(rates))


def workloads(steps: int) -> st.SearchStrategy[Workload]:
    return toeplitz_workloads() | schedules(steps)


@st.composite
def non_increasing(draw: st.DrawFn, steps: int) -> ToeplitzStrategy:
    ratios = draw(st.lists(st.floats(0, 1), max_size=steps - 1))
    first = draw(st.just(1.0) | st.floats(0.1, 10))
    return ToeplitzStrategy(steps=steps, strategy_coefs=tuple((first * np.cumprod([1.0, *ratios])).tolist()))


@st.composite
def buffered(draw: st.DrawFn, steps: int) -> BufferedToeplitzStrategy:
    count = draw(st.integers(0, 4))
    decays = draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=count, max_size=count))
    shares = draw(st.lists(st.floats(1e-3, 1), min_size=count, max_size=count))
    total = draw(st.floats(0.01, 0.999))
    weights = tuple(total * share / sum(shares) for share in shares)
    return BufferedToeplitzStrategy(steps=steps, decays=tuple(decays), weights=weights)


@st.composite
def banded_inverse(draw: st.DrawFn, steps: int) -> BandedInverseStrategy:
    """Draw coefficients with positive, log-convex, non-increasing prefix sums."""
    bends = np.array(draw(st.lists(st.floats(0, 0.5), max_size=steps - 1)))
    prefix = np.exp(-np.cumsum(np.concatenate([[0.0], np.cumsum(bends[::-1])[::-1]])))
    return BandedInverseStrategy(steps=steps, inverse_coefs=(1.0, *np.diff(prefix).tolist()))


def toeplitz_strategies(steps: int) -> st.SearchStrategy[ToeplitzStrategy]:
    """Draw a Toeplitz strategy of any kind whose sensitivity is known."""
    return non_increasing(steps) | buffered(steps) | banded_inverse(steps)
