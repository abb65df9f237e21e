"""Norms of released gradients, for logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dpoptim.clipping import Released


def released_norms(released: Released, scale: Mapping[str, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Compute ‖g̃‖, the norm of the noisy gradient, and √(φ·Σ 1/s²), the expected norm of its noise.

    The results are tensors, so that nothing waits for the GPU before they are logged. Parameters without an entry in
    `scale` have s = 1.

    Guarantee: Only released values and public numbers of the plan are used.

    >>> values = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    >>> released = Released(step=0, gradient=values, square=None, noise_variance=0.25)
    >>> [float(norm) for norm in released_norms(released, {"b": torch.tensor([0.5])})]
    [5.0, 1.224744871391589]
    """
    scale = scale or {}
    gradient = norm_of(released.gradient.values())
    numbers = {name: float(value.numel()) for name, value in released.gradient.items()}
    spread = [
        scale[name].reciprocal().square_().sum(dtype=torch.float64) if name in scale else gradient.new_tensor(numel)
        for name, numel in numbers.items()
    ]
    return gradient, (torch.stack(spread).sum() * released.noise_variance).sqrt()


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """√Σ ‖tensor‖² in float64; sums within a tensor are in float32."""
    squares = [torch.linalg.vector_norm(tensor, dtype=torch.float32).double().square() for tensor in tensors]
    return torch.stack(squares).sum().sqrt()
