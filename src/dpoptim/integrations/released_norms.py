"""Norms of what a step released, for logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dpoptim.clipping import Released


def released_norms(released: Released, scale: Mapping[str, Tensor] | None) -> tuple[Tensor, Tensor]:
    """‖g̃‖, the norm of the noisy gradient, and √(φ·Σ 1/s²), what the noise alone would have.

    Guarantee: released values and the plan's public numbers alone. Tensors, so that a GPU is waited for only where a
    log shows them.
    Edge cases: a parameter that `scale` does not name has s = 1, and so have all where it is None.

    >>> values = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    >>> released = Released(step=0, gradient=values, square=None, noise_variance=0.25)
    >>> [float(norm) for norm in released_norms(released, {"b": torch.tensor([0.5])})]
    [5.0, 1.224744871391589]
    """
    scale = scale or {}
    gradient = norm_of(released.gradient.values())
    spread = [
        scale[name].double().pow(-2).sum() if name in scale else gradient.new_tensor(float(value.numel()))
        for name, value in released.gradient.items()
    ]
    return gradient, (torch.stack(spread).sum() * released.noise_variance).sqrt()


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """√Σ ‖tensor‖², float64; within a tensor it is summed in float32."""
    squares = [torch.linalg.vector_norm(tensor, dtype=torch.float32).double().square() for tensor in tensors]
    return torch.stack(squares).sum().sqrt()
