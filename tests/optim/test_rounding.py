"""Parameters in 16 bits: what rounding removes from an update is kept and added to the next."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dpoptim

KEY = dpoptim.NoiseKey.from_bytes(bytes(range(32)))
PLAN = dpoptim.PrivacyPlan(num_examples=50, batch_size=4, steps=60, clip_norm=8.0, noise_multiplier=0.1)
X = torch.tensor([[1.0, 2.0, -1.0], [0.5, 1.0, 1.0], [-2.0, 1.0, 3.0], [1.0, -1.0, 0.25]])
RULES: dict[str, Any] = {
    "adam": dpoptim.Adam(),
    "adam with decay": dpoptim.Adam(weight_decay=0.1),
    "adamw": dpoptim.AdamW(weight_decay=0.1),
    "adagrad": dpoptim.AdaGrad(),
    "rmsprop": dpoptim.RMSProp(momentum=0.9),
}
VARIANTS = {"post-processing": dpoptim.post_processing, "scaled": dpoptim.scale_then_privatize}


def begun(dtype, rule="adam", variant="post-processing", device="cpu"):
    model = nn.Linear(3, 2).to(device, dtype)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(-1.0)
    optimizer = VARIANTS[variant](model, PLAN, 1e-4, rule=RULES[rule], key=KEY, run_id="", external_batches=True)
    return model, optimizer


def trained(model, optimizer, steps=60):
    """The loss is linear in the parameters, so that gradients do not depend on how they were rounded."""
    x = X.to(model.weight)
    for _ in range(steps):
        model(x).sum(1).sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("dtype", "rule", "variant"),
    [
        (torch.bfloat16, "adam", "post-processing"),
        (torch.bfloat16, "adamw", "scaled"),
        (torch.bfloat16, "adagrad", "post-processing"),
        (torch.float16, "adam with decay", "post-processing"),
        (torch.float16, "rmsprop", "scaled"),
    ],
)
def test_a_run_equals_the_rounded_float32_run(dtype, rule, variant):
    found = trained(*begun(dtype, rule, variant))
    expected = trained(*begun(torch.float32, rule, variant))
    for low, high in zip(found, expected, strict=True):
        torch.testing.assert_close(low, high.to(dtype), rtol=0, atol=0)


def test_a_dp_sgd_run_equals_the_rounded_float32_run():
    paths = []
    for dtype in (torch.bfloat16, torch.float32):
        model, _ = begun(dtype)
        optimizer = dpoptim.dp_sgd(model, PLAN, 1e-4, momentum=0.9, key=KEY, run_id="", external_batches=True)
        paths.append(trained(model, optimizer))
    for low, high in zip(*paths, strict=True):
        assert torch.equal(low, high.bfloat16())
        assert (low.abs() != 1).any()


def test_many_updates_below_half_a_bit_move_a_parameter():
    """Next to 1.0 values are 2^-8 or 2^-7 apart; each update is about 1e-4."""
    weight, bias = trained(*begun(torch.bfloat16))
    assert (weight != 1).all()
    assert (bias != -1).all()


def test_a_resumed_run_continues_bit_for_bit():
    model, optimizer = begun(torch.bfloat16)
    trained(model, optimizer, 25)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = trained(model, optimizer, 35)
    model, optimizer = begun(torch.bfloat16)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    for found, value in zip(trained(model, optimizer, 35), expected, strict=True):
        assert torch.equal(found, value)


@pytest.mark.parametrize("value", [0.25, 0.0])
def test_setting_a_parameter_discards_its_remainder(value):
    """The old remainder, up to 2^-9 here, is not added to the new value."""
    model, optimizer = begun(torch.bfloat16)
    trained(model, optimizer, 25)
    with torch.no_grad():
        model.weight.fill_(value)
    trained(model, optimizer, 1)
    whole = model.weight.float() + optimizer.state[model.weight]["rounding"]
    assert float((whole - value).abs().max()) <= 3e-4


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_parameter_recovers_from_non_finite_values(broken):
    model, optimizer = begun(torch.float16)
    trained(model, optimizer, 5)
    with torch.no_grad():
        model.bias.fill_(broken)
        optimizer.state[model.bias]["rounding"].fill_(broken)
        model.bias.fill_(1.0)
    _, bias = trained(model, optimizer, 1)
    assert float((bias.float() - 1).abs().max()) <= 2e-3


def test_remainders_of_a_different_precision_are_dropped():
    """A state that went through a run in float32 has none; nor has one in which some are missing."""
    low, optimizer = begun(torch.bfloat16)
    trained(low, optimizer, 25)
    high, wide = begun(torch.float32)
    wide.load_state_dict(optimizer.state_dict())
    assert "rounding" not in wide.state[high.weight]
    state = optimizer.state_dict()
    state["state"] = {index: dict(own) for index, own in state["state"].items()}
    del state["state"][0]["rounding"]
    again, third = begun(torch.bfloat16)
    third.load_state_dict(state)
    trained(again, third, 1)


def test_float32_parameters_keep_no_remainder():
    model, optimizer = begun(torch.float32)
    trained(model, optimizer, 1)
    assert "rounding" not in optimizer.state[model.weight]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", ["adam", "adam with decay", "adamw"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gpu_kernel_stores_the_same_remainders(dtype, rule):
    model, optimizer = begun(dtype, rule, device="cuda")
    found = trained(model, optimizer)
    expected = trained(*begun(torch.float32, rule))
    for parameter, low, high in zip(model.parameters(), found, expected, strict=True):
        value = low.float() + optimizer.state[parameter]["rounding"]
        torch.testing.assert_close(value.cpu(), high, rtol=1e-6, atol=1e-6)
