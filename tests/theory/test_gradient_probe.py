"""Measured gradients on problems with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from dpoptim.theory import GradientSignal, measure_signal
from dpoptim.theory.gradient_probe import split_moments, spread


def linear_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The gradient of example j is x_j itself."""
    return model(batch)[:, 0]


def examples(mean: np.ndarray, stddev: np.ndarray, *, count: int, seed: int) -> torch.Tensor:
    drawn = mean + stddev * np.random.default_rng(seed).standard_normal((count, len(mean)))
    return torch.tensor(drawn, dtype=torch.float32)


def known_problem(parameters: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """‖μ‖ = .2 and tr V = 4: a batch of 100 examples is as long by chance as its mean."""
    rng = np.random.default_rng(0)
    stddev = np.exp(rng.standard_normal(parameters))
    mean = stddev * rng.standard_normal(parameters)
    return 0.2 * mean / np.linalg.norm(mean), 2.0 * stddev / np.linalg.norm(stddev)


def probed(data: torch.Tensor, *, batch_size: float, clip_norm: float = 10.0, split: int = 8) -> GradientSignal:
    model = nn.Linear(data.shape[1], 1, bias=False)
    return measure_signal(model, linear_loss, data.split(split), clip_norm=clip_norm, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [*(pytest.param(b, marks=pytest.mark.slow) for b in (1, 100)), 10_000])
def test_the_norm_is_estimated_for_the_training_batch_size(batch_size):
    """The average over 128 public examples is .27 long; training's is 2.01, .28 and .201."""
    mean, stddev = known_problem()
    found = [probed(examples(mean, stddev, count=128, seed=s), batch_size=batch_size).norm * 10 for s in range(5)]
    truth = math.sqrt(0.2**2 + 4 / batch_size)
    error = float(np.std(np.square(found))) / math.sqrt(len(found))
    assert np.mean(np.square(found)) == pytest.approx(truth**2, abs=4 * error)
    assert np.mean(np.square(found)) == pytest.approx(truth**2, rel=0.15)
    if batch_size != 100:  # the estimate from the probe's average alone
        naive = 0.2**2 + 4 / 128
        assert abs(naive - np.mean(np.square(found))) > 8 * error


def test_the_split_is_unbiased_for_unequal_batches():
    """Over many repeats, coordinate by coordinate: means within four standard errors; unequal batches too."""
    rng = np.random.default_rng(3)
    sizes = np.array([1.0, 2.0, 5.0, 3.0])
    mean, variance, repeats = 0.7, 2.0, 200_000
    sums = sizes * mean + np.sqrt(sizes * variance) * rng.standard_normal((repeats, len(sizes)))
    squares, variances = split_moments(sums.sum(1), (sums**2).sum(1), sizes)
    for found, truth in ((squares, mean**2), (variances, variance)):
        error = found.std() / math.sqrt(repeats)
        assert found.mean() == pytest.approx(truth, abs=4 * error)
        assert abs(found.mean() - 1.1 * truth) > 4 * error


@pytest.mark.parametrize("count", [64, 512])
def test_the_spread_is_recovered(count):
    """The part of the coordinates below each decile, and the mean of x/(1+x), which the adviser looks at."""
    mean, stddev = known_problem()
    signal = probed(examples(mean, stddev, count=count, seed=1), batch_size=1000)
    truth = (mean**2 + stddev**2 / 1000) / 10**2
    squares, weights = np.asarray(signal.squares), np.asarray(signal.weights)
    for share in (0.1, 0.5, 0.9):
        level = np.quantile(truth, share)
        assert weights[squares < level].sum() == pytest.approx(share, abs=0.07)
    noise = truth.mean()
    even = 0.5
    assert signal.average(squares / (squares + noise)) == pytest.approx(np.mean(truth / (truth + noise)), abs=0.03)
    assert signal.average(squares / (squares + noise)) < even - 0.1


def test_many_examples_reveal_a_spread_that_variances_hide():
    """All v alike, μ² of two sizes: the prior knows nothing of it and the posterior does."""
    mean = np.concatenate([np.full(1000, 1e-3), np.full(1000, 1e-1)])
    signal = probed(examples(mean, np.full(2000, 0.1), count=2000, seed=2), batch_size=1e6, clip_norm=100.0, split=40)
    squares, weights = np.asarray(signal.squares) * 100**2, np.asarray(signal.weights)
    assert weights[squares < 1e-3].sum() == pytest.approx(0.5, abs=0.02)
    assert weights[(squares > 0.8e-2) & (squares < 1.25e-2)].sum() == pytest.approx(0.5, abs=0.05)


def test_clipping_norms_and_agreement():
    """Gradients of one direction and two lengths, 3 and .5, at clip norm 1: half are clipped."""
    direction = np.zeros(50)
    direction[:2] = (0.6, 0.8)
    data = torch.tensor(np.outer(np.tile([3.0, 0.5], 20), direction), dtype=torch.float32)
    signal = probed(data, batch_size=1e9, clip_norm=1.0, split=2)
    assert signal.example_norms == pytest.approx((0.5, 1.75, 3.0))
    assert signal.norm == pytest.approx(0.75, rel=1e-3)
    assert signal.agreement == pytest.approx(1.0, rel=1e-3)
    assert (signal.measured, signal.examples, signal.parameters) == (True, 40, 50)
    assert sum(w for w, s in zip(signal.weights, signal.squares, strict=True) if s > 0) == pytest.approx(2 / 50)


def test_orthogonal_examples_have_low_agreement():
    data = torch.eye(64).repeat(4, 1)
    signal = probed(data, batch_size=1e9, clip_norm=1.0)
    assert signal.agreement == pytest.approx(1 / 8, rel=0.15)  # ‖mean of 64 unit vectors‖ = 1/8


def test_the_model_stays_unchanged():
    model = nn.Linear(5, 1, bias=False)
    model.weight.grad = torch.full((1, 5), 7.0)
    before = model.weight.detach().clone()
    seen: list[int] = []
    measure_signal(model, linear_loss, torch.randn(6, 5).split(2), clip_norm=1.0, batch_size=10, progress=seen.append)
    assert torch.equal(model.weight.grad, torch.full((1, 5), 7.0))
    assert torch.equal(model.weight, before)
    assert seen == [2, 4, 6]


def test_groups_preserve_the_total_of_many_coordinates(monkeypatch):
    monkeypatch.setattr("dpoptim.theory.gradient_probe._MOST_COORDINATES", 500)
    mean, stddev = known_problem(4001)
    squares, weights = spread(mean, mean**2, stddev**2, count=100.0, batch_size=50.0)
    assert weights.sum() == pytest.approx(1.0)
    assert squares @ weights == pytest.approx(float(np.mean(mean**2 + stddev**2 / 50)))
    assert len(squares) <= 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clip_norm": 0.0}, "Expected clip_norm > 0"),
        ({"batch_size": 0.5}, "Expected batch_size >= 1"),
        ({"batches": [torch.ones(4, 3)]}, "holds 1 batches"),
        ({"batches": []}, "holds 0 batches"),
        ({"batches": [torch.full((2, 3), math.nan)] * 2}, "no example has a finite gradient"),
    ],
)
def test_bad_arguments_are_refused(change, words):
    given = {"batches": torch.ones(4, 3).split(2), "clip_norm": 1.0, "batch_size": 10, **change}
    with pytest.raises(ValueError, match=words):
        measure_signal(nn.Linear(3, 1, bias=False), linear_loss, **given)
