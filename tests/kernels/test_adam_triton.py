"""The optimizer kernels against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from tests.interpreter import DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.gpu]
BETAS, EPS, LR, DECAY = (0.8, 0.95), 1e-3, 1e-2, 0.1


def made(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_steps_of_adam(dtype, decoupled):
    """Parameters with their remainders, and moments, follow a float64 run; gradients are not adjacent."""
    from dpoptim.kernels import adam_triton

    shapes = [(7, 301), (3,), (1024,), (8, 16)]
    parameters = [made(*shape, seed=n).to(DEVICE, dtype) for n, shape in enumerate(shapes)]
    numel = sum(parameter.numel() for parameter in parameters)
    first, second = torch.zeros(numel, device=DEVICE), torch.zeros(numel, device=DEVICE)
    rounding = torch.zeros(numel, device=DEVICE, dtype=torch.int16 if dtype == torch.bfloat16 else torch.float32)
    value = torch.cat([parameter.double().flatten() for parameter in parameters])
    mu, nu = torch.zeros_like(value), torch.zeros_like(value)
    for step in (1, 2, 3):
        gradients = [made(*shape, seed=10 * step + n).to(DEVICE) for n, shape in enumerate(shapes)]
        adam_triton.adam_step_(
            parameters, gradients, first, second, rounding if dtype != torch.float32 else None, betas=BETAS, step=step,
            eps=EPS, lr=LR, added_decay=0.0 if decoupled else DECAY, kept=1 - LR * DECAY if decoupled else 1.0,
        )  # fmt: skip
        g = torch.cat([gradient.double().flatten() for gradient in gradients]) + (0.0 if decoupled else DECAY) * value
        mu = BETAS[0] * mu + (1 - BETAS[0]) * g
        nu = BETAS[1] * nu + (1 - BETAS[1]) * g.square()
        denominator = (nu / (1 - BETAS[1] ** step)).sqrt() + EPS
        kept = 1 - LR * DECAY if decoupled else 1.0
        value = kept * value - LR * (mu / (1 - BETAS[0] ** step)) / denominator
    found = torch.cat([parameter.float().flatten() for parameter in parameters])
    if dtype == torch.bfloat16:
        found = (found.view(torch.int32) + rounding).view(torch.float32)
    else:
        found = found.double() + rounding
    found = found.double()
    torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first.double(), mu, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second.double(), nu, rtol=1e-5, atol=1e-6)
    if dtype != torch.float32:
        assert rounding.any()


def test_inverse_roots():
    from dpoptim.kernels.inverse_root import inverse_root

    moment = made(2001).to(DEVICE)
    moment[:2] = torch.tensor([0.0, torch.nan])
    found = inverse_root(moment, exponent=0.5, factor=2.5, floor=1e-3)
    expected = 1 / (2.5 * moment.double().clamp(min=0).sqrt() + 1e-3)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0, equal_nan=True)
