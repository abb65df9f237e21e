"""A separate strategy for the squares: its joint sensitivity by brute force, and its place in the plan."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch

import dpoptim
from dpoptim.noise import (
    Banded,
    BandedInverse,
    BandedToeplitz,
    DecayedSums,
    Independent,
    PrefixSums,
    SquareRoot,
)
from dpoptim.privacy import (
    Adjacency,
    CyclicPoisson,
    Gradient,
    IndependentMoments,
    Poisson,
    PrivacyPlan,
    Shuffled,
    joint_ratio,
    noise_stddevs,
    square_sensitivity,
)
from dpoptim.privacy.accounting import GaussianRun, PoissonRun

TOEPLITZ = [
    (Independent(), BandedToeplitz(bands=3)),
    (BandedToeplitz(bands=3), Independent()),
    (SquareRoot(), BandedToeplitz(bands=2)),
    (BandedToeplitz(bands=2), SquareRoot()),
]
OTHERS = [
    (Banded(bands=3), SquareRoot()),
    (Independent(), BandedInverse(bands=2)),
    (BandedInverse(bands=3), Banded(bands=2)),
]


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("DPOPTIM_CACHE_DIR", str(tmp_path))


def make(noise, square_noise, *, balance="equal", squares="of_average", **changes):
    release = IndependentMoments(balance=balance, squares=squares, square_noise=square_noise)
    settings = {"num_examples": 4, "batch_size": 2, "steps": 6, "clip_norm": 0.7, "noise_multiplier": 1.7}
    return PrivacyPlan(noise=noise, release=release, **{**settings, **changes})


def patterns(plan):
    """Every set of steps at which one example can take part, by number and separation."""
    for count in range(1, plan.max_participations + 1):
        for steps in itertools.combinations(range(plan.steps), count):
            if all(b - a >= plan.min_separation for a, b in itertools.pairwise(steps)):
                yield list(steps)


def largest_move(plan):
    """The largest ‖change over noise‖ of both streams: all patterns, contributions of full size along one line."""
    stds = plan.noise_stddevs()
    gradient_size = plan.adjacency.sensitivity_factor * plan.clip_norm / plan.batch_size
    square_size = square_sensitivity(
        squares=plan.release.squares, sampling=plan.sampling, adjacency=plan.adjacency,
        clip_norm=plan.clip_norm, batch_size=plan.batch_size,
    )  # fmt: skip
    streams = [
        (plan.strategy, gradient_size, stds.gradient_sum / plan.batch_size),
        (plan.square_strategy, square_size, stds.square),
    ]
    largest = 0.0
    for steps in patterns(plan):
        total = 0.0
        for strategy, size, std in streams:
            columns = strategy.strategy_matrix()[:, steps] * size / (std * strategy.column_norm)
            signs = itertools.product([-1.0, 1.0], repeat=len(steps))
            total += max(float(np.linalg.norm(columns @ np.array(sign)) ** 2) for sign in signs)
        largest = max(largest, math.sqrt(total))
    return largest


@pytest.mark.parametrize(("adjacency", "balance"), itertools.product(list(Adjacency)[::2], ["equal", "mse", 0.05]))
@pytest.mark.parametrize(("noise", "square_noise"), TOEPLITZ)
def test_worst_pattern_of_both_streams_attains_the_sensitivity(noise, square_noise, balance, adjacency):
    for squares in ("of_average", "average_of"):
        plan = make(noise, square_noise, balance=balance, squares=squares, adjacency=adjacency)
        assert plan.max_participations == 3
        assert largest_move(plan) == pytest.approx(plan.run.sensitivity / 1.7, rel=1e-9)


@pytest.mark.parametrize("sizes", [(3, 1, 7), (5, 5, 4)])
@pytest.mark.parametrize(("noise", "square_noise"), [*TOEPLITZ, *OTHERS])
def test_no_pattern_exceeds_the_sensitivity(noise, square_noise, sizes):
    count, size, steps = sizes
    plan = make(noise, square_noise, balance="mse", num_examples=count, batch_size=size, steps=steps)
    limit = plan.run.sensitivity / 1.7
    assert 0.8 * limit <= largest_move(plan) <= limit * (1 + 1e-9)


def test_rotated_contributions_do_not_exceed_the_sensitivity():
    """Contributions in several dimensions, with a different direction at each step."""
    plan = make(Banded(bands=3), SquareRoot(), adjacency=Adjacency.ZERO_OUT, num_examples=2, batch_size=2, steps=5)
    stds, rng, largest = plan.noise_stddevs(), np.random.default_rng(2), 0.0
    square_size = (2 * 2 - 1) * 0.7**2 / 2**2
    for _ in range(2000):
        total = 0.0
        assert stds.square is not None
        for strategy, over_noise in (
            (plan.strategy, 0.7 / stds.gradient_sum),
            (plan.square_strategy, square_size / stds.square),
        ):
            turned = rng.normal(size=(5, 2)) + rng.normal() * 3
            turned /= np.linalg.norm(turned, axis=1, keepdims=True)
            moved = strategy.strategy_matrix() @ turned * over_noise / strategy.column_norm
            total += float(np.linalg.norm(moved)) ** 2
        largest = max(largest, math.sqrt(total))
    limit = plan.run.sensitivity / 1.7
    assert 0.95 * limit <= largest <= limit * (1 + 1e-9)


def test_accounting_for_two_strategies_as_one_understates_epsilon():
    plan = make(Independent(), SquareRoot())
    as_one = plan.replace(release=IndependentMoments())
    assert as_one.run.sensitivity == pytest.approx(math.sqrt(3))
    assert largest_move(plan) > 1.1 * as_one.run.sensitivity / 1.7
    assert plan.epsilon(delta=1e-6) > as_one.epsilon(delta=1e-6)


def test_the_same_strategy_twice_is_one():
    noise = BandedToeplitz(bands=3)
    plan, plain = make(noise, BandedToeplitz(bands=3)), make(noise, None)
    assert plan.square_strategy is plan.strategy
    assert plain.square_strategy is plain.strategy
    assert plan.run == plain.run == plain.with_release(Gradient()).run


@pytest.mark.parametrize("balance", ["equal", "mse", 1e-3, 50.0])
@pytest.mark.parametrize(
    ("squares", "sampling", "adjacency"),
    [
        ("of_average", Shuffled(), Adjacency.ZERO_OUT),
        ("average_of", CyclicPoisson(bands=2), Adjacency.ZERO_OUT),
        ("average_of", Shuffled(), Adjacency.REPLACE),
        ("of_average", CyclicPoisson(bands=2), Adjacency.REPLACE),
    ],
)
def test_shares_are_those_of_the_noise(balance, squares, sampling, adjacency):
    release = IndependentMoments(balance=balance, squares=squares)
    common = {"sampling": sampling, "adjacency": adjacency, "clip_norm": 0.6, "batch_size": 5}
    stds = noise_stddevs(release, noise_multiplier=1.3, **common)
    factor = adjacency.sensitivity_factor
    assert stds.square is not None
    shares = (
        (factor * 0.6 / stds.gradient_sum * 1.3 / factor) ** 2,
        (square_sensitivity(squares=squares, **common) / stds.square * 1.3 / factor) ** 2,
    )
    assert sum(shares) == pytest.approx(1.0, rel=1e-12)
    expected = math.sqrt(shares[0] * 2.0**2 + shares[1] * 5.0**2)
    assert joint_ratio(release, ratios=(2.0, 5.0), **common) == pytest.approx(expected, rel=1e-9)
    assert joint_ratio(release, ratios=(3.0, 3.0), **common) == 3.0


def test_amplified_runs_do_not_depend_on_the_strategies():
    cyclic = {"sampling": CyclicPoisson(bands=3), "num_examples": 40, "steps": 10}
    plan = make(BandedToeplitz(bands=2), Banded(bands=3), **cyclic)
    assert plan.run == PoissonRun(sampling_prob=0.15, steps=4, adjacency=Adjacency.ZERO_OUT)
    for strategy in (plan.strategy, plan.square_strategy):
        assert np.linalg.norm(strategy.strategy_matrix(), axis=0).max() == pytest.approx(strategy.column_norm)
    independent = make(Independent(), Independent(), sampling=Poisson(), num_examples=40)
    assert independent.run == PoissonRun(sampling_prob=0.05, steps=6, adjacency=Adjacency.ZERO_OUT)
    for changes, match in (
        ({"square_noise": BandedToeplitz(bands=4), **cyclic}, "square_noise=.* at most 3 diagonals"),
        ({"square_noise": SquareRoot(), "sampling": Poisson()}, "square_noise=.*CyclicPoisson"),
    ):
        with pytest.raises(ValueError, match=match):
            make(Independent(), **changes)


def test_full_groups_are_accounted_for_jointly():
    plan = make(BandedToeplitz(bands=2), Independent(), sampling=CyclicPoisson(bands=2), steps=5)
    assert plan.sampling_prob == 1.0
    assert isinstance(plan.run, GaussianRun)
    assert largest_move(plan) == pytest.approx(plan.run.sensitivity / 1.7, rel=1e-9)


def test_calibration_and_stale_calibrations():
    plan = make(Independent(), SquareRoot(), noise_multiplier=None).calibrate(epsilon=4.0, delta=1e-6)
    assert 4.0 - 1e-4 <= plan.epsilon() <= 4.0
    # The gradient alone, or one strategy, costs less. A different strategy for the squares needs a new calibration.
    assert plan.with_release(Gradient()).epsilon() < 4.0
    calibrated = plan.replace(release=Gradient(), noise_multiplier=None).calibrate(epsilon=4.0, delta=1e-6)
    assert calibrated.with_release(IndependentMoments()).epsilon() == calibrated.epsilon()
    with pytest.raises(ValueError, match=r"has a larger epsilon.*Calibrate"):
        calibrated.with_release(IndependentMoments(square_noise=SquareRoot()))
    assert make(Independent(), None, noise_multiplier=None).with_release(plan.release).run == plan.run


def test_survives_json_at_any_depth():
    plan = make(SquareRoot(), BandedToeplitz(bands=3), balance=0.25)
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["release"]["square_noise"]["kind"] == "BandedToeplitz"
    assert PrivacyPlan.from_dict(values) == plan
    older = {name: value for name, value in values["release"].items() if name != "square_noise"}
    assert PrivacyPlan.from_dict({**values, "release": older}).release == IndependentMoments(balance=0.25)
    for wrong, match in (
        ({"kind": "keystream"}, r"release\.square_noise has the unknown kind 'keystream'"),
        ({"kind": "Poisson"}, r"release\.square_noise has the unknown kind 'Poisson'"),
        ({"kind": "Independent", "colour": 1}, r"release\.square_noise has the unknown fields \['colour'\]"),
    ):
        with pytest.raises(ValueError, match=match):
            PrivacyPlan.from_dict({**values, "release": {**values["release"], "square_noise": wrong}})


def test_nested_workloads_survive_json():
    rates = tuple(1.0 / (t + 1) for t in range(6))
    noise = BandedToeplitz(bands=2, workload=PrefixSums(learning_rate=rates, momentum=0.5))
    plan = make(noise, BandedToeplitz(bands=3, workload=DecayedSums(beta=0.9)))
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["noise"]["workload"]["learning_rate"] == list(rates)
    again = PrivacyPlan.from_dict(values)
    assert again == plan
    assert hash(again) == hash(plan)


def test_bad_specifications_are_named():
    for wrong in (Independent, "independent", 3, 0):
        with pytest.raises(ValueError, match="square_noise"):
            IndependentMoments(square_noise=wrong)  # type: ignore[arg-type]


def test_results_are_defined_without_noise():
    plan = make(Independent(), SquareRoot(), balance="mse", clip_norm=math.inf, noise_multiplier=0.0)
    assert plan.epsilon(delta=1e-6) == math.inf
    assert math.isfinite(plan.run.sensitivity)
    assert plan.statement(delta=1e-6).startswith("NOT PRIVATE")


def test_statement_names_both_strategies():
    plan = make(Independent(), SquareRoot())
    text = " ".join(plan.statement(delta=1e-6).split())
    norm = plan.square_strategy.column_norm
    for words in (
        "Gaussian matrix mechanism, Independent(",
        "on the square SquareRoot(",
        f"column norm {norm:.6g}, accounted for jointly",
        "row t of the noising matrix of each strategy",
        f"with unit columns: {plan.run.sensitivity:.6g} (an upper bound)",
    ):
        assert words in text, words
    assert "on the square" not in plan.replace(release=IndependentMoments()).statement(delta=1e-6)


class TestVariant:
    """`independent_moments` and the plan agree on what is released."""

    def made(self, plan, **options):
        return dpoptim.independent_moments(torch.nn.Linear(2, 1), plan, **options).plan

    def test_defaults_come_from_the_plan(self):
        plan = make(Independent(), SquareRoot(), balance="mse", squares="average_of")
        assert self.made(plan) == plan
        assert self.made(plan, balance=0.5).release == IndependentMoments(
            balance=0.5, squares="average_of", square_noise=SquareRoot()
        )
        assert self.made(plan.replace(release=Gradient())).release == IndependentMoments()

    def test_noise_that_the_plan_was_not_calibrated_for_is_refused(self):
        plan = make(Independent(), None)
        with pytest.raises(ValueError, match=r"has a larger epsilon.*Calibrate"):
            self.made(plan, square_noise=SquareRoot())
        assert self.made(plan, square_noise=Independent()).epsilon(delta=1e-6) == plan.epsilon(delta=1e-6)
        cheaper = make(SquareRoot(), None)
        assert self.made(cheaper, square_noise=Independent()).epsilon(delta=1e-6) < cheaper.epsilon(delta=1e-6)


BALANCES = [0.01, "equal", "mse", 100.0]


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(BALANCES, 2)))
def test_a_different_balance_never_raises_epsilon(before, after):
    """The shares of the budget weigh two different sensitivities, so changing them changes ε."""
    settings = {"num_examples": 400, "batch_size": 10, "steps": 100, "noise_multiplier": None}
    plan = make(BandedToeplitz(bands=10), SquareRoot(), balance=before, **settings).calibrate(epsilon=4.0, delta=1e-6)
    for other in ("of_average", "average_of"):
        wanted = IndependentMoments(balance=after, squares=other, square_noise=SquareRoot())
        true = plan.replace(release=wanted).epsilon()
        if true > 4.0 + 1e-9:
            with pytest.raises(ValueError, match="has a larger epsilon"):
                plan.with_release(wanted)
        else:
            assert plan.with_release(wanted).epsilon() <= 4.0 + 1e-9
    model = torch.nn.Linear(2, 1)
    if plan.replace(release=IndependentMoments(balance=after, square_noise=SquareRoot())).epsilon() > 4.0 + 1e-9:
        with pytest.raises(ValueError, match="has a larger epsilon"):
            dpoptim.independent_moments(model, plan, balance=after, squares="of_average")
