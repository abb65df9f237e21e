"""A private loop under Accelerate equals the plain loop, and settings that would change it are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import dpoptim
from dpoptim.integrations.accelerate import prepare_accelerate

KEY = dpoptim.NoiseKey.from_bytes(bytes(range(32)))
DATA: Any = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(20)]


@pytest.fixture(autouse=True)
def fresh_state() -> None:
    """Accelerate keeps its settings for the whole process, and earlier tests may have set bf16."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def made() -> tuple[nn.Module, dpoptim.PrivateOptimizer, dpoptim.PrivateLoader]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    plan = dpoptim.PrivacyPlan(
        num_examples=20, batch_size=5, steps=6, sampling=dpoptim.Poisson(), noise_multiplier=0.5, delta=1e-3
    )
    loader = dpoptim.private_loader(DATA, plan, key=KEY, run_id="a", micro_batch_size=2)
    return model, dpoptim.scale_then_privatize(model, plan, lr=1e-2, key=KEY, run_id="b"), loader


def losses(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_the_loop_equals_the_plain_one():
    plain, optimizer, loader = made()
    for batch in loader:
        losses(plain, batch).sum().backward()
        optimizer.step()
    model, optimizer, loader = made()
    accelerator = Accelerator(cpu=True)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    prepared, stepped, scheduler = prepare_accelerate(accelerator, model, optimizer, schedule)
    for batch in loader:
        accelerator.backward(losses(prepared, batch).sum())
        stepped.step()
        if loader.step_ends:
            scheduler.step()
        stepped.zero_grad()
    assert optimizer.mechanism.step == 6
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_bf16_runs():
    model, optimizer, loader = made()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared, stepped = prepare_accelerate(accelerator, model, optimizer)
    for batch in loader:
        with accelerator.autocast():
            found = losses(prepared, batch)
        accelerator.backward(found.sum())
        stepped.step()
    assert optimizer.mechanism.step == 6


def test_accelerate_leaves_a_private_loader_unchanged():
    *_, loader = made()
    assert Accelerator(cpu=True).prepare(loader) is loader


def test_loaders_and_stock_optimizers_are_refused():
    model, optimizer, loader = made()
    accelerator = Accelerator(cpu=True)
    for other in (loader, torch.utils.data.DataLoader(DATA)):
        with pytest.raises(ValueError, match="must not be prepared here"):
            prepare_accelerate(accelerator, model, optimizer, other)
    with pytest.raises(ValueError, match="Create it with dpoptim"):
        prepare_accelerate(accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_accumulation_steps": 4}, "micro_batch_size"),
        ({"scaler": object()}, "fp16"),
        ({"distributed_type": "DEEPSPEED"}, "a whole model in each process"),
        ({"distributed_type": "TP"}, "distributed_type=TP"),
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type=MEGATRON_LM"),
        ({"distributed_type": "FSDP"}, "fsdp_version=2"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "dp_shard alone"),
    ],
)
def test_unsupported_settings_are_refused(settings, message):
    model, optimizer, _ = made()
    plain = {"gradient_accumulation_steps": 1, "scaler": None, "num_processes": 1, "distributed_type": "NO"}
    accelerator = type("Settings", (), {**plain, **settings})()
    with pytest.raises(ValueError, match=message):
        prepare_accelerate(accelerator, model, optimizer)


def test_the_loader_refuses_gradient_accumulation():
    """Prepared without dpoptim, Accelerate holds back step(), and the loader refuses to yield another batch."""
    model, optimizer, loader = made()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    prepared, stepped = accelerator.prepare(model, optimizer)

    def loop() -> None:
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(losses(prepared, batch).sum())
                stepped.step()

    with pytest.raises(ValueError, match="before optimizer"):
        loop()
