"""Reference optimizers that clip the plain gradient: DP-SGD, post-processing, bias correction, IME and JME.

`noise_stddev` is on the clipped SUM, and every sum is divided by the expected `batch_size`. `noise` holds the rows of
C⁻¹z with unit z, already correlated, one row per step. Each function returns θ_1, ..., θ_T stacked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpoptim.optim.reference.rules import (
    SGD,
    AdaGrad,
    Gradients,
    RMSProp,
    Rule,
    add_decay,
    clip,
    debiased,
    next_second_moment,
    next_theta,
)


def dp_sgd(
    theta: Tensor,  # [coordinates]
    gradients: Gradients,
    noise: Tensor,  # [steps, coordinates]
    *,
    rule: SGD,
    clip_norm: float,
    noise_stddev: float,
    batch_size: float,
) -> Tensor:
    """DP-SGD with momentum: buffer ← momentum·buffer + g̃, θ ← θ − lr·buffer.

    >>> dp_sgd(torch.zeros(1), lambda theta, t: torch.full((4, 1), 9.0), torch.zeros(2, 1),
    ...        rule=SGD(lr=1.0), clip_norm=1.0, noise_stddev=0.0, batch_size=4).tolist()
    [[-1.0], [-2.0]]
    """
    buffer = torch.zeros_like(theta)
    path = []
    for t in range(len(noise)):
        clipped = clip(gradients(theta, t), clip_norm)
        noisy_grad = (clipped.sum(0) + noise_stddev * noise[t]) / batch_size
        noisy_grad = add_decay(rule, noisy_grad, theta)
        buffer = rule.momentum * buffer + noisy_grad
        theta = theta - rule.lr * buffer
        path.append(theta)
    return torch.stack(path)


def post_processing(
    theta: Tensor,  # [coordinates]
    gradients: Gradients,
    noise: Tensor,  # [steps, coordinates]
    *,
    rule: Rule,
    clip_norm: float,
    noise_stddev: float,
    batch_size: float,
) -> Tensor:
    """Post-processing: the rule on the noisy gradient, ν = EMA (or sum) of g̃², divided by √ν̂ + ε.

    >>> from dpoptim.optim.reference import Adam
    >>> post_processing(torch.zeros(1), lambda theta, t: torch.ones(4, 1), torch.zeros(2, 1),
    ...                 rule=Adam(lr=1.0, eps=0.0), clip_norm=1.0, noise_stddev=0.0, batch_size=4).tolist()
    [[-1.0], [-2.0]]
    """
    mu, nu = torch.zeros_like(theta), torch.zeros_like(theta)
    path = []
    for t in range(1, len(noise) + 1):
        clipped = clip(gradients(theta, t - 1), clip_norm)
        noisy_grad = (clipped.sum(0) + noise_stddev * noise[t - 1]) / batch_size
        noisy_grad = add_decay(rule, noisy_grad, theta)
        nu = next_second_moment(rule, nu, noisy_grad**2)
        nu_hat = debiased(rule, nu, t)
        theta, mu = next_theta(rule, theta, mu, noisy_grad, nu_hat.sqrt() + rule.eps, t)
        path.append(theta)
    return torch.stack(path)


def bias_correction(
    theta: Tensor,  # [coordinates]
    gradients: Gradients,
    noise: Tensor,  # [steps, coordinates]
    *,
    rule: Rule,
    clip_norm: float,
    noise_stddev: float,
    batch_size: float,
    row_norms_squared: Tensor,  # [steps], ‖row t of C⁻¹‖²
    noise_variance: float | None = None,
) -> Tensor:
    """Bias correction: subtract from ν̂ what the noise alone adds, and divide by √max(ν̂ − b_t, ε²).

    b_t averages the noise variances ‖row t‖²·φ as ν̂ averages the squares (`noise_bias`). `noise_variance` is φ; it
    defaults to (noise_stddev/batch_size)². With φ = 0 the denominator is max(√ν̂, ε).

    >>> from dpoptim.optim.reference import Adam
    >>> bias_correction(torch.zeros(1), lambda theta, t: torch.ones(4, 1), torch.zeros(1, 1),
    ...                 rule=Adam(lr=1.0, eps=0.1), clip_norm=1.0, noise_stddev=0.0, batch_size=4,
    ...                 row_norms_squared=torch.ones(1), noise_variance=0.75).tolist()
    [[-2.0]]
    """
    phi = (noise_stddev / batch_size) ** 2 if noise_variance is None else noise_variance
    biases = noise_bias(rule, row_norms_squared, phi)
    mu, nu = torch.zeros_like(theta), torch.zeros_like(theta)
    path = []
    for t in range(1, len(noise) + 1):
        clipped = clip(gradients(theta, t - 1), clip_norm)
        noisy_grad = (clipped.sum(0) + noise_stddev * noise[t - 1]) / batch_size
        noisy_grad = add_decay(rule, noisy_grad, theta)
        nu = next_second_moment(rule, nu, noisy_grad**2)
        nu_hat = debiased(rule, nu, t)
        denominator = (nu_hat - biases[t - 1]).clamp(min=rule.eps**2).sqrt()
        theta, mu = next_theta(rule, theta, mu, noisy_grad, denominator, t)
        path.append(theta)
    return torch.stack(path)


def noise_bias(rule: Rule, row_norms_squared: Tensor, phi: float) -> list[float]:
    """b_1, ..., b_T: what noise of variance ‖row t of C⁻¹‖²·φ adds to the mean of the rule's ν̂_t.

    Adam: b_t = ((β₂−β₂ᵗ)/(1−β₂ᵗ))·b_{t−1} + ((1−β₂)/(1−β₂ᵗ))·‖row t‖²·φ. RMSProp: the same EMA without
    debiasing. AdaGrad: the sum. The paper's recursion has one β₂ too many (docs/errata.md).

    >>> from dpoptim.optim.reference import Adam
    >>> [round(b, 12) for b in noise_bias(Adam(lr=0.1), torch.ones(3, dtype=torch.float64), 0.5)]
    [0.5, 0.5, 0.5]
    """
    bias, biases = 0.0, []
    for t, row_norm_squared in enumerate(row_norms_squared.tolist(), start=1):
        if isinstance(rule, AdaGrad):
            bias = bias + row_norm_squared * phi
        elif isinstance(rule, RMSProp):
            bias = rule.beta2 * bias + (1 - rule.beta2) * row_norm_squared * phi
        else:
            weight = 1 - rule.beta2**t
            bias = (rule.beta2 - rule.beta2**t) / weight * bias
            bias = bias + (1 - rule.beta2) / weight * row_norm_squared * phi
        biases.append(bias)
    return biases


def independent_moments(
    theta: Tensor,  # [coordinates]
    gradients: Gradients,
    noise: Tensor,  # [steps, coordinates]
    square_noise: Tensor,  # [steps, coordinates]
    *,
    rule: Rule,
    clip_norm: float,
    noise_stddev: float,
    square_noise_stddev: float,
    batch_size: float,
    average_of_squares: bool = False,
    project: bool = True,
) -> Tensor:
    """Independent moment estimation: release the gradient and its square with separate noise.

    ν = EMA (or sum) of the released square, and the step divides by √max(ν̂, 0) + ε. The square is that of the averaged
    gradient, or with `average_of_squares` (1/B)Σ clip(g_j)². `square_noise_stddev` is on the square as released (after
    the division by B). With `project`, the averaged gradient is projected to norm ≤ clip_norm before it is squared.
    Without it, a Poisson batch larger than B breaks the sensitivity bound and the release is not private.

    >>> from dpoptim.optim.reference import AdaGrad
    >>> ones = lambda theta, t: torch.ones(4, 1)
    >>> independent_moments(torch.zeros(1), ones, torch.zeros(1, 1), torch.ones(1, 1),
    ...                     rule=AdaGrad(lr=1.0, eps=0.0), clip_norm=1.0, noise_stddev=0.0,
    ...                     square_noise_stddev=3.0, batch_size=4).tolist()
    [[-0.5]]
    """
    mu, nu = torch.zeros_like(theta), torch.zeros_like(theta)
    path = []
    for t in range(1, len(noise) + 1):
        clipped = clip(gradients(theta, t - 1), clip_norm)
        average = clipped.sum(0) / batch_size
        noisy_grad = average + noise_stddev / batch_size * noise[t - 1]
        noisy_grad = add_decay(rule, noisy_grad, theta)
        if average_of_squares:
            square = (clipped**2).sum(0) / batch_size
        elif project:
            square = clip(average[None], clip_norm)[0] ** 2
        else:
            square = average**2
        noisy_square = square + square_noise_stddev * square_noise[t - 1]
        nu = next_second_moment(rule, nu, noisy_square)
        nu_hat = debiased(rule, nu, t)
        theta, mu = next_theta(rule, theta, mu, noisy_grad, nu_hat.clamp(min=0).sqrt() + rule.eps, t)
        path.append(theta)
    return torch.stack(path)


def joint_moments(
    theta: Tensor,  # [coordinates]
    gradients: Gradients,
    noise: Tensor,  # [steps, coordinates]
    square_noise: Tensor,  # [steps, coordinates]
    *,
    rule: Rule,
    clip_norm: float,
    noise_stddev: float,
    square_weight: float,
    batch_size: float,
) -> Tensor:
    """Joint moment estimation: release Σ_j (v_j, √λ·v_j²), v_j = clip(g_j), as ONE vector with one noise.

    λ is `square_weight`. The released square is divided by √λ afterwards, so its noise is noise_stddev/(√λ·B). For
    λ ≤ 1/(2ζ²) the joint sensitivity to a replacement is that of the gradient alone, 2ζ. Each example is squared before
    averaging; the square of the average has no such bound.

    >>> from dpoptim.optim.reference import AdaGrad
    >>> joint_moments(torch.zeros(1), lambda theta, t: torch.ones(4, 1), torch.zeros(1, 1), torch.ones(1, 1),
    ...               rule=AdaGrad(lr=1.0, eps=0.0), clip_norm=1.0, noise_stddev=6.0, square_weight=0.25,
    ...               batch_size=4).tolist()
    [[-0.5]]
    """
    mu, nu = torch.zeros_like(theta), torch.zeros_like(theta)
    path = []
    for t in range(1, len(noise) + 1):
        clipped = clip(gradients(theta, t - 1), clip_norm)
        released_sum = clipped.sum(0) + noise_stddev * noise[t - 1]
        released_square = square_weight**0.5 * (clipped**2).sum(0) + noise_stddev * square_noise[t - 1]
        noisy_grad = add_decay(rule, released_sum / batch_size, theta)
        noisy_square = released_square / square_weight**0.5 / batch_size
        nu = next_second_moment(rule, nu, noisy_square)
        nu_hat = debiased(rule, nu, t)
        theta, mu = next_theta(rule, theta, mu, noisy_grad, nu_hat.clamp(min=0).sqrt() + rule.eps, t)
        path.append(theta)
    return torch.stack(path)
