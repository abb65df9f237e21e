"""Closed forms against integrals, privacy loss distributions against integrals and dp-accounting."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting import TruncatedSubsampledGaussianDpEvent as TruncatedEvent
from dp_accounting.pld import PLDAccountant
from scipy.integrate import quad
from scipy.stats import norm

from dpoptim.privacy import accounting
from dpoptim.privacy.accounting import (
    GaussianRun,
    PoissonRun,
    TruncatedPoissonRun,
    epsilon,
    gaussian_epsilon,
    gaussian_log_delta,
    gaussian_noise_multiplier,
    rdp_epsilon,
)
from dpoptim.privacy.adjacency import Adjacency
from dpoptim.privacy.sampled_gaussian import Direction, grid_interval, hockey_stick

RELATIONS = {
    Adjacency.ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
    Adjacency.ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
    Adjacency.REPLACE: NeighboringRelation.REPLACE_ONE,
}


def poisson(rate, steps, adjacency=Adjacency.ZERO_OUT):
    return PoissonRun(sampling_prob=rate, steps=steps, adjacency=adjacency)


def test_three_participations_golden_values():
    run = GaussianRun(sensitivity=math.sqrt(3))
    assert epsilon(run, noise_multiplier=1.0, delta=1e-7) == pytest.approx(10.0453, abs=1e-4)
    assert epsilon(run, noise_multiplier=0.134466, delta=1e-7) == pytest.approx(149.093, abs=1e-3)


@pytest.mark.parametrize("multiplier", [0.05, 0.5, 1.0, 3.0, 20.0])
def test_gaussian_delta_is_the_integral_of_the_positive_part(multiplier):
    for level in (0.0, 0.3, 2.0):
        cut = 0.5 - level * multiplier**2  # the loss of x ~ N(0, σ²) against N(1, σ²) exceeds the level below
        expected, _ = quad(
            lambda x, level=level: norm.pdf(x, 0, multiplier) - math.exp(level) * norm.pdf(x, 1, multiplier),
            cut - 12 * multiplier - 1,
            cut,
            points=[0.0] if cut - 12 * multiplier - 1 < 0 < cut else None,
            limit=400,
        )
        assert math.exp(gaussian_log_delta(multiplier, level)) == pytest.approx(expected, rel=1e-7, abs=1e-14)


@pytest.mark.parametrize("delta", [1e-2, 1e-6, 1e-12, 1e-100])
def test_gaussian_epsilon_inverts_over_eleven_decades(delta):
    for target in (1e-6, 1e-3, 0.1, 1.0, 10.0, 1e3, 1e5):
        multiplier = gaussian_noise_multiplier(target, delta)
        achieved = gaussian_epsilon(multiplier, delta)
        assert achieved <= target
        assert achieved == pytest.approx(target, rel=1e-8)
        assert gaussian_log_delta(multiplier, target) == pytest.approx(math.log(delta), rel=1e-7)


def test_gaussian_epsilon_in_the_far_tail_follows_the_asymptote():
    # At large ε, x = ε/μ − μ/2 is the normal quantile of δ up to a vanishing correction.
    multiplier = 1 / 440.0
    x = -norm.ppf(1e-10)
    assert gaussian_epsilon(multiplier, 1e-10) == pytest.approx(440.0**2 / 2 + 440.0 * x, rel=1e-4)


def test_no_noise_is_infinite_and_enough_noise_is_zero():
    for run in (GaussianRun(sensitivity=1.0), poisson(0.1, 10)):
        assert epsilon(run, noise_multiplier=0.0, delta=1e-5) == math.inf
        assert rdp_epsilon(run, noise_multiplier=0.0, delta=1e-5) == math.inf
    assert gaussian_epsilon(1e6, 1e-3) == 0.0
    assert gaussian_noise_multiplier(math.inf, 1e-5) == 0.0


def _densities(direction, rate, std):
    def plain(x):
        return norm.pdf(x, 0, std)

    def shifted(x, by):
        return rate * norm.pdf(x, by, std) + (1 - rate) * norm.pdf(x, 0, std)

    if direction is Direction.REMOVE:
        return lambda x: shifted(x, -1), plain
    if direction is Direction.ADD:
        return plain, lambda x: shifted(x, 1)
    return lambda x: shifted(x, -1), lambda x: shifted(x, 1)


def _integrated(upper, lower, level, std, points=100_001):
    grid = np.linspace(-1 - 12 * std, 1 + 12 * std, points)
    positive = np.maximum(upper(grid) - math.exp(level) * lower(grid), 0.0)
    return float(np.sum(positive) * (grid[1] - grid[0]))


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(("rate", "std"), [(0.01, 0.7), (0.3, 1.0), (0.9, 3.0), (1.0, 1.5)])
def test_one_step_curve_is_the_integral(direction, rate, std):
    upper, lower = _densities(direction, rate, std)
    levels = np.array([-1.5, -0.2, -0.004, 0.0, 0.004, 0.05, 0.4, 1.5, 4.0])
    expected = [_integrated(upper, lower, level, std) for level in levels]
    np.testing.assert_allclose(hockey_stick(levels, std, rate, direction), expected, atol=2e-8, rtol=1e-5)


def test_replacement_by_the_opposite_is_the_worst_of_all_replacements():
    rate, std = 0.2, 0.8
    for level in (0.1, 0.5, 1.5):
        worst = float(hockey_stick(np.array([level]), std, rate, Direction.REPLACE)[0])
        for a, b in itertools.product(np.linspace(-1, 1, 7), repeat=2):
            value = _integrated(
                lambda x, a=a: rate * norm.pdf(x, a, std) + (1 - rate) * norm.pdf(x, 0, std),
                lambda x, b=b: rate * norm.pdf(x, b, std) + (1 - rate) * norm.pdf(x, 0, std),
                level,
                std,
                points=20_001,
            )
            assert value <= worst + 1e-6


def test_two_replace_steps_against_a_double_integral():
    rate, std = 0.3, 1.2
    run = poisson(rate, 2, Adjacency.REPLACE)
    grid = np.linspace(-1 - 8 * std, 1 + 8 * std, 2501)
    upper, lower = (density(grid) for density in _densities(Direction.REPLACE, rate, std))
    for delta in (1e-2, 1e-4):
        level = epsilon(run, noise_multiplier=std, delta=delta)
        positive = np.maximum(np.outer(upper, upper) - math.exp(level) * np.outer(lower, lower), 0.0)
        exact = float(positive.sum() * (grid[1] - grid[0]) ** 2)
        assert exact <= delta * (1 + 1e-6)
        assert exact == pytest.approx(delta, rel=5e-3)


@pytest.mark.parametrize(
    ("adjacency", "rate", "steps", "std"),
    [
        (Adjacency.ZERO_OUT, 0.01, 500, 0.8),
        (Adjacency.ADD_REMOVE, 0.2, 50, 3.0),
        (Adjacency.REPLACE, 0.01, 500, 0.8),
        (Adjacency.REPLACE, 0.2, 50, 3.0),
    ],
)
def test_agrees_with_dp_accounting_on_the_same_grid(adjacency, rate, steps, std):
    interval = grid_interval(std, rate, adjacency, steps=steps)
    event = PoissonSampledDpEvent(rate, GaussianDpEvent(std))
    theirs = PLDAccountant(RELATIONS[adjacency], interval).compose(event, steps).get_epsilon(1e-6)
    ours = epsilon(poisson(rate, steps, adjacency), noise_multiplier=std, delta=1e-6)
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE])
def test_truncated_samples_agree_with_dp_accounting(adjacency, monkeypatch):
    run = TruncatedPoissonRun(sampling_prob=0.05, steps=20, adjacency=adjacency, num_examples=400, max_batch_size=24)
    interval = 1e-3  # coarser than the default, so that the second part of the mixture fits
    monkeypatch.setattr(accounting, "grid_interval", lambda *args, **kwargs: interval)
    accounting._pld_epsilon.cache_clear()
    theirs = PLDAccountant(RELATIONS[adjacency], interval).compose(TruncatedEvent(400, 0.05, 24, 1.5), 20)
    assert epsilon(run, noise_multiplier=1.5, delta=1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-6)
    untruncated = epsilon(poisson(0.05, 20, adjacency), noise_multiplier=1.5, delta=1e-5)
    assert epsilon(run, noise_multiplier=1.5, delta=1e-5) > untruncated
    accounting._pld_epsilon.cache_clear()


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE])
def test_truncated_bound_covers_the_enumerated_worst_case(adjacency):
    # Four examples on a line, samples of at most one: the law of a step is a mixture that we can write down.
    count, rate, limit, std = 4, 0.4, 1, 0.9

    def law(values):
        weights: dict[float, float] = {}
        for members in itertools.product([False, True], repeat=count):
            chosen = [v for v, inside in zip(values, members, strict=True) if inside]
            chance = math.prod(rate if inside else 1 - rate for inside in members)
            kept = list(itertools.combinations(chosen, min(limit, len(chosen))))
            for subset in kept:
                weights[sum(subset)] = weights.get(sum(subset), 0.0) + chance / len(kept)
        return lambda x: sum(w * norm.pdf(x, centre, std) for centre, w in weights.items())

    run = TruncatedPoissonRun(
        sampling_prob=rate, steps=1, adjacency=adjacency, num_examples=count, max_batch_size=limit
    )
    other = 0.0 if adjacency is Adjacency.ZERO_OUT else -1.0
    for delta in (1e-1, 1e-2, 1e-3):
        level = epsilon(run, noise_multiplier=std, delta=delta)
        for rest in (-1.0, 0.0, 1.0):
            first, second = law([1.0, rest, rest, rest]), law([other, rest, rest, rest])
            assert _integrated(first, second, level, std) <= delta * (1 + 1e-6)
            assert _integrated(second, first, level, std) <= delta * (1 + 1e-6)


@pytest.mark.parametrize(
    ("rate", "steps", "std"), [(0.002, 1000, 0.8), (0.02, 10, 0.8), (0.02, 1000, 1.5), (0.3, 10, 6)]
)
def test_renyi_lies_above_and_not_far_above(rate, steps, std):
    run = poisson(rate, steps)
    tight = epsilon(run, noise_multiplier=std, delta=1e-6)
    loose = rdp_epsilon(run, noise_multiplier=std, delta=1e-6)
    assert loose >= tight * (1 - 1e-3)
    # The conversion is loose for small ε; low orders, which large ε needs, are left out where they diverge.
    if 2.0 <= tight <= 100.0:
        assert loose <= 1.35 * tight


def test_renyi_of_a_gaussian_run_lies_just_above_the_closed_form():
    run = GaussianRun(sensitivity=2.0)
    for std in (0.3, 1.0, 10.0):
        tight = epsilon(run, noise_multiplier=std, delta=1e-6)
        assert tight <= rdp_epsilon(run, noise_multiplier=std, delta=1e-6) <= 1.15 * tight


def test_runs_without_a_renyi_bound_are_refused():
    with pytest.raises(ValueError, match=r"No Rényi bound.*REPLACE"):
        rdp_epsilon(poisson(0.1, 10, Adjacency.REPLACE), noise_multiplier=1.0, delta=1e-5)
    run = TruncatedPoissonRun(
        sampling_prob=0.1, steps=1, adjacency=Adjacency.ZERO_OUT, num_examples=10, max_batch_size=2
    )
    with pytest.raises(ValueError, match=r"No Rényi bound.*Truncated"):
        rdp_epsilon(run, noise_multiplier=1.0, delta=1e-5)
    assert not accounting.has_rdp_bound(run)


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE])
def test_epsilon_falls_with_noise_and_rises_with_steps(adjacency):
    values = [
        epsilon(poisson(0.01, 300, adjacency), noise_multiplier=std, delta=1e-6) for std in np.geomspace(0.5, 8, 6)
    ]
    assert all(a > b for a, b in itertools.pairwise(values))
    by_steps = [epsilon(poisson(0.01, t, adjacency), noise_multiplier=1.0, delta=1e-6) for t in (1, 30, 300)]
    assert all(a < b for a, b in itertools.pairwise(by_steps))


def test_replace_costs_more_than_zero_out_and_zero_out_is_add_remove():
    values = {a: epsilon(poisson(0.02, 200, a), noise_multiplier=1.2, delta=1e-6) for a in Adjacency}
    assert values[Adjacency.ZERO_OUT] == values[Adjacency.ADD_REMOVE]
    assert 1.2 * values[Adjacency.ZERO_OUT] < values[Adjacency.REPLACE]


@pytest.mark.parametrize(("rate", "steps", "std"), [(256 / 60_000, 5000, 1.5), (0.5, 100, 5.0)])
def test_grid_is_fine_enough_and_coarser_grids_only_overstate(rate, steps, std):
    run = poisson(rate, steps)
    coarse, default, fine = (epsilon(run, noise_multiplier=std, delta=1e-6, resolution=r) for r in (8.0, 32.0, 128.0))
    assert coarse >= default >= fine
    assert default <= fine * (1 + 1.5e-4)


def test_bad_arguments_are_named():
    run = poisson(0.1, 10)
    with pytest.raises(ValueError, match="delta"):
        epsilon(run, noise_multiplier=1.0, delta=0.0)
    with pytest.raises(ValueError, match="1e-12"):
        epsilon(run, noise_multiplier=1.0, delta=1e-13)
    with pytest.raises(ValueError, match="noise_multiplier"):
        epsilon(run, noise_multiplier=math.nan, delta=1e-5)
