"""Toeplitz strategies against explicit matrices, brute force over participation patterns, and their limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dpoptim.noise import (
    BandedToeplitz,
    DecayedSums,
    Independent,
    SquareRoot,
    StrategySpec,
    ToeplitzStrategy,
)

SPECS: list[StrategySpec] = [Independent(), SquareRoot(), BandedToeplitz(bands=1), BandedToeplitz(bands=5)]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("steps", [5, 6, 40])
def test_errors_and_norms_are_those_of_the_matrices(spec: StrategySpec, steps: int) -> None:
    strategy = spec.optimize(steps=steps)
    matrix, inverse = strategy.strategy_matrix(), strategy.noising_matrix()
    assert matrix.shape == inverse.shape == (steps, steps)
    assert matrix.dtype == inverse.dtype == np.float64
    np.testing.assert_allclose(matrix @ inverse, np.eye(steps), atol=1e-12)
    np.testing.assert_allclose(np.triu(matrix, 1), 0)
    noise = np.linalg.norm(np.tril(np.ones((steps, steps))) @ inverse, axis=1)
    assert strategy.mean_error() == pytest.approx(np.sqrt((noise**2).mean()), rel=1e-12)
    assert strategy.max_error() == pytest.approx(noise.max(), rel=1e-12)
    assert strategy.column_norm == pytest.approx(np.linalg.norm(matrix, axis=0).max(), rel=1e-12)
    np.testing.assert_allclose(strategy.row_norms(), np.linalg.norm(inverse, axis=1), rtol=1e-12)
    single = strategy.sensitivity(max_participations=1, min_separation=1)
    assert single == pytest.approx(strategy.column_norm, rel=1e-12)


def test_matrix_is_its_coefficients() -> None:
    strategy = ToeplitzStrategy(steps=4, strategy_coefs=(2.0, 0.5, 0.25))
    expected = [[2.0, 0, 0, 0], [0.5, 2.0, 0, 0], [0.25, 0.5, 2.0, 0], [0, 0.25, 0.5, 2.0]]
    assert strategy.strategy_matrix().tolist() == expected


def test_sensitivity_closed_forms() -> None:
    independent = Independent().optimize(steps=2000)
    assert independent.sensitivity(max_participations=3, min_separation=830) == pytest.approx(np.sqrt(3))
    banded = BandedToeplitz(bands=128).optimize(steps=2000)
    apart = banded.sensitivity(max_participations=3, min_separation=830)
    assert apart == pytest.approx(np.sqrt(3) * banded.column_norm, rel=1e-12)
    assert banded.sensitivity(max_participations=3, min_separation=64) > apart


@pytest.mark.parametrize("coefs", [(1.0, 0.2, 0.5), (1.0, -0.1), (1.0, 1.1), (1.0, 0.0, 0.1)])
def test_sensitivity_of_other_coefficients_is_refused(coefs: tuple[float, ...]) -> None:
    strategy = ToeplitzStrategy(steps=5, strategy_coefs=coefs)
    assert not strategy.sensitivity_is_exact
    with pytest.raises(ValueError, match="strategy_coefs"):
        strategy.sensitivity(max_participations=1, min_separation=1)


@pytest.mark.parametrize(
    ("max_participations", "min_separation", "message"),
    [
        (0, 1, "max_participations=0"),
        (1, 0, "min_separation=0"),
    ],
)
def test_patterns_that_cannot_be_are_refused(max_participations: int, min_separation: int, message: str) -> None:
    strategy = SquareRoot().optimize(steps=10)
    with pytest.raises(ValueError, match=message):
        strategy.sensitivity(max_participations=max_participations, min_separation=min_separation)


def test_row_norms_give_the_golden_bias_of_the_second_moment() -> None:
    """b_t = Σ_i weight of step i·‖row i of C⁻¹‖², with the weights of a debiased average."""
    average = DecayedSums(beta=0.9).matrix(20)[-1]
    banded = ToeplitzStrategy(steps=20, strategy_coefs=(1.0, 0.5, 0.3))
    assert average @ banded.row_norms() ** 2 == pytest.approx(1.2836411, abs=5e-8)
    assert average @ Independent().optimize(steps=20).row_norms() ** 2 == pytest.approx(1.0, abs=1e-14)


def test_strategies_are_values() -> None:
    a = ToeplitzStrategy(steps=5, strategy_coefs=(1.0, 0.5, 0.0, 0.0))
    b = ToeplitzStrategy(steps=5, strategy_coefs=(1, 0.5))
    assert a == b
    assert hash(a) == hash(b)
    assert a.noising_coefs is a.noising_coefs
    assert a == b
    assert a != ToeplitzStrategy(steps=6, strategy_coefs=(1.0, 0.5))
    with pytest.raises(ValueError, match="read-only"):
        a.noising_coefs[0] = 2.0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"steps": 0, "strategy_coefs": (1.0,)}, "steps=0"),
        ({"steps": -3, "strategy_coefs": (1.0,)}, "steps=-3"),
        ({"strategy_coefs": ()}, "strategy_coefs="),
        ({"strategy_coefs": (0.0,)}, "strategy_coefs="),
        ({"strategy_coefs": (-1.0, 0.5)}, "strategy_coefs="),
        ({"strategy_coefs": (0.0, 1.0)}, "strategy_coefs="),
        ({"strategy_coefs": (1.0, math.nan)}, "strategy_coefs="),
        ({"strategy_coefs": (math.nan,)}, "strategy_coefs="),
        ({"strategy_coefs": (1.0, math.inf)}, "strategy_coefs="),
        ({"strategy_coefs": (math.inf, 1.0)}, "strategy_coefs="),
        ({"steps": 2, "strategy_coefs": (1.0, 0.5, 0.3)}, "strategy_coefs has 3 bands for steps=2"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        ToeplitzStrategy(**{"steps": 5, **arguments})


def test_parameters_cannot_be_negative() -> None:
    with pytest.raises(ValueError, match="parameters=-1"):
        Independent().optimize(steps=3).memory_bytes(-1)
