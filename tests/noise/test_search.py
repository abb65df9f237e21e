"""Searches for banded, Toeplitz, buffered and banded-inverse strategies: golden errors, gradients, minima, limits."""

from __future__ import annotations

import inspect
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import check_grad

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
    PrefixSums,
    SquareRoot,
    Strategy,
    ToeplitzStrategy,
    Workload,
    inverse_series,
    sqrt_series,
)
from dpoptim.noise.search import banded_inverse, buffered
from dpoptim.noise.search.banded import _falling, log_error, optimal_banded
from dpoptim.noise.search.banded_inverse import inverse_sqrt_series
from dpoptim.noise.search.objective import Objective, SearchObjective, workload_matrix
from tests.noise.explicit import patterns, scaled_error

search_banded = inspect.unwrap(optimal_banded)  # without the cache


def workloads(steps: int) -> dict[str, Workload]:
    rates = tuple(np.linspace(1.0, 0.2, steps).tolist())
    return {
        "prefix": PrefixSums(),
        "momentum": PrefixSums(momentum=0.9),
        "schedule": PrefixSums(momentum=0.8, weight_decay=0.1, learning_rate=rates),
        "adam": DecayedSums(beta=0.9),
        "biased": DecayedSums(beta=0.95, debiased=False),
        "no past": DecayedSums(beta=0.0),
    }


KINDS = list(workloads(1))
STEPS = 40
SPECS: dict[str, Any] = {
    "BandedToeplitz": partial(BandedToeplitz, bands=5),
    "BufferedToeplitz": partial(BufferedToeplitz, buffers=2),
    "BandedInverse": partial(BandedInverse, bands=5),
}


@pytest.mark.parametrize("pattern", [(1, 1), (3, 10)], ids=["one participation", "three"])
@pytest.mark.parametrize("kind", ["momentum", "schedule", "adam", "biased"])
@pytest.mark.parametrize("spec", SPECS)
def test_strategy_optimized_for_a_workload_is_best_for_it(spec: str, kind: str, pattern: tuple[int, int]) -> None:
    """It beats independent noise and the strategy optimized for prefix sums."""
    workload = workloads(STEPS)[kind]
    arguments = {"steps": STEPS, "max_participations": pattern[0], "min_separation": pattern[1]}
    found, for_prefix_sums, independent = (
        scaled_error(made.optimize(**arguments), *pattern, workload=workload)
        for made in (SPECS[spec](workload=workload), SPECS[spec](), Independent())
    )
    assert found < for_prefix_sums * (1 - 1e-3)
    assert found < independent


@pytest.mark.parametrize(
    ("spec", "steps", "pattern", "mean", "largest"),
    [
        (BandedToeplitz(bands=16), 256, (1, 1), 3.637574, None),
        (BandedToeplitz(bands=128), 2000, (1, 1), 4.253252, None),
        (BandedToeplitz(bands=128), 2000, (3, 128), np.sqrt(3) * 4.253252, None),
        (Banded(bands=8), 64, (1, 1), 2.620517, None),
        (BufferedToeplitz(buffers=2, objective="max"), 2000, (3, 128), 7.18, 7.70),
        (BufferedToeplitz(buffers=2), 2000, (3, 128), 7.018, 7.931),
        (BandedInverse(bands=128), 2000, (3, 128), 7.19, 8.55),
    ],
    ids=repr,
)
def test_golden_errors(spec: Any, steps: int, pattern: tuple[int, int], mean: float, largest: float | None) -> None:
    strategy = spec.optimize(steps=steps, max_participations=pattern[0], min_separation=pattern[1])
    tolerance = 1e-6 if largest is None else 0.005
    assert scaled_error(strategy, *pattern) == pytest.approx(mean, abs=tolerance)
    if largest is not None:
        assert scaled_error(strategy, *pattern, objective="max") == pytest.approx(largest, abs=tolerance)


@pytest.mark.slow
def test_two_thousand_steps_of_a_banded_matrix() -> None:
    strategy = MatrixStrategy(diagonals=search_banded(2000, 128, PrefixSums()))
    assert strategy.mean_error() == pytest.approx(4.177726, abs=1e-6)
    for participations in (1, 3):
        pattern = {"max_participations": participations, "min_separation": 128}
        assert strategy.sensitivity(**pattern) == pytest.approx(np.sqrt(participations), rel=1e-12)
        assert strategy.is_exact_for(**pattern)


def test_defaults_are_what_their_docstrings_say() -> None:
    """Four buffers reach the best full Toeplitz matrix, 3.27010, to one part in 10,000."""
    assert 3.27009 < scaled_error(BufferedToeplitz(buffers=4).optimize(steps=2000)) < 3.2704
    assert 1.10 < scaled_error(BandedInverse().optimize(steps=2000)) / 3.2702 < 1.11
    for pattern, most in (((1, 1), 1.0015), ((3, 128), 1.0003)):
        given = dict(zip(("max_participations", "min_separation"), pattern, strict=True))
        fewer, default, more = (
            scaled_error(BufferedToeplitz(buffers=b).optimize(steps=2000, **given), *pattern) for b in (2, 3, 6)
        )
        assert more <= default < most * more
        assert fewer > 1.01 * default


@pytest.mark.parametrize(("steps", "bands"), [(8, 8), (200, 40)])
def test_gradient_of_banded_toeplitz(steps: int, bands: int) -> None:
    search, at = SearchObjective(steps=steps), sqrt_series(bands)[1:] * 0.9

    def value_and_slope(tail: np.ndarray) -> tuple[float, np.ndarray]:
        coefs = np.concatenate([[1.0], tail, np.zeros(steps - bands)])
        value, slope = search.by_strategy(coefs, inverse_series(coefs, steps))
        return value, slope[1:bands]

    assert check_grad(lambda x: value_and_slope(x)[0], lambda x: value_and_slope(x)[1], at) < 1e-5
    strategy = ToeplitzStrategy(steps=steps, strategy_coefs=(1.0, *at.tolist()))
    assert value_and_slope(at)[0] == pytest.approx(2 * np.log(scaled_error(strategy)), rel=1e-12)


@given(ratios=st.lists(st.floats(0, 1), min_size=1, max_size=8), seed=st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_gradient_in_the_ratios(ratios: list[float], seed: int) -> None:
    """c is linear in each ratio, so differences are exact."""
    at, pull = np.array(ratios), np.random.default_rng(seed).normal(size=len(ratios))
    tail, back = _falling(at)
    np.testing.assert_allclose(tail, np.cumprod(at), rtol=1e-14)
    for index, found in enumerate(back(pull)):
        unit = np.eye(len(at))[index]
        assert found == pytest.approx(pull @ (_falling(at + unit)[0] - tail), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("steps", "pattern", "objective"), [(30, (1, 1), "mean"), (31, (3, 7), "max"), (40, (40, 1), "mean")]
)
def test_gradient_of_buffers(steps: int, pattern: tuple[int, int], objective: Objective) -> None:
    decays, weights = np.array([0.9, 0.4]), np.array([0.2, 0.3])
    search = SearchObjective(steps=steps, max_participations=pattern[0], min_separation=pattern[1], objective=objective)

    def value_and_slopes(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, pull = buffered._log_error(x[:2], x[2:], search)
        powers = x[:2, None] ** np.arange(steps - 1)
        by_decay = x[2:] * ((powers[:, :-1] * np.arange(1, steps - 1)) @ pull[2:])
        return value, np.concatenate([by_decay, powers @ pull[1:]])

    at = np.concatenate([decays, weights])
    assert check_grad(lambda x: value_and_slopes(x)[0], lambda x: value_and_slopes(x)[1], at) < 1e-5
    strategy = BufferedToeplitzStrategy(steps=steps, decays=tuple(decays), weights=tuple(weights))
    expected = scaled_error(strategy, *pattern, objective=objective)
    assert value_and_slopes(at)[0] == pytest.approx(2 * np.log(expected), rel=1e-12)


@pytest.mark.parametrize(("steps", "bands", "pattern"), [(30, 8, (1, 1)), (31, 31, (3, 7)), (12, 5, (12, 1))])
def test_gradient_of_a_banded_inverse(steps: int, bands: int, pattern: tuple[int, int]) -> None:
    at = np.linspace(0.6, 0.1, bands - 1)
    search = SearchObjective(steps=steps, max_participations=pattern[0], min_separation=pattern[1])
    value_and_slope = partial(banded_inverse._log_error, search=search)
    assert check_grad(lambda x: value_and_slope(x)[0], lambda x: value_and_slope(x)[1], at) < 1e-5
    _, coefs = banded_inverse._prefix_and_coefs(at)
    strategy = BandedInverseStrategy(steps=steps, inverse_coefs=tuple(coefs.tolist()))
    assert value_and_slope(at)[0] == pytest.approx(2 * np.log(scaled_error(strategy, *pattern)), rel=1e-12)


@given(
    shape=st.integers(2, 90).flatmap(lambda steps: st.tuples(st.just(steps), st.integers(1, min(steps, 50)))),
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(KINDS),
)
@settings(max_examples=40, deadline=None)
def test_gradient_of_a_banded_matrix(shape: tuple[int, int], seed: int, kind: str) -> None:
    """Against autograd through the explicit matrices."""
    steps, bands = shape
    workload = workloads(steps)[kind]
    generator = torch.Generator().manual_seed(seed)
    inside = torch.arange(bands)[:, None] + torch.arange(steps) < steps
    at = 0.3 * torch.rand(bands, steps, dtype=torch.float64, generator=generator)
    at[0] += 1.0
    at = (at * inside).requires_grad_()
    matrix = sum(torch.diag(at[lag, : steps - lag], -lag) for lag in range(bands))
    assert isinstance(matrix, torch.Tensor)
    matrix = matrix / matrix.norm(dim=0)
    noise = torch.from_numpy(workload_matrix(workload, steps)) @ torch.linalg.inv(matrix)
    expected = (noise**2).sum().log()
    (gradient,) = torch.autograd.grad(expected, at)
    found = log_error(at, torch.from_numpy(workload.inverse_diagonals(steps)))
    (slope,) = torch.autograd.grad(found, at)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(slope * inside, gradient, rtol=1e-7, atol=1e-9)


def changed(best: Strategy, size: float, generator: np.random.Generator) -> Strategy:
    """Return a strategy of the same kind with parameters moved by about `size`."""
    steps = best.steps
    if isinstance(best, BufferedToeplitzStrategy):
        decays = 1 - (1 - np.array(best.decays)) * np.exp(size * generator.normal(size=best.kept_rows))
        weights = np.array(best.weights) * np.exp(size * generator.normal(size=best.kept_rows))
        return BufferedToeplitzStrategy(steps=steps, decays=tuple(decays), weights=tuple(weights))
    if isinstance(best, BandedInverseStrategy):
        falls = -np.diff(np.log(np.cumsum(best.inverse_coefs)))
        bends = np.maximum(-np.diff(falls, append=0.0), 0.0) * np.exp(size * generator.normal(size=len(falls)))
        bends += size * 1e-2 * generator.random(len(bends)) / np.arange(1, len(bends) + 1) ** 2
        _, coefs = banded_inverse._prefix_and_coefs(np.cumsum(bends[::-1])[::-1])
        return BandedInverseStrategy(steps=steps, inverse_coefs=tuple(coefs.tolist()))
    assert isinstance(best, ToeplitzStrategy)
    tail = np.array(best.strategy_coefs[1:]) * (1 + size * generator.normal(size=best.bands - 1))
    return ToeplitzStrategy(steps=steps, strategy_coefs=(1.0, *tail.tolist()))


@pytest.mark.parametrize(
    ("spec", "steps", "pattern"),
    [
        *((BandedToeplitz(bands=bands), steps, (1, 1)) for steps, bands in ((2, 2), (8, 8), (300, 100), (3000, 5))),
        (BufferedToeplitz(buffers=1), 50, (1, 1)),
        (BufferedToeplitz(buffers=2, objective="max"), 300, (4, 60)),
        (BufferedToeplitz(buffers=3), 1000, (1, 1)),
        (BandedInverse(bands=3), 50, (1, 1)),
        (BandedInverse(bands=20), 200, (3, 50)),
    ],
    ids=repr,
)
def test_searches_end_in_a_minimum(spec: Any, steps: int, pattern: tuple[int, int]) -> None:
    objective = getattr(spec, "objective", "mean")
    best = spec.optimize(steps=steps, max_participations=pattern[0], min_separation=pattern[1])
    # Perturbed coefficients of a Toeplitz matrix may increase, so their column norm stands for the sensitivity.
    toeplitz = isinstance(spec, BandedToeplitz)

    def error(strategy: Strategy) -> float:
        if toeplitz:
            return strategy.mean_error() * strategy.column_norm
        return scaled_error(strategy, *pattern, objective=objective)

    generator = np.random.default_rng(0)
    for size in (1e-1, 1e-2, 1e-3):
        for _ in range(5):
            assert error(changed(best, size, generator)) > error(best) * (1 - 1e-7)
    assert best.sensitivity_is_exact


@given(pattern=patterns(60))
@settings(max_examples=15, deadline=None)
def test_more_buffers_are_never_worse(pattern: tuple[int, int, int]) -> None:
    steps, max_participations, min_separation = pattern
    errors = [scaled_error(Independent().optimize(steps=steps), max_participations, min_separation)]
    for buffers in (1, 2, 3):
        strategy = BufferedToeplitz(buffers=buffers).optimize(
            steps=steps, max_participations=max_participations, min_separation=min_separation
        )
        assert strategy.kept_rows <= buffers
        assert strategy.sensitivity_is_exact
        errors.append(scaled_error(strategy, max_participations, min_separation))
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(errors))


@given(pattern=patterns(60), bands=st.integers(1, 60))
@settings(max_examples=20, deadline=None)
def test_a_banded_inverse_is_no_worse_than_its_start(pattern: tuple[int, int, int], bands: int) -> None:
    steps, max_participations, min_separation = pattern
    best, start = (
        BandedInverse(bands=bands, optimized=optimized).optimize(
            steps=steps, max_participations=max_participations, min_separation=min_separation
        )
        for optimized in (True, False)
    )
    assert best.sensitivity_is_exact
    assert start.sensitivity_is_exact
    assert len(best.inverse_coefs) <= bands
    found = scaled_error(best, max_participations, min_separation)
    assert found <= scaled_error(start, max_participations, min_separation) * (1 + 1e-12)
    independent = scaled_error(Independent().optimize(steps=steps), max_participations, min_separation)
    assert found <= independent * (1 + 1e-6)


@pytest.mark.parametrize("workload", [PrefixSums(), DecayedSums(beta=0.9)], ids=repr)
def test_more_bands_are_never_worse(workload: Workload) -> None:
    errors = [
        scaled_error(BandedToeplitz(bands=bands, workload=workload).optimize(steps=64), workload=workload)
        for bands in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(errors))
    assert errors[-1] < scaled_error(SquareRoot().optimize(steps=64), workload=workload)


def test_a_full_banded_inverse_is_near_the_best_toeplitz_matrix() -> None:
    best = scaled_error(BandedToeplitz(bands=64).optimize(steps=64))
    assert best < scaled_error(BandedInverse(bands=64).optimize(steps=64)) < best * 1.0005


def proven_error(matrix: np.ndarray, workload: Workload, bands: int) -> float:
    """Return a lower bound on the mean error of banded C with unit columns, by the dual of the convex problem.

    For every Y ≥ 0 that is zero within the band except for its diagonal, X = CᵀC has tr(XY) = tr Y, and so
    ‖AC⁻¹‖_F²·tr Y ≥ (tr (AYAᵀ)^½)². At the optimum Y = X⁻¹AᵀAX⁻¹ makes them equal.
    """
    steps, sums = len(matrix), workload_matrix(workload, len(matrix))
    inverse = np.linalg.inv(matrix.T @ matrix)
    dual = inverse @ sums.T @ sums @ inverse
    lag = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
    dual[(lag > 0) & (lag < bands)] = 0.0
    values = np.linalg.eigvalsh(sums @ dual @ sums.T)
    assert values[0] > 0
    return float(np.sqrt(values).sum() / np.sqrt(np.trace(dual) * steps))


@pytest.mark.parametrize(
    ("steps", "bands", "kind"),
    [(2, 2, "prefix"), (9, 3, "prefix"), (40, 35, "prefix"), (100, 2, "prefix"), *((40, 6, kind) for kind in KINDS)],
)
def test_a_banded_matrix_is_proved_to_be_the_best(steps: int, bands: int, kind: str) -> None:
    workload = workloads(steps)[kind]
    strategy = Banded(bands=bands, workload=workload).optimize(steps=steps)
    matrix = strategy.strategy_matrix()
    np.testing.assert_allclose(np.linalg.norm(matrix, axis=0), 1.0, rtol=1e-12)
    assert not np.tril(matrix, -bands).any()
    bound = proven_error(matrix, workload, bands)
    assert bound * (1 - 1e-9) <= strategy.mean_error(workload) < bound * (1 + 1e-6)
    toeplitz = BandedToeplitz(bands=bands, workload=workload).optimize(steps=steps)
    assert strategy.mean_error(workload) <= scaled_error(toeplitz, workload=workload) * (1 + 1e-9)
    dense = Dense(workload=workload).optimize(steps=steps)
    assert dense.mean_error(workload) <= strategy.mean_error(workload) * (1 + 1e-9)
    assert Banded(bands=steps, workload=workload).optimize(steps=steps) == dense


def test_bands_that_do_not_overlap() -> None:
    strategy = Banded(bands=8).optimize(steps=64)
    for separation in (8, 20):
        pattern = {"max_participations": 3, "min_separation": separation}
        assert strategy.sensitivity(**pattern) == pytest.approx(np.sqrt(3), rel=1e-12)
        assert strategy.is_exact_for(**pattern)
    assert strategy.sensitivity(max_participations=3, min_separation=7) > 1.01 * np.sqrt(3)


def test_limits() -> None:
    independent = Independent().optimize(steps=9)
    assert BandedToeplitz(bands=1).optimize(steps=9) == independent
    np.testing.assert_array_equal(Banded(bands=1).optimize(steps=9).strategy_matrix(), np.eye(9))
    for optimized in (True, False):
        assert BandedInverse(bands=1, optimized=optimized).optimize(steps=9).strategy_coefs == (1.0,)
        short = BandedInverse(optimized=optimized).optimize(steps=7)
        assert short == BandedInverse(bands=7, optimized=optimized).optimize(steps=7)
    full, root = BandedInverse(bands=300, optimized=False).optimize(steps=300), SquareRoot().optimize(steps=300)
    np.testing.assert_allclose(full.strategy_coefs, root.strategy_coefs, rtol=1e-12)
    assert full.noising_coefs.tolist() == inverse_sqrt_series(300).tolist()
    everywhere = {"steps": 9, "max_participations": 9, "min_separation": 1}  # nothing to correlate
    assert BandedInverse(bands=5).optimize(**everywhere).inverse_coefs == (1.0,)
    assert BufferedToeplitz(buffers=2).optimize(**everywhere).kept_rows == 0
    assert BufferedToeplitz(buffers=2).optimize(steps=1).strategy_coefs == (1.0,)
    assert BufferedToeplitz(buffers=3).optimize(steps=2).strategy_coefs[1] == pytest.approx(0.30585, abs=1e-5)


def test_buffers_of_one_decay_are_merged_and_those_without_weight_dropped() -> None:
    decays, weights = buffered._merged(np.array([0.5, 0.9, 0.2, 0.5 + 1e-7]), np.array([0.1, 0.2, 1e-15, 0.3]))
    np.testing.assert_allclose(decays, [0.9, 0.5 + 0.75e-7], rtol=1e-12)
    np.testing.assert_allclose(weights, [0.2, 0.4], rtol=1e-12)


def test_the_number_of_threads_is_left_alone() -> None:
    threads = torch.get_num_threads()
    search_banded(7, 3, PrefixSums())
    assert torch.get_num_threads() == threads


def test_a_schedule_needs_one_rate_per_step_and_few_steps() -> None:
    for kind in (Banded, BandedToeplitz):
        with pytest.raises(ValueError, match="one learning_rate per step, got 3 for 8 steps"):
            kind(bands=2, workload=PrefixSums(learning_rate=(1.0, 1.0, 1.0))).optimize(steps=8)
    with pytest.raises(ValueError, match="4097 > 4096"):
        BandedToeplitz(bands=2, workload=PrefixSums(learning_rate=(0.1,) * 4097)).optimize(steps=4097)


@pytest.mark.parametrize(
    "workload", [DecayedSums(beta=0.9), PrefixSums(learning_rate=(1.0, 1.0, 1.0))], ids=["debiased", "schedule"]
)
def test_max_error_objective_needs_the_last_row_to_be_the_largest(workload: Workload) -> None:
    with pytest.raises(ValueError, match="objective='max' is not available"):
        BufferedToeplitz(buffers=1, objective="max", workload=workload).optimize(steps=3)
