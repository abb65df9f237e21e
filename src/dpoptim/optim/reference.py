"""Slow reference implementations: the paper's optimizers on one flat parameter vector, to test the fast path against.

They are for tests only: they hold every per-example gradient in memory and see values without noise. All take a `Run`
and return θ_1, ..., θ_T stacked: [steps, coordinates].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

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


def normalize(vectors: Tensor, clip_norm: float, *, stability: float) -> Tensor:
    """Scale each row v to v·clip_norm/(‖v‖ + stability).

    >>> normalize(torch.tensor([[3.0, 4.0]]), 1.0, stability=5.0)
    tensor([[0.3000, 0.4000]])
    """
    return vectors * clip_norm / (vectors.norm(dim=1, keepdim=True) + stability)


def clip_groups(vectors: Tensor, clip_norm: float, *, groups: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Clip groups of coordinates separately, each to its share of the clip norm."""
    clipped = torch.empty_like(vectors)
    for coordinates, share in groups:
        clipped[:, coordinates] = clip(vectors[:, coordinates], share * clip_norm)
    return clipped


@dataclass(frozen=True)
class Run:
    """What all optimizers are given: the start, the gradients, the noise, and how steps are clipped and averaged."""

    theta: Tensor  # [coordinates], the parameters θ_0
    gradients: Gradients
    noise: Tensor  # [steps, coordinates], the rows of C⁻¹z with unit z, already correlated
    _: KW_ONLY
    clip_norm: float
    noise_stddev: float  # on the clipped SUM
    batch_size: float  # expected; every sum is divided by it
    bound: Callable[[Tensor, float], Tensor] = clip

    def factor(self, t: int) -> float:
        """The clip norm of step t over `clip_norm`."""
        return 1.0

    def privatize(self, theta: Tensor, t: int, scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """The noisy average of the clipped (scaled) gradients of step t, and the clipped gradients [examples, ...]."""
        clipped = self.bound(scale * self.gradients(theta, t), self.clip_norm)
        return (clipped.sum(0) + self.noise_stddev * self.noise[t]) / self.batch_size, clipped


@dataclass(frozen=True, kw_only=True)
class AdaptiveRun(Run):
    """A run whose clip norm follows the noisy share of clipped examples; see `dpoptim.AdaptiveClipNorm`."""

    count_noise: Tensor  # [steps], rows of C⁻¹z for the count
    count_levels: Tensor  # [steps], their standard deviations
    quantile: float
    rate: float
    count_weight: float  # a; noise_stddev includes √(1 + a²)
    factors: list[float] = field(default_factory=lambda: [1.0])

    def factor(self, t: int) -> float:
        return self.factors[t]

    def privatize(self, theta: Tensor, t: int, scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        kappa, scaled = self.factors[t], scale * self.gradients(theta, t)
        clip_norm = kappa * self.clip_norm
        clipped, ratios = clip(scaled, clip_norm), scaled.norm(dim=1) / clip_norm
        weight = self.count_weight * self.clip_norm
        noisy_count = weight * float((10 * (ratios - 0.95)).clamp(0, 1).sum()) + self.noise_stddev * self.count_noise[t]
        share = noisy_count / (weight * self.batch_size)
        level = self.noise_stddev * float(self.count_levels[t]) / (weight * self.batch_size)
        rate = min(self.rate, 0.01 / level) if level else self.rate  # so that noise moves the clip norm by 1 % at most
        self.factors.append(kappa * math.exp(rate * (float(share) - (1 - self.quantile))))
        return (clipped.sum(0) + kappa * self.noise_stddev * self.noise[t]) / self.batch_size, clipped


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


def _follow(
    rule: Rule,
    run: Run,
    release: Callable[[Tensor, int, Tensor, Tensor], tuple[Tensor, Tensor | None]],
    biases: list[float] | None = None,
) -> Tensor:
    """Update by the rule, given release(θ, t, ν, ν̂): g̃ and the square that ν accumulates, or None for g̃².

    The update divides by √max(ν̂, 0) + ε, and under bias correction by √max(ν̂ − b_t, ε²).
    """
    theta, path = run.theta, []
    mu = nu = nu_hat = torch.zeros_like(theta)
    for t in range(len(run.noise)):
        noisy_grad, square = release(theta, t, nu, nu_hat)
        noisy_grad = add_decay(rule, noisy_grad, theta)
        nu = next_second_moment(rule, nu, noisy_grad**2 if square is None else square)
        nu_hat = debiased(rule, nu, t + 1)
        if biases is None:
            denominator = nu_hat.clamp(min=0).sqrt() + rule.eps
        else:
            denominator = (nu_hat - biases[t]).clamp(min=rule.eps**2).sqrt()
        theta, mu = next_theta(rule, theta, mu, noisy_grad, denominator, t + 1)
        path.append(theta)
    return torch.stack(path)


def dp_sgd(run: Run, *, rule: SGD) -> Tensor:
    """DP-SGD with momentum: buffer ← momentum·buffer + g̃, θ ← θ − lr·buffer."""
    theta, path = run.theta, []
    buffer = torch.zeros_like(theta)
    for t in range(len(run.noise)):
        noisy_grad, _ = run.privatize(theta, t)
        buffer = rule.momentum * buffer + add_decay(rule, noisy_grad, theta)
        theta = theta - rule.lr * buffer
        path.append(theta)
    return torch.stack(path)


def post_processing(run: Run, *, rule: Rule, noiseless: bool = False, biases: list[float] | None = None) -> Tensor:
    """Post-processing: the rule on the noisy gradient. With `noiseless`, ν is without noise: NOT private.

    `biases` are subtracted from ν̂; see `bias_correction`.

    >>> run = Run(torch.zeros(1), lambda theta, t: torch.ones(4, 1), torch.zeros(2, 1),
    ...           clip_norm=1.0, noise_stddev=0.0, batch_size=4)
    >>> post_processing(run, rule=Adam(lr=1.0, eps=0.0)).tolist()
    [[-1.0], [-2.0]]
    """

    def release(theta: Tensor, t: int, nu: Tensor, nu_hat: Tensor) -> tuple[Tensor, Tensor | None]:
        noisy_grad, clipped = run.privatize(theta, t)
        return noisy_grad, (clipped.sum(0) / run.batch_size) ** 2 if noiseless else None

    return _follow(rule, run, release, biases)


def side_information(run: Run, public_gradients: PublicGradients, *, rule: Rule) -> Tensor:
    """Side information: the noisy gradient as in post-processing, ν of g_pub²."""

    def release(theta: Tensor, t: int, nu: Tensor, nu_hat: Tensor) -> tuple[Tensor, Tensor]:
        return run.privatize(theta, t)[0], public_gradients(theta, t) ** 2

    return _follow(rule, run, release)


def bias_correction(run: Run, *, rule: Rule, row_norms_squared: Tensor) -> Tensor:
    """Bias correction: subtract from ν̂ what the noise alone adds (`noise_bias`), and divide by √max(ν̂ − b_t, ε²).

    `row_norms_squared` is ‖row t of C⁻¹‖² for each step.
    """
    biases = noise_bias(rule, row_norms_squared, (run.noise_stddev / run.batch_size) ** 2)
    return post_processing(run, rule=rule, biases=biases)


def noise_bias(rule: Rule, row_norms_squared: Tensor, phi: float) -> list[float]:
    """b_1, ..., b_T: what noise of variance ‖row t of C⁻¹‖²·φ adds to the mean of the rule's ν̂_t.

    Adam: b_t = ((β₂−β₂ᵗ)/(1−β₂ᵗ))·b_{t−1} + ((1−β₂)/(1−β₂ᵗ))·‖row t‖²·φ. RMSProp: the same average without
    debiasing. AdaGrad: the sum. The paper's recursion has one β₂ too many (docs/errata.md).

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
    run: Run,
    square_noise: Tensor,
    *,
    rule: Rule,
    square_noise_stddev: float,
    average_of_squares: bool = False,
    project: bool = True,
) -> Tensor:
    """Independent moment estimation: release the gradient and its square with separate noise; ν of the released square.

    The square is that of the averaged gradient, or with `average_of_squares` (1/B)Σ clip(g_j)². `square_noise_stddev`
    is on the square as released (after the division by B). With `project`, the averaged gradient is projected to
    norm ≤ clip_norm before it is squared. Without it, a Poisson batch larger than B breaks the sensitivity bound.
    """

    def release(theta: Tensor, t: int, nu: Tensor, nu_hat: Tensor) -> tuple[Tensor, Tensor]:
        noisy_grad, clipped = run.privatize(theta, t)
        average = clipped.sum(0) / run.batch_size
        if average_of_squares:
            square = (clipped**2).sum(0) / run.batch_size
        elif project:
            square = clip(average[None], run.clip_norm)[0] ** 2
        else:
            square = average**2
        return noisy_grad, square + square_noise_stddev * square_noise[t]

    return _follow(rule, run, release)


def joint_moments(run: Run, square_noise: Tensor, *, rule: Rule, square_weight: float) -> Tensor:
    """Joint moment estimation: release Σ_j (v_j, √λ·v_j²), v_j = clip(g_j), as ONE vector with one noise.

    λ is `square_weight`. The released square is divided by √λ afterwards, so its noise is noise_stddev/(√λ·B). Each
    example is squared before averaging; the square of the average has no such sensitivity bound.
    """

    def release(theta: Tensor, t: int, nu: Tensor, nu_hat: Tensor) -> tuple[Tensor, Tensor]:
        noisy_grad, clipped = run.privatize(theta, t)
        released_square = square_weight**0.5 * (clipped**2).sum(0) + run.noise_stddev * square_noise[t]
        return noisy_grad, released_square / square_weight**0.5 / run.batch_size

    return _follow(rule, run, release)


def scale_of(nu_hat: Tensor, *, exponent: float, eps_scale: float, normalised: bool) -> Tensor:
    """s = 1/(ν̂^p + ε_s1), or normalised s = ε_s1/(ν̂^p + ε_s1), which lies in (0, 1].

    Both are the same algorithm if the clip norm is also multiplied by ε_s1. Exponent 0 gives a constant.

    >>> scale_of(torch.tensor([0.0, 9.0]), exponent=0.5, eps_scale=1.0, normalised=True)
    tensor([1.0000, 0.2500])
    """
    s = 1 / (nu_hat**exponent + eps_scale)
    return eps_scale * s if normalised else s


def scale_then_privatize(
    run: Run,
    *,
    rule: Rule,
    eps_scale: float,
    exponent: float = 0.5,
    normalised: bool = False,
    debias: bool = True,
    start: float = 0.0,
    noiseless: bool = False,
) -> Tensor:
    """Scale-then-privatize: s_t from ν̂_{t−1}; g̃ = (Σ clip(s_t⊙g_j) + noise)/B/s_t; ν of g̃².

    `run.clip_norm` bounds ‖s_t⊙g_j‖, so it is in the units of the scaled gradient. s_1 comes from ν̂_0 = `start`, which
    is used nowhere else. `debias=False` computes s_t from ν_{t−1} and leaves the update's ν̂ unchanged. With
    `noiseless`, ν is of (Σ clip(s_t⊙g_j)/B/s_t)²: NOT private.
    """

    def release(theta: Tensor, t: int, nu: Tensor, nu_hat: Tensor) -> tuple[Tensor, Tensor | None]:
        previous = torch.full_like(theta, start) if t == 0 else nu_hat if debias else nu
        eps = eps_scale * run.factor(t) ** (2 * exponent)
        s = scale_of(previous, exponent=exponent, eps_scale=eps, normalised=normalised)
        noisy_grad, clipped = run.privatize(theta, t, scale=s)
        return noisy_grad / s, (clipped.sum(0) / run.batch_size / s) ** 2 if noiseless else None

    return _follow(rule, run, release)


def delayed_preconditioner(
    run: Run,
    *,
    lr: float,
    scaled_clip_norm: float,
    scaled_noise_stddev: float,
    plain_steps: int,
    scaled_steps: int,
    eps: float,
    decay: float | None,
) -> Tensor:
    """DP² (Li et al. 2023): `plain_steps` of DP-SGD that also sum up G, then `scaled_steps` that use it.

    Where t mod (s₁+s₂) = s₁: A ← γA + (1−γ)(G/s₁)² with γ = `decay`, or A ← A + (G/s₁)² for `decay=None`; then G ← 0.
    A scaled step is θ ← θ − lr·(Σ clip(g_j/(√A+ε), ζ₂) + σζ₂·row)/B, without unscaling or momentum.
    `scaled_noise_stddev` is σζ₂, with the same σ as noise_stddev = σζ: each step spends the same.
    """
    scaled_run = replace(run, clip_norm=scaled_clip_norm, noise_stddev=scaled_noise_stddev)
    theta, path = run.theta, []
    gathered, second_moment = torch.zeros_like(theta), torch.zeros_like(theta)
    for t in range(len(run.noise)):
        place = t % (plain_steps + scaled_steps)
        if place == plain_steps:
            square = (gathered / plain_steps) ** 2
            second_moment = second_moment + square if decay is None else decay * second_moment + (1 - decay) * square
            gathered = torch.zeros_like(theta)
        if place < plain_steps:
            noisy_grad, _ = run.privatize(theta, t)
            gathered = gathered + noisy_grad
        else:
            noisy_grad, _ = scaled_run.privatize(theta, t, scale=1 / (second_moment.sqrt() + eps))
        theta = theta - lr * noisy_grad
        path.append(theta)
    return torch.stack(path)


def adadps(
    run: Run, public_gradients: PublicGradients, *, lr: float, renew_every: int, eps: float, decay: float = 0.0
) -> Tensor:
    """AdaDPS (Li et al. 2022): s = 1/√(A+ε) from public gradients, θ ← θ − lr·(Σ clip(s⊙g_j) + noise)/B.

    A ← γA + (1−γ)g_pub² every `renew_every` steps, starting with the first, with γ = `decay` (0 replaces A). A starts
    at 0. The result is not divided by the scale again.
    """
    theta, path = run.theta, []
    second_moment = torch.zeros_like(theta)
    for t in range(len(run.noise)):
        if t % renew_every == 0:
            second_moment = decay * second_moment + (1 - decay) * public_gradients(theta, t) ** 2
        noisy_grad, _ = run.privatize(theta, t, scale=1 / (second_moment + eps).sqrt())
        theta = theta - lr * noisy_grad
        path.append(theta)
    return torch.stack(path)
