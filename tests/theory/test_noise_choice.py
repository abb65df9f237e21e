"""The choice of a mechanism: errors match streamed noise, budgets are respected, and the reason is stated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dpoptim import (
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    CyclicPoisson,
    DecayedSums,
    Dense,
    Independent,
    NoiseKey,
    NoiseMemory,
    Poisson,
    PrivacyPlan,
    Shuffled,
    choose_noise,
)
from dpoptim.noise import TensorPart
from dpoptim.theory import Candidate, format_bytes

TARGET: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-6}


def shuffled(**changes):
    return PrivacyPlan(**{"num_examples": 2000, "batch_size": 100, "steps": 60, **changes})


def test_errors_match_streamed_noise():
    """Sum the noise of a plan and compare with the candidate's errors."""
    plan = shuffled(noise=BandedToeplitz(bands=8)).calibrate(**TARGET)
    candidate = Candidate(plan=plan, parameters=10)
    parts = [TensorPart(name="w", numel=20_000)]
    rows = plan.strategy.stream(NoiseKey.from_bytes(bytes(32)), parts, stream="gradient")
    level = plan.noise_stddevs().gradient_sum * plan.strategy.column_norm / plan.batch_size
    sums = torch.stack([rows.row(step) for step in range(plan.steps)]).double().mul(level).cumsum(0)
    seen = sums.square().mean(1).sqrt().numpy()
    np.testing.assert_allclose(seen, candidate.errors, rtol=0.03)
    assert not np.allclose(1.1 * seen, candidate.errors, rtol=0.03)
    assert candidate.rmse_mean == pytest.approx(math.sqrt(np.mean(candidate.errors**2)))
    assert candidate.rmse_max == candidate.errors.max() >= candidate.rmse_mean


def test_the_papers_setting():
    """BandMF with 128 bands has .1345 times the error of independent noise; buffers do better, in less memory."""
    plan = PrivacyPlan(num_examples=1_700_000, batch_size=2048, steps=2000)
    choice = choose_noise(plan, epsilon=10.0, delta=1e-7, parameters=4_385_920)
    by_name = {candidate.name: candidate for candidate in choice.candidates}
    banded, independent = by_name["BandedToeplitz(bands=128)"], by_name["Independent()"]
    assert banded.rmse_mean / independent.rmse_mean == pytest.approx(0.134466, abs=1e-6)
    assert independent.plan.noise_multiplier == pytest.approx(1.0039, abs=1e-4)
    assert isinstance(choice.plan.noise, BufferedToeplitz)
    assert choice.chosen.rmse_mean < 0.81 * banded.rmse_mean
    assert choice.chosen.memory_bytes < banded.memory_bytes / 40
    for candidate in choice.candidates:
        assert 10 - 1e-4 <= candidate.plan.epsilon() <= 10
    assert choice.reason.startswith(choice.chosen.name)
    assert "\n" not in choice.reason


def test_memory_and_time_limits_are_respected():
    everything = choose_noise(shuffled(), **TARGET, parameters=1000)
    least = min(c.rmse_mean for c in everything.candidates if c.normal_rows <= 16)
    assert everything.chosen.rmse_mean <= 1.005 * least
    tight = choose_noise(shuffled(), **TARGET, parameters=1000, memory_budget=0)
    assert tight.chosen.memory_bytes == 0
    assert isinstance(tight.plan.noise, BandedInverse)
    assert tight.chosen.normal_rows <= 16
    halved = choose_noise(shuffled(), **TARGET, parameters=1000, memory=NoiseMemory(bits=16))
    for full, half in zip(everything.candidates, halved.candidates, strict=True):
        assert 2 * half.memory_bytes == full.memory_bytes
    assert "would take" in tight.reason


def test_extra_mechanisms_and_a_different_workload():
    workload = DecayedSums(beta=0.9)
    dense = Dense(workload=workload)
    plan = shuffled(num_examples=6000)  # one participation
    choice = choose_noise(plan, **TARGET, parameters=1000, workload=workload, more=[dense])
    found = {candidate.name: candidate for candidate in choice.candidates}
    assert found["Dense()"].rmse_mean == min(c.rmse_mean for c in choice.candidates)
    strategy = choice.plan.strategy
    unit = float(choice.plan.noise_multiplier or 0) * strategy.column_norm / plan.batch_size
    assert choice.chosen.rmse_mean == pytest.approx(unit * strategy.mean_error(workload))


class TestAmplified:
    @pytest.mark.slow
    def test_finds_the_best_number_of_bands(self):
        plan = shuffled(num_examples=20_000, sampling=Poisson())
        choice = choose_noise(plan, **TARGET, parameters=10)
        chosen, errors = choice.plan.strategy.bands, {}
        for bands in {1, 2, *range(3, 61, 3), chosen - 1, chosen, chosen + 1}:
            noise = BandedToeplitz(bands=bands) if bands > 1 else Independent()
            tried = plan.replace(noise=noise, sampling=CyclicPoisson(bands=bands)).calibrate(**TARGET)
            errors[bands] = Candidate(plan=tried, parameters=10).rmse_mean
        assert choice.chosen.rmse_mean <= 1.01 * min(errors.values())
        assert choice.plan.sampling == CyclicPoisson(bands=chosen)
        assert choice.chosen.rmse_mean == pytest.approx(errors[chosen], rel=1e-4)
        assert f"BandedToeplitz(bands={chosen})" in choice.reason

    def test_groups_are_at_least_as_large_as_a_batch(self):
        choice = choose_noise(shuffled(num_examples=250, sampling=Poisson()), **TARGET, parameters=10)
        assert max(getattr(c.plan.noise, "bands", 1) for c in choice.candidates) == 2

    def test_truncated_batches_allow_only_independent_noise(self):
        plan = shuffled(sampling=Poisson(max_batch_size=150))
        choice = choose_noise(plan, **TARGET, parameters=10)
        assert choice.plan.noise == Independent()
        assert choice.plan.sampling == plan.sampling


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"parameters": 0}, "Expected parameters .* got 0"), ({"memory_budget": -1}, "Expected memory_budget .* got -1")],
)
def test_bad_arguments_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        choose_noise(shuffled(), **{**TARGET, "parameters": 10, **changes})


def test_progress_names_each_mechanism():
    reported: list[str] = []
    choice = choose_noise(shuffled(), **TARGET, parameters=10, progress=reported.append)
    assert reported == [c.name for c in choice.candidates]


def test_one_step():
    choice = choose_noise(shuffled(steps=1), **TARGET, parameters=10)
    assert choice.plan.noise == Independent()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "no memory"), (999, "999 B"), (1000, "1 kB"), (52_800_000, "52.8 MB"), (3 * 10**13, "30 TB")],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


def test_a_shuffled_choice_keeps_its_sampling():
    assert choose_noise(shuffled(), **TARGET, parameters=10).plan.sampling == Shuffled()


def test_the_reason_names_what_was_too_expensive():
    tight = choose_noise(shuffled(), **TARGET, parameters=1000, memory_budget=1).reason
    assert ", in no memory; " in tight
    assert tight.endswith("above the 1 B allowed") or "rows of normals per step, above 16" in tight
    assert "of the" not in tight


def test_searches_that_take_too_long_are_refused():
    with pytest.raises(ValueError, match="Expected steps <= the limit, got 1000000 > 100000"):
        choose_noise(PrivacyPlan(num_examples=10_000_000, batch_size=64, steps=1_000_000), **TARGET, parameters=1000)
    secret = shuffled(sampling=Poisson())
    with pytest.raises(ValueError, match="secret sampling <= 100"):
        choose_noise(secret, epsilon=1e6, delta=1e-6, parameters=1000)
    assert choose_noise(shuffled(), epsilon=1e6, delta=1e-6, parameters=1000).chosen.plan.noise_multiplier
    assert choose_noise(secret, epsilon=math.inf, delta=1e-6, parameters=1000).plan.noise_multiplier == 0
