"""What the tests of strategies compare with: explicit matrices, all patterns, random strategies, plain streams."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np
import torch
from hypothesis import strategies as st

from dpoptim.noise import (
    DecayedSums,
    NoiseKey,
    NoiseMemory,
    NoiseStream,
    PrefixSums,
    Strategy,
    ToeplitzStrategy,
    Workload,
    normals,
)
from dpoptim.noise.strategies.banded_inverse import BandedInverseStrategy
from dpoptim.noise.strategies.buffered import BufferedToeplitzStrategy

KEY = NoiseKey.from_bytes(bytes(range(32)))
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def matrix_by_recurrence(workload: Workload, steps: int) -> np.ndarray:
    """A, column by column: what the recurrence in the workload's docstring makes of a gradient of 1 at one step."""
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
    """All vectors of -1, 0, 1, with the number of their non-zeros and the least distance of two of them."""
    signs = np.array(list(product((-1.0, 0.0, 1.0), repeat=steps)))
    present = signs != 0
    gaps = np.full(len(signs), 1000)  # of one participation there is none
    for lag in range(steps - 1, 0, -1):
        gaps[(present[:, lag:] & present[:, :-lag]).any(axis=1)] = lag
    return signs, present.sum(axis=1), gaps


def brute_force_sensitivity(matrix: np.ndarray, max_participations: int, min_separation: int) -> float:
    """The largest ‖Σ ±column‖ over all patterns of participation and all signs."""
    signs, counts, gaps = _signed_patterns(len(matrix))
    allowed = signs[(counts <= max_participations) & (gaps >= min_separation)]
    return float(np.linalg.norm(allowed @ matrix.T, axis=1).max())


def products_bound(matrix: np.ndarray, max_participations: int, min_separation: int) -> float:
    """The largest sqrt(Σ |G_ij|) over all patterns, G the products of columns.

    It bounds ‖Σ_i u_i column_i‖ over all unit vectors u_i, and is reached where G is non-negative.
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
    """Error times sensitivity, which the specs minimise."""
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
    return strategy.stream(
        KEY, stream="gradient", name="weight", numel=numel, start=start, dtype=dtype, device=device, memory=memory
    )


def rows(stream: NoiseStream, count: int) -> torch.Tensor:
    return torch.stack([stream.row(step) for step in range(count)])


def fresh_normals(steps: int, numel: int = 33) -> torch.Tensor:
    """z as float64 [steps, numel]."""
    return torch.stack(
        [normals(KEY, stream="gradient", name="weight", step=step, count=numel) for step in range(steps)]
    )


@st.composite
def patterns(draw: st.DrawFn, max_steps: int, max_participations: int = 9) -> tuple[int, int, int]:
    """A number of steps, participations and a separation that fit together."""
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
    """Coefficients of positive, log-convex, non-increasing prefix sums."""
    bends = np.array(draw(st.lists(st.floats(0, 0.5), max_size=steps - 1)))
    prefix = np.exp(-np.cumsum(np.concatenate([[0.0], np.cumsum(bends[::-1])[::-1]])))
    return BandedInverseStrategy(steps=steps, inverse_coefs=(1.0, *np.diff(prefix).tolist()))


def toeplitz_strategies(steps: int) -> st.SearchStrategy[ToeplitzStrategy]:
    """Every kind of Toeplitz strategy whose sensitivity is known."""
    return non_increasing(steps) | buffered(steps) | banded_inverse(steps)
