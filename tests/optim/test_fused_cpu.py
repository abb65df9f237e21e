"""Torch's fused Adam on a CPU against the slots."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpoptim
from dpoptim.optim import fused
from tests.optim.test_fused import KEY, PLAN, RULES


def trained(variant, rule, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 31), nn.Tanh(), nn.Linear(31, 3)).to(dtype)
    optimizer = variant(model, PLAN, 1e-2, rule=rule, key=KEY, run_id="", external_batches=True)
    start = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    for _ in range(8):
        model(x).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten().double() for p in model.parameters()]), start


@pytest.mark.parametrize(
    ("variant", "rule", "dtype"),
    [
        (dpoptim.post_processing, "adam", torch.float32),
        (dpoptim.post_processing, "adam with decay", torch.float64),
        (dpoptim.scale_then_privatize, "adam with decay", torch.float32),
        (dpoptim.scale_then_privatize, "adamw", torch.float64),
    ],
)
def test_fused_steps_equal_the_slots(variant, rule, dtype, monkeypatch):
    found, start = trained(variant, RULES[rule], dtype)
    monkeypatch.setattr(fused, "_runs_on_cpu", lambda bundle: False)
    expected, _ = trained(variant, RULES[rule], dtype)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-12}[dtype]
    assert float((expected - start).norm()) > 0
    assert float((found - expected).norm()) <= tolerance * float((expected - start).norm())


@pytest.mark.parametrize(
    ("rule", "dtype", "taken"),
    [
        (dpoptim.Adam(), torch.float32, True),
        (dpoptim.Adam(eps=0.0), torch.float32, False),  # 0/0 must be 0
        (dpoptim.Adam(), torch.bfloat16, False),  # its moments are float32
    ],
)
def test_when_the_fused_step_applies(rule, dtype, taken, monkeypatch):
    asked = []
    step = fused._cpu_adam_step_

    def counted(*given):
        asked.append(1)
        step(*given)

    monkeypatch.setattr(fused, "_cpu_adam_step_", counted)
    trained(dpoptim.post_processing, rule, dtype)
    assert bool(asked) is taken
