"""The fused kernels on a GPU against the slots."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dpoptim
from dpoptim.optim import fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KEY = dpoptim.NoiseKey.from_bytes(bytes(range(32)))
PLAN = dpoptim.PrivacyPlan(num_examples=50, batch_size=5, steps=20, clip_norm=0.8, noise_multiplier=0.5)
RULES = {
    "adam": dpoptim.Adam(),
    "adam with decay": dpoptim.Adam(weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3),
    "adamw": dpoptim.AdamW(weight_decay=0.1),
}


class Model(nn.Module):
    """Parameters of odd sizes, some larger than a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 301), nn.Tanh(), nn.Linear(301, 96), nn.Tanh(), nn.Linear(96, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def begun(variant, rule, dtype):
    torch.manual_seed(0)
    model = Model().to("cuda", dtype)
    return model, variant(model, PLAN, 1e-2, rule=rule, key=KEY, run_id="", external_batches=True)


def trained(model, optimizer, steps):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to("cuda", next(model.parameters()).dtype)
    for _ in range(steps):
        model(x).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


@pytest.mark.parametrize("variant", [dpoptim.post_processing, dpoptim.scale_then_privatize])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_steps_equal_the_slots(variant, rule, dtype, monkeypatch):
    model, optimizer = begun(variant, RULES[rule], dtype)
    found = trained(model, optimizer, 8)
    monkeypatch.setattr(fused, "_runs_on_gpu", lambda bundle: False)
    model, optimizer = begun(variant, RULES[rule], dtype)
    start = trained(model, optimizer, 0)
    expected = trained(model, optimizer, 8)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    assert float((found - expected).norm()) <= tolerance * float((expected - start).norm())


def test_a_resumed_run_continues_bit_for_bit():
    model, optimizer = begun(dpoptim.scale_then_privatize, RULES["adam"], torch.float32)
    trained(model, optimizer, 4)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = trained(model, optimizer, 4)
    model, optimizer = begun(dpoptim.scale_then_privatize, RULES["adam"], torch.float32)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert torch.equal(trained(model, optimizer, 4), expected)
