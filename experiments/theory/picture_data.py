"""The numbers that the pictures of the theory show, apart from their drawing; `pictures` draws them.

Each function calls the theory's own functions at the settings of docs/theory.md. Units are chosen so that few letters
are left: ζ = 1 and √φ = ζσ/B = 1 unless it says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from scipy.special import ndtri

from dpoptim.noise import BandedToeplitz, BufferedToeplitz, Independent, Strategy
from dpoptim.noise.series import Series
from dpoptim.optim import reference as twins
from dpoptim.privacy import Adjacency, Poisson, Sampling, Shuffled
from dpoptim.privacy.release_types import square_sensitivity
from dpoptim.theory import regimes, second_moments, steady_state, update_noise
from dpoptim.theory.bias import second_moment_bias
from dpoptim.theory.exponents import Cost, least_noise_cost, noise_cost
from dpoptim.theory.regimes import Signal

BATCH, STEPS, BETA2 = 2048, 2000, 0.999  # the paper's setting, at noise multiplier 1
BATCHES = np.unique(np.geomspace(16, 2**17, 53).round())  # where batch sizes are the axis
BERT_TINY = 4_416_698  # parameters, with the tied masked-LM head
PRINTED = {Signal.OPTIMISTIC: 1e6, Signal.PESSIMISTIC: 2e4}
"""The dimension limits that the paper prints for bias correction; its own formula gives others."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lines:
    """Named curves over one axis."""

    x: Series
    y: Mapping[str, Series]


@cache
def strategies() -> Mapping[str, Strategy]:
    """Independent noise, BandMF (128 bands) and BLT (2 buffers) for 2,000 steps, 3 participations 830 steps apart."""
    kinds = {"independent": Independent(), "BandMF": BandedToeplitz(bands=128), "BLT": BufferedToeplitz(buffers=2)}
    return {
        name: kind.optimize(steps=STEPS, max_participations=3, min_separation=830)  # type: ignore[attr-defined]
        for name, kind in kinds.items()
    }


def preconditioners() -> Lines:
    """1/√ν̂ against |g| at φ = 1, with ν̂ at its mean: without noise, and under post-processing."""
    sizes = np.geomspace(1e-2, 1e2, 121)
    with_noise = second_moments.second_moment_mean(sizes, noise_variance=1.0)
    return Lines(x=sizes, y={"without noise": 1 / sizes, "post_processing": 1 / np.sqrt(with_noise)})


def noise_biases() -> Lines:
    """b_t/φ at one noise multiplier: `second_moment_bias` times column_norm², φ being that of independent noise."""
    return Lines(
        x=np.arange(1.0, STEPS + 1),
        y={name: s.column_norm**2 * second_moment_bias(s, beta2=BETA2) for name, s in strategies().items()},
    )


def noise_variances() -> Lines:
    """Variance of the noise of each step alone, over φ: column_norm²·‖row t of C⁻¹‖²."""
    return Lines(
        x=np.arange(1.0, STEPS + 1),
        y={name: (s.column_norm * np.asarray(s.row_norms())) ** 2 for name, s in strategies().items()},
    )


def negative_by_gradient(*, steps: Sequence[int] = (1, 10, 100, 1000, 5000), points: int = 33) -> Lines:
    """P(ν̂_t − b_t < 0) against |g|/√φ, at a few steps; independent noise, β₂ = .999."""
    sizes = np.geomspace(0.02, 5, points)
    found = {f"step {t:,}": second_moments.negative_probability(sizes, noise_variance=1.0, step=t) for t in steps}
    return Lines(x=sizes, y=found)


def negative_by_step(*, most: int = 5000) -> Lines:
    """P(ν̂_t − b_t < 0) in pure noise against the step, and its limit."""
    steps = np.unique(np.geomspace(1, most, 33).round().astype(int))
    found = [float(second_moments.negative_probability(noise_variance=1.0, step=int(t))) for t in steps]
    limit = float(second_moments.negative_probability(noise_variance=1.0))
    return Lines(x=steps.astype(float), y={"step by step": np.array(found), "limit": np.full(len(steps), limit)})


def largest_dimensions(signal: Signal) -> Lines:
    """The number of coordinates up to which each method sees the gradient, against the batch size; σ = 1."""
    found = {
        "post_processing": regimes.largest_dimension_post_processing,
        "bias_correction": regimes.largest_dimension_bias_correction,
        "independent_moments": regimes.largest_dimension_ime,
    }
    return Lines(
        x=BATCHES,
        y={
            name: np.array([limit(batch_size=b, noise_multiplier=1.0, signal=signal) for b in BATCHES.tolist()])
            for name, limit in found.items()
        },
    )


def second_moment_noise() -> Lines:
    """Standard deviation of ν̂ in pure noise, over ζ², against the batch size, in the limit of many steps; σ = 1."""
    corrected = [math.sqrt(second_moments.second_moment_variance(noise_variance=b**-2)) for b in BATCHES.tolist()]
    average = math.sqrt(second_moments.squared_weight(beta=BETA2))
    released = [math.sqrt(2) * _square_sensitivity(int(b), Poisson()) * average for b in BATCHES]
    return Lines(x=BATCHES, y={"bias_correction": np.array(corrected), "independent_moments": np.array(released)})


def square_changes(*, batch_size: int = 4, most: int = 16) -> Lines:
    """The most that one of n examples changes the square of the averaged gradient, ζ = 1, with and without projection.

    Not projected, equal gradients are the worst. Projected, the worst is searched for over pairs of vectors in a
    plane: the sum of the others, which may be as long as n − 1, and the example.
    """
    counts = np.arange(1, most + 1)
    equal = (counts / batch_size) ** 2 - ((counts - 1) / batch_size) ** 2
    angles = np.linspace(0, math.pi / 2, 46)
    towards = np.stack([np.cos(angles), np.sin(angles)])
    example = towards[:, None, None, :] / batch_size
    worst = []
    for count in counts:
        lengths = np.linspace(0, count - 1, 8 * count - 7) / batch_size
        others = (lengths[:, None] * towards[:, None, :])[..., None]
        change = _projected(others + example) ** 2 - _projected(others) ** 2
        worst.append(float(np.sqrt((change**2).sum(0)).max()))
    ones = np.ones(len(counts))
    return Lines(
        x=counts.astype(float),
        y={
            "not projected": equal,
            "projected": np.array(worst),
            "allowed, exactly B": _square_sensitivity(batch_size, Shuffled()) * ones,
            "allowed, Poisson": _square_sensitivity(batch_size, Poisson()) * ones,
        },
    )


def window_paths(
    *,
    start: float,
    clip_norms: Sequence[float] = (19.0, 22.0, 40.0, 70.0, 120.0),
    steps: int = 2000,
    dimension: int = 400,
    batch_size: int = 100,
    noise_multiplier: float = 1.0,
    beta2: float = 0.99,
    eps_scale: float = 1e-3,
) -> tuple[Lines, Lines]:
    """ν̂_t over g² = 1 of scale-then-privatize at each clip norm: in mean field, and averaged over one simulated run.

    `start` is ν̂_0, eps_scale the paper's ε_s1.
    """
    field = {}
    for clip_norm in clip_norms:
        path = steady_state.mean_field(
            np.ones(dimension), clip_norm=clip_norm, noise_multiplier=noise_multiplier, batch_size=batch_size,
            steps=steps, beta2=beta2, eps_scale=eps_scale, start=start,
        )  # fmt: skip
        field[f"{clip_norm:g}"] = path.mean(1)
    moments = _simulated_second_moments(
        clip_norms, start=start, steps=steps, dimension=dimension, noise_over_batch=noise_multiplier / batch_size,
        beta2=beta2, eps_scale=eps_scale,
    )  # fmt: skip
    simulated = dict(zip(field, moments, strict=True))
    x = np.arange(1.0, steps + 1)
    return Lines(x=x, y=field), Lines(x=x, y=simulated)


def uneven_gradient(*, dimension: int = 10_000, spread: float = 2.0) -> Series:
    """A gradient of norm 1 whose sizes are the quantiles of a lognormal law, log |g| having standard deviation spread.

    >>> round(float(np.linalg.norm(uneven_gradient())), 12)
    1.0
    """
    sizes = np.exp(spread * ndtri((np.arange(dimension) + 0.5) / dimension))
    return np.asarray(sizes / np.linalg.norm(sizes))


def coordinate_noise(gradient: Series, *, batch_size: float = 1000.0) -> Lines:
    """Standard deviation of the noise on g̃ against |g|, with clip norms that just clip nothing; σ = 1."""
    low, nu_hat = _resting(gradient, batch_size)
    scaled = update_noise.scaled_noise_stddev(
        1 / np.sqrt(nu_hat), clip_norm=low, noise_multiplier=1.0, batch_size=batch_size
    )
    flat = np.full(len(gradient), float(np.linalg.norm(gradient)) / batch_size)
    return Lines(x=gradient, y={"without noise": gradient, "post_processing": flat, "scale_then_privatize": scaled})


def update_noise_by_coordinate(gradient: Series, *, batch_size: float = 1000.0, beta1: float = 0.9) -> Lines:
    """Standard deviation of the noise in Adam's update against |g|, ν̂ at its mean, bias correction with ε_s = √φ/10."""
    noise = coordinate_noise(gradient, batch_size=batch_size).y
    flat = noise["post_processing"]
    _, nu_hat = _resting(gradient, batch_size)
    average = math.sqrt(update_noise.momentum_noise_variance(noise_variance=1.0, beta1=beta1))
    moved = second_moments.second_moment_mean(gradient, noise_variance=float(flat[0]) ** 2)
    return Lines(
        x=gradient,
        y={
            "post_processing": average * flat / np.sqrt(moved),
            "bias_correction": average * flat / np.maximum(gradient, flat / 10),
            "scale_then_privatize": average * noise["scale_then_privatize"] / np.sqrt(nu_hat),
        },
    )


def momentum_noise(*, step: int = 500) -> Lines:
    """Standard deviation of the noise in μ̂, over √φ of independent noise at one noise multiplier, against β₁."""
    decays = np.array([0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995])
    found = {}
    for name, strategy in strategies().items():
        variances = [
            update_noise.momentum_noise_variance(
                noise_variance=strategy.column_norm**2, step=step, beta1=float(beta1), strategy=strategy
            )
            for beta1 in decays
        ]
        found[name] = np.sqrt(variances)
    return Lines(x=decays, y=found)


def exponent_costs(gradient: Series) -> Lines:
    """Each of the three costs of the noise, over the least that any scale can have, against the exponent p."""
    exponents = np.linspace(0, 0.6, 61)
    return Lines(
        x=exponents,
        y={
            cost.value: np.array([noise_cost(gradient, exponent=float(p), cost=cost) for p in exponents])
            / least_noise_cost(gradient, cost=cost)
            for cost in Cost
        },
    )


def _square_sensitivity(batch_size: int, sampling: Sampling) -> float:
    return square_sensitivity(
        squares="of_average", sampling=sampling, adjacency=Adjacency.ZERO_OUT, clip_norm=1.0, batch_size=batch_size
    )


def _projected(vectors: Series) -> Series:
    """To norm 1 or less, along the first axis."""
    return np.asarray(vectors / np.maximum(1.0, np.linalg.norm(vectors, axis=0, keepdims=True)))


def _simulated_second_moments(
    clip_norms: Sequence[float],
    *,
    start: float,
    steps: int,
    dimension: int,
    noise_over_batch: float,
    beta2: float,
    eps_scale: float,
) -> Series:
    """[clip norms, steps]: the mean of ν̂_t over coordinates with g = 1, by the twins' scale and clipping."""
    norms, rng = torch.tensor(clip_norms, dtype=torch.float64)[:, None], np.random.default_rng(0)
    nu, means = torch.zeros(len(clip_norms), dimension, dtype=torch.float64), []
    nu_hat = torch.full_like(nu, start)
    for t in range(1, steps + 1):
        s = twins.scale_of(nu_hat, exponent=0.5, eps_scale=eps_scale, normalised=False)
        clipped = norms * twins.clip(s / norms, 1.0)  # s⊙g clipped to its norm; the mean of equal examples
        noise = norms * noise_over_batch * torch.from_numpy(rng.standard_normal(dimension))
        nu = beta2 * nu + (1 - beta2) * ((clipped + noise) / s) ** 2
        nu_hat = nu / (1 - beta2**t)
        means.append(nu_hat.mean(1))
    return np.asarray(torch.stack(means, 1).numpy())


def _resting(gradient: Series, batch_size: float) -> tuple[float, Series]:
    """The least clip norm at which scale-then-privatize rests, and ν̂ there."""
    low, _ = steady_state.clip_norm_window(dimension=len(gradient), noise_multiplier=1.0, batch_size=batch_size)
    return low, steady_state.steady_state(gradient**2, clip_norm=low, noise_multiplier=1.0, batch_size=batch_size)
