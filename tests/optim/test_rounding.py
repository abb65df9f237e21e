"""Parameters in 16 bits: what rounding removes from an update is kept and added to the next."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dpoptim
from dpoptim.optim.bundle import ParameterBundle

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


def whole(optimizer, parameter):
    """The parameter with its remainder; see `ParameterBundle.values`."""
    stored, rounding = parameter.detach().float(), optimizer.state[parameter]["rounding"]
    if rounding.dtype != torch.int16:
        return stored + rounding
    return (stored.view(torch.int32) + rounding).view(torch.float32)


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


def test_remainders_of_bfloat16_are_exact_in_16_bits():
    """Except at half of the ties, for every exponent, infinities and not-a-numbers included."""
    words = torch.randint(-(2**31), 2**31, (10_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    edges = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    words[:-4] += edges[torch.arange(len(words) - 4) % 6] - words[:-4] % 2**16
    words[-4:] = torch.tensor([0, 1, 0x7F800000, 0x7F7FFFFF], dtype=torch.int32)
    values = words.view(torch.float32)
    parameter = torch.zeros(len(values), dtype=torch.bfloat16)
    bundle = ParameterBundle(["p"], [parameter], {}, {}, {}, 1)
    bundle.move_(values, kept=1.0, lr=-1.0)
    assert bundle.state["rounding"].dtype == torch.int16
    assert torch.equal(parameter.nan_to_num(0.5), values.bfloat16().nan_to_num(0.5))
    off = words - bundle.values().view(torch.int32)
    tie = (words % 2**16 == 2**15) & (words // 2**16 % 2 == 0)
    assert torch.equal(off[values.isfinite()], tie[values.isfinite()].int())
    assert tie.any()
    assert torch.equal(bundle.values().isnan(), values.isnan())


def test_remainders_of_float16_reach_below_its_range():
    """Float16 has no number between 0 and 2^-24."""
    model, optimizer = begun(torch.float16)
    with torch.no_grad():
        model.bias.zero_()
    optimizer.param_groups[0]["lr"] = 1e-9
    trained(model, optimizer, 3)
    assert (model.bias == 0).all()
    assert (whole(optimizer, model.bias).abs() > 2e-9).all()


@pytest.mark.parametrize("value", [0.25, 0.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_setting_a_parameter_discards_its_remainder(value, dtype):
    """Of the old remainder, up to 2^-9 here, at most half of the new last bit is added to the new value."""
    model, optimizer = begun(dtype)
    trained(model, optimizer, 25)
    with torch.no_grad():
        model.weight.fill_(value)
    trained(model, optimizer, 1)
    assert float((whole(optimizer, model.weight) - value).abs().max()) <= 3e-4 + value * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize(
    ("dtype", "broken", "remainder"),
    [
        (torch.float16, torch.nan, torch.nan),
        (torch.float16, torch.inf, torch.inf),
        (torch.bfloat16, torch.nan, 2**15 - 1),
        (torch.bfloat16, torch.inf, 1),
    ],
)
def test_a_parameter_recovers_from_non_finite_values(dtype, broken, remainder):
    model, optimizer = begun(dtype)
    trained(model, optimizer, 5)
    with torch.no_grad():
        model.bias.fill_(broken)
        optimizer.state[model.bias]["rounding"].fill_(remainder)
    _, bias = trained(model, optimizer, 1)
    assert not bias.isfinite().any()
    with torch.no_grad():
        model.bias.fill_(1.0)
    _, bias = trained(model, optimizer, 1)
    assert float((bias.float() - 1).abs().max()) <= 2e-3 + torch.finfo(dtype).eps / 2


def test_remainders_of_a_different_precision_are_dropped():
    """A float32 run keeps no remainders. A run that lacks some, or has them in float16, starts without any."""
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
    half, fourth = begun(torch.float16)
    fourth.load_state_dict(optimizer.state_dict())
    assert "rounding" not in fourth.state[half.weight]


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
        assert torch.equal(low, parameter)
        torch.testing.assert_close(whole(optimizer, parameter).cpu(), high, rtol=1e-6, atol=1e-6)
