"""The brute-force reference of clipped sums: ordinary autograd on a copy of the model, one example at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpoptim.clipping import clipped_sum
from dpoptim.clipping.clipped_sums import ClippedSums, ClippingCounts
from dpoptim.clipping.engine import UncheckedLossError
from tests.clipping.models import Case


def gradients_one_at_a_time(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any, examples: int
) -> list[dict[str, Tensor]]:
    model = copy.deepcopy(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    result = []
    for j in range(examples):
        own = pytree.tree_map(lambda t, j=j: t[j : j + 1], batch)
        model.zero_grad(set_to_none=True)
        loss_fn(model, own).sum().backward()
        result.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()})
    return result


def clipped_sum_one_at_a_time(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    examples: int,
    clip_norm: float,
    scale: Mapping[str, Tensor] | None,
) -> tuple[dict[str, Tensor], Tensor]:
    return clip_and_sum(gradients_one_at_a_time(model, loss_fn, batch, examples), clip_norm, scale)


def clip_and_sum(
    gradients: list[dict[str, Tensor]], clip_norm: float, scale: Mapping[str, Tensor] | None
) -> tuple[dict[str, Tensor], Tensor]:
    """Clip whole gradients by name and add them up; also return their norms."""
    sums = {name: torch.zeros_like(g) for name, g in gradients[0].items()}
    norms = []
    for own in gradients:
        squared = sum(((g if scale is None else g * scale[name]) ** 2).sum() for name, g in own.items())
        norm = torch.as_tensor(squared).sqrt()
        norms.append(norm)
        weight = min(1.0, clip_norm / float(norm)) if norm > 0 else 1.0
        for name, g in own.items():
            sums[name] += weight * g
    return sums, torch.stack(norms)


def assert_exact(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    examples: int,
    scale: Mapping[str, Tensor] | None = None,
    *,
    rtol: float = 1e-10,
) -> None:
    """Compare norms and sums of the engine with brute force, at a clip norm that half of the examples exceed."""
    _, norms = clipped_sum_one_at_a_time(model, loss_fn, batch, examples, 1.0, scale)
    clip_norm = float(norms.median())
    expected, norms = clipped_sum_one_at_a_time(model, loss_fn, batch, examples, clip_norm, scale)
    sums, found = clipped_sum(model, loss_fn, batch, clip_norm=clip_norm, scale=scale)
    torch.testing.assert_close(found, norms, rtol=rtol, atol=rtol / 100)
    assert sums.keys() == expected.keys()
    for name, total in expected.items():
        torch.testing.assert_close(sums[name], total, rtol=10 * rtol, atol=rtol / 10)


def clipped_by_user(
    made: Case,
    counts: Sequence[int] | None,
    clip_norm: float,
    scale: Mapping[str, Tensor] | None = None,
    *,
    mean: bool = False,
    memory: int = 0,
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor], ClippingCounts]:
    """The engine's sums by user, their norms, the sums of squares, and what was counted."""
    sums = ClippedSums(made.model, clip_norm=clip_norm, by_user=True, mean_loss=mean, extra_memory=memory, squares=True)
    sums.scale = scale
    sums.engine.attach()
    try:
        try:
            losses = made.loss_fn(made.model, made.batch)
        except UncheckedLossError:
            sums.engine.check_losses(lambda batch: made.loss_fn(made.model, batch), made.batch, lasting=False)
            losses = made.loss_fn(made.model, made.batch)
        (losses.mean() if mean else losses.sum()).backward()
        sums.rows_of_users = counts
        sums.engine.flush()
        norms = torch.cat(sums.norms)
        total, squares = sums.take()
        return dict(total), norms, dict(squares or {}), sums.counts
    finally:
        sums.engine.detach()


def random_scale(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) * 2 + 0.05
        for name, p in model.named_parameters()
        if p.requires_grad
    }
