"""The badly scaled quadratic in two dimensions: where the noise goes at its start, and a few runs from there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.noise.series import Series
from dpoptim.optim import reference as twins
from dpoptim.theory import second_moments, steady_state, update_noise


@dataclass(frozen=True, kw_only=True, eq=False)
class Plane:
    """The quadratic in two dimensions, at its start and on the way: arrays have two entries, the steep one first."""

    gradient: Series
    preconditioners: Mapping[str, Series]  # 1/√ν̂ with ν̂ at its mean
    noise: Mapping[str, Series]  # standard deviation on g̃ at the start
    trajectories: Mapping[str, Series]  # [runs, steps + 1, 2]


def plane(*, flat_curvature: float = 0.03, batch_size: int = 20, steps: int = 250, runs: int = 5) -> Plane:
    """f(θ) = ½(θ₁² + hθ₂²) from (1, 1), σ = 1: preconditioners and noise there, and runs of the slow twins.

    Flat clipping at the norm of the first gradient; scale-then-privatize at the least clip norm of its window. Equal
    examples.
    """
    curvatures = torch.tensor([1.0, flat_curvature], dtype=torch.float64)
    gradient = curvatures.numpy()
    norm = float(np.linalg.norm(gradient))
    setting: dict[str, float] = {"noise_multiplier": 1.0, "batch_size": batch_size}
    low, _ = steady_state.clip_norm_window(dimension=2, noise_multiplier=1.0, batch_size=batch_size)
    resting = steady_state.steady_state(gradient**2, clip_norm=low, **setting)
    phi = (norm / batch_size) ** 2
    noise = np.random.default_rng(1).standard_normal((runs, steps, 2))
    eps_scale, start = 1e-2, torch.ones(2, dtype=torch.float64)

    def gradients(theta: Tensor, t: int) -> Tensor:
        return (curvatures * theta).expand(batch_size, 2)

    adam = twins.Adam(lr=0.02, beta2=0.99)
    flat: dict[str, Any] = {"clip_norm": norm, "noise_stddev": norm, "batch_size": batch_size}
    scaled: dict[str, Any] = {"clip_norm": low, "noise_stddev": low, "batch_size": batch_size, "eps_scale": eps_scale}
    made: dict[str, list[Tensor]] = {"dp_sgd": [], "post_processing": [], "scale_then_privatize": []}
    for rows in torch.from_numpy(noise):
        made["dp_sgd"].append(twins.dp_sgd(start, gradients, rows, rule=twins.SGD(lr=0.02, momentum=0.9), **flat))
        made["post_processing"].append(twins.post_processing(start, gradients, rows, rule=adam, **flat))
        made["scale_then_privatize"].append(twins.scale_then_privatize(start, gradients, rows, rule=adam, **scaled))
    return Plane(
        gradient=gradient,
        preconditioners={
            "without noise": 1 / gradient,
            "post_processing": 1 / np.sqrt(second_moments.second_moment_mean(gradient, noise_variance=phi)),
            "scale_then_privatize": 1 / np.sqrt(resting),
        },
        noise={
            "post_processing": np.full(2, math.sqrt(phi)),
            "scale_then_privatize": update_noise.scaled_noise_stddev(1 / np.sqrt(resting), clip_norm=low, **setting),
        },
        trajectories={
            name: torch.stack([torch.cat([start[None], path]) for path in paths]).numpy()
            for name, paths in made.items()
        },
    )
