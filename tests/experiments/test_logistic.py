"""The logistic simulation: the library's optimizer step for step, its noise levels, its losses, its tuning."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor, nn

import dpoptim
from experiments.logistic import cells as logistic_cells
from experiments.logistic import problem as logistic_problem
from experiments.logistic.problem import Datasets, Problem, datasets, evaluate, mean_loss, population_loss
from experiments.logistic.report import excess_of, holds

pytestmark = pytest.mark.slow

SMALL = Problem(
    present=0.5,
    batch_size=6,
    steps=30,
    draws=3,
    trials=2,
    test_samples=50,
    seed=5,
    clip_norm=0.4,
    noise_multiplier=1.0,
)
LR, EPS = 0.7, 0.6


class OneWeight(nn.Module):
    """log(1 + exp(−θ·s x)) for each example s·x."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, signed: Tensor) -> Tensor:
        return nn.functional.softplus(-self.theta * signed[:, 0])


def library_path(data: Datasets, variant: str, noise: str) -> list[float]:
    """θ_1, ..., θ_T of the library's own optimizer on the first draw, with the normals of its first trial."""
    model, plan = OneWeight(), SMALL.plan(noise)
    common: dict[str, Any] = {"key": SMALL.key, "run_id": logistic_problem.RUN_ID, "external_batches": True}
    make = getattr(dpoptim, "post_processing" if variant.startswith("post") else variant)
    optimizer = make(model, plan, LR, rule=dpoptim.AdaGrad(eps=EPS), **common)
    path = []
    for row in data.signed[:, 0]:
        kept = row[row != 0]
        batch = torch.cat([kept, torch.zeros(SMALL.batch_size - len(kept), dtype=torch.float64)])
        model(batch[:, None]).sum().backward()
        optimizer.step()
        path.append(float(model.theta.detach()))
    return path


@pytest.mark.parametrize("noise", ["independent", "dense"])
@pytest.mark.parametrize("variant", ["post_processing", "independent_moments"])
def test_equals_the_library_step_for_step(variant, noise):
    data = datasets(SMALL)
    expected = library_path(data, variant, noise)
    walked = logistic_problem.walk(SMALL, data, variant, noise, lrs=(0.1, LR), eps=(EPS, 2.0))
    found = [float(theta[0, 0, 1, 0]) for theta in walked]
    assert max(map(abs, expected)) > 0.1, "the run does not move"
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def test_without_noise_it_is_torch_adagrad():
    data = datasets(SMALL)
    theta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    reference = torch.optim.Adagrad([theta], lr=LR, eps=EPS)
    for row in data.signed[:, 1]:
        theta.grad = -(row * torch.sigmoid(-theta.detach() * row)).sum(0, keepdim=True) / SMALL.batch_size
        reference.step()
    *_, last = logistic_problem.walk(SMALL, data, "non_private", "none", lrs=(LR,), eps=(EPS,))
    assert last.shape == (3, 1, 1, 1)
    assert float(last[1]) == pytest.approx(float(theta.detach()), abs=1e-12)


def test_a_floor_bounds_the_rate():
    """With a floor above every √ν it is SGD with the rate lr/floor; a floor of 0 changes nothing."""
    data = datasets(SMALL)

    def last(**rates):
        (theta,) = deque(logistic_problem.walk(SMALL, data, "non_private", "none", eps=(0.0,), **rates), maxlen=1)
        return theta.flatten().numpy()

    theta = np.zeros(SMALL.draws)
    for rows in data.signed.numpy():
        theta += (rows / (1 + np.exp(theta[:, None] * rows))).sum(1) / SMALL.batch_size * LR / 50
    np.testing.assert_allclose(last(lrs=(LR,), floor=50.0), theta, atol=1e-12)
    assert np.abs(last(lrs=(LR,)) - theta).min() > 0.01


def test_the_cells_have_the_setting_and_the_rates_of_the_paper():
    assert {(c["present"], c["batch_size"], c["steps"], c["noise_multiplier"], c["clip_norm"], c["trials"])
            for c in logistic_cells.cells("paper")} == {(0.1, 1, 1000, 0.1, 1.0, 30)}  # fmt: skip
    floors = {c["variant"]: c["floor"] for c in logistic_cells.cells("paper")}
    assert floors["independent_moments"] == floors["independent_moments_for_free"] == 1.0
    assert floors["post_processing"] == floors["non_private"] == 0.0


def test_trials_and_draws_have_different_noise():
    *_, last = logistic_problem.walk(SMALL, datasets(SMALL), "post_processing", "independent", lrs=(LR,), eps=(EPS,))
    assert len(np.unique(last.numpy())) == 6
    more = dataclasses.replace(SMALL, draws=4)
    few = datasets(SMALL).signed
    np.testing.assert_allclose(datasets(more).signed[:, :3, : few.shape[2]].numpy(), few.numpy())


@pytest.mark.parametrize("noise", ["independent", "dense"])
def test_noise_levels_equal_the_library(noise):
    """IME pays √2 on the gradient and √2·Δ₂σ on the square, Δ₂ = (2B − 1)ζ²/B²; "for free" does not pay the √2."""
    size, clip_norm = SMALL.batch_size, SMALL.clip_norm
    post, ime, free = (
        logistic_problem.levels(SMALL, name, noise)
        for name in ("post_processing", "independent_moments", "independent_moments_for_free")
    )
    assert (post.gradient_sum, post.square) == (pytest.approx(clip_norm), 0.0)
    assert ime.gradient_sum == pytest.approx(math.sqrt(2) * clip_norm)
    assert ime.square == pytest.approx(math.sqrt(2) * (2 * size - 1) / size**2 * clip_norm**2)
    assert free.gradient_sum == pytest.approx(clip_norm)
    assert free.square == pytest.approx(ime.square / math.sqrt(2))
    rows = logistic_problem.noise_rows(dataclasses.replace(SMALL, draws=2000), SMALL.plan(noise).strategy, "gradient")
    wanted = np.array(SMALL.plan(noise).strategy.row_norms()) * SMALL.plan(noise).strategy.column_norm
    found = (rows**2).mean(1).sqrt().numpy() / wanted
    assert np.abs(found - 1).max() < 5 / math.sqrt(2 * 4000)
    assert np.abs(found * 1.1 - 1).min() > 0.03, "a level 1.1 times as high would be seen"


def test_examples_are_present_and_labelled_at_the_expected_rates():
    """Half of 3,000 examples, spread over the steps; s·x has the mean E x(2·sigmoid(x) − 1) = .41321."""
    signed = datasets(dataclasses.replace(SMALL, steps=500, draws=1)).signed
    assert int((signed != 0).sum()) == 1500
    of_steps = (signed != 0).sum((1, 2)).double()
    assert abs(float(of_steps.var()) - 1.5) < 0.4
    assert int((signed[:250] != 0).sum()) != 750
    values = logistic_problem.signed_samples(np.random.default_rng(3), 160_000)
    assert abs(values.mean() - 0.41324) < 4 * values.std() / 400
    assert abs(values.mean() - 0.9 * 0.41324) > 8 * values.std() / 400


def test_losses_are_sample_means():
    signed = logistic_problem.signed_samples(np.random.default_rng(1), 300)
    theta = np.array([-4.99, -1.0, 0.33, 1.0, 2.777, 6.9])
    exact = np.logaddexp(0.0, -theta[:, None] * signed).mean(1)
    np.testing.assert_allclose(evaluate(mean_loss(signed), theta), exact, rtol=0, atol=1e-6)
    far = np.array([9.0, -40.0])
    exact = np.logaddexp(0.0, -far[:, None] * signed).mean(1)
    found = evaluate(mean_loss(signed), far)
    assert np.all(found <= exact + 1e-6)
    assert np.all(found > 0.9 * exact)
    assert np.all(np.isinf(evaluate(mean_loss(signed), np.array([np.nan, np.inf, -np.inf]))))


@pytest.mark.parametrize("count", [20, 400, 10_000])
def test_losses_are_accurate_between_the_knots(count):
    signed = logistic_problem.signed_samples(np.random.default_rng(0), count)
    theta = np.linspace(-5, 7, 241)
    off = np.abs(mean_loss(signed)(theta) - [np.logaddexp(0.0, -at * signed).mean() for at in theta])
    assert off.max() < 4e-8 * (signed**4).mean()
    assert off.max() > 3e-8 * (signed**4).mean(), "the bound is not far from what is reached"


def test_losses_rise_beyond_the_knots():
    """Also that of samples of one sign, which in truth falls on."""
    loss = mean_loss(np.array([0.5, 1.0]))
    values = evaluate(loss, np.array([7.0, 8.0, 9.0]))
    np.testing.assert_allclose(np.diff(values), abs(float(loss(7.0, 1))), rtol=1e-9)


def test_the_population_loss_is_least_at_one():
    loss = population_loss()
    assert float(loss(1.0)) == pytest.approx(0.5994382, abs=1e-7)
    assert float(loss(1.0, 1)) == pytest.approx(0.0, abs=1e-12)
    assert float(loss(1.0, 2)) == pytest.approx(0.1442245, abs=5e-8)


@pytest.mark.parametrize("theta", [-5.0, -4.96, -1.37, 0.0, 0.05, 1.0, 1.234, 3.05, 5.0, 6.0, 6.9, 6.95, 7.0])
def test_the_population_loss_is_the_integral_over_x(theta):
    def density(x):
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def at(x):  # of y = 1 and x; the loss of y = 0 and x is that of y = 1 and −x, as is its chance
        return 2 * density(x) / (1 + math.exp(-x)) * math.log1p(math.exp(-theta * x))

    def bend(x):
        return density(x) * (x / 2 / math.cosh(theta * x / 2)) ** 2

    settled = {"limit": 400, "epsabs": 1e-12, "epsrel": 1e-12, "points": [0.0]}
    loss = population_loss()
    assert float(loss(theta)) == pytest.approx(integrate.quad(at, -12, 12, **settled)[0], abs=1e-9)
    assert float(loss(theta, 2)) == pytest.approx(integrate.quad(bend, -12, 12, **settled)[0], abs=1e-6)


def test_tuning_uses_validation_and_the_first_half_and_reports_the_second():
    """Choice 1 is better by validation in the first half of the trials; its second half is what is reported."""
    losses = tuple(mean_loss(logistic_problem.signed_samples(np.random.default_rng(s), 20_000)) for s in (1, 2))
    data = Datasets(signed=torch.zeros(1, 1, 1), validation=(losses[0],), test=(losses[1],))
    final = np.stack([np.array([3.0, 3.0, 1.0, 1.0]), np.array([1.0, 1.0, 2.0, 2.0])], axis=1)[None]
    truth = np.array([float(losses[1](1.0))])
    found = logistic_cells.scores(final, data, truth)
    assert found["best"] == [1]
    assert found["excess"] == [pytest.approx(float(losses[1](2.0)) - truth[0], rel=1e-5)]
    assert found["population_excess"] == [pytest.approx(float(population_loss()(2.0)) - 0.5994382, abs=1e-6)]
    means = evaluate(losses[1], final[0]).mean(0)
    assert found["as_paper"] == [pytest.approx(means.min() - truth[0], rel=1e-5)]


def test_scores_equal_plain_loops():
    """Three draws, four trials, five choices: losses summed sample by sample, halves and choices counted out."""
    rng = np.random.default_rng(1)
    held_out, test = ([logistic_problem.signed_samples(rng, 20) for _ in range(3)] for _ in range(2))
    final = 1 + 0.7 * rng.standard_normal((3, 4, 5))
    data = Datasets(
        signed=torch.zeros(1, 3, 1), validation=tuple(map(mean_loss, held_out)), test=tuple(map(mean_loss, test))
    )

    def loss(samples, theta):
        return sum(math.log1p(math.exp(-theta * x)) for x in samples) / len(samples)

    def least(values):
        return min(range(5), key=values.__getitem__)

    truth = [loss(samples, 1.0) for samples in test]
    found = logistic_cells.scores(final, data, np.array(truth))
    other_choices = []
    for draw in range(3):
        own, tuning = test[draw], [[loss(held_out[draw], theta) for theta in trial] for trial in final[draw]]
        tested = [[loss(own, theta) for theta in trial] for trial in final[draw]]
        best = least([tuning[0][choice] + tuning[1][choice] for choice in range(5)])
        other_choices.append(best != least([sum(trial[choice] for trial in tuning) for choice in range(5)]))
        other_choices.append(best != least([tested[0][choice] + tested[1][choice] for choice in range(5)]))
        reported = [tested[2][best], tested[3][best]]
        mean = sum(reported) / 2
        means = [sum(trial[choice] for trial in tested) / 4 for choice in range(5)]
        thetas = [float(final[draw][trial][best]) for trial in (2, 3)]
        everywhere = sum(float(population_loss()(theta)) for theta in thetas) / 2 - float(population_loss()(1.0))
        assert found["best"][draw] == best
        assert found["excess"][draw] == pytest.approx(mean - truth[draw], abs=1e-6)
        assert found["as_paper"][draw] == pytest.approx(min(means) - truth[draw], abs=1e-6)
        assert found["spread"][draw] == pytest.approx(abs(reported[0] - reported[1]) / 2, abs=1e-6)
        assert found["theta"][draw] == pytest.approx(sum(thetas) / 2, abs=1e-6)
        assert found["population_excess"][draw] == pytest.approx(everywhere, abs=1e-6)
    assert any(other_choices[::2]), "all trials would have chosen otherwise"
    assert any(other_choices[1::2]), "the test samples would have chosen otherwise"


def test_draws_have_different_samples():
    data = datasets(SMALL)
    losses = [float(loss(2.0)) for loss in (*data.validation, *data.test)]
    assert len(set(losses)) == 6
    assert len({tuple(draw.flatten().tolist()) for draw in data.signed.unbind(1)}) == 3


def _line(variant, noise, excess):
    return {"cell": {"variant": variant, "noise": noise}, "result": {"excess": excess}}


def test_the_order_is_counted_draw_by_draw():
    lines = [_line("non_private", "none", [0.0, 0.0, 0.3]), _line("post_processing", "dense", [0.2, 0.1, None])]
    found = holds(lines, "dense", ("non_private", "post_processing"))
    assert found is not None
    assert found.tolist() == [True, True, True], "what diverged is last"
    found = holds(lines, "dense", ("post_processing", "non_private"))
    assert found is not None
    assert found.tolist() == [False, False, False]
    assert holds(lines, "independent", ("non_private", "post_processing")) is None
    assert excess_of(lines, "independent_moments", "dense") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"present": 0.0}, "present=0.0"),
        ({"draws": 0}, "draws=0"),
        ({"seed": -1}, "seed=-1"),
        ({"steps": 0}, "steps=0"),
    ],
)
def test_refuses_bad_problems(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)
