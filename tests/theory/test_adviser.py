"""The adviser on random problems: its forecasts match simulations, and wrong advisers are caught."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpoptim import Adjacency, IndependentMoments, Poisson, PrivacyPlan, Shuffled
from dpoptim.noise import Independent
from dpoptim.theory import (
    Alternative,
    Assumption,
    Choice,
    GradientSignal,
    ScaleWindow,
    SecondMomentRegime,
    advise,
    adviser,
    choose_noise,
    measure_signal,
    negative_probability,
    second_moment_bias,
)
from dpoptim.theory.second_moments import moment_laws, moment_weights, squared_weight

DELTA = 1e-6


def plan_of(batch_size: int, steps: int, *, correlated: bool, clip_norm: float = 1.0) -> PrivacyPlan:
    """Two epochs. Under add/remove neighbours the only noise with a proof is independent."""
    return PrivacyPlan(
        num_examples=batch_size * steps // 2,
        batch_size=batch_size,
        steps=steps,
        clip_norm=clip_norm,
        sampling=Shuffled() if correlated else Poisson(),
        adjacency=Adjacency.ZERO_OUT if correlated else Adjacency.ADD_REMOVE,
    )


@pytest.fixture
def without_alternatives(monkeypatch):
    monkeypatch.setattr(adviser, "alternatives", lambda *_, **__: ((), None))
    monkeypatch.setattr(adviser, "_MOST_FORECASTS", 2)


def level_of(plan: PrivacyPlan) -> float:
    """Standard deviation of the noise on the averaged gradient for a row of norm 1, from the plan's definition."""
    assert plan.noise_multiplier is not None
    return plan.clip_norm * plan.noise_multiplier * plan.strategy.column_norm / plan.batch_size


def rows_of_noise(plan: PrivacyPlan, parameters: int, rng: np.random.Generator) -> np.ndarray:
    """[steps, parameters], on the averaged gradient."""
    return level_of(plan) * (plan.strategy.noising_matrix() @ rng.standard_normal((plan.steps, parameters)))


# Bias correction: the fraction of negative second moments.


@dataclass(frozen=True)
class Problem:
    plan: PrivacyPlan
    gradient: np.ndarray  # averaged, clipped, the same at every step
    epsilon: float
    beta2: float

    @property
    def signal(self) -> GradientSignal:
        squares = np.sort(self.gradient**2) / self.plan.clip_norm**2
        groups = np.array_split(squares, 30)
        return GradientSignal(
            parameters=len(squares),
            squares=tuple(float(group.mean()) for group in groups),
            weights=tuple(len(group) / len(squares) for group in groups),
        )

    def advised(self):
        return advise(
            self.plan,
            epsilon=self.epsilon,
            delta=DELTA,
            parameters=len(self.gradient),
            signal=self.signal,
            beta2=self.beta2,
        )

    def simulated(self, plan: PrivacyPlan, rng: np.random.Generator) -> float:
        """The fraction of ν̂ − b below 0 after the last step."""
        noise = rows_of_noise(plan, len(self.gradient), rng)
        norms = np.linalg.norm(plan.strategy.noising_matrix(), axis=1)
        nu, bias = np.zeros_like(self.gradient), 0.0
        for row, norm in zip(noise, norms, strict=True):
            nu = self.beta2 * nu + (1 - self.beta2) * (self.gradient + row) ** 2
            bias = self.beta2 * bias + (1 - self.beta2) * (level_of(plan) * norm) ** 2
        return float(np.mean(nu < bias))


def draw_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    clip_norm = float(rng.choice([0.3, 1.0, 5.0]))
    plan = plan_of(int(rng.integers(50, 1000)), 120, correlated=seed % 2 == 0, clip_norm=clip_norm)
    gradient = np.exp(rng.choice([0.0, 0.7, 1.5]) * rng.standard_normal(int(rng.integers(15_000, 25_000))))
    gradient *= clip_norm * 10 ** rng.uniform(-1.5, 0) / np.linalg.norm(gradient)
    return Problem(plan, gradient, float(np.exp(rng.uniform(0.5, 3.5))), float(rng.choice([0.98, 0.99, 0.999])))


SEEDS = range(8)


@functools.cache
def solved(seed: int) -> tuple[Problem, Choice, float]:
    """The problem, the noise that is chosen for it, and what a simulation of that shows."""
    problem = draw_problem(seed)
    choice = choose_noise(problem.plan, epsilon=problem.epsilon, delta=DELTA, parameters=len(problem.gradient))
    return problem, choice, problem.simulated(choice.plan, np.random.default_rng(1000 + seed))


def deviations(monkeypatch) -> list[tuple[float, float]]:
    """(advised, simulated) for each problem."""
    found = []
    for seed in SEEDS:
        problem, choice, simulated = solved(seed)
        with monkeypatch.context() as patched:
            patched.setattr(adviser, "choose_noise", lambda *_, choice=choice, **__: choice)  # which takes a while
            found.append((problem.advised().negative_fraction, simulated))
    return found


def is_right(pairs: list[tuple[float, float]]) -> bool:
    """Within four standard errors of 15,000 coordinates, and on the same side of 25 % unless it is a tie."""
    near = all(abs(advised - seen) < 0.017 for advised, seen in pairs)
    return near and all((advised > 0.25) == (seen > 0.25) for advised, seen in pairs if abs(seen - 0.25) > 0.017)


def test_negative_fractions_match_simulations(without_alternatives, monkeypatch):
    pairs = deviations(monkeypatch)
    assert is_right(pairs), pairs
    assert sum(advised > 0.27 for advised, _ in pairs) >= 4
    assert sum(advised < 0.23 for advised, _ in pairs) >= 3


WRONG = {
    "over B": lambda plan: 1 / plan.batch_size,
    "without the column norm": lambda plan: plan.strategy.column_norm**-2,
    "half as much": lambda plan: 0.5,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_adviser_with_a_wrong_noise_variance_is_caught(without_alternatives, monkeypatch, wrong):
    right = adviser.unit_variance
    monkeypatch.setattr(adviser, "unit_variance", lambda plan: right(plan) * WRONG[wrong](plan))
    assert not is_right(deviations(monkeypatch))


@pytest.mark.parametrize("length", [pytest.param(0.02, marks=pytest.mark.slow), 0.15])
def test_forecast_from_public_examples_matches_training(without_alternatives, length):
    """Gradients that differ between examples: probe 200 examples, then train on batches of others."""
    rng = np.random.default_rng(8)
    parameters, clip_norm = 6000, 1.0
    plan = plan_of(300, 120, correlated=True)
    stddev = np.exp(0.8 * rng.standard_normal(parameters))
    mean = stddev * rng.standard_normal(parameters)
    mean *= length / np.linalg.norm(mean)
    stddev *= 0.5 / np.linalg.norm(stddev)  # norms of examples are near .5: nothing is clipped
    public = torch.tensor(mean + stddev * rng.standard_normal((200, parameters)), dtype=torch.float32)
    model = nn.Linear(parameters, 1, bias=False)
    signal = measure_signal(
        model, lambda m, x: m(x)[:, 0], public.split(10), clip_norm=clip_norm, batch_size=plan.batch_size
    )
    advice = advise(plan, epsilon=30.0, delta=DELTA, parameters=parameters, signal=signal, beta2=0.99)
    batches = mean + stddev / math.sqrt(plan.batch_size) * rng.standard_normal((plan.steps, parameters))
    noisy = batches + rows_of_noise(advice.plan, parameters, rng)
    weights = moment_weights(beta=0.99, step=plan.steps)
    bias = level_of(advice.plan) ** 2 * float(second_moment_bias(advice.plan.strategy, beta2=0.99)[-1])
    simulated = float(np.mean(weights @ noisy**2 < bias))
    assert advice.negative_fraction == pytest.approx(simulated, abs=0.03)
    assert advice.many_negative is (simulated > 0.25) is (length < 0.1)


# The window of eps_scale.


def relative_second_moment(
    gradient: np.ndarray, noise: np.ndarray, *, clip_norm: float, eps_scale: float, beta2: float = 0.9
) -> float:
    """Σν̂/Σg² at the end of scale-then-privatize with equal examples; ∞ if it diverges."""
    nu = nu_hat = np.zeros_like(gradient)
    for t, row in enumerate(noise, start=1):
        scale = eps_scale / (np.sqrt(nu_hat) + eps_scale)
        clipped = gradient * min(1.0, clip_norm / np.linalg.norm(scale * gradient))
        nu = beta2 * nu + (1 - beta2) * (clipped + row / scale) ** 2
        nu_hat = nu / (1 - beta2**t)
        if nu_hat.sum() > 1e3 * (gradient**2).sum():
            return math.inf
    return float(nu_hat.sum() / (gradient**2).sum())


def seen_regime(relative: float) -> SecondMomentRegime:
    if relative == math.inf:
        return SecondMomentRegime.DIVERGES
    return SecondMomentRegime.STEADY if relative > 0.7 else SecondMomentRegime.COLLAPSES


@dataclass(frozen=True)
class WindowCase:
    """A problem with a window that is wide enough to have an inside."""

    plan: PrivacyPlan
    window: ScaleWindow
    gradient: np.ndarray
    noise: np.ndarray

    def outcomes(self, window: ScaleWindow) -> list[tuple[SecondMomentRegime, SecondMomentRegime, float]]:
        """(predicted by `window`, simulated, Σν̂/Σg² over the theory's value) at four places of the right window."""
        right = self.window
        values = (0.85 * right.low, math.sqrt(right.low * right.high), 0.9 * right.high, 1.15 * right.high)
        found = []
        for eps_scale in values:
            seen = relative_second_moment(self.gradient, self.noise, clip_norm=self.plan.clip_norm, eps_scale=eps_scale)
            rest = 1 / (1 - (right.low / eps_scale) ** 2)
            found.append((window.regime(eps_scale), seen_regime(seen), seen / rest))
        return found


def draw_window_case(seed: int) -> WindowCase:
    rng = np.random.default_rng(seed)
    clip_norm, parameters = float(rng.choice([0.1, 1.0, 4.0])), int(rng.integers(200, 800))
    correlated = seed % 2 == 0
    plan = plan_of(int(rng.integers(20, 100)), 200 if correlated else 700, correlated=correlated, clip_norm=clip_norm)
    advice = advise(plan, epsilon=float(rng.uniform(4, 20)), delta=DELTA, parameters=parameters)
    gradient = np.exp(rng.choice([0.0, 0.5]) * rng.standard_normal(parameters)) * rng.choice([-1, 1], parameters)
    gradient *= (20 if correlated else 100) * clip_norm / np.linalg.norm(gradient)
    return WindowCase(advice.plan, advice.window, gradient, rows_of_noise(advice.plan, parameters, rng))


def without_noise_term(window: ScaleWindow) -> ScaleWindow:
    """A wrong one: √m for the paper's lower end, c/√m for the upper end of eps_scale."""
    high = math.sqrt(window.high**2 - window.low**2)
    return ScaleWindow(**{**vars(window), "high": high})


def off_by(factor: float) -> Callable[[ScaleWindow], ScaleWindow]:
    return lambda window: ScaleWindow(**{**vars(window), "low": window.low * factor})


@pytest.mark.slow
def test_the_window_matches_simulations(without_alternatives, monkeypatch):
    cases = [case for seed in range(10) if (case := draw_window_case(seed)).window.width > 1.3]
    assert len(cases) >= 8
    assert {case.plan.strategy.bands > 1 for case in cases} == {True, False}
    for case in cases:
        for predicted, seen, relative in case.outcomes(case.window):
            assert predicted is seen, (case.window, predicted, relative)
            if predicted is SecondMomentRegime.STEADY:
                assert 0.75 < relative < 1.25

    def agree(change: Callable[[ScaleWindow], ScaleWindow]) -> bool:
        return all(predicted is seen for case in cases for predicted, seen, _ in case.outcomes(change(case.window)))

    assert agree(lambda window: window)
    assert not agree(without_noise_term)
    assert not agree(off_by(0.5))
    assert not agree(off_by(3.0))


# The advice itself.


def kind(row: Alternative) -> type:
    return type(row.candidate.plan.sampling)


@pytest.mark.slow
def test_the_papers_setting(monkeypatch):
    monkeypatch.setattr("dpoptim.theory.second_moments._LONGEST_BLOCK", 600)  # for time: the rest is scaled
    plan = PrivacyPlan(num_examples=1_700_000, batch_size=2048, steps=2000)
    advice = advise(plan, epsilon=10.0, delta=1e-7, parameters=4_400_000)
    assert (advice.variant, advice.many_negative) == ("scale_then_privatize", True)
    strategy = advice.plan.strategy
    phi = level_of(advice.plan) ** 2
    assert advice.noise_variance == pytest.approx(phi * strategy.row_norms()[-1] ** 2)
    first = float(negative_probability(0.1 / math.sqrt(4.4e6), noise_variance=phi, step=1))
    assert advice.forecasts[0].bias_correction == pytest.approx(first, abs=1e-6)
    # Exact values of negative_probability at step 2,000, for the strategy's noise.
    assert [one.negative_fraction for one in advice.assumptions] == pytest.approx([0.5049, 0.4849, 0.3149], abs=2e-3)
    assert advice.negative_fraction == advice.assumptions[1].negative_fraction
    assert "the choice is the same over that range" in advice.reason
    level = math.sqrt(phi) * float(max(strategy.row_norms()))
    assert advice.window.low == pytest.approx(level)
    assert advice.window.high == pytest.approx(math.hypot(level, 4.4e6**-0.5))
    assert advice.window.default == pytest.approx(2 * level)
    assert advice.eps_to_try[1] == pytest.approx(level, rel=0.05)
    assert advice.notes[0].startswith("ASSUMED")
    for row in advice.alternatives:
        assert row.candidate.plan.epsilon(delta=1e-7) <= 10.0
        assert row.candidate.plan.adjacency is Adjacency.ZERO_OUT
        expected = row.candidate.rmse_mean / advice.choice.chosen.rmse_mean  # more error, more ε at the same error
        assert row.epsilon_at_chosen_error is not None
        assert (row.epsilon_at_chosen_error > 10.001) == (expected > 1.0001)
    assert {kind(row) for row in advice.alternatives} >= {Shuffled, Poisson}
    accountants = {row.accountant.split(",")[0] for row in advice.alternatives}
    assert len(accountants) == 2


@pytest.mark.slow
def test_epsilon_at_the_same_error():
    plan = PrivacyPlan(num_examples=2000, batch_size=100, steps=60)
    advice = advise(plan, epsilon=4.0, delta=DELTA, parameters=1000)
    (row,) = [row for row in advice.alternatives if row.candidate.plan.noise == Independent() and kind(row) is Shuffled]
    cost = row.epsilon_at_chosen_error
    assert cost is not None
    again = plan.calibrate(epsilon=cost, delta=DELTA)
    # By the definition of the error of independent noise: σ√((T+1)/2)/B for prefix sums, on average.
    assert level_of(again) * math.sqrt(61 / 2) == pytest.approx(advice.choice.chosen.rmse_mean, rel=1e-3)


def test_notes_name_a_sampling_without_proof():
    plan = plan_of(100, 60, correlated=False)
    advice = advise(plan, epsilon=4.0, delta=DELTA, parameters=1000)
    assert {kind(row) for row in advice.alternatives} == {Poisson}
    assert any("not compared" in note and "no proof" in note for note in advice.notes)


@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.999])
def test_the_choice_over_a_range_is_that_of_the_norms_in_it(beta2):
    """Against `choose_variant` at 60 norms of the range, over 14 decades of noise: no choice inside is overlooked."""
    parameters, seen = 10_000, set()
    for phi in np.geomspace(1e-12, 1e2, 57):
        norms = np.geomspace(adviser.ASSUMED_NORMS[0], adviser.ASSUMED_NORMS[-1], 60)
        signals = [GradientSignal.evenly(parameters=parameters, norm=float(norm)) for norm in norms]
        chosen = [
            adviser.choose_variant(signal, phi=phi, negative=0.5, shares=(0.5, 0.5), beta2=beta2)[0]
            for signal in signals
        ]
        ends = [
            Assumption(norm=float(norms[i]), variant=chosen[i], snr=signals[i].mean / phi, negative_fraction=0.5)
            for i in (0, -1)
        ]
        variant, reason = adviser.choose_over_range(ends, parameters=parameters, phi=phi, beta2=beta2)
        assert variant == ("scale_then_privatize" if "scale_then_privatize" in chosen else "post_processing")
        assert ("is the same over that range" in reason) == (set(chosen) == {"scale_then_privatize"})
        if len(set(chosen)) == 2:  # where it changes
            (change,) = (i for i in range(1, 60) if chosen[i] != chosen[i - 1])
            (where,) = re.findall(r"; (?:below|from) ([0-9.]+) ", reason)
            assert 0.93 * norms[change - 1] < float(where) < 1.07 * norms[change]
            assert ("; below" in reason) == (chosen[0] == "post_processing")
        seen.add(tuple(dict.fromkeys(chosen)))
    post, scale = ("post_processing",), ("scale_then_privatize",)
    assert seen == {post, scale, post + scale, scale + post}


def test_a_given_signal_has_no_range(without_alternatives):
    """One that is given counts as it is, measured or not; without one, the range decides and is reported."""
    plan, parameters = plan_of(400, 200, correlated=True), 10_000
    given = GradientSignal.evenly(parameters=parameters, norm=0.3)
    settings: dict[str, Any] = {"epsilon": 8.0, "delta": DELTA, "parameters": parameters}
    assert advise(plan, signal=given, **settings).assumptions == ()
    advice = advise(plan, **settings)
    assert [one.norm for one in advice.assumptions] == [0.03, 0.1, 0.3]
    for one in advice.assumptions:
        alone = advise(plan, signal=GradientSignal.evenly(parameters=parameters, norm=one.norm), **settings)
        assert (one.variant, one.snr) == (alone.variant, pytest.approx(alone.snr))
        assert one.negative_fraction == pytest.approx(alone.negative_fraction)


def measured(squares, weights=None, parameters=10_000) -> GradientSignal:
    weights = weights or (1 / len(squares),) * len(squares)
    return GradientSignal(parameters=parameters, squares=squares, weights=weights, measured=True, examples=256)


def test_the_rule_chooses_each_variant(without_alternatives):
    """Each variant where its condition holds, with its numbers in the reason."""
    plan = plan_of(400, 200, correlated=True)
    phi = advise(plan, epsilon=8.0, delta=DELTA, parameters=10_000).noise_variance

    def of(signal):
        return advise(plan, epsilon=8.0, delta=DELTA, parameters=10_000, signal=signal)

    assert of(measured((20 * phi,))).variant == "post_processing"
    even = of(measured((phi,)))
    assert (even.variant, even.many_negative) == ("bias_correction", False)
    assert even.scaled_share == pytest.approx(even.signal_share)
    uneven = of(measured((1e-3 * phi, 4 * phi), (0.8, 0.2)))
    assert uneven.variant == "scale_then_privatize"
    assert uneven.scaled_share > uneven.signal_share + 0.02
    lost = of(measured((1e-4 * phi,)))
    assert lost.variant == "post_processing"
    assert "nothing to adapt to" in lost.reason
    assert f"{uneven.negative_fraction:.1%}" in uneven.reason
    for ratio, variant in ((1e-4, "scale_then_privatize"), (3e-5, "post_processing")):
        assumed = GradientSignal(parameters=10_000, squares=(ratio * phi,), weights=(1.0,))
        assert of(assumed).variant == variant


def test_ime_and_clip_norms(without_alternatives):
    plan = plan_of(400, 200, correlated=True, clip_norm=2.0)
    signal = GradientSignal(
        parameters=100, squares=(1e-3,), weights=(1.0,), measured=True, examples=64, example_norms=(0.51, 1.0, 3.0)
    )
    advice = advise(plan, epsilon=8.0, delta=DELTA, parameters=100, signal=signal)
    square = advice.plan.with_release(IndependentMoments()).noise_stddevs().square
    assert square is not None
    spread = square * advice.plan.strategy.column_norm
    spread *= math.sqrt(squared_weight(beta=0.999, step=200, strategy=advice.plan.strategy))
    expected = 0.5 * math.erfc(1e-3 * 4 / spread / math.sqrt(2))
    assert advice.forecasts[-1].independent_moments == pytest.approx(expected, rel=1e-6)
    assert advice.clip_norms_to_try == (0.51, 1.0, 3.0)
    assert any("not clipped" in note for note in advice.notes)


def test_without_noise_nothing_is_negative():
    advice = advise(plan_of(100, 20, correlated=True), epsilon=math.inf, delta=DELTA, parameters=50)
    assert (advice.variant, advice.negative_fraction, advice.snr) == ("post_processing", 0.0, math.inf)
    assert advice.window.low == 0.0
    assert len(advice.window.to_try) == 4


def test_bad_arguments_are_refused():
    plan = plan_of(100, 20, correlated=True)
    with pytest.raises(ValueError, match="release=Gradient"):
        advise(plan.replace(release=IndependentMoments()), epsilon=1.0, delta=DELTA, parameters=10)
    with pytest.raises(ValueError, match="same model"):
        advise(plan, epsilon=1.0, delta=DELTA, parameters=10, signal=GradientSignal.evenly(parameters=11))
    with pytest.raises(ValueError, match="add up to 1"):
        GradientSignal(parameters=10, squares=(1.0,), weights=(0.5,))
    with pytest.raises(ValueError, match="no longer than"):
        GradientSignal.evenly(parameters=10, norm=1.5)
    with pytest.raises(ValueError, match="Expected step <= the strategy's steps, got 5 > 4"):
        moment_laws(Independent().optimize(steps=4), [5])
