"""Update rules: how moments are accumulated and in which direction the parameters move.

Each is the rule of the `torch.optim` class of the same name. Without noise and clipping they agree step for step, with
one exception: if the second moment is not that of g̃ (IME, JME, public, noiseless), it does not include a `weight_decay`
that is added to the gradient. AdamW agrees everywhere. ν is the second moment as accumulated, ν̂ what the update divides
by; `step` counts from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpoptim.arguments import check_number
from dpoptim.optim.bundle import ParameterBundle


class UpdateRule:
    """The update rule of a variant: Adam, AdaGrad, RMSProp or SGD, each a dataclass of its settings."""

    eps: float = 0.0
    adaptive = True
    decoupled: bool = False

    def __post_init__(self) -> None:
        for name, value in self.defaults().items():
            if name == "betas":
                for i, beta in enumerate(value):
                    check_number(f"betas[{i}]", beta, low=0, below=1)
            else:
                check_number(name, value, low=0, below=1 if name in ("alpha", "momentum") else None)

    def defaults(self) -> dict[str, Any]:
        """The settings of a parameter group."""
        return {name: value for name, value in vars(self).items() if name != "decoupled"}

    def accumulate(self, total: Tensor, value: Tensor, group: dict[str, Any]) -> None:
        raise AssertionError(f"{self} keeps no second moment")

    def estimate(self, total: Tensor, group: dict[str, Any], step: int) -> Tensor:
        return total

    def direction(self, gradient: Tensor, denominator: Tensor | None, bundle: ParameterBundle) -> Tensor:
        ratio = _ratio(gradient, denominator)
        momentum = bundle.group.get("momentum", 0.0)
        return bundle.get("momentum_buffer").mul_(momentum).add_(ratio) if momentum else ratio


@dataclass(frozen=True, kw_only=True)
class Adam(UpdateRule):
    """μ ← β₁μ + (1−β₁)g, ν ← β₂ν + (1−β₂)g²; direction (μ/(1−β₁ᵗ)) / denominator; ν̂ = ν/(1−β₂ᵗ).

    Args:
        betas: (β₁, β₂).
        eps: Added to the denominator, or its floor under bias correction.
        weight_decay: Added to the noisy gradient, as in `torch.optim.Adam`.
        decoupled: True is AdamW: decay multiplies the parameters instead.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def accumulate(self, total: Tensor, value: Tensor, group: dict[str, Any]) -> None:
        total.lerp_(value, 1 - group["betas"][1])

    def estimate(self, total: Tensor, group: dict[str, Any], step: int) -> Tensor:
        return total / (1 - group["betas"][1] ** step)

    def direction(self, gradient: Tensor, denominator: Tensor | None, bundle: ParameterBundle) -> Tensor:
        beta1 = bundle.group["betas"][0]
        mu = bundle.get("first_moment").lerp_(gradient, 1 - beta1)
        return _ratio(mu / (1 - beta1**bundle.step), denominator)


def AdamW(*, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2) -> Adam:
    """Create `Adam(decoupled=True)`: θ ← (1 − lr·weight_decay)·θ before the update.

    Args:
        betas: (β₁, β₂).
        eps: Added to the denominator, or its floor under bias correction.
        weight_decay: The decay.
    """
    return Adam(betas=betas, eps=eps, weight_decay=weight_decay, decoupled=True)


@dataclass(frozen=True, kw_only=True)
class AdaGrad(UpdateRule):
    """ν ← ν + g², direction g / denominator. Where ν and g are 0 the step is 0, even at eps = 0.

    Args:
        eps: Added to the denominator, or its floor under bias correction.
        weight_decay: Added to the noisy gradient.
    """

    eps: float = 1e-10
    weight_decay: float = 0.0

    def accumulate(self, total: Tensor, value: Tensor, group: dict[str, Any]) -> None:
        total.add_(value)


@dataclass(frozen=True, kw_only=True)
class RMSProp(UpdateRule):
    """ν ← αν + (1−α)g², not debiased; direction g / denominator, through a momentum buffer if momentum > 0.

    Args:
        alpha: α.
        momentum: The momentum of the buffer.
        eps: Added to the denominator, or its floor under bias correction.
        weight_decay: Added to the noisy gradient.
    """

    alpha: float = 0.99
    momentum: float = 0.0
    eps: float = 1e-8
    weight_decay: float = 0.0

    def accumulate(self, total: Tensor, value: Tensor, group: dict[str, Any]) -> None:
        total.lerp_(value, 1 - group["alpha"])


@dataclass(frozen=True, kw_only=True)
class SGD(UpdateRule):
    """buf ← momentum·buf + g, direction buf: no second moment.

    Args:
        momentum: The momentum of the buffer.
        weight_decay: Added to the noisy gradient.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    adaptive = False


def _ratio(numerator: Tensor, denominator: Tensor | None) -> Tensor:
    """numerator / denominator, and 0 for 0/0."""
    if denominator is None:
        return numerator
    return torch.where(numerator == 0, 0.0, numerator / denominator)
