"""Models, batches and loops that compare captured batches with ordinary ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dpoptim
from dpoptim.optim import PrivateOptimizer

WIDTH = 6
VARIANTS: dict[str, Callable[..., PrivateOptimizer]] = {
    "flat": dpoptim.dp_sgd,
    "scaled": dpoptim.scale_then_privatize,
    "squares": functools.partial(dpoptim.independent_moments, squares="average_of"),
    "in turns": functools.partial(dpoptim.delayed_preconditioner, plain_steps=2, scaled_clip_norm=0.5),
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3, bias=False)
    return nn.Sequential(*layers)


def losses_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def losses(x: Tensor, y: Tensor) -> Tensor:
        outputs: Tensor = model(x)
        return (outputs - y[:, None, None]).square().mean((1, 2))

    return losses


def batches_of(*sizes: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    """Return a batch for each (examples, positions); gradient norms range from tiny to a few clip norms."""
    torch.manual_seed(1)
    return [(torch.randn(n, t, WIDTH) * torch.rand(n, 1, 1) * 3, torch.randn(n)) for n, t in sizes]


def plan_of(steps: int = 12, **options: Any) -> dpoptim.PrivacyPlan:
    return dpoptim.PrivacyPlan(
        **{"num_examples": 64, "batch_size": 8, "steps": steps, "noise_multiplier": 0.1, **options}
    )


def captured_run(
    model: nn.Module, losses: Callable[..., Tensor] | None = None, **options: Any
) -> tuple[PrivateOptimizer, Any]:
    """Return an optimizer with lr=0 and almost no noise, and its captured function."""
    plan = plan_of(40, noise_multiplier=1e-9, **options)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.0, external_batches=True)
    return optimizer, optimizer.captured(losses or losses_of(model), pad_to_multiple=4)


def seen_by(optimizer: PrivateOptimizer) -> list[Tensor]:
    """Return a list that collects what the optimizer releases, as flat vectors."""
    released: list[Tensor] = []
    optimizer.observers.append(lambda r: released.append(torch.cat([g.flatten() for g in r.gradient.values()]).cpu()))
    return released


def warm(run: Any, x: Tensor, y: Tensor, optimizer: PrivateOptimizer) -> None:
    """Run until there is a graph."""
    for _ in range(2):
        run(x, y)
        optimizer.step()


def with_a_graph(**options: Any) -> tuple[nn.Module, PrivateOptimizer, Any, tuple[Tensor, Tensor]]:
    """Return a model, its optimizer, its captured function, and a batch that has a graph."""
    model, (batch,) = model_of(), batches_of((4, 2))
    optimizer, run = captured_run(model, **options)
    warm(run, *batch, optimizer)
    return model, optimizer, run, batch


def both_ways(
    loop: Callable[..., None],
    *,
    pad_to_multiple: int = 4,
    plan: dpoptim.PrivacyPlan | None = None,
    external_batches: bool = True,
) -> tuple[nn.Module, nn.Module]:
    """Run `loop(differentiate, ordinary, optimizer)`, ordinary and captured, with the same key; return both models."""
    models = []
    for is_captured in (False, True):
        model, key = model_of(), dpoptim.NoiseKey.from_bytes(bytes(32))
        optimizer = dpoptim.dp_sgd(
            model, plan or plan_of(), lr=0.3, key=key, run_id="run", external_batches=external_batches
        )
        losses = losses_of(model)

        def ordinary(x: Tensor, y: Tensor, losses: Callable[[Tensor, Tensor], Tensor] = losses) -> None:
            losses(x, y).sum().backward()

        loop(
            optimizer.captured(losses, pad_to_multiple=pad_to_multiple) if is_captured else ordinary,
            ordinary,
            optimizer,
        )
        models.append(model)
    one, other = models
    return one, other
