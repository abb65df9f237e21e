"""Samplers: distribution, participation bounds, purity."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import binom, chisquare

from dpoptim.noise import NoiseKey
from dpoptim.privacy.sampling import CyclicPoisson, Poisson, Sampling, Shuffled

KEY = NoiseKey.from_bytes(bytes(range(32)))


@pytest.mark.parametrize("sampling", [Shuffled(), Poisson(), Poisson(max_batch_size=3), CyclicPoisson(bands=4)])
def test_draws_are_a_pure_function_of_key_and_step(sampling):
    assert isinstance(sampling, Sampling)
    first = [sampling.indices(KEY, t, num_examples=50, batch_size=5) for t in range(30)]
    other = NoiseKey.from_bytes(bytes(range(1, 33)))
    sampling.indices(other, 3, num_examples=50, batch_size=5)
    for t in reversed(range(30)):
        np.testing.assert_array_equal(first[t], sampling.indices(KEY, t, num_examples=50, batch_size=5))
    assert any(
        not np.array_equal(first[t], sampling.indices(other, t, num_examples=50, batch_size=5)) for t in range(30)
    )
    for batch in first:
        assert len(set(batch.tolist())) == len(batch)
        assert all(0 <= i < 50 for i in batch)


@pytest.mark.parametrize(
    ("count", "size", "steps"),
    [(7, 3, 20), (10, 5, 9), (5, 5, 4), (11, 1, 30), (9, 7, 25), (13, 4, 2), (8, 3, 1)],
)
def test_shuffled_participations_and_separation_by_brute_force(count, size, steps):
    sampling = Shuffled()
    times: dict[int, list[int]] = {i: [] for i in range(count)}
    for step in range(steps):
        batch = sampling.indices(KEY, step, num_examples=count, batch_size=size)
        assert len(batch) == size
        for i in batch.tolist():
            times[i].append(step)
    numbers = {"num_examples": count, "batch_size": size, "steps": steps}
    assert max(len(t) for t in times.values()) == sampling.max_participations(**numbers)
    gaps = [b - a for t in times.values() for a, b in itertools.pairwise(t)]
    if gaps:
        assert min(gaps) >= sampling.min_separation(**numbers)
    if steps * size >= 4 * count:
        assert min(gaps) == sampling.min_separation(**numbers)


def test_shuffled_order_is_uniform():
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for seed in range(2400):
        key = NoiseKey.from_bytes(seed.to_bytes(32, "little"))
        order = Shuffled().indices(key, 0, num_examples=4, batch_size=4)
        counts[tuple(order.tolist())] += 1
    assert chisquare(list(counts.values())).pvalue > 1e-3


def _frequency_is(observed, trials, rate):
    return abs(observed - trials * rate) <= 4.5 * np.sqrt(trials * rate * (1 - rate))


def test_poisson_rate_and_its_rejection_of_wrong_rates():
    count, size, steps = 2000, 100, 400
    sizes = [len(Poisson().indices(KEY, t, num_examples=count, batch_size=size)) for t in range(steps)]
    trials, total = count * steps, sum(sizes)
    assert _frequency_is(total, trials, size / count)
    assert not _frequency_is(total, trials, 0.9 * size / count)
    assert not _frequency_is(total, trials, 1.1 * size / count)
    # Batch sizes are binomial, which a shuffled sampler (constant size) would not be.
    edges = binom.ppf([0.2, 0.4, 0.6, 0.8], count, size / count)
    observed = np.bincount(np.searchsorted(edges, sizes), minlength=5)
    cuts = np.concatenate([[0.0], binom.cdf(edges, count, size / count), [1.0]])
    assert chisquare(observed, steps * np.diff(cuts)).pvalue > 1e-3


def test_poisson_examples_are_alike_and_steps_independent():
    count, steps = 20, 3000
    member = np.zeros((steps, count), dtype=bool)
    for t in range(steps):
        member[t, Poisson().indices(KEY, t, num_examples=count, batch_size=5)] = True
    assert chisquare(member.sum(axis=0)).pvalue > 1e-3
    both = (member[1:] & member[:-1]).sum()
    assert _frequency_is(both, (steps - 1) * count, 1 / 16)
    pairs = (member[:, 0] & member[:, 1]).sum()
    assert _frequency_is(pairs, steps, 1 / 16)


def test_truncation_keeps_a_uniform_subset():
    count, limit, steps = 12, 4, 3000
    sampling = Poisson(max_batch_size=limit)
    seen = np.zeros(count)
    for t in range(steps):
        whole = Poisson().indices(KEY, t, num_examples=count, batch_size=6)
        kept = sampling.indices(KEY, t, num_examples=count, batch_size=6)
        assert set(kept.tolist()) <= set(whole.tolist())
        assert len(kept) == min(limit, len(whole))
        seen[kept] += 1
    assert chisquare(seen).pvalue > 1e-3


def test_rate_comes_from_the_declared_number_of_examples():
    batches = [Poisson().indices(KEY, t, num_examples=1000, batch_size=100, dataset_size=3000) for t in range(50)]
    assert _frequency_is(sum(map(len, batches)), 50 * 3000, 0.1)
    assert max(batch.max() for batch in batches) >= 1000
    with pytest.raises(ValueError, match="dataset_size == num_examples, got 5 != 4"):
        Shuffled().indices(KEY, 0, num_examples=4, batch_size=2, dataset_size=5)


@pytest.mark.parametrize("size", [0, -1, True, 2.5, "4"])
def test_bad_truncation_is_refused(size):
    with pytest.raises(ValueError, match="max_batch_size"):
        Poisson(max_batch_size=size)
