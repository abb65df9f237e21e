"""Diagnostics of released values, and ε of the steps so far."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import dpoptim
from dpoptim.app.runs.metrics import QUANTILES, Diagnostics
from dpoptim.privacy.composition import EpsilonSpent

ROWS, WIDTH = 64, 40


def measured(variant: str, *, steps: int = 6, noise_multiplier: float = 1.0, noise=None):
    """A few steps of a linear model; the diagnostics and the releases of the last one."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    inputs = torch.randn(ROWS, WIDTH)
    plan = dpoptim.PrivacyPlan(
        num_examples=ROWS, batch_size=ROWS, steps=steps, clip_norm=0.5, noise_multiplier=noise_multiplier, delta=1e-5,
        noise=noise or dpoptim.Independent(),
    )  # fmt: skip
    key = dpoptim.NoiseKey.from_bytes(bytes(32))
    optimizer = getattr(dpoptim, variant)(model, plan, lr=0.1, key=key, run_id="test", external_batches=True)
    diagnostics = Diagnostics(optimizer)
    seen: list[Any] = []
    optimizer.observers.append(seen.append)
    found, before, scale = {}, [], None
    for _ in range(steps):
        diagnostics.before()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scale = None if optimizer.mechanism.scale is None else dict(optimizer.mechanism.scale)
        model(inputs).square().sum(1).sum().backward()
        optimizer.step()
        found = diagnostics.after()
    moved = [parameter.detach() - old for parameter, old in zip(model.parameters(), before, strict=True)]
    assert len(seen) == steps, "an observer is called once per step"
    assert [released.step for released in seen] == list(range(steps))
    return found, seen[-1], torch.cat([m.reshape(-1) for m in moved]), scale, optimizer


def test_norms_match_the_release():
    found, released, moved, _, _ = measured("post_processing")
    flat = torch.cat([value.reshape(-1) for value in released.gradient.values()])
    level = 0.5 * 1.0 / ROWS
    assert found["gradient_norm"] == pytest.approx(float(flat.norm()), rel=1e-5)
    assert found["noise_norm"] == pytest.approx(level * math.sqrt(flat.numel()), rel=1e-6)
    assert found["update_norm"] == pytest.approx(float(moved.norm()), rel=1e-4)
    signal = math.sqrt(max(found["gradient_norm"] ** 2 - found["noise_norm"] ** 2, 0))
    assert found["signal_norm"] == pytest.approx(signal)
    assert found["signal_over_clip"] == pytest.approx(signal / 0.5)
    assert found["noise_to_signal"] == pytest.approx(found["noise_norm"] / signal)
    assert found["scale_quantiles"] is None


def test_signal_estimate_removes_large_noise():
    """σ = 8: noise is most of ‖g̃‖², and its expected part is subtracted."""
    noisy, *_ = measured("dp_sgd", steps=1, noise_multiplier=8.0)
    exact, *_ = measured("dp_sgd", steps=1, noise_multiplier=0.0)
    assert exact["signal_norm"] == pytest.approx(exact["gradient_norm"])
    assert noisy["noise_norm"] > 3 * exact["gradient_norm"]
    assert noisy["gradient_norm"] == pytest.approx(noisy["noise_norm"], rel=0.1)
    wrong = abs(noisy["signal_norm"] - exact["gradient_norm"])
    assert wrong < 0.5 * abs(noisy["gradient_norm"] - exact["gradient_norm"])


def test_noise_norm_includes_the_scale():
    found, released, _, scale, _ = measured("scale_then_privatize")
    assert scale is not None
    flat = torch.cat([value.reshape(-1) for value in scale.values()]).double()
    assert (flat < 1).any()
    assert found["noise_norm"] == pytest.approx(math.sqrt(released.noise_variance * float((1 / flat**2).sum())))
    assert found["scale_quantiles"] == pytest.approx(
        torch.quantile(flat.float(), torch.tensor(QUANTILES)).tolist(), rel=1e-5
    )
    assert found["negative_fraction"] is None


@pytest.mark.parametrize("noise", [dpoptim.Independent(), dpoptim.BandedToeplitz(bands=3)])
def test_negative_second_moments_are_counted(noise):
    found, _, _, _, optimizer = measured("bias_correction", noise_multiplier=4.0, noise=noise)
    parameters = list(optimizer.param_groups[0]["params"])
    nu = torch.cat([optimizer.state[p]["second_moment"].reshape(-1) for p in parameters]).double()
    bias = float(optimizer.state[parameters[0]]["noise_moment"])
    assert found["negative_fraction"] == pytest.approx(float((nu < bias).double().mean()), abs=2e-3)
    assert 0.2 < found["negative_fraction"] < 0.9
    plain, *_ = measured("post_processing", noise_multiplier=4.0, noise=noise)
    assert plain["negative_fraction"] is not None
    squares, *_ = measured("independent_moments", noise_multiplier=4.0)
    assert 0.3 < squares["negative_fraction"] < 0.7
    assert measured("dp_sgd")[0]["negative_fraction"] is None


def test_steps_are_measured_only_on_request():
    _, _, _, _, optimizer = measured("post_processing", steps=2)
    other = Diagnostics(optimizer)
    assert other._found == {}


def test_epsilon_grows_up_to_the_plans():
    plan = dpoptim.PrivacyPlan(num_examples=1000, batch_size=50, steps=100, sampling=dpoptim.Poisson())
    plan = plan.calibrate(epsilon=3.0, delta=1e-5)
    spent = EpsilonSpent(plan)
    values = [spent.at(step) for step in range(0, 101, 20)]
    assert values[0] == 0
    assert values == sorted(values)
    assert values[-1] == plan.epsilon()
    for step in (1, 7, 50):
        exact = plan.replace(steps=step).epsilon()
        assert exact <= spent.at(step) <= 1.2 * exact
    assert spent.note is None


def test_correlated_noise_spends_all_at_once():
    plan = dpoptim.PrivacyPlan(num_examples=1000, batch_size=50, steps=30, noise=dpoptim.BandedToeplitz(bands=4))
    spent = EpsilonSpent(plan.calibrate(epsilon=3.0, delta=1e-5))
    assert spent.at(1) == spent.at(30) == pytest.approx(3.0, abs=1e-3)
    assert spent.note is not None
