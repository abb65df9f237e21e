"""Reference optimizers that clip a scaled gradient: scale-then-privatize, delayed preconditioners (DP²) and AdaDPS.

Scale-then-privatize divides by the scale again after the noise; DP² and AdaDPS do not. `noise_stddev` is on the clipped
SUM, `noise` holds the rows of C⁻¹z, and each function returns θ_1, ..., θ_T stacked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpoptim.optim.reference.rules import (
    Gradients,
    PublicGradients,
    Rule,
    add_decay,
    clip,
    debiased,
    next_second_moment,
    next_theta,
)


def scale_of(nu_hat: Tensor, *, exponent: float, eps_scale: float, normalised: bool) -> Tensor:
    """s = 1/(ν̂^p + ε_s1), or normalised s = ε_s1/(ν̂^p + ε_s1), which lies in (0, 1].

    Both are the same algorithm if the clip norm is also multiplied by ε_s1. Exponent 0 gives a constant, even at ν̂ = 0
    (0⁰ = 1).

    >>> scale_of(torch.tensor([0.0, 9.0]), exponent=0.5, eps_scale=1.0, normalised=True)
    tensor([1.0000, 0.2500])
    """
    s = 1 / (nu_hat**exponent + eps_scale)
    return eps_scale * s if normalised else s


def scale_then_privatize(
    theta: Tensor,  # [coordinates]
    gradients: Gradients,
    noise: Tensor,  # [steps, coordinates]
    *,
    rule: Rule,
    clip_norm: float,
    noise_stddev: float,
    batch_size: float,
    eps_scale: float,
    exponent: float = 0.5,
    normalised: bool = False,
    debias: bool = True,
    start: float = 0.0,
) -> Tensor:
    """Scale-then-privatize: s_t from ν̂_{t−1}; g̃ = (Σ clip(s_t⊙g_j) + noise)/B/s_t; ν = EMA of g̃².

    `clip_norm` bounds ‖s_t⊙g_j‖, so it is in the units of the scaled gradient. s_1 comes from ν̂_0 = `start`, which is
    used nowhere else: ν starts at 0, as debiasing requires. `debias=False` computes s_t from ν_{t−1} and leaves the
    step's ν̂ unchanged. The step divides by √ν̂_t + ε.

    >>> from dpoptim.optim.reference import Adam
    >>> scale_then_privatize(torch.zeros(1), lambda theta, t: torch.ones(4, 1), torch.zeros(2, 1),
    ...                      rule=Adam(lr=1.0, eps=0.0), clip_norm=9.0, noise_stddev=0.0, batch_size=4,
    ...                      eps_scale=0.5).tolist()
    [[-1.0], [-2.0]]
    """
    mu, nu = torch.zeros_like(theta), torch.zeros_like(theta)
    previous = torch.full_like(theta, start)
    path = []
    for t in range(1, len(noise) + 1):
        s = scale_of(previous, exponent=exponent, eps_scale=eps_scale, normalised=normalised)
        clipped = clip(s * gradients(theta, t - 1), clip_norm)
        noisy_grad = (clipped.sum(0) + noise_stddev * noise[t - 1]) / batch_size / s
        noisy_grad = add_decay(rule, noisy_grad, theta)
        nu = next_second_moment(rule, nu, noisy_grad**2)
        nu_hat = debiased(rule, nu, t)
        theta, mu = next_theta(rule, theta, mu, noisy_grad, nu_hat.sqrt() + rule.eps, t)
        previous = nu_hat if debias else nu
        path.append(theta)
    return torch.stack(path)


def delayed_preconditioner(
    theta: Tensor,  # [coordinates]
    gradients: Gradients,
    noise: Tensor,  # [steps, coordinates]
    *,
    lr: float,
    clip_norm: float,
    noise_stddev: float,
    scaled_clip_norm: float,
    scaled_noise_stddev: float,
    batch_size: float,
    plain_steps: int,
    scaled_steps: int,
    eps: float,
    decay: float | None,
) -> Tensor:
    """DP² (Li et al. 2023): `plain_steps` of DP-SGD that also sum up G, then `scaled_steps` that use it.

    Where t mod (s₁+s₂) = s₁: A ← γA + (1−γ)(G/s₁)² with γ = `decay`, or A ← A + (G/s₁)² for `decay=None`; then G ← 0.
    A scaled step is θ ← θ − lr·(Σ clip(g_j/(√A+ε), ζ₂) + σζ₂·row)/B, without unscaling or momentum.
    `scaled_noise_stddev` is σζ₂, with the same σ as noise_stddev = σζ: each step spends the same.

    >>> twos = lambda theta, t: torch.full((4, 1), 2.0)
    >>> delayed_preconditioner(torch.zeros(1), twos, torch.zeros(2, 1), lr=1.0,
    ...                        clip_norm=9.0, noise_stddev=0.0, scaled_clip_norm=9.0, scaled_noise_stddev=0.0,
    ...                        batch_size=4, plain_steps=1, scaled_steps=1, eps=0.0, decay=0.75).tolist()
    [[-2.0], [-4.0]]
    """
    gathered, second_moment = torch.zeros_like(theta), torch.zeros_like(theta)
    path = []
    for t in range(len(noise)):
        place = t % (plain_steps + scaled_steps)
        if place == plain_steps:
            square = (gathered / plain_steps) ** 2
            second_moment = second_moment + square if decay is None else decay * second_moment + (1 - decay) * square
            gathered = torch.zeros_like(theta)
        if place < plain_steps:
            clipped = clip(gradients(theta, t), clip_norm)
            noisy_grad = (clipped.sum(0) + noise_stddev * noise[t]) / batch_size
            gathered = gathered + noisy_grad
        else:
            clipped = clip(gradients(theta, t) / (second_moment.sqrt() + eps), scaled_clip_norm)
            noisy_grad = (clipped.sum(0) + scaled_noise_stddev * noise[t]) / batch_size
        theta = theta - lr * noisy_grad
        path.append(theta)
    return torch.stack(path)


def adadps(
    theta: Tensor,  # [coordinates]
    gradients: Gradients,
    noise: Tensor,  # [steps, coordinates]
    public_gradients: PublicGradients,
    *,
    lr: float,
    clip_norm: float,
    noise_stddev: float,
    batch_size: float,
    renew_every: int,
    eps: float,
    decay: float = 0.0,
) -> Tensor:
    """AdaDPS (Li et al. 2022): s = 1/√(A+ε) from public gradients, θ ← θ − lr·(Σ clip(s⊙g_j) + noise)/B.

    A ← γA + (1−γ)g_pub² every `renew_every` steps, starting with the first, with γ = `decay` (0 replaces A). A starts
    at 0. The result is not divided by the scale again.

    >>> adadps(torch.zeros(1), lambda theta, t: torch.full((4, 1), 2.0), torch.zeros(2, 1),
    ...        lambda theta, t: torch.full((1,), 4.0), lr=1.0, clip_norm=9.0, noise_stddev=0.0, batch_size=4,
    ...        renew_every=2, eps=0.0).tolist()
    [[-0.5], [-1.0]]
    """
    second_moment = torch.zeros_like(theta)
    path = []
    for t in range(len(noise)):
        if t % renew_every == 0:
            second_moment = decay * second_moment + (1 - decay) * public_gradients(theta, t) ** 2
        s = 1 / (second_moment + eps).sqrt()
        clipped = clip(s * gradients(theta, t), clip_norm)
        noisy_grad = (clipped.sum(0) + noise_stddev * noise[t]) / batch_size
        theta = theta - lr * noisy_grad
        path.append(theta)
    return torch.stack(path)
