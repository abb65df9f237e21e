"""Reference optimizers whose second moment comes from public data, or (NOT private) from the gradient without noise.

The noiseless ones are baselines that show what a perfect preconditioner would be worth. They have no privacy guarantee,
whatever the noise on the gradient. `noise_stddev` is on the clipped SUM, `noise` holds the rows of C⁻¹z, and each
function returns θ_1, ..., θ_T stacked.
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
from dpoptim.optim.reference.scaled import scale_of


def side_information(
    theta: Tensor,  # [coordinates]
    gradients: Gradients,
    noise: Tensor,  # [steps, coordinates]
    public_gradients: PublicGradients,
    *,
    rule: Rule,
    clip_norm: float,
    noise_stddev: float,
    batch_size: float,
) -> Tensor:
    """Side information: the noisy gradient as in post-processing, ν = EMA (or sum) of g_pub².

    >>> from dpoptim.optim.reference import AdaGrad
    >>> side_information(torch.zeros(1), lambda theta, t: torch.ones(4, 1), torch.zeros(1, 1),
    ...                  lambda theta, t: torch.full((1,), 2.0), rule=AdaGrad(lr=1.0, eps=0.0), clip_norm=1.0,
    ...                  noise_stddev=0.0, batch_size=4).tolist()
    [[-0.5]]
    """
    mu, nu = torch.zeros_like(theta), torch.zeros_like(theta)
    path = []
    for t in range(1, len(noise) + 1):
        clipped = clip(gradients(theta, t - 1), clip_norm)
        noisy_grad = (clipped.sum(0) + noise_stddev * noise[t - 1]) / batch_size
        noisy_grad = add_decay(rule, noisy_grad, theta)
        nu = next_second_moment(rule, nu, public_gradients(theta, t - 1) ** 2)
        nu_hat = debiased(rule, nu, t)
        theta, mu = next_theta(rule, theta, mu, noisy_grad, nu_hat.sqrt() + rule.eps, t)
        path.append(theta)
    return torch.stack(path)


def noiseless_preconditioner(
    theta: Tensor,  # [coordinates]
    gradients: Gradients,
    noise: Tensor,  # [steps, coordinates]
    *,
    rule: Rule,
    clip_norm: float,
    noise_stddev: float,
    batch_size: float,
) -> Tensor:
    """NOT private. ν = EMA (or sum) of the squared clipped average without noise; the step uses g̃.

    >>> from dpoptim.optim.reference import AdaGrad
    >>> noiseless_preconditioner(torch.zeros(1), lambda theta, t: torch.full((4, 1), 2.0), torch.ones(1, 1),
    ...                          rule=AdaGrad(lr=1.0, eps=0.0), clip_norm=9.0, noise_stddev=4.0,
    ...                          batch_size=4).tolist()
    [[-1.5]]
    """
    mu, nu = torch.zeros_like(theta), torch.zeros_like(theta)
    path = []
    for t in range(1, len(noise) + 1):
        clipped = clip(gradients(theta, t - 1), clip_norm)
        noisy_grad = (clipped.sum(0) + noise_stddev * noise[t - 1]) / batch_size
        noisy_grad = add_decay(rule, noisy_grad, theta)
        nu = next_second_moment(rule, nu, (clipped.sum(0) / batch_size) ** 2)
        nu_hat = debiased(rule, nu, t)
        theta, mu = next_theta(rule, theta, mu, noisy_grad, nu_hat.sqrt() + rule.eps, t)
        path.append(theta)
    return torch.stack(path)


def noiseless_scale_then_privatize(
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
    """NOT private. Scale-then-privatize with ν = EMA (or sum) of (Σ clip(s_t⊙g_j)/B/s_t)², without noise.

    >>> from dpoptim.optim.reference import AdaGrad
    >>> twos = lambda theta, t: torch.full((4, 1), 2.0)
    >>> noiseless_scale_then_privatize(torch.zeros(1), twos, torch.ones(1, 1),
    ...                                rule=AdaGrad(lr=1.0, eps=0.0), clip_norm=9.0, noise_stddev=4.0,
    ...                                batch_size=4, eps_scale=0.5).tolist()
    [[-1.25]]
    """
    mu, nu = torch.zeros_like(theta), torch.zeros_like(theta)
    previous = torch.full_like(theta, start)
    path = []
    for t in range(1, len(noise) + 1):
        s = scale_of(previous, exponent=exponent, eps_scale=eps_scale, normalised=normalised)
        clipped = clip(s * gradients(theta, t - 1), clip_norm)
        noisy_grad = (clipped.sum(0) + noise_stddev * noise[t - 1]) / batch_size / s
        noisy_grad = add_decay(rule, noisy_grad, theta)
        nu = next_second_moment(rule, nu, (clipped.sum(0) / batch_size / s) ** 2)
        nu_hat = debiased(rule, nu, t)
        theta, mu = next_theta(rule, theta, mu, noisy_grad, nu_hat.sqrt() + rule.eps, t)
        previous = nu_hat if debias else nu
        path.append(theta)
    return torch.stack(path)
