"""Sensitivities of the squares: the worst pairs attain them, and random search does not exceed them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

from dpoptim.privacy import (
    Adjacency,
    Gradient,
    IndependentMoments,
    JointMoments,
    NoiselessSquare,
    joint_sensitivity,
    noise_stddevs,
    square_sensitivity,
)
from dpoptim.privacy.sampling import Poisson, Shuffled

ZERO, ADD, REPLACE = Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE, Adjacency.REPLACE


def clip(vectors, norm):
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors * np.minimum(1.0, norm / np.maximum(lengths, 1e-30))


def bound(squares, sampling, adjacency, size, norm=1.0):
    return square_sensitivity(squares=squares, sampling=sampling, adjacency=adjacency, clip_norm=norm, batch_size=size)


def released(batch, squares, sampling, size, norm):
    """The averaged square of a batch [examples, dimension] of raw gradients."""
    clipped = clip(batch, norm)
    if squares == "average_of":
        return (clipped**2).sum(axis=0) / size
    average = clipped.sum(axis=0) / size
    if squares == "of_average" and isinstance(sampling, Poisson):
        average = clip(average, norm)
    return average**2


def largest_change(squares, sampling, adjacency, size, norm, examples, dimension, rng):
    """The worst pair of batches that differ in their first example, found by search from many starts."""

    def change(flat):
        rows = flat.reshape(examples + 1, dimension)
        first = rows[1:]
        second = first.copy()
        second[0] = rows[0] if adjacency is REPLACE else 0.0
        a, b = (released(batch, squares, sampling, size, norm) for batch in (first, second))
        return float(np.linalg.norm(a - b))

    best = 0.0
    for _ in range(150):
        best = max(best, change(rng.normal(size=(examples + 1) * dimension) * 3 * norm))
    for _ in range(3):
        start = rng.normal(size=(examples + 1) * dimension) * norm
        found = minimize(lambda flat: -change(flat), start, method="Powell", options={"maxiter": 30})
        best = max(best, -found.fun)
    return best


@pytest.mark.parametrize("squares", ["of_average", "average_of"])
@pytest.mark.parametrize("sampling", [Shuffled(), Poisson()])
@pytest.mark.parametrize("adjacency", [ZERO, REPLACE])
@pytest.mark.parametrize(("size", "dimension", "norm"), [(1, 2, 1.0), (2, 3, 2.0)])
def test_no_pair_of_batches_exceeds_the_bound(squares, sampling, adjacency, size, dimension, norm):
    rng = np.random.default_rng(7)
    counts = [size] if isinstance(sampling, Shuffled) else [1, 2 * size]
    limit = bound(squares, sampling, adjacency, size, norm)
    for examples in counts:
        change = largest_change(squares, sampling, adjacency, size, norm, examples, dimension, rng)
        assert change <= limit * (1 + 1e-9)


@pytest.mark.parametrize("size", [1, 2, 8, 33])
def test_equal_gradients_attain_the_zero_out_bound(size):
    batch = np.zeros((size, 3))
    batch[:, 0] = 5.0
    other = batch.copy()
    other[0] = 0.0
    a, b = (released(x, "of_average", Shuffled(), size, 1.0) for x in (batch, other))
    assert np.linalg.norm(a - b) == pytest.approx(bound("of_average", Shuffled(), ZERO, size), rel=1e-12)
    assert bound("of_average", Shuffled(), ZERO, size) == pytest.approx((2 * size - 1) / size**2)


@pytest.mark.parametrize("size", [2, 8, 33])
def test_opposite_replacement_attains_all_but_the_stated_factor(size):
    batch = np.zeros((size, 3))
    batch[:, 0] = 1.0
    other = batch.copy()
    other[0, 0] = -1.0
    a, b = (released(x, "of_average", Shuffled(), size, 1.0) for x in (batch, other))
    attained = bound("of_average", Shuffled(), REPLACE, size) * (2 * size - 2) / (2 * size - 1)
    assert np.linalg.norm(a - b) == pytest.approx(attained, rel=1e-12)


def test_average_of_squares_is_attained_by_one_and_by_two_coordinates():
    first, second, none = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]]), np.zeros((1, 2))
    for size in (1, 5):
        one, two, zero = (released(x, "average_of", Shuffled(), size, 1.0) for x in (first, second, none))
        assert np.linalg.norm(one - zero) == pytest.approx(bound("average_of", Shuffled(), ZERO, size))
        assert np.linalg.norm(one - two) == pytest.approx(bound("average_of", Shuffled(), REPLACE, size))


def test_a_large_poisson_batch_breaks_the_bound_without_projection():
    size = 4
    batch = np.zeros((3 * size, 2))
    batch[:, 0] = 1.0
    whole = batch.sum(axis=0) / size
    less = batch[1:].sum(axis=0) / size
    assert np.linalg.norm(whole**2 - less**2) == pytest.approx(1.4375)
    assert bound("of_average", Shuffled(), ZERO, size) == pytest.approx(0.4375)
    a, b = (released(x, "of_average", Poisson(), size, 1.0) for x in (batch, batch[1:]))
    assert np.linalg.norm(a - b) <= bound("of_average", Poisson(), ZERO, size) == 0.5


def test_projected_bound_is_approached():
    # With average exactly ζ, taking one example away moves the square by (2B−1)/B² → 2/B.
    for size in (4, 64):
        batch = np.zeros((size, 2))
        batch[:, 0] = 1.0
        a, b = (released(x, "of_average", Poisson(), size, 1.0) for x in (batch, batch[1:]))
        ratio = np.linalg.norm(a - b) / bound("of_average", Poisson(), ZERO, size)
        assert 1 - 1 / (2 * size) - 1e-9 <= ratio <= 1


@pytest.mark.parametrize(("norm", "weight"), [(0.5, 0.1), (3.0, 0.5), (0.5, 0.6), (3.0, 40.0)])
def test_joint_sensitivity_is_attained_and_not_exceeded(norm, weight):
    rng = np.random.default_rng(3)
    scale = weight / norm**2

    def embed(vector):
        return np.concatenate([vector, math.sqrt(scale) * vector**2])

    def distance(flat, replace):
        x, y = clip(flat.reshape(2, -1), norm)
        return float(np.linalg.norm(embed(x) - (embed(y) if replace else 0.0)))

    for adjacency in (ZERO, ADD, REPLACE):
        replace = adjacency is REPLACE
        limit = joint_sensitivity(square_weight=scale, sampling=Shuffled(), adjacency=adjacency, clip_norm=norm)
        best = 0.0
        for dimension, _ in itertools.product((1, 2, 3), range(4)):
            start = rng.normal(size=2 * dimension) * norm
            found = minimize(lambda flat, r=replace: -distance(flat, r), start, method="Nelder-Mead")
            best = max(best, -found.fun)
        assert best <= limit * (1 + 1e-9)
        assert best >= limit * (1 - 1e-3)


def test_replace_costs_more_above_joint_weight_one_half():
    def of(weight):
        return joint_sensitivity(square_weight=weight, sampling=Shuffled(), adjacency=REPLACE, clip_norm=1.0)

    assert of(0.1) == of(0.5) == 2.0
    assert of(0.51) > 2.0


SIZES: dict[str, Any] = {"clip_norm": 0.8, "batch_size": 16, "noise_multiplier": 1.7}


@pytest.mark.parametrize("balance", ["equal", "mse", 0.01, 1.0, 30.0])
def test_every_split_spends_exactly_the_budget(balance):
    kinds: Any = itertools.product(["of_average", "average_of"], [Shuffled(), Poisson()], [ZERO, REPLACE])
    for squares, sampling, adjacency in kinds:
        release = IndependentMoments(balance=balance, squares=squares)
        stds = noise_stddevs(release, sampling=sampling, adjacency=adjacency, **SIZES)
        factor = adjacency.sensitivity_factor
        second = bound(squares, sampling, adjacency, 16, 0.8)
        spent = (factor * 0.8 / stds.gradient_sum) ** 2 + (second / stds.square) ** 2
        assert spent == pytest.approx(factor**2 / 1.7**2, rel=1e-12)


def test_poisson_replace_keeps_each_neighbour_within_one_unit_of_the_batch_without_the_example():
    for release in (
        IndependentMoments(squares="average_of"),
        IndependentMoments(),
        IndependentMoments(balance="mse", squares="average_of"),
    ):
        stds = noise_stddevs(release, sampling=Poisson(), adjacency=REPLACE, **SIZES)
        one_side = bound(release.squares, Poisson(), ZERO, 16, 0.8)
        assert (0.8 / stds.gradient_sum) ** 2 + (one_side / stds.square) ** 2 <= 1 / 1.7**2 * (1 + 1e-12)
    joint = noise_stddevs(JointMoments(), sampling=Poisson(), adjacency=REPLACE, **SIZES)
    assert 0.8 * math.sqrt(1.5) / joint.gradient_sum == pytest.approx(1 / 1.7)


def test_equal_split_is_the_printed_algorithm_and_matches_its_balance():
    stds = noise_stddevs(IndependentMoments(), sampling=Shuffled(), adjacency=ZERO, **SIZES)
    second = bound("of_average", Shuffled(), ZERO, 16, 0.8)
    assert stds.gradient_sum == pytest.approx(math.sqrt(2) * 0.8 * 1.7)
    assert stds.square == pytest.approx(math.sqrt(2) * second * 1.7)
    as_number = IndependentMoments(balance=(0.8 / 16) / second)
    assert noise_stddevs(as_number, sampling=Shuffled(), adjacency=ZERO, **SIZES) == pytest.approx(stds)


def test_mse_split_has_the_least_total_variance():
    def total(balance):
        stds = noise_stddevs(IndependentMoments(balance=balance), sampling=Shuffled(), adjacency=ZERO, **SIZES)
        assert stds.square is not None
        return (stds.gradient_sum / 16) ** 2 + stds.square**2

    others = [total(c) for c in np.geomspace(1e-2, 1e3, 301)]
    assert total("mse") <= min(others) * (1 + 1e-12)
    assert total("mse") == pytest.approx(min(others), rel=1e-3)


def test_plain_and_joint_noise():
    for adjacency in Adjacency:
        stds = noise_stddevs(Gradient(), sampling=Poisson(), adjacency=adjacency, **SIZES)
        assert stds == (pytest.approx(0.8 * 1.7), None)
    free = noise_stddevs(JointMoments(), sampling=Shuffled(), adjacency=REPLACE, **SIZES)
    assert free.gradient_sum == pytest.approx(0.8 * 1.7)
    assert free.square == pytest.approx(free.gradient_sum / (math.sqrt(0.5 / 0.64) * 16))
    paid = noise_stddevs(JointMoments(), sampling=Shuffled(), adjacency=ZERO, **SIZES)
    assert paid.gradient_sum == pytest.approx(0.8 * 1.7 * math.sqrt(1.5))
    bare = noise_stddevs(NoiselessSquare(), sampling=Shuffled(), adjacency=ZERO, **SIZES)
    assert bare == (pytest.approx(0.8 * 1.7), 0.0)


def test_truncated_squares_are_refused():
    for release in (IndependentMoments(), JointMoments()):
        with pytest.raises(ValueError, match="truncated Poisson"):
            noise_stddevs(release, sampling=Poisson(max_batch_size=20), adjacency=ZERO, **SIZES)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, True, "half"])
def test_bad_weights_are_refused(bad):
    with pytest.raises(ValueError, match="balance"):
        IndependentMoments(balance=bad)
    if not isinstance(bad, str):
        with pytest.raises(ValueError, match="square_weight"):
            JointMoments(square_weight=bad)
    with pytest.raises(ValueError, match="squares"):
        IndependentMoments(squares="of_the_average")  # type: ignore[arg-type]
