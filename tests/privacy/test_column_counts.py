"""What counts before training cost: against exact distributions, and composed with training."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from dpoptim.privacy import Adjacency, ColumnCounts, Poisson, PrivacyPlan, epsilon_of_runs, gaussian_epsilon
from dpoptim.privacy.composition import EpsilonSpent

RELATIONS = list(Adjacency)


@pytest.mark.parametrize("adjacency", RELATIONS)
def test_the_sensitivity_bounds_every_pair_of_tables(adjacency):
    """All tables of two columns with two records, and all their neighbours: no histogram moves further than claimed."""
    counts = ColumnCounts(columns=2, releases=1, stddev=1.0, threshold=1.0)
    values, blank = list(itertools.product(range(2), range(3))), None

    def histogram(table: tuple) -> np.ndarray:
        found = np.zeros(5)
        for record in table:
            if record is not blank:
                found[record[0]] += 1
                found[2 + record[1]] += 1
        return found

    furthest = 0.0
    for table in itertools.product(values, repeat=2):
        others = values if adjacency is Adjacency.REPLACE else [blank]
        for other in others:
            furthest = max(furthest, float(np.linalg.norm(histogram(table) - histogram((other, table[1])))))
    assert counts.shift(adjacency) == pytest.approx(furthest)


@pytest.mark.parametrize("adjacency", RELATIONS)
def test_calibrated_counts_keep_to_their_budget(adjacency):
    counts = ColumnCounts.calibrate(epsilon=0.7, delta=1e-6, columns=5, releases=2, adjacency=adjacency)
    assert 0.6999 < counts.epsilon(adjacency, delta=1e-6) <= 0.7
    assert counts.exposed_delta(adjacency) <= 0.5e-6
    assert counts.epsilon(adjacency, delta=counts.exposed_delta(adjacency)) == math.inf


def plan(**changes) -> PrivacyPlan:
    values: dict[str, Any] = {"num_examples": 1000, "batch_size": 100, "steps": 30, **changes}
    return PrivacyPlan(**values)


COUNTS = ColumnCounts(columns=3, releases=2, stddev=20.0, threshold=110.0)


@pytest.mark.parametrize("sampling", [None, Poisson()])
def test_counts_compose_with_training(sampling):
    sampled = {} if sampling is None else {"sampling": sampling}
    alone = plan(noise_multiplier=2.0, **sampled)
    both = alone.replace(counts=COUNTS)
    delta = 1e-5
    parts = alone.epsilon(delta=delta / 2), COUNTS.epsilon(both.adjacency, delta=delta / 2)
    assert max(alone.epsilon(delta=delta), COUNTS.epsilon(both.adjacency, delta=delta)) < both.epsilon(delta=delta)
    assert both.epsilon(delta=delta) < sum(parts), "never worse than adding up"
    assert epsilon_of_runs([both], delta=delta) == both.epsilon(delta=delta)
    assert epsilon_of_runs([both, both], delta=delta) > both.epsilon(delta=delta)
    assert both.epsilon(delta=COUNTS.exposed_delta(both.adjacency) / 2) == math.inf


def test_gaussian_training_and_counts_have_a_closed_form():
    both = plan(noise_multiplier=2.0, counts=COUNTS)
    shift = math.hypot(math.sqrt(3) / 2.0, math.sqrt(6) / 20.0)
    delta = 1e-5 - COUNTS.exposed_delta(both.adjacency)
    assert both.epsilon(delta=1e-5) == pytest.approx(gaussian_epsilon(1 / shift, delta), rel=1e-12)


@pytest.mark.parametrize("sampling", [None, Poisson()])
def test_calibration_includes_the_counts(sampling):
    sampled = {} if sampling is None else {"sampling": sampling}
    found = plan(counts=COUNTS, **sampled).calibrate(epsilon=2.0, delta=1e-5)
    assert 1.9998 < found.epsilon() <= 2.0
    without = plan(**sampled).calibrate(epsilon=2.0, delta=1e-5)
    assert found.noise_multiplier is not None
    assert without.noise_multiplier is not None
    assert found.noise_multiplier > without.noise_multiplier
    with pytest.raises(ValueError, match="The counts alone have epsilon"):
        plan(counts=COUNTS, **sampled).calibrate(epsilon=0.2, delta=1e-5)


def test_counts_are_spent_before_the_first_step():
    found = plan(counts=COUNTS, sampling=Poisson()).calibrate(epsilon=2.0, delta=1e-5)
    assert EpsilonSpent(found).at(0) >= COUNTS.epsilon(found.adjacency, delta=1e-5)
    assert EpsilonSpent(found).at(30) <= 2.0


def test_a_plan_with_counts_is_written_and_read():
    found = plan(counts=COUNTS, noise_multiplier=1.0, delta=1e-5)
    assert PrivacyPlan.from_dict(found.to_dict()) == found
    assert "counts" not in plan().to_dict()
    assert "Before training:" in found.statement()
    assert found.replace(noise_multiplier=0.0).epsilon() == math.inf
    assert found.rdp_epsilon() is None
