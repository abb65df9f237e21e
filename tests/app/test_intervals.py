"""Student's intervals against scipy, their coverage, and the cases without one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpoptim.app.comparison.intervals import mean_interval, paired_difference

VALUES = [2.31, 2.27, 2.40, 2.29, 2.35]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_interval_matches_scipy(count):
    values = VALUES[:count]
    low, high = stats.t.interval(0.95, count - 1, loc=np.mean(values), scale=stats.sem(values))
    assert mean_interval(values).mean == pytest.approx((low + high) / 2)
    assert half_width(values) == pytest.approx((high - low) / 2, rel=1e-12)


def half_width(values):
    found = mean_interval(values).half_width
    assert found is not None
    return found


def coverage(interval, *, draws=2000, count=3):
    values = np.random.default_rng(5).normal(0.7, 2.0, (draws, count))
    return np.mean([abs(np.mean(row) - 0.7) <= interval(row.tolist()) for row in values])


def test_interval_covers_the_mean_95_percent_of_the_time():
    slack = 4 * math.sqrt(0.95 * 0.05 / 2000)
    assert coverage(half_width) == pytest.approx(0.95, abs=slack)
    normal = coverage(lambda row: 1.959964 * np.std(row, ddof=1) / math.sqrt(3))
    wide = coverage(lambda row: 1.5 * half_width(row))
    assert abs(normal - 0.95) > slack
    assert abs(wide - 0.95) > slack


def test_pairing_removes_variation_shared_by_seeds():
    seeds = np.array([0.0, 5.0, -3.0, 8.0])
    one, other = seeds + np.array([1.0, 1.1, 0.9, 1.0]), seeds + np.array([0.5, 0.5, 0.6, 0.5])
    found = paired_difference(one.tolist(), other.tolist())
    expected = stats.ttest_rel(one, other).confidence_interval(0.95)
    assert found.mean == pytest.approx((expected.low + expected.high) / 2, rel=1e-9)
    assert found.half_width == pytest.approx((expected.high - expected.low) / 2, rel=1e-9)
    assert found.excludes_zero
    assert not mean_interval(one.tolist()).excludes_zero
    reverse = paired_difference(other.tolist(), one.tolist())
    assert reverse.excludes_zero
    assert reverse.mean == pytest.approx(-found.mean)


def test_single_and_infinite_values_have_no_interval():
    single = mean_interval([3.0])
    assert (single.mean, single.half_width, single.excludes_zero) == (3.0, None, False)
    diverged = mean_interval([3.0, math.inf])
    assert (diverged.mean, diverged.half_width) == (math.inf, None)
    for one, other in ((1.0, math.inf), (math.inf, 1.0), (math.inf, math.inf)):
        assert paired_difference([1.0, one], [1.0, other]).mean == math.inf
    same = mean_interval([2.0, 2.0])
    assert (same.half_width, same.excludes_zero) == (0.0, True)
