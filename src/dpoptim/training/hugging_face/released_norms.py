"""Norms of what a step released, for the log."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dpoptim.gradients import Released


def released_norms(released: Released, scale: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """The norm of the noisy gradient, and √(φ·Σ 1/s²), what the noise alone would have.

    Guarantee: released values and the plan's public numbers alone. Tensors, so that a GPU is waited for only where the
    log shows them.
    """
    scale = scale or {}
    values = released.gradient
    square = torch.stack([value.double().square().sum() for value in values.values()]).sum()
    spread = [
        scale[name].double().pow(-2).sum() if name in scale else square.new_tensor(float(value.numel()))
        for name, value in values.items()
    ]
    return {
        "released_gradient_norm": square.sqrt(),
        "expected_noise_norm": (torch.stack(spread).sum() * released.noise_variance).sqrt(),
    }
