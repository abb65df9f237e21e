"""What all reference optimizers share: clip, accumulate a second moment, debias it, and step by an update rule.

Adam, AdamW, AdaGrad and RMSProp differ in three lines: how ν grows, whether it is debiased, how the step is taken.
These functions are for tests only: they hold every per-example gradient in memory and see values without noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Gradients = Callable[[Tensor, int], Tensor]
"""(θ, t) -> per-example gradients [examples, coordinates] of step t = 0, 1, ...; there may be 0 examples."""

PublicGradients = Callable[[Tensor, int], Tensor]
"""(θ, t) -> one gradient [coordinates] of public data at step t = 0, 1, ..."""


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam with debiased moments, ε outside the root, and L2 decay added to the noisy gradient."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled decay: θ ← (1 − lr·weight_decay)·θ before the step; the moments never see it."""

    weight_decay: float = 0.01


@dataclass(frozen=True, kw_only=True)
class AdaGrad:
    """AdaGrad: ν = Σ squares, not debiased, ε outside the root, no first moment."""

    lr: float
    eps: float = 1e-10
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RMSProp:
    """RMSProp: ν = EMA of squares, not debiased; momentum accumulates the divided gradient."""

    lr: float
    beta2: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SGD:
    """SGD with heavy-ball momentum, buffer ← momentum·buffer + g; it has no second moment."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


Rule = Adam | AdaGrad | RMSProp
"""The rules with a second moment. SGD has none, so only `dp_sgd` takes it."""


def clip(vectors: Tensor, clip_norm: float) -> Tensor:
    """Scale each row v to v·min(1, clip_norm/‖v‖).

    A zero row stays zero, and `clip_norm = inf` changes nothing.

    >>> clip(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    norms = vectors.norm(dim=1, keepdim=True)
    return vectors * (clip_norm / norms).clamp(max=1.0)


def add_decay(rule: Rule | SGD, noisy_grad: Tensor, theta: Tensor) -> Tensor:
    """L2 decay: g̃ + weight_decay·θ. It is added after the noise, so it costs no privacy.

    AdamW decays in the step instead. A second moment of g̃ includes the decay, as in torch.optim; one that is released,
    public or noiseless does not.
    """
    if isinstance(rule, AdamW):
        return noisy_grad
    return noisy_grad + rule.weight_decay * theta


def next_second_moment(rule: Rule, nu: Tensor, square: Tensor) -> Tensor:
    """ν_t from ν_{t−1}: ν + square for AdaGrad, β₂ν + (1−β₂)·square otherwise."""
    if isinstance(rule, AdaGrad):
        return nu + square
    return rule.beta2 * nu + (1 - rule.beta2) * square


def debiased(rule: Rule, nu: Tensor, t: int) -> Tensor:
    """ν̂_t = ν_t/(1−β₂ᵗ) after t = 1, 2, ... steps for Adam and AdamW; ν_t itself for the other rules."""
    if isinstance(rule, Adam):
        return nu / (1 - rule.beta2**t)
    return nu


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator/denominator, and 0 for 0/0: no gradient, no step, even at ν = ε = 0."""
    return torch.where(numerator == 0, torch.zeros_like(numerator), numerator / denominator)


def next_theta(
    rule: Rule, theta: Tensor, mu: Tensor, noisy_grad: Tensor, denominator: Tensor, t: int
) -> tuple[Tensor, Tensor]:
    """(θ_t, μ_t) after step t = 1, 2, ... of the rule, for the variant's denominator.

    Adam, AdamW: μ = β₁μ + (1−β₁)g̃, θ −= lr·μ/(1−β₁ᵗ)/denominator. AdaGrad: θ −= lr·g̃/denominator.
    RMSProp: μ = momentum·μ + g̃/denominator, θ −= lr·μ.
    """
    if isinstance(rule, AdaGrad):
        return theta - rule.lr * divide(noisy_grad, denominator), mu
    if isinstance(rule, RMSProp):
        mu = rule.momentum * mu + divide(noisy_grad, denominator)
        return theta - rule.lr * mu, mu
    if isinstance(rule, AdamW):
        theta = theta - rule.lr * rule.weight_decay * theta
    mu = rule.beta1 * mu + (1 - rule.beta1) * noisy_grad
    mu_hat = mu / (1 - rule.beta1**t)
    return theta - rule.lr * divide(mu_hat, denominator), mu
