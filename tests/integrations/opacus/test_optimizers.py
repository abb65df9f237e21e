"""max_grad_norm, noise_multiplier and the update are those of Opacus."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpoptim
from dpoptim.integrations.opacus import (
    BatchMemoryManager,
    PrivacyEngine,
    make_private,
)
from tests.integrations.opacus.cases import EXPECTED_WARNINGS, convolutions, images, of_linear, one_epoch

pytestmark = EXPECTED_WARNINGS


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1.0),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, weight_decay=0.3),
    "Adam, decoupled": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, weight_decay=0.3, decoupled_weight_decay=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-3, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-3, momentum=0.5, weight_decay=0.1),
}


def trained(make: Any, *, engine: Any, memory: Any = None, steps: int = 3, **arguments: Any) -> nn.Module:
    """All examples in every batch and no noise: nothing is random."""
    model, data = convolutions(), images()
    optimizer = make(model.parameters()) if callable(make) else make
    loader = DataLoader(data, batch_size=len(data))
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader,
        **{"noise_multiplier": 0.0, "max_grad_norm": 0.7, **arguments},
    )  # fmt: skip
    for _ in range(steps):
        if memory is None:
            one_epoch(private, optimizer, loader)
        else:
            with memory(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as parts:
                one_epoch(private, optimizer, parts)
    return model


def assert_same(ours: nn.Module, theirs: nn.Module, *, differs_from: nn.Module) -> None:
    moved = []
    for a, b, before in zip(ours.parameters(), theirs.parameters(), differs_from.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        moved.append(float((a - before).detach().abs().max()))
    assert max(moved) > 0.02


@pytest.mark.slow
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_without_noise_equal_those_of_opacus(make):
    opacus = pytest.importorskip("opacus")
    theirs = trained(make, engine=opacus.PrivacyEngine())
    assert_same(trained(make, engine=PrivacyEngine()), theirs, differs_from=convolutions())


@pytest.mark.slow
def test_micro_batches_give_the_same_steps_as_opacus():
    pytest.importorskip("opacus")
    from opacus import PrivacyEngine as Theirs
    from opacus.utils.batch_memory_manager import BatchMemoryManager as TheirMemory

    make = OPTIMIZERS["SGD, momentum"]
    ours = trained(make, engine=PrivacyEngine(), memory=BatchMemoryManager)
    assert_same(ours, trained(make, engine=Theirs(), memory=TheirMemory), differs_from=convolutions())
    assert_same(ours, trained(make, engine=PrivacyEngine()), differs_from=convolutions())


def clipped_mean(model: nn.Module, data: TensorDataset, clip_norm: float) -> list[torch.Tensor]:
    """(1/N)·Σ_j min(1, clip_norm/‖g_j‖)·g_j, one example at a time."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for inputs, target in (data[i] for i in range(len(data))):
        loss = F.cross_entropy(model(inputs[None]), target[None])
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        norm = float(torch.stack([g.norm() for g in gradient]).norm())
        for sum_, g in zip(total, gradient, strict=True):
            sum_ += g * min(1.0, clip_norm / norm)
    return [sum_ / len(data) for sum_ in total]


@pytest.mark.parametrize("memory", [None, BatchMemoryManager], ids=["whole", "in parts"])
@pytest.mark.parametrize("clip_norm", [0.5, 5.0])
def test_max_grad_norm_clips_the_gradient_of_one_loss(memory, clip_norm):
    expected = clipped_mean(convolutions(), images(), clip_norm)
    after = trained(
        lambda p: torch.optim.SGD(p, lr=1.0), engine=PrivacyEngine(), memory=memory, steps=1, max_grad_norm=clip_norm
    )
    for before, now, step in zip(convolutions().parameters(), after.parameters(), expected, strict=True):
        torch.testing.assert_close(before - now, step, atol=1e-5, rtol=1e-4)


def test_a_summed_loss_is_clipped_in_the_same_unit():
    model, data = convolutions(), images()
    with pytest.warns(UserWarning, match="multiply lr by 12"):
        private = make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(data, batch_size=12), noise_multiplier=0.0, max_grad_norm=0.5, loss_reduction="sum",
        )  # fmt: skip
    one_epoch(*private, reduction="sum")
    for before, now, step in zip(
        convolutions().parameters(), model.parameters(), clipped_mean(convolutions(), data, 0.5), strict=True
    ):
        torch.testing.assert_close(before - now, step, atol=1e-5, rtol=1e-4)


def noise_of(engine: Any, **arguments: Any) -> torch.Tensor:
    """What one step adds to the sum, per unit max_grad_norm: inputs are 0, and so are gradients."""
    model = nn.Linear(150, 100, bias=False)
    data = TensorDataset(torch.zeros(6, 150), torch.zeros(6).long())
    before = model.weight.detach().clone()
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), data_loader=DataLoader(data, batch_size=6),
        noise_multiplier=1.5, max_grad_norm=0.4, **arguments,
    )  # fmt: skip
    one_epoch(private, optimizer, loader)
    return ((before - model.weight.detach()) * 6 / 0.4).flatten()


def has_stddev(noise: torch.Tensor, stddev: float) -> bool:
    """Within 4 standard errors, which is 2.3 % for 15,000 numbers."""
    return abs(float(noise.std()) / stddev - 1) < 4 / math.sqrt(2 * len(noise))


def test_noise_multiplier_has_the_same_unit_as_in_opacus(monkeypatch):
    monkeypatch.setattr(os, "urandom", bytes)  # so that run_id is fixed
    key = dpoptim.NoiseKey.from_bytes(bytes(range(32)))
    ours = noise_of(PrivacyEngine(), key=key)
    torch.testing.assert_close(ours, noise_of(PrivacyEngine(), key=key), rtol=0, atol=1e-4)  # nothing here is random
    assert has_stddev(ours, 1.5)
    assert not has_stddev(ours, 1.5 * 0.9)
    assert not has_stddev(ours, 1.5 * 1.1)
    assert abs(float(ours.mean())) < 4 * 1.5 / math.sqrt(len(ours))


@pytest.mark.slow
def test_noise_of_opacus_has_the_same_stddev():
    opacus = pytest.importorskip("opacus")
    torch.manual_seed(0)
    assert has_stddev(noise_of(opacus.PrivacyEngine()), 1.5)


def test_groups_and_schedulers_work_as_in_torch():
    model = convolutions()
    groups: list[dict[str, Any]] = [
        {"params": model.conv.parameters(), "lr": 0.5, "weight_decay": 0.0},
        {"params": [*model.norm.parameters(), *model.out.parameters()]},
    ]
    given = torch.optim.AdamW(groups, lr=0.25, betas=(0.7, 0.8))
    _, optimizer, loader = make_private(
        module=model, optimizer=given, data_loader=DataLoader(images(), batch_size=4), noise_multiplier=1.0,
        max_grad_norm=1.0, epochs=2,
    )  # fmt: skip
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.5, (0.7, 0.8), 0.0), (0.25, (0.7, 0.8), 0.01),
    ]  # fmt: skip
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    one_epoch(model, optimizer, loader)
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05, 0.025])
    assert [g["lr"] for g in given.param_groups] == [0.5, 0.25]
    assert not given.state


@pytest.mark.parametrize("variant", ["post_processing", "bias_correction", "scale_then_privatize"])
def test_variant_selects_the_private_optimizer(variant):
    options = {"eps_scale": 0.5} if variant == "scale_then_privatize" else {}
    private = of_linear(variant=variant, variant_options=options, optimizer=torch.optim.Adam)
    kind = {"post_processing": "Flat", "bias_correction": "Flat", "scale_then_privatize": "InverseRoot"}
    assert type(private.optimizer.geometry).__name__ == kind[variant]
    one_epoch(*private)
