"""Strategies of every kind: numbers against explicit matrices and brute force, costs against streams, refusals."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpoptim.noise import (
    Banded,
    BandedInverse,
    BandedInverseStrategy,
    BandedToeplitz,
    BufferedToeplitz,
    BufferedToeplitzStrategy,
    DecayedSums,
    Dense,
    Independent,
    MatrixStrategy,
    NoiseMemory,
    NormalSource,
    SquareRoot,
    Strategy,
    StrategySpec,
    ToeplitzStrategy,
    Workload,
)
from dpoptim.noise.search.banded_inverse import inverse_sqrt_series
from dpoptim.noise.search.objective import workload_matrix
from dpoptim.noise.strategies.matrix import times_banded
from tests.noise.explicit import (
    STRATEGIES,
    brute_force_sensitivity,
    fresh_normals,
    make,
    matrix_by_recurrence,
    patterns,
    products_bound,
    random_matrix,
    rows,
    toeplitz_strategies,
    workloads,
)

NAN, INF = math.nan, math.inf


def check_sensitivity(strategy: Strategy, max_participations: int, min_separation: int) -> None:
    """Exact where it claims to be, and a tight bound elsewhere."""
    pattern = {"max_participations": max_participations, "min_separation": min_separation}
    matrix = strategy.strategy_matrix()
    found, above = strategy.sensitivity(**pattern), products_bound(matrix, **pattern)
    assert above * (1 - 1e-11) <= found <= above * 1.5
    if isinstance(strategy, ToeplitzStrategy):
        assert strategy.sensitivity_is_exact
    elif max_participations <= 2 or min_separation >= strategy.bands:
        assert strategy.is_exact_for(**pattern)
    if strategy.is_exact_for(**pattern):
        assert found == pytest.approx(brute_force_sensitivity(matrix, **pattern), rel=1e-11)
    else:
        assert not strategy.sensitivity_is_exact
    assert strategy.column_norm == pytest.approx(np.linalg.norm(matrix, axis=0).max(), rel=1e-12)


def check_errors(strategy: Strategy, workload: Workload) -> None:
    steps, matrix, inverse = strategy.steps, strategy.strategy_matrix(), strategy.noising_matrix()
    assert matrix.shape == inverse.shape == (steps, steps)
    assert not np.triu(matrix, 1).any()
    assert not np.tril(matrix, -strategy.bands).any()
    np.testing.assert_allclose(matrix @ inverse, np.eye(steps), atol=1e-9)
    np.testing.assert_allclose(strategy.row_norms(), np.linalg.norm(inverse, axis=1), rtol=1e-9)
    noise = matrix_by_recurrence(workload, steps) @ inverse
    squares = (noise**2).sum(axis=1)
    np.testing.assert_allclose(strategy.squared_errors(workload), squares, rtol=1e-8, atol=1e-12 * squares.max())
    assert strategy.mean_error(workload) == pytest.approx(np.sqrt(squares.mean()), rel=1e-9)
    assert strategy.max_error(workload) == pytest.approx(np.sqrt(squares.max()), rel=1e-9)


def check_costs(strategy: Strategy) -> None:
    """The stated memory and normals, against streams and the calls that they make."""
    for memory in (NoiseMemory(), NoiseMemory(bits=16), NoiseMemory(on_host=True)):
        streams = [make(strategy, numel, memory=memory) for numel in (0, 7, 30)]
        kept = sum(stream.memory_bytes for stream in streams)
        assert strategy.memory_bytes(37, memory=memory) == kept == strategy.kept_rows * 37 * memory.bits // 8
    calls = 0

    def counted(self: NormalSource, step: int, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return original(self, step, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        original = NormalSource.normals
        patch.setattr(NormalSource, "normals", counted)
        rows(make(strategy, 3), strategy.steps)
    assert calls / strategy.steps == pytest.approx(strategy.normal_rows, rel=1e-12)


@st.composite
def matrices(draw: st.DrawFn, steps: int) -> MatrixStrategy:
    bands = draw(st.integers(1, steps))
    return random_matrix(steps, bands, draw(st.integers(0, 2**16)), negative=draw(st.booleans()))


@st.composite
def optimized(draw: st.DrawFn, steps: int, max_participations: int, min_separation: int) -> Strategy:
    """Draw a strategy optimized for a random workload, with few parameters so that the search is short."""
    workload, bands = draw(workloads(steps)), draw(st.integers(1, min(steps, 4)))
    specs: list[StrategySpec] = [
        Independent(),
        SquareRoot(),
        BandedToeplitz(bands=bands, workload=workload),
        BufferedToeplitz(buffers=bands, workload=workload),
        BandedInverse(bands=bands, workload=workload),
        BandedInverse(bands=bands, optimized=False),
    ]
    spec = draw(st.sampled_from(specs))
    return spec.optimize(steps=steps, max_participations=max_participations, min_separation=min_separation)


@given(data=st.data(), pattern=patterns(9))
@settings(max_examples=150, deadline=None)
def test_random_strategies(data: st.DataObject, pattern: tuple[int, int, int]) -> None:
    strategy = data.draw(toeplitz_strategies(pattern[0]) | matrices(pattern[0]))
    check_sensitivity(strategy, *pattern[1:])
    check_errors(strategy, data.draw(workloads(pattern[0])))


@given(data=st.data(), pattern=patterns(9))
@settings(max_examples=50, deadline=None)
def test_optimized_strategies(data: st.DataObject, pattern: tuple[int, int, int]) -> None:
    strategy = data.draw(optimized(*pattern))
    check_sensitivity(strategy, *pattern[1:])
    check_errors(strategy, data.draw(workloads(pattern[0])))


@pytest.mark.parametrize("name", STRATEGIES)
def test_memory_and_normals_of_each_strategy(name: str) -> None:
    check_costs(STRATEGIES[name])


@pytest.mark.parametrize("bands", [1, 2, 5, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_equals_its_toeplitz_strategy(bands: int, dtype: torch.dtype) -> None:
    toeplitz = BandedToeplitz(bands=bands).optimize(steps=12)
    matrix = MatrixStrategy.from_matrix(toeplitz.strategy_matrix())
    assert torch.equal(rows(make(matrix, dtype=dtype), 12), rows(make(toeplitz, dtype=dtype), 12))
    assert matrix.sensitivity_is_exact
    for pattern in ({"max_participations": 4, "min_separation": 3}, {"max_participations": 12, "min_separation": 1}):
        assert matrix.sensitivity(**pattern) == pytest.approx(toeplitz.sensitivity(**pattern), rel=1e-12)


@pytest.mark.parametrize(("steps", "bands"), [(100, 1), (100, 3), (97, 40), (65, 33), (70, 70)])
def test_matrix_errors_over_several_blocks(steps: int, bands: int) -> None:
    toeplitz = BandedToeplitz(bands=bands).optimize(steps=steps)
    strategy = MatrixStrategy.from_matrix(toeplitz.strategy_matrix())
    for workload in (DecayedSums(beta=0.9), DecayedSums(beta=0.99, debiased=False)):
        np.testing.assert_allclose(strategy.squared_errors(workload), toeplitz.squared_errors(workload), rtol=1e-9)
    assert strategy.mean_error() == pytest.approx(toeplitz.mean_error(), rel=1e-11)
    np.testing.assert_allclose(strategy.row_norms(), toeplitz.row_norms(), rtol=1e-11)


def test_products_with_a_banded_inverse() -> None:
    strategy, workload = random_matrix(40, 6, 5), DecayedSums(beta=0.9)
    inverse = torch.from_numpy(workload.inverse_diagonals(40))
    found = times_banded(torch.from_numpy(strategy.diagonals.copy()), inverse).numpy()
    explicit = strategy.strategy_matrix() @ np.linalg.inv(workload_matrix(workload, 40))
    for lag in range(40):
        expected = found[lag, : 40 - lag] if lag < len(found) else np.zeros(40 - lag)
        np.testing.assert_allclose(np.diagonal(explicit, -lag), expected, atol=1e-10)


def test_an_upper_bound_is_not_called_exact() -> None:
    """With products of columns +, +, -, no signs make all three columns add up."""
    matrix = np.array([[1.0, 0.0, 0.0], [2.0, 1.0, 0.0], [-1.0, 1.0, 1.0]])
    strategy, pattern = MatrixStrategy.from_matrix(matrix), {"max_participations": 3, "min_separation": 1}
    assert not strategy.is_exact_for(**pattern)
    assert not strategy.sensitivity_is_exact
    assert strategy.sensitivity(**pattern) > 1.05 * brute_force_sensitivity(matrix, **pattern)


def test_sensitivity_takes_the_longest_columns_that_are_allowed() -> None:
    """Squared column norms are 1, 9, 16, 9, 1: with two at separation 2, both nines beat sixteen and one."""
    strategy = MatrixStrategy(diagonals=np.array([[1.0, 3.0, 4.0, 3.0, 1.0]]))
    for pattern, squared in (((2, 2), 18), ((2, 3), 16), ((1, 3), 16), ((5, 1), 36)):
        found = strategy.sensitivity(max_participations=pattern[0], min_separation=pattern[1])
        assert found**2 == pytest.approx(squared)
    assert strategy.sensitivity_is_exact


@pytest.mark.parametrize("max_participations", [3, 20])
def test_sensitivity_at_length(max_participations: int) -> None:
    root = SquareRoot().optimize(steps=500)
    pattern = {"max_participations": max_participations, "min_separation": 400 // max_participations}
    strategy = MatrixStrategy.from_matrix(root.strategy_matrix())
    assert strategy.sensitivity(**pattern) == pytest.approx(root.sensitivity(**pattern), rel=1e-12)


def test_sensitivity_closed_forms() -> None:
    independent = Independent().optimize(steps=2000)
    assert independent.sensitivity(max_participations=3, min_separation=830) == pytest.approx(np.sqrt(3))
    banded = BandedToeplitz(bands=128).optimize(steps=2000)
    separate = banded.sensitivity(max_participations=3, min_separation=830)
    assert separate == pytest.approx(np.sqrt(3) * banded.column_norm, rel=1e-12)
    assert banded.sensitivity(max_participations=3, min_separation=64) > separate


@pytest.mark.parametrize(("steps", "largest", "mean"), [(64, 2.388848, 2.229676), (2000, 3.485678, 3.322963)])
def test_square_root_golden_errors(steps: int, largest: float, mean: float) -> None:
    strategy = SquareRoot().optimize(steps=steps)
    assert strategy.max_error() * strategy.column_norm == pytest.approx(largest, abs=5e-7)
    assert strategy.mean_error() * strategy.column_norm == pytest.approx(mean, abs=5e-7)


def test_square_root_squared_is_the_prefix_sums() -> None:
    matrix = SquareRoot().optimize(steps=50).strategy_matrix()
    np.testing.assert_allclose(matrix @ matrix, np.tril(np.ones((50, 50))), atol=1e-13)


def test_three_participations_of_the_square_root_at_separation_128() -> None:
    root = SquareRoot().optimize(steps=2000)
    sensitivity = root.sensitivity(max_participations=3, min_separation=128)
    assert root.mean_error() * sensitivity == pytest.approx(7.49, abs=0.005)
    assert root.max_error() * sensitivity == pytest.approx(7.86, abs=0.005)


def test_independent_golden_error_and_ratio() -> None:
    independent = Independent().optimize(steps=2000)
    banded = BandedToeplitz(bands=128).optimize(steps=2000)
    assert independent.mean_error() == pytest.approx(31.6307, abs=5e-5)
    assert independent.max_error() == pytest.approx(np.sqrt(2000))
    ratio = banded.mean_error() * banded.column_norm / independent.mean_error()
    assert ratio == pytest.approx(0.134466, abs=5e-7)


def test_row_norms_give_the_golden_bias_of_the_second_moment() -> None:
    """b_t = Σ_i weight of step i·‖row i of C⁻¹‖², with the weights of a debiased average."""
    average = workload_matrix(DecayedSums(beta=0.9), 20)[-1]
    banded = ToeplitzStrategy(steps=20, strategy_coefs=(1.0, 0.5, 0.3))
    assert average @ banded.row_norms() ** 2 == pytest.approx(1.2836411, abs=5e-8)
    assert average @ Independent().optimize(steps=20).row_norms() ** 2 == pytest.approx(1.0, abs=1e-14)


def test_long_buffered_streams_stay_exact() -> None:
    strategy = BufferedToeplitz(buffers=3).optimize(steps=600, max_participations=3, min_separation=128)
    expected = torch.from_numpy(strategy.noising_matrix()) @ fresh_normals(600, 5)
    torch.testing.assert_close(rows(make(strategy, 5, dtype=torch.float64), 600), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(rows(make(strategy, 5), 600).double(), expected, rtol=0, atol=1e-5)


def test_late_rows_of_a_banded_inverse_need_only_the_last_bands() -> None:
    strategy = BandedInverse(bands=3).optimize(steps=100_000)
    row = make(strategy, 4, dtype=torch.float64).row(99_999)
    plain = make(Independent().optimize(steps=100_000), 4, dtype=torch.float64)
    expected = sum(coef * plain.row(99_999 - lag) for lag, coef in enumerate(strategy.inverse_coefs))
    torch.testing.assert_close(row, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("steps", "bands"), [(3000, 2), (10_000, 9000), (30_000, 3000)])
def test_a_long_banded_inverse_is_exact(steps: int, bands: int) -> None:
    """The series division uses the FFT here, and its rounding must not look like an increase."""
    strategy = BandedInverse(bands=bands, optimized=False).optimize(steps=steps)
    assert strategy.inverse_coefs == tuple(inverse_sqrt_series(bands).tolist())
    assert strategy.sensitivity_is_exact


@pytest.mark.parametrize(
    "strategy",
    [
        *(ToeplitzStrategy(steps=5, strategy_coefs=c) for c in ((1.0, 0.2, 0.5), (1.0, -0.1), (1.0, 0.0, 0.1))),
        *(BandedInverseStrategy(steps=6, inverse_coefs=c) for c in ((1.0, 0.5), (1.0, 0.0, -0.5), (1.0, -1.1))),
    ],
    ids=repr,
)
def test_coefficients_that_increase_or_are_negative_have_no_sensitivity(strategy: ToeplitzStrategy) -> None:
    assert not strategy.sensitivity_is_exact
    with pytest.raises(ValueError, match="strategy_coefs"):
        strategy.sensitivity(max_participations=1, min_separation=1)


EQUAL: list[tuple[Strategy, Strategy, Strategy]] = [  # equal, equal, different
    (
        ToeplitzStrategy(steps=5, strategy_coefs=(1.0, 0.5, 0.0, 0.0)),
        ToeplitzStrategy(steps=5, strategy_coefs=(1, 0.5)),
        ToeplitzStrategy(steps=6, strategy_coefs=(1.0, 0.5)),
    ),
    (
        BufferedToeplitzStrategy(steps=5, decays=(0.5, 0.9), weights=(0.3, 0.1)),
        BufferedToeplitzStrategy(steps=5, decays=(0.9, 0.5), weights=(0.1, 0.3)),
        BufferedToeplitzStrategy(steps=5, decays=(0.9, 0.5), weights=(0.1, 0.2)),
    ),
    (
        BandedInverseStrategy(steps=5, inverse_coefs=(1.0, -0.5, 0.0)),
        BandedInverseStrategy(steps=5, inverse_coefs=(1, -0.5)),
        BandedInverseStrategy(steps=5, inverse_coefs=(1.0, -0.4)),
    ),
    (
        MatrixStrategy(diagonals=np.array([[1, 2, 1], [0.5, -0.0, 7.0], [0, 8.0, 9.0]])),
        MatrixStrategy.from_matrix(np.array([[1, 0, 0], [0.5, 2, 0], [0, 0, 1]])),
        MatrixStrategy.from_matrix(np.array([[1, 0, 0], [0.5, 2, 0], [0, 0.1, 1]])),
    ),
]


@pytest.mark.parametrize(("one", "same", "other"), EQUAL, ids=lambda strategy: type(strategy).__name__)
def test_strategies_are_values(one: Any, same: Any, other: Any) -> None:
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != Independent().optimize(steps=3)
    with pytest.raises(ValueError, match="read-only"):
        (one.diagonals[0] if isinstance(one, MatrixStrategy) else one.noising_coefs)[0] = 2.0
    one.noising_matrix()[0, 0] = 7.0
    assert one.noising_matrix()[0, 0] == 1.0


def test_a_matrix_strategy_copies_its_diagonals() -> None:
    given = np.ones((1, 3))
    strategy = MatrixStrategy(diagonals=given)
    given[0, 0] = 5.0
    assert strategy.diagonals[0, 0] == 1.0
    assert repr(strategy) == "MatrixStrategy(steps=3, bands=1)"


BAD_COEFS: list[tuple[float, ...]] = [(), (0.0,), (-1.0, 0.5), (0.0, 1.0), (1.0, NAN), (NAN,), (1.0, INF), (INF, 1.0)]


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        *((ToeplitzStrategy, {"strategy_coefs": coefs}, "strategy_coefs") for coefs in BAD_COEFS),
        *((BandedInverseStrategy, {"inverse_coefs": coefs}, "inverse_coefs") for coefs in BAD_COEFS),
        (ToeplitzStrategy, {"strategy_coefs": (1.0,) * 6}, "strategy_coefs <= steps, got 6 > 5"),
        (BandedInverseStrategy, {"inverse_coefs": (1.0,) * 6}, "inverse_coefs <= steps, got 6 > 5"),
        (ToeplitzStrategy, {"steps": 0, "strategy_coefs": (1.0,)}, "steps"),
        (BufferedToeplitzStrategy, {"steps": -3, "decays": (0.5,), "weights": (0.5,)}, "steps"),
        *((BufferedToeplitzStrategy, {"decays": (d,), "weights": (0.5,)}, "decays") for d in (1.0, -0.1, NAN, INF)),
        *((BufferedToeplitzStrategy, {"decays": (0.5,), "weights": (w,)}, "weights") for w in (1.1, 0.0, NAN, INF)),
        (BufferedToeplitzStrategy, {"decays": (0.5, 0.4), "weights": (1.5, -0.6)}, "weights"),
        (BufferedToeplitzStrategy, {"decays": (0.5,), "weights": (0.2, 0.3)}, "one weight per decay"),
    ],
)
def test_bad_coefficients_are_refused(kind: Any, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        kind(**{"steps": 5, **arguments})


@pytest.mark.parametrize(
    "diagonals",
    [[[1.0, 0.0]], [[1.0, -1.0]], [[1.0, NAN]], [[1.0], [1.0]], np.ones((1, 0)), np.ones((1, 2, 2))],
    ids=lambda diagonals: str(np.shape(diagonals)),
)
def test_bad_diagonals_are_refused(diagonals: Any) -> None:
    with pytest.raises(ValueError, match="diagonals"):
        MatrixStrategy(diagonals=diagonals)


@pytest.mark.parametrize("matrix", [np.ones((2, 3)), np.ones(3), np.ones((2, 2)), np.zeros((0, 0))])
def test_bad_matrices_are_refused(matrix: np.ndarray) -> None:
    with pytest.raises(ValueError, match="matrix"):
        MatrixStrategy.from_matrix(matrix)


ALL: tuple[StrategySpec, ...] = (
    Independent(),
    SquareRoot(),
    Dense(),
    Banded(bands=2),
    BandedToeplitz(bands=2),
    BufferedToeplitz(buffers=2),
    BandedInverse(bands=2),
    BandedInverse(bands=2, optimized=False),
)
every_spec = pytest.mark.parametrize("spec", ALL, ids=repr)


@every_spec
def test_bad_steps_and_patterns_are_refused(spec: StrategySpec) -> None:
    for arguments, named in (
        ({"steps": 0}, "steps"),
        ({"steps": 10, "max_participations": 0}, "max_participations"),
        ({"steps": 10, "min_separation": 0}, "min_separation"),
        ({"steps": 10, "max_participations": 3, "min_separation": 5}, "Use max_participations=2 or fewer"),
    ):
        with pytest.raises(ValueError, match=named):
            spec.optimize(**arguments)
    strategy = spec.optimize(steps=8)
    for pattern, named in (((0, 1), "max_participations"), ((1, 0), "min_separation"), ((-1, 1), "max_participations")):
        with pytest.raises(ValueError, match=named):
            strategy.sensitivity(max_participations=pattern[0], min_separation=pattern[1])
    with pytest.raises(ValueError, match="parameters"):
        strategy.memory_bytes(-1)


@every_spec
def test_excess_participations_count_as_many_as_fit(spec: StrategySpec) -> None:
    strategy = spec.optimize(steps=8)
    for separation, fitting in ((1, 8), (3, 3), (4, 2), (8, 1), (100, 1)):
        most = strategy.sensitivity(max_participations=fitting, min_separation=separation)
        assert strategy.is_exact_for(max_participations=10**9, min_separation=separation)
        assert most == pytest.approx(brute_force_sensitivity(strategy.strategy_matrix(), 8, separation), rel=1e-11)
        for count in (fitting + 1, 100, 10**9):
            assert strategy.sensitivity(max_participations=count, min_separation=separation) == most
        if fitting > 1:
            assert strategy.sensitivity(max_participations=fitting - 1, min_separation=separation) < most


@pytest.mark.parametrize("kind", [BandedToeplitz, BandedInverse, partial(BandedInverse, optimized=False), Banded])
@pytest.mark.parametrize("bands", [0, -2, True, 2.0, NAN])
def test_bad_bands_are_refused(kind: Any, bands: Any) -> None:
    with pytest.raises(ValueError, match="bands"):
        kind(bands=bands)


@pytest.mark.parametrize("kind", [BandedToeplitz, Banded])
def test_more_bands_than_steps_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="bands <= steps, got 11 > 10"):
        kind(bands=11).optimize(steps=10)


def test_other_bad_arguments_are_refused() -> None:
    for buffers in (0, -1, 1.0):
        with pytest.raises(ValueError, match="buffers"):
            BufferedToeplitz(buffers=buffers)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="objective"):
        BufferedToeplitz(buffers=1, objective="median")  # type: ignore[arg-type]
    for kind in (Banded, BandedToeplitz, BandedInverse):
        with pytest.raises(ValueError, match="workload"):
            kind(bands=2, workload="sums")  # type: ignore[arg-type]
    for bits in (8, 0, 64, -16):
        with pytest.raises(ValueError, match="bits"):
            NoiseMemory(bits=bits)


def test_specs_are_values() -> None:
    assert len({BandedToeplitz(bands=2), BandedToeplitz(bands=2), Independent(), SquareRoot()}) == 3
    assert BufferedToeplitz() == BufferedToeplitz(buffers=3)
    assert BandedInverse() == BandedInverse(bands=32)
    shown = [repr(spec) for spec in (BufferedToeplitz(), BandedInverse(), BandedToeplitz(bands=2), Dense())]
    assert shown == ["BufferedToeplitz(buffers=3)", "BandedInverse(bands=32)", "BandedToeplitz(bands=2)", "Dense()"]
