"""Norms of released gradients, for logs, and whether released parameters are finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from dpoptim.clipping import Released
from dpoptim.data.shards import own_part


def released_norms(released: Released, scale: Mapping[str, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Compute ‖g̃‖, the norm of the noisy gradient, and √(φ·Σ 1/s²), the expected norm of its noise.

    Guarantee: Only released values and public numbers of the plan are used.
    """
    scale = scale or {}
    gradient = norm_of(released.gradient.values())  # a tensor, so that nothing waits for the GPU before it is logged
    spread = [
        scale[name].reciprocal().square_().sum(dtype=torch.float64) if name in scale
        else gradient.new_tensor(float(value.numel()))
        for name, value in released.gradient.items()
    ]  # fmt: skip
    return gradient, (torch.stack(spread).sum() * released.noise_variance).sqrt()


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """√Σ ‖tensor‖² in float64; sums within a tensor are in float32."""
    squares = [torch.linalg.vector_norm(tensor, dtype=torch.float32).double().square() for tensor in tensors]
    return torch.stack(squares).sum().sqrt()


def not_finite(model: nn.Module) -> list[str]:
    """The names of the parameters that hold a NaN or an infinity; of sharded ones, in this process."""
    named = dict(model.named_parameters())
    fine = torch.stack(
        [own_part(value.detach()).isfinite().all() for value in named.values()]
    ).tolist()  # one wait for a GPU
    return [name for name, finite in zip(named, fine, strict=True) if not finite]
