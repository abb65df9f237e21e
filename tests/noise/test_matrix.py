"""Explicit strategies against dense matrices, brute force over patterns, and Toeplitz twins."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpoptim.noise import (
    BandedToeplitz,
    DecayedSums,
    Independent,
    NoiseKey,
    NoiseMemory,
    NoiseStream,
    PrefixSums,
    SquareRoot,
    ToeplitzStrategy,
    Workload,
    normals,
)
from dpoptim.noise.strategies.matrix import MatrixStrategy, times_banded

KEY = NoiseKey.from_bytes(bytes(range(32)))
STEPS = 12


def random_strategy(steps: int, bands: int, seed: int, *, negative: bool = False) -> MatrixStrategy:
    generator = np.random.default_rng(seed)
    diagonals = generator.uniform(-1 if negative else 0, 1, size=(bands, steps))
    diagonals[0] = generator.uniform(0.5, 2, size=steps)
    return MatrixStrategy(diagonals=diagonals)


STRATEGIES = {
    "identity": MatrixStrategy(diagonals=np.ones((1, STEPS))),
    "diagonal": random_strategy(STEPS, 1, 0),
    "two bands": random_strategy(STEPS, 2, 1),
    "five bands": random_strategy(STEPS, 5, 2, negative=True),
    "one band short": random_strategy(STEPS, STEPS - 1, 3),
    "full": random_strategy(STEPS, STEPS, 4, negative=True),
}
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
shapes = st.integers(1, 9).flatmap(lambda steps: st.tuples(st.just(steps), st.integers(1, steps)))


def as_matrix(strategy: ToeplitzStrategy) -> MatrixStrategy:
    return MatrixStrategy.from_matrix(strategy.strategy_matrix())


def patterns(steps: int, max_participations: int, min_separation: int) -> list[tuple[int, ...]]:
    return [
        pattern
        for size in range(1, max_participations + 1)
        for pattern in combinations(range(steps), size)
        if all(b - a >= min_separation for a, b in pairwise(pattern))
    ]


def largest_by_products(matrix: np.ndarray, max_participations: int, min_separation: int) -> float:
    """The largest sqrt(Σ |G_ij|) over all patterns, G the products of columns: above what can be reached."""
    gram = np.abs(matrix.T @ matrix)
    allowed = patterns(len(matrix), max_participations, min_separation)
    return max(float(np.sqrt(gram[np.ix_(pattern, pattern)].sum())) for pattern in allowed)


def largest_by_signs(matrix: np.ndarray, max_participations: int, min_separation: int) -> float:
    """The largest ‖Σ ±column‖ over all patterns and signs: reached by contributions on one line."""
    return max(
        float(np.linalg.norm(matrix[:, pattern] @ signs))
        for pattern in patterns(len(matrix), max_participations, min_separation)
        for signs in product((1.0, -1.0), repeat=len(pattern))
    )


@given(shape=shapes, seed=st.integers(0, 2**16), negative=st.booleans())
@settings(max_examples=60, deadline=None)
def test_errors_and_norms_are_those_of_the_matrices(shape: tuple[int, int], seed: int, negative: bool) -> None:
    steps, bands = shape
    strategy = random_strategy(steps, bands, seed, negative=negative)
    matrix, inverse = strategy.strategy_matrix(), strategy.noising_matrix()
    assert matrix.shape == inverse.shape == (steps, steps)
    assert (strategy.steps, strategy.bands) == (steps, bands)
    for lag in range(steps):
        expected = strategy.diagonals[lag, : steps - lag] if lag < bands else np.zeros(steps - lag)
        np.testing.assert_array_equal(np.diagonal(matrix, -lag), expected)
    assert not np.triu(matrix, 1).any()
    np.testing.assert_allclose(inverse, np.linalg.inv(matrix), rtol=1e-9, atol=1e-9)
    noise = np.linalg.norm(np.cumsum(inverse, axis=0), axis=1)
    assert strategy.mean_error() == pytest.approx(np.sqrt((noise**2).mean()), rel=1e-10)
    assert strategy.max_error() == pytest.approx(noise.max(), rel=1e-10)
    np.testing.assert_allclose(strategy.row_norms(), np.linalg.norm(inverse, axis=1), rtol=1e-10)
    assert strategy.column_norm == pytest.approx(np.linalg.norm(matrix, axis=0).max(), rel=1e-12)


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    "momentum": lambda steps: PrefixSums(momentum=0.9),
    "schedule": lambda steps: PrefixSums(
        momentum=0.5, weight_decay=0.1, learning_rate=tuple(np.linspace(2, 0.1, steps).tolist())
    ),
    "adam": lambda steps: DecayedSums(beta=0.9),
    "biased": lambda steps: DecayedSums(beta=0.99, debiased=False),
}


@pytest.mark.parametrize("kind", WORKLOADS)
@pytest.mark.parametrize(("steps", "bands"), [(1, 1), (2, 2), (3, 2), (9, 4), (40, 39), (80, 5), (70, 33)])
def test_errors_of_any_workload(steps: int, bands: int, kind: str) -> None:
    workload, strategy = WORKLOADS[kind](steps), random_strategy(steps, bands, 5)
    matrix = strategy.strategy_matrix() + np.eye(steps) * bands  # far from singular
    strategy = MatrixStrategy.from_matrix(matrix)
    noise = np.linalg.norm(workload.matrix(steps) @ np.linalg.inv(matrix), axis=1)
    np.testing.assert_allclose(strategy.squared_errors(workload), noise**2, rtol=1e-9)
    assert strategy.mean_error(workload) == pytest.approx(np.sqrt((noise**2).mean()), rel=1e-10)
    assert strategy.max_error(workload) == pytest.approx(noise.max(), rel=1e-10)
    inverse = workload.inverse_diagonals(steps)
    found = times_banded(torch.from_numpy(strategy.diagonals.copy()), torch.from_numpy(inverse)).numpy()
    explicit = matrix @ np.linalg.inv(workload.matrix(steps))
    assert len(found) == bands + len(inverse) - 1
    for lag in range(steps):
        expected = found[lag, : steps - lag] if lag < len(found) else np.zeros(steps - lag)
        np.testing.assert_allclose(np.diagonal(explicit, -lag), expected, atol=1e-9 * np.abs(explicit).max())


@pytest.mark.parametrize(("steps", "bands"), [(100, 1), (100, 3), (97, 40), (64, 32), (65, 33), (70, 70)])
def test_errors_over_several_blocks(steps: int, bands: int) -> None:
    toeplitz = BandedToeplitz(bands=bands).optimize(steps=steps)
    strategy = as_matrix(toeplitz)
    assert strategy.mean_error() == pytest.approx(toeplitz.mean_error(), rel=1e-11)
    assert strategy.max_error() == pytest.approx(toeplitz.max_error(), rel=1e-11)
    np.testing.assert_allclose(strategy.row_norms(), toeplitz.row_norms(), rtol=1e-11)


@given(
    shape=shapes,
    seed=st.integers(0, 2**16),
    negative=st.booleans(),
    max_participations=st.integers(1, 4),
    min_separation=st.integers(1, 9),
)
@settings(max_examples=250, deadline=None)
def test_sensitivity_is_a_bound_and_exact_where_it_says_so(
    shape: tuple[int, int], seed: int, negative: bool, max_participations: int, min_separation: int
) -> None:
    steps, bands = shape
    pattern = {"max_participations": max_participations, "min_separation": min_separation}
    strategy = random_strategy(steps, bands, seed, negative=negative)
    matrix = strategy.strategy_matrix()
    found, above = strategy.sensitivity(**pattern), largest_by_products(matrix, **pattern)
    assert above * (1 - 1e-12) <= found <= above * 1.5  # a bound, and not a loose one
    if max_participations <= 2 or min_separation >= bands:
        assert strategy.is_exact_for(**pattern)
    if strategy.is_exact_for(**pattern):
        assert found == pytest.approx(largest_by_signs(matrix, **pattern), rel=1e-12)
    else:
        assert not strategy.sensitivity_is_exact


def test_an_upper_bound_is_not_called_exact() -> None:
    """Products of columns +, +, -: no signs make all three columns add up."""
    matrix = np.array([[1.0, 0.0, 0.0], [2.0, 1.0, 0.0], [-1.0, 1.0, 1.0]])
    strategy, pattern = MatrixStrategy.from_matrix(matrix), {"max_participations": 3, "min_separation": 1}
    assert not strategy.is_exact_for(**pattern)
    assert not strategy.sensitivity_is_exact
    assert strategy.sensitivity(**pattern) > 1.05 * largest_by_signs(matrix, **pattern)


@given(
    seed=st.integers(0, 2**16),
    steps=st.integers(1, 10),
    max_participations=st.integers(1, 5),
    min_separation=st.integers(1, 5),
)
@settings(max_examples=80, deadline=None)
def test_sensitivity_of_a_toeplitz_matrix(seed: int, steps: int, max_participations: int, min_separation: int) -> None:
    """Earlier and closer is worse there, so the dynamic programme finds the exact value, however they overlap."""
    coefs = np.cumprod([1.0, *np.random.default_rng(seed).uniform(0, 1, size=steps - 1)])
    pattern = {
        "max_participations": min(max_participations, (steps - 1) // min_separation + 1),
        "min_separation": min_separation,
    }
    toeplitz = ToeplitzStrategy(steps=steps, strategy_coefs=tuple(coefs.tolist()))
    strategy = as_matrix(toeplitz)
    assert strategy.sensitivity_is_exact
    assert strategy.is_exact_for(**pattern)
    assert strategy.sensitivity(**pattern) == pytest.approx(toeplitz.sensitivity(**pattern), rel=1e-12)


def test_sensitivity_at_length() -> None:
    root = SquareRoot().optimize(steps=500)
    strategy = as_matrix(root)
    for pattern in ({"max_participations": 3, "min_separation": 128}, {"max_participations": 20, "min_separation": 7}):
        assert strategy.sensitivity(**pattern) == pytest.approx(root.sensitivity(**pattern), rel=1e-12)


def test_sensitivity_takes_the_longest_columns_that_are_allowed() -> None:
    """Squared column norms 1, 9, 16, 9, 1: with two at separation 2, both nines beat sixteen and one."""
    strategy = MatrixStrategy(diagonals=np.array([[1.0, 3.0, 4.0, 3.0, 1.0]]))
    assert strategy.sensitivity(max_participations=2, min_separation=2) ** 2 == pytest.approx(18)
    assert strategy.sensitivity(max_participations=2, min_separation=3) ** 2 == pytest.approx(16)
    assert strategy.sensitivity(max_participations=1, min_separation=3) ** 2 == pytest.approx(16)
    assert strategy.sensitivity(max_participations=5, min_separation=1) ** 2 == pytest.approx(36)
    assert strategy.sensitivity_is_exact


@pytest.mark.parametrize(
    ("max_participations", "min_separation", "message"),
    [(0, 1, "max_participations=0"), (1, 0, "min_separation=0")],
)
def test_patterns_that_cannot_be_are_refused(max_participations: int, min_separation: int, message: str) -> None:
    strategy = STRATEGIES["five bands"]
    for ask in (strategy.sensitivity, strategy.is_exact_for):
        with pytest.raises(ValueError, match=message):
            ask(max_participations=max_participations, min_separation=min_separation)


def make(
    strategy: MatrixStrategy | ToeplitzStrategy,
    dtype: torch.dtype = torch.float32,
    numel: int = 33,
    start: int = 0,
    bits: int = 32,
) -> NoiseStream:
    named = {"stream": "gradient", "name": "weight"}
    return strategy.stream(KEY, **named, numel=numel, start=start, dtype=dtype, memory=NoiseMemory(bits=bits))


def rows(stream: NoiseStream, count: int = STEPS) -> torch.Tensor:
    return torch.stack([stream.row(step) for step in range(count)])


@every_strategy
def test_strategy_times_rows_gives_back_the_normals(strategy: MatrixStrategy) -> None:
    fresh = torch.stack([normals(KEY, stream="gradient", name="weight", step=step, count=33) for step in range(STEPS)])
    streamed = rows(make(strategy, torch.float64))
    back = torch.from_numpy(strategy.strategy_matrix()) @ streamed
    torch.testing.assert_close(back, fresh, rtol=0, atol=1e-10)


@every_strategy
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 32), (torch.float64, 32), (torch.float32, 16)])
def test_any_order_of_steps_gives_the_same_bits(strategy: MatrixStrategy, dtype: torch.dtype, bits: int) -> None:
    whole = rows(make(strategy, dtype, bits=bits))
    for restart in (1, 4, STEPS - 1):
        resumed = make(strategy, dtype, bits=bits)
        for step in range(restart, STEPS):
            assert torch.equal(resumed.row(step), whole[step])
    stream = make(strategy, dtype, bits=bits)
    for step in (3, 3, 0, 11, 10, 11, 2, 3, 4, 8, 8, 7, 0, 0, 1):
        row = stream.row(step)
        assert torch.equal(row, whole[step])
        row.mul_(0)


@every_strategy
def test_shards_are_slices(strategy: MatrixStrategy) -> None:
    whole = rows(make(strategy, numel=50))
    for start, numel in ((0, 7), (7, 43), (50, 0)):
        assert torch.equal(rows(make(strategy, numel=numel, start=start)), whole[:, start : start + numel])


@pytest.mark.parametrize("bands", [1, 2, 5, STEPS - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_toeplitz_matrix_streams_the_bits_of_its_twin(bands: int, dtype: torch.dtype) -> None:
    toeplitz = BandedToeplitz(bands=bands).optimize(steps=STEPS)
    assert torch.equal(rows(make(as_matrix(toeplitz), dtype)), rows(make(toeplitz, dtype)))


def test_memory() -> None:
    assert make(STRATEGIES["identity"]).memory_bytes == 0
    assert make(STRATEGIES["full"]).memory_bytes == 0
    assert make(STRATEGIES["five bands"]).memory_bytes == 4 * 33 * 4
    assert make(STRATEGIES["five bands"], bits=16).memory_bytes == 4 * 33 * 2


def level_is_right(streamed: torch.Tensor, row_norms: np.ndarray) -> bool:
    energies = (streamed.double() ** 2).sum(1).numpy() / row_norms**2
    numel = streamed.shape[1]
    return min(2 * min(stats.chi2.cdf(e, numel), stats.chi2.sf(e, numel)) for e in energies) > 1e-5


@every_strategy
def test_rows_have_the_stated_level(strategy: MatrixStrategy) -> None:
    streamed = rows(make(strategy, numel=20_000))
    assert level_is_right(streamed, strategy.row_norms())
    for wrong in (0.9, 0.97, 1.03, 1.1):
        assert not level_is_right(wrong * streamed, strategy.row_norms())


@every_strategy
@pytest.mark.parametrize("step", [-1, STEPS])
def test_steps_beyond_the_strategy_are_refused(strategy: MatrixStrategy, step: int) -> None:
    with pytest.raises(ValueError, match=f"step={step} .*steps={STEPS}"):
        make(strategy).row(step)


def test_strategies_are_values() -> None:
    a = MatrixStrategy(diagonals=np.array([[1, 2, 1], [0.5, -0.0, 7.0], [0, 8.0, 9.0]]))
    b = MatrixStrategy.from_matrix(np.array([[1, 0, 0], [0.5, 2, 0], [0, 0, 1]]))
    assert a == b
    assert hash(a) == hash(b)
    assert a.bands == 2
    assert a != MatrixStrategy.from_matrix(np.array([[1, 0, 0], [0.5, 2, 0], [0, 0.1, 1]]))
    assert a != Independent().optimize(steps=3)
    assert repr(a) == "MatrixStrategy(steps=3, bands=2)"
    with pytest.raises(ValueError, match="read-only"):
        a.diagonals[0, 0] = 2.0
    given = np.ones((1, 3))
    strategy = MatrixStrategy(diagonals=given)
    given[0, 0] = 5.0
    assert strategy.diagonals[0, 0] == 1.0
    a.noising_matrix()[0, 0] = 7.0
    assert a.noising_matrix()[0, 0] == 1.0


@pytest.mark.parametrize(
    ("diagonals", "message"),
    [
        ([[1.0, 0.0]], "diagonals.*positive"),
        ([[1.0, -1.0]], "diagonals.*positive"),
        ([[1.0, np.nan]], "diagonals must be finite"),
        ([[1.0], [1.0]], r"diagonals has shape \(2, 1\)"),
        (np.ones((1, 0)), "diagonals has shape"),
        (np.ones((1, 2, 2)), "diagonals has shape"),
    ],
)
def test_bad_diagonals_are_named(diagonals: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MatrixStrategy(diagonals=diagonals)


@pytest.mark.parametrize("matrix", [np.ones((2, 3)), np.ones(3), np.ones((2, 2)), np.zeros((0, 0))])
def test_bad_matrices_are_named(matrix: np.ndarray) -> None:
    with pytest.raises(ValueError, match="matrix has"):
        MatrixStrategy.from_matrix(matrix)
