"""What searches minimise, against strategies' own figures and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpoptim.noise import DecayedSums, PrefixSums, Workload, inverse_series
from dpoptim.noise.search.objective import Objective, SearchObjective, _comb, participation_energy
from tests.noise.explicit import patterns, scaled_error, toeplitz_strategies, workloads


@st.composite
def objectives(draw: st.DrawFn) -> SearchObjective:
    steps, max_participations, min_separation = draw(patterns(9))
    workload = draw(workloads(steps))
    last_is_largest = workload.is_toeplitz and not (isinstance(workload, DecayedSums) and workload.debiased)
    return SearchObjective(
        steps=steps,
        max_participations=max_participations,
        min_separation=min_separation,
        workload=workload,
        objective=draw(st.sampled_from(["mean", "max"])) if last_is_largest else "mean",
    )


def falling_coefs(steps: int, seed: int) -> np.ndarray:
    return np.cumprod(np.concatenate([[1.0], np.random.default_rng(seed).uniform(0, 1, size=steps - 1)]))


def directional(value: object, at: np.ndarray, direction: np.ndarray) -> float:
    """The derivative along a direction, by central differences of fourth order."""
    assert callable(value)
    step = 1e-3
    near, far = (value(at + h * direction) - value(at - h * direction) for h in (step, 2 * step))
    return float((8 * near - far) / (12 * step))


@given(search=objectives(), seed=st.integers(0, 2**16))
@settings(max_examples=100, deadline=None)
def test_gradients_are_finite_differences(search: SearchObjective, seed: int) -> None:
    coefs = falling_coefs(search.steps, seed)
    noising = inverse_series(coefs, search.steps)
    direction = np.random.default_rng(seed + 1).uniform(-1, 1, size=search.steps)
    direction /= np.abs(direction).sum()  # the coefficients stay far from a singular matrix

    value, slope = search.by_strategy(coefs, noising)
    difference = directional(lambda c: search.by_strategy(c, inverse_series(c, search.steps))[0], coefs, direction)
    assert difference == pytest.approx(slope @ direction, rel=1e-6, abs=1e-7)

    same, slope = search.by_noising(coefs, noising)
    difference = directional(lambda d: search.by_noising(inverse_series(d, search.steps), d)[0], noising, direction)
    assert difference == pytest.approx(slope @ direction, rel=1e-5, abs=1e-6)
    assert same == value


@given(data=st.data(), search=objectives())
@settings(max_examples=60, deadline=None)
def test_value_is_that_of_the_strategy(data: st.DataObject, search: SearchObjective) -> None:
    strategy = data.draw(toeplitz_strategies(search.steps))
    coefs, noising = strategy.strategy_matrix()[:, 0], strategy.noising_coefs
    expected = 2 * np.log(
        scaled_error(
            strategy,
            search.max_participations,
            search.min_separation,
            workload=search.workload,
            objective=search.objective,
        )
    )
    for found in (search.by_strategy(coefs, noising)[0], search.by_noising(coefs, noising)[0]):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(pattern=patterns(13), seed=st.integers(0, 2**16))
@settings(max_examples=100, deadline=None)
def test_energy_is_that_of_the_summed_columns(pattern: tuple[int, int, int], seed: int) -> None:
    steps, max_participations, min_separation = pattern
    coefs, direction = np.random.default_rng(seed).normal(size=(2, steps))

    def energy(coefs: np.ndarray) -> float:
        shifts = range(0, max_participations * min_separation, min_separation)
        return float(np.linalg.norm(sum(np.eye(steps, k=-shift) @ coefs for shift in shifts)) ** 2)

    found, slope = participation_energy(coefs, max_participations, min_separation)
    assert found == pytest.approx(energy(coefs), rel=1e-11)
    difference = (energy(coefs + direction) - energy(coefs - direction)) / 2
    assert slope @ direction == pytest.approx(difference, rel=1e-9, abs=1e-9)


def test_comb_is_its_sum() -> None:
    series = np.random.default_rng(0).normal(size=13)
    for count, lag in ((1, 1), (2, 5), (13, 1), (3, 4), (2, 12), (9, 7)):
        sums = [sum(series[t - i * lag] for i in range(count) if t >= i * lag) for t in range(13)]
        np.testing.assert_allclose(_comb(series, count, lag), sums, atol=1e-13)


def test_objectives_are_values() -> None:
    """Their repr is the key of the disk cache."""
    assert SearchObjective(steps=4) == SearchObjective(steps=4, workload=PrefixSums())
    assert hash(SearchObjective(steps=4)) == hash(SearchObjective(steps=4, workload=PrefixSums()))
    aims: tuple[Objective, ...] = ("mean", "max")
    kinds: tuple[Workload, ...] = (PrefixSums(), PrefixSums(momentum=0.5), DecayedSums(beta=0.5, debiased=False))
    made = {repr(SearchObjective(steps=4, workload=kind, objective=objective)) for kind in kinds for objective in aims}
    assert len(made) == 6


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 5, "max_participations": 0}, "max_participations"),
        ({"steps": 5, "min_separation": 0}, "min_separation"),
        ({"steps": 5, "max_participations": 3, "min_separation": 3}, "3 participations at min_separation=3"),
    ],
)
def test_bad_objectives_are_refused(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SearchObjective(**arguments)  # type: ignore[arg-type]
