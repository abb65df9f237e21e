"""A mean over the batch is refused at the first backward, unless the optimizer expects one."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpoptim

AVERAGED = {
    "mean": lambda x, y: (x - y).square().sum(1).mean(),
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "cross_entropy": lambda x, y: F.cross_entropy(x, y.argmax(1)),
    "binary cross entropy": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "two means": lambda x, y: F.l1_loss(x, y) + (x - y).square().mean(),
    "accumulated": lambda x, y: F.mse_loss(x, y) / 4,
    "negative": lambda x, y: -(x - y).mean(),
}
SUMMED = {
    "sum": lambda x, y: (x - y).square().sum(1).sum(),
    "mean of positions": lambda x, y: (x - y).square().mean(1).sum(),
    "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "mean times examples": lambda x, y: F.mse_loss(x, y) * len(x),
}


def step(loss, examples=4, **settings):
    plan = dpoptim.PrivacyPlan(num_examples=8, batch_size=examples, steps=2, noise_multiplier=1.0)
    model = nn.Linear(3, 2)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1, external_batches=True, **settings)
    loss(model(torch.randn(examples, 3)), torch.randn(examples, 2)).backward()
    optimizer.step()


@pytest.mark.parametrize("name", AVERAGED)
def test_a_mean_is_refused(name):
    with pytest.raises(ValueError, match=r"losses\.sum\(\)\.backward\(\)"):
        step(AVERAGED[name])


@pytest.mark.parametrize("name", SUMMED)
def test_a_sum_is_accepted(name):
    step(SUMMED[name])


def test_a_mean_is_accepted_if_expected_or_of_one_example():
    step(AVERAGED["mean"], loss_reduction="mean")
    step(AVERAGED["mean"], examples=1)


def test_a_refused_batch_is_dropped():
    plan = dpoptim.PrivacyPlan(num_examples=8, batch_size=4, steps=2, noise_multiplier=1e-9)
    model = nn.Linear(3, 2)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1, external_batches=True)
    released = []
    optimizer.observers.append(lambda found: released.append(found.gradient["weight"]))
    with contextlib.suppress(ValueError):
        model(torch.randn(4, 3)).mean().backward()
    optimizer.step()
    assert released[0].abs().max() < 1e-6


def test_the_look_at_the_graph_keeps_nothing_alive():
    plan = dpoptim.PrivacyPlan(num_examples=8, batch_size=4, steps=2, noise_multiplier=1.0)
    model = nn.Linear(3, 2)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1, external_batches=True)

    def run():
        losses = model(torch.randn(4, 3)).sum(1)
        losses.sum().backward()
        return weakref.ref(losses)

    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()
    optimizer.step()
