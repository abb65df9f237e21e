"""Averaged weights: the mean that the docstring says, in the model for as long as a block lasts, saved and resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dpoptim

KEY = dpoptim.NoiseKey.from_bytes(bytes(32))
PLAN = dpoptim.PrivacyPlan(num_examples=40, batch_size=8, steps=12, noise_multiplier=0.5)
MAKE: dict[str, Any] = {
    "scale_then_privatize": dpoptim.scale_then_privatize,
    "post_processing": dpoptim.post_processing,
    "dp_sgd": dpoptim.dp_sgd,
}


def started(
    make: Any = dpoptim.scale_then_privatize, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Sequential, dpoptim.optim.PrivateOptimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    options = {"key": KEY, "run_id": "a", "external_batches": True, **options}
    return model, make(model, PLAN, 0.05, **options)


def train(model: nn.Module, optimizer: Any, steps: range) -> list[list[torch.Tensor]]:
    """Return the weights after each step."""
    found = []
    for step in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        model(x).square().sum().backward()
        optimizer.step()
        found.append(weights(model))
    return found


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def averages(optimizer: dpoptim.optim.PrivateOptimizer, model: nn.Module) -> list[torch.Tensor]:
    with optimizer.averaged_weights():
        return weights(model)


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("decay", [0.6, 0.99, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_average_is_a_mean_that_becomes_exponential(make: str, decay: float, dtype: torch.dtype) -> None:
    model, optimizer = started(MAKE[make], dtype, averaged=decay)
    expected: list[torch.Tensor] = []
    for step, after in enumerate(train(model, optimizer, range(12)), 1):
        kept = min(decay, (step - 1) / step)
        own = [one.double() for one in after]
        expected = [kept * a + (1 - kept) * b for a, b in zip(expected or own, own, strict=True)]
    # bfloat16 weights are averaged before they are rounded.
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2}[dtype]
    for found, one in zip(averages(optimizer, model), expected, strict=True):
        torch.testing.assert_close(found.double(), one, rtol=tolerance, atol=tolerance)


def test_training_does_not_change() -> None:
    model, optimizer = started(averaged=0.9)
    expected = train(*started(), range(12))
    for step, after in enumerate(expected):
        (found,) = train(model, optimizer, range(step, step + 1))
        averages(optimizer, model)
        assert all(torch.equal(*pair) for pair in zip(found, after, strict=True))
        assert all(torch.equal(*pair) for pair in zip(weights(model), after, strict=True))


def test_weights_return_after_an_error() -> None:
    model, optimizer = started(averaged=0.9, dtype=torch.bfloat16)
    *_, last = train(model, optimizer, range(3))
    with pytest.raises(ZeroDivisionError), optimizer.averaged_weights():
        _ = 1 / 0
    assert all(torch.equal(*pair) for pair in zip(weights(model), last, strict=True))


def test_a_resumed_run_has_the_same_average() -> None:
    whole, optimizer = started(averaged=0.9)
    train(whole, optimizer, range(12))
    model, first = started(averaged=0.9)
    train(model, first, range(5))
    saved = {"model": model.state_dict(), "optimizer": first.state_dict()}
    resumed, second = started(averaged=0.9)
    resumed.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    train(resumed, second, range(5, 12))
    for found, expected in zip(averages(second, resumed), averages(optimizer, whole), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="averaged weights"):
        started()[1].load_state_dict(saved["optimizer"])


def test_the_model_stays_as_it_is_without_an_average() -> None:
    model, optimizer = started(averaged=0.9)
    before = weights(model)
    assert all(torch.equal(*pair) for pair in zip(averages(optimizer, model), before, strict=True))
    model, optimizer = started()
    *_, last = train(model, optimizer, range(2))
    assert all(torch.equal(*pair) for pair in zip(averages(optimizer, model), last, strict=True))


@pytest.mark.parametrize("averaged", [0, 1.5, "0.9", True])
def test_other_decays_are_refused(averaged: Any) -> None:
    with pytest.raises(ValueError, match="averaged"):
        started(averaged=averaged)
