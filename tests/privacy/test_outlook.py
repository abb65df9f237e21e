"""The outlook is the noise that a run really adds, beside the largest signal that clipping allows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import dpoptim
from dpoptim.outlook import GOOD


def plan(**settings):
    common = {"num_examples": 400, "batch_size": 10, "steps": 40, "clip_norm": 0.7, "noise_multiplier": 2.0}
    return dpoptim.PrivacyPlan(**{**common, **settings})


def test_independent_noise_grows_with_the_root_of_the_steps():
    found = plan().outlook(parameters=900)
    assert found.noise_to_signal == pytest.approx(2.0 * 30 / 10 / math.sqrt(40))


def test_a_model_instead_of_a_number_is_refused_in_one_line():
    with pytest.raises(ValueError, match="whole number >= 1, got a Sequential") as error:
        plan().outlook(parameters=nn.Sequential(nn.Linear(2, 2)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "noise"),
    [
        (dpoptim.dp_sgd, dpoptim.Independent()),
        (dpoptim.dp_sgd, dpoptim.Banded(bands=4)),
        (dpoptim.dp_sgd, dpoptim.BufferedToeplitz(buffers=2)),
        (dpoptim.dp_sgd, dpoptim.BandedInverse(bands=4)),
        (dpoptim.joint_moments, dpoptim.Banded(bands=4)),
    ],
    ids=lambda one: getattr(one, "__name__", repr(one)),
)
def test_the_ratio_is_that_of_the_noise_that_a_run_adds(make, noise):
    model = nn.Linear(200, 50)
    optimizer = make(model, plan(noise=noise), 0.0, external_batches=True)
    total: torch.Tensor | float = 0.0

    def add(found):
        nonlocal total
        total = total + torch.cat([part.flatten() for part in found.gradient.values()])

    optimizer.observers.append(add)
    for _ in range(40):
        (0.0 * model(torch.ones(10, 200))).sum().backward()
        optimizer.step()
    expected = optimizer.plan.outlook(parameters=200 * 50 + 50).noise_to_signal
    assert float(torch.as_tensor(total).norm()) / (0.7 * 40) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("multiplier", "verdict"), [(0.0, "good"), (0.1, "good"), (1.0, "poor"), (4.0, "hopeless")])
def test_the_verdict_and_what_would_help(multiplier, verdict):
    found = plan(noise_multiplier=multiplier, steps=25).outlook(parameters=900)
    assert found.verdict == verdict
    assert str(found).startswith(verdict)
    assert ("LoRA" in str(found)) == (verdict != "good")


def test_the_advice_is_enough():
    found = plan(noise_multiplier=3.9).outlook(parameters=900)
    times = found.noise_to_signal / GOOD
    assert f"needs {times:.2g} times less noise" in str(found)
    fewer = int(900 / times**2)
    assert f"at most {fewer:,} trained" in str(found)
    assert plan(noise_multiplier=3.9).outlook(parameters=fewer).verdict == "good"
    assert plan(noise_multiplier=3.9, batch_size=math.ceil(10 * times)).outlook(parameters=900).verdict == "good"


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="parameters"):
        plan().outlook(parameters=0)
    with pytest.raises(ValueError, match="noise_multiplier is not set"):
        plan(noise_multiplier=None).outlook(parameters=9)
