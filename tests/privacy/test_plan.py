"""The plan refuses combinations without a proof and survives JSON; its statement is correct."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest

from dpoptim.noise import BandedToeplitz, Independent, SquareRoot
from dpoptim.privacy import (
    Adjacency,
    CyclicPoisson,
    Gradient,
    IndependentMoments,
    JointMoments,
    NoiselessSquare,
    Poisson,
    PrivacyPlan,
    Shuffled,
    gaussian_epsilon,
)
from dpoptim.privacy.accounting import GaussianRun, PoissonRun, TruncatedPoissonRun


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("DPOPTIM_CACHE_DIR", str(tmp_path))


def make(**changes):
    return PrivacyPlan(**{"num_examples": 1000, "batch_size": 100, "steps": 30, **changes})


def test_unamplified_plan_counts_participations():
    plan = make(noise_multiplier=1.0)
    assert (plan.max_participations, plan.min_separation, plan.sampling_prob) == (3, 10, 0.1)
    assert plan.epsilon(delta=1e-7) == pytest.approx(10.0453, abs=1e-4)
    assert make(noise_multiplier=0.134466).epsilon(delta=1e-7) == pytest.approx(149.093, abs=1e-3)
    assert make(steps=31, noise_multiplier=1.0).max_participations == 4


def test_integers_of_numpy_are_whole_numbers():
    four: Any = np.int64(4)
    sampling, noise = CyclicPoisson(bands=four), BandedToeplitz(bands=four)
    plan = make(steps=np.int64(30), batch_size=np.uint8(100), sampling=sampling, noise=noise)
    expected = make(sampling=CyclicPoisson(bands=4), noise=BandedToeplitz(bands=4))
    assert repr(plan) == repr(expected)
    assert json.dumps(plan.to_dict()) == json.dumps(expected.to_dict())
    for wrong in (np.bool_(True), True, 30.0, "30"):
        with pytest.raises(ValueError, match="steps to be a whole number"):
            make(steps=wrong)


@pytest.mark.parametrize("noise", [Independent(), SquareRoot(), BandedToeplitz(bands=4), BandedToeplitz(bands=20)])
def test_effective_noise_is_column_norm_over_sensitivity(noise):
    plan = make(noise=noise, noise_multiplier=1.3)
    sensitivity = plan.strategy.sensitivity(max_participations=3, min_separation=10)
    expected = gaussian_epsilon(1.3 * plan.strategy.column_norm / sensitivity, 1e-6)
    assert plan.epsilon(delta=1e-6) == pytest.approx(expected, rel=1e-12)
    replaced = plan.replace(adjacency=Adjacency.REPLACE, noise_multiplier=2.6)
    assert replaced.epsilon(delta=1e-6) == pytest.approx(expected, rel=1e-9)
    assert replaced.noise_stddevs() == (2.6, None)


def test_no_sampling_counts_more_participations_than_fit(monkeypatch):
    """A sampling that did would be refused."""
    for sampling in (Shuffled(), Poisson(), CyclicPoisson(bands=1), CyclicPoisson(bands=4)):
        for batch_size, steps in itertools.product((1, 7, 10), (4, 5, 11, 24)):
            plan = PrivacyPlan(num_examples=40, batch_size=batch_size, steps=steps, sampling=sampling)
            assert (plan.max_participations - 1) * plan.min_separation < steps
    monkeypatch.setattr(Shuffled, "max_participations", lambda self, **numbers: 4)
    with pytest.raises(ValueError, match="4 participations at min_separation=10 do not fit into 30 steps"):
        make(noise_multiplier=1.0).epsilon(delta=1e-7)


def test_separated_bands_cost_what_independent_noise_costs():
    banded = make(noise=BandedToeplitz(bands=8), noise_multiplier=1.0)
    assert banded.epsilon(delta=1e-7) == pytest.approx(10.0453, abs=1e-4)
    overlapping = make(noise=BandedToeplitz(bands=16), noise_multiplier=1.0)
    assert overlapping.epsilon(delta=1e-7) > 10.1


def test_accountant_depends_on_the_sampling():
    assert isinstance(make().run, GaussianRun)
    assert isinstance(make(sampling=Poisson()).run, PoissonRun)
    assert isinstance(make(sampling=Poisson(max_batch_size=120)).run, TruncatedPoissonRun)
    assert isinstance(make(sampling=Poisson(max_batch_size=1000)).run, PoissonRun)


@pytest.mark.parametrize("adjacency", [Adjacency.ADD_REMOVE, Adjacency.REPLACE])
def test_full_batches_use_the_closed_form(adjacency):
    plan = make(batch_size=1000, sampling=Poisson(), adjacency=adjacency, noise_multiplier=5.0)
    expected = gaussian_epsilon(5.0 / (adjacency.sensitivity_factor * math.sqrt(30)), 1e-6)
    assert plan.epsilon(delta=1e-6) == pytest.approx(expected, rel=1e-12)
    nearly = make(num_examples=10**6, batch_size=999_999, sampling=Poisson(), adjacency=adjacency)
    assert nearly.replace(noise_multiplier=5.0).epsilon(delta=1e-6) == pytest.approx(expected, rel=1e-3)


def test_sampling_amplifies():
    unamplified = make(noise_multiplier=1.0).epsilon(delta=1e-6)
    assert make(sampling=Poisson(), noise_multiplier=1.0).epsilon(delta=1e-6) < unamplified


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"noise": BandedToeplitz(bands=4), "release": JointMoments(), "adjacency": Adjacency.REPLACE},
        {"sampling": Poisson(), "release": IndependentMoments()},
        {"sampling": Poisson(max_batch_size=150)},
    ],
)
def test_calibration_fills_in_the_multiplier_and_remembers_delta(changes):
    plan = make(**changes)
    calibrated = plan.calibrate(epsilon=3.0, delta=1e-6)
    assert plan.noise_multiplier is None
    assert calibrated.delta == 1e-6
    assert 3.0 - 1e-4 <= calibrated.epsilon() <= 3.0
    assert calibrated.epsilon(delta=1e-8) > 3.0
    assert calibrated.replace(noise_multiplier=None, delta=None) == plan
    assert make(**changes).calibrate(epsilon=math.inf, delta=1e-6).epsilon() == math.inf


def test_the_release_does_not_change_epsilon_unless_it_is_noiseless():
    plan = make(noise_multiplier=1.0)
    for release in (Gradient(), IndependentMoments(balance="mse"), JointMoments()):
        assert plan.with_release(release).epsilon(delta=1e-6) == plan.epsilon(delta=1e-6)
    bare = plan.with_release(NoiselessSquare())
    assert bare.epsilon(delta=1e-6) == math.inf
    assert not bare.is_private
    with pytest.raises(ValueError, match="not private"):
        bare.calibrate(epsilon=1.0, delta=1e-6)


def test_missing_numbers_are_named_in_errors():
    with pytest.raises(ValueError, match="calibrate"):
        make().epsilon(delta=1e-6)
    with pytest.raises(ValueError, match="delta"):
        make(noise_multiplier=1.0).epsilon()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"adjacency": Adjacency.ADD_REMOVE}, "moves others to different steps"),
        (
            {"sampling": Poisson(), "noise": BandedToeplitz(bands=4)},
            r"needs cyclic .* Use sampling=CyclicPoisson\(bands=",
        ),
        ({"sampling": Poisson(), "noise": SquareRoot()}, "no proof"),
        ({"sampling": Poisson(max_batch_size=120), "adjacency": Adjacency.ADD_REMOVE}, "Truncated"),
        ({"sampling": Poisson(max_batch_size=120), "release": IndependentMoments()}, "truncated"),
        ({"sampling": Poisson(max_batch_size=120), "release": JointMoments()}, "truncated"),
    ],
)
def test_combinations_without_a_proof_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        make(**changes)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_examples", [0, -1, 1.5, True, "9", None, math.nan]),
        ("batch_size", [0, 2.0, True, 1001]),
        ("steps", [0, -3, False, 1.0]),
        ("clip_norm", [0.0, -1.0, 9e-13, math.nan, True, "1", math.inf, None]),
        ("noise_multiplier", [-0.1, math.nan, math.inf, True, "1"]),
        ("delta", [0.0, 1.0, -1e-6, math.nan, True, "small"]),
        ("sampling", [Shuffled, None, "poisson"]),
        ("noise", [Independent, None, 3]),
        ("release", [Gradient, None, "gradient"]),
        ("adjacency", ["zero_out", None, 1]),
    ],
)
def test_bad_arguments_are_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            make(**{name: value})


def test_infinite_clip_norm_is_only_for_debugging():
    plan = make(clip_norm=math.inf, noise_multiplier=0.0)
    assert plan.epsilon(delta=1e-6) == math.inf
    for release in (Gradient(), IndependentMoments(), JointMoments(), NoiselessSquare()):
        assert plan.with_release(release).noise_stddevs().gradient_sum == 0.0


def test_plans_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().steps = 4
    with pytest.raises(TypeError):
        PrivacyPlan(1000, 100, 30)  # type: ignore[call-arg]


PLANS = [
    make(),
    make(noise=BandedToeplitz(bands=7), release=IndependentMoments(balance=0.3), delta=1e-5),
    make(sampling=Poisson(max_batch_size=130), adjacency=Adjacency.REPLACE, noise_multiplier=1.5),
    make(sampling=Poisson(), adjacency=Adjacency.ADD_REMOVE, release=JointMoments(square_weight=0.1)),
    make(noise=SquareRoot(), release=NoiselessSquare(), clip_norm=0.25),
]


@pytest.mark.parametrize("plan", PLANS)
def test_survives_json(plan):
    again = PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert type(again.sampling) is type(plan.sampling)


def test_unknown_fields_and_kinds_are_refused():
    values = make().to_dict()
    with pytest.raises(ValueError, match="epochs"):
        PrivacyPlan.from_dict({**values, "epochs": 3})
    with pytest.raises(ValueError, match="sampling"):
        PrivacyPlan.from_dict({**values, "sampling": {"kind": "Sorted"}})
    with pytest.raises(ValueError, match="noise"):
        PrivacyPlan.from_dict({**values, "noise": {"kind": "NoiseKey", "_secret": ""}})


def test_statement_has_all_an_auditor_needs():
    plan = make(sampling=Poisson(), release=IndependentMoments(), clip_norm=0.5)
    text = " ".join(plan.calibrate(epsilon=2.0, delta=1e-6).statement().split())
    assert text.startswith("Differentially private: epsilon = 2.0000 at delta = 1e-06")
    # The answer comes first: who is protected, against which neighbours, with which sampling and accountant.
    titles = ["Protected:", "Neighbours:", "Sampling:", "Accountant:", "Participation:", "Noise:", "Assumptions:"]
    assert [text.index(title) for title in titles] == sorted(text.index(title) for title in titles)
    for words in (
        "one example",
        "zero-out",
        "each example is in each batch independently",
        "must stay secret",
        "num_examples = 1000, batch_size = 100",
        "steps = 30",
        "projected onto norm 0.5",
        "clipped sum by at most 0.5, and the square by at most 0.005",
        "Gaussian matrix mechanism, Independent()",
        "noise_multiplier = ",
        "dp-accounting 0.6",
        "Rényi",
        "weight 0",
        "no batch statistics",
        "hyperparameters",
        "real numbers",
        "no more than 30 steps",
        "key is secret",
    ):
        assert words in text, words
    assert "NOT PRIVATE" not in text


def test_statement_of_an_unamplified_plan():
    plan = make(noise=BandedToeplitz(bands=4), noise_multiplier=2.0, adjacency=Adjacency.REPLACE)
    text = " ".join(plan.statement(delta=1e-7).split())
    for words in (
        "at most 3 steps, at least 10 steps apart",
        "closed form",
        "replace:",
        "exact",
        "need not be secret",
    ):
        assert words in text, words
    headline = float(text.split("epsilon = ")[1].split(" ")[0])
    assert 0 <= headline - plan.epsilon(delta=1e-7) <= 1e-4


def test_statement_without_second_opinion_and_with_truncation():
    plan = make(sampling=Poisson(max_batch_size=130), noise_multiplier=1.0, delta=1e-6)
    text = " ".join(plan.statement().split())
    assert "No second bound is implemented" in text
    assert "takes another example's place" in text


@pytest.mark.parametrize(
    "plan",
    [
        make(noise_multiplier=0.0, delta=1e-6),
        make(noise_multiplier=2.0, delta=1e-6, release=NoiselessSquare()),
        make(noise_multiplier=0.0, delta=1e-6, sampling=Poisson(), release=JointMoments()),
    ],
)
def test_statement_without_a_guarantee_starts_with_not_private(plan):
    first = plan.statement().splitlines()[0]
    assert first.startswith("NOT PRIVATE: epsilon = inf")
    assert "Differentially private" not in plan.statement()


def test_a_delta_that_allows_publishing_one_example_is_refused():
    weak = 1 / make().num_examples
    for state in (
        lambda: make(noise_multiplier=1.0, delta=weak),
        lambda: make(delta=weak),
        lambda: make().calibrate(epsilon=3.0, delta=0.9 * weak).replace(delta=weak),
        lambda: make(noise_multiplier=1.0).statement(delta=weak),
        lambda: make().calibrate(epsilon=3.0, delta=weak),
    ):
        with pytest.raises(ValueError, match=r"is not below 1/.* such as"):
            state()
    make(noise_multiplier=1.0, delta=0.9 * weak).statement()
    make(noise_multiplier=0.0, delta=weak).statement()  # says that it is not private


def test_statement_needs_delta():
    with pytest.raises(ValueError, match="delta"):
        make(noise_multiplier=1.0).statement()
