"""Noisy counts: exact without noise, as noisy as accounted for, and refused beyond."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest, kstest

from dpoptim.data.noisy_counts import NoisyCounter
from dpoptim.noise import NoiseKey
from dpoptim.privacy import Adjacency, ColumnCounts


def counter(*, columns: int = 2, releases: int = 2, stddev: float = 1e-9, threshold: float = 2.5) -> NoisyCounter:
    counts = ColumnCounts(columns=columns, releases=releases, stddev=stddev, threshold=threshold)
    return NoisyCounter(counts=counts, key=NoiseKey.from_bytes(bytes(32)))


def test_rare_values_are_hidden():
    found = counter().frequent(["b", "a", "b", "c", "b", "c", "c", "c"], column="ward", release=0)
    assert list(found) == ["b", "c"], "in order, whatever the order of the records"
    assert found == pytest.approx({"b": 3, "c": 4})


def test_a_histogram_has_every_place():
    assert counter().histogram([3, 1, 3], size=5, column="age", release=1) == pytest.approx([0, 1, 0, 2, 0], abs=1e-6)


def test_noise_is_what_the_plan_accounts_for():
    drawn = [
        count
        for number in range(40)
        for count in NoisyCounter(
            counts=ColumnCounts(columns=1, releases=1, stddev=7.0, threshold=1.0),
            key=NoiseKey.from_bytes(number.to_bytes(32, "little")),
        ).histogram([], size=100, column="age", release=0)
    ]
    assert kstest(np.array(drawn) / 7.0, "norm").pvalue > 1e-3
    assert kstest(np.array(drawn) / 6.0, "norm").pvalue < 1e-3, "the test rejects a wrong level"


def test_lone_values_are_seen_as_often_as_delta_allows():
    """The probability that anything shows of a record whose values nobody shares, against the δ that covers it."""
    counts = ColumnCounts(columns=2, releases=2, stddev=3.0, threshold=7.0)
    trials, shown = 2000, 0
    for number in range(trials):
        one = NoisyCounter(counts=counts, key=NoiseKey.from_bytes(number.to_bytes(32, "little")))
        shown += any(one.frequent(["only"], column=c, release=r) for c in ("a", "b") for r in (0, 1))
    (delta,) = {counts.exposed_delta(relation) for relation in (Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE)}
    assert counts.exposed_delta(Adjacency.REPLACE) == 2 * delta, "either neighbour may have such a record"
    exact = 1 - (1 - delta / 4) ** 4
    assert exact <= delta
    assert binomtest(shown, trials, exact).pvalue > 1e-3


def test_noise_differs_between_columns_and_releases():
    wide = counter(columns=2, stddev=1.0)
    draws = [wide.histogram([], size=3, column=c, release=r) for c in ("a", "b") for r in (0, 1)]
    assert len({value for draw in draws for value in draw}) == 12


def test_counts_that_are_not_accounted_for_are_refused():
    limited = counter(columns=1, releases=1)
    limited.histogram([0], size=1, column="age", release=0)
    for column, release in (("age", 0), ("ward", 0), ("age", 1)):
        with pytest.raises(ValueError, match="is not covered"):
            limited.histogram([0], size=1, column=column, release=release)
