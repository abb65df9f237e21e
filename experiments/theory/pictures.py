"""The pictures of docs/theory.md: `python -m experiments.theory.pictures FOLDER [--only NAME]`.

Writes theory-NAME.png into the folder, all of them in one to two minutes on one core. The first half computes the
numbers by calling the theory's functions; the second half draws them. Units leave few letters: ζ = 1 and
√φ = ζσ/B = 1 unless stated otherwise.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri

from dpoptim import theory
from dpoptim.noise import BandedToeplitz, BufferedToeplitz, Independent, Strategy
from dpoptim.noise.series import Series
from dpoptim.optim import reference
from dpoptim.privacy import Adjacency, Poisson, Sampling, Shuffled
from dpoptim.privacy.release_types import square_sensitivity
from dpoptim.theory import Cost, Signal
from dpoptim.theory.second_moments import squared_weight
from experiments import plot_style as style

BATCH, STEPS, BETA2 = 2048, 2000, 0.999  # the paper's setting, at noise multiplier 1
BATCHES = np.unique(np.geomspace(16, 2**17, 53).round())  # where batch sizes are the axis
BERT_TINY = 4_416_698  # parameters, with the tied masked-LM head
PRINTED = {Signal.OPTIMISTIC: 1e6, Signal.PESSIMISTIC: 2e4}
"""The dimension limits that the paper prints for bias correction; its formula gives different ones."""


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
    with_noise = theory.second_moment_mean(sizes, noise_variance=1.0)
    return Lines(x=sizes, y={"without noise": 1 / sizes, "post_processing": 1 / np.sqrt(with_noise)})


def noise_biases() -> Lines:
    """b_t/φ at one noise multiplier: `second_moment_bias` times column_norm², φ being that of independent noise."""
    return Lines(
        x=np.arange(1.0, STEPS + 1),
        y={name: s.column_norm**2 * theory.second_moment_bias(s, beta2=BETA2) for name, s in strategies().items()},
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
    found = {f"step {t:,}": theory.negative_probability(sizes, noise_variance=1.0, step=t) for t in steps}
    return Lines(x=sizes, y=found)


def negative_by_step(*, most: int = 5000) -> Lines:
    """P(ν̂_t − b_t < 0) in pure noise against the step, and its limit."""
    steps = np.unique(np.geomspace(1, most, 33).round().astype(int))
    found = [float(theory.negative_probability(noise_variance=1.0, step=int(t))) for t in steps]
    limit = float(theory.negative_probability(noise_variance=1.0))
    return Lines(x=steps.astype(float), y={"step by step": np.array(found), "limit": np.full(len(steps), limit)})


def largest_dimensions(signal: Signal) -> Lines:
    """The number of coordinates up to which each method sees the gradient, against the batch size; σ = 1."""
    found = {
        "post_processing": theory.largest_dimension_post_processing,
        "bias_correction": theory.largest_dimension_bias_correction,
        "independent_moments": theory.largest_dimension_ime,
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
    corrected = [math.sqrt(theory.second_moment_variance(noise_variance=b**-2)) for b in BATCHES.tolist()]
    average = math.sqrt(squared_weight(beta=BETA2))
    released = [math.sqrt(2) * _square_sensitivity(int(b), Poisson()) * average for b in BATCHES]
    return Lines(x=BATCHES, y={"bias_correction": np.array(corrected), "independent_moments": np.array(released)})


def square_changes(*, batch_size: int = 4, most: int = 16) -> Lines:
    """How far one of n examples can change the square of the averaged gradient at ζ = 1, with and without projection.

    Without projection, equal gradients are the worst case. With it, the worst case is searched over pairs of vectors in
    a plane: the example, and the sum of the others, which has norm up to n − 1.
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
        path = theory.mean_field(
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
    """A gradient of norm 1 with lognormal quantiles; `spread` is the standard deviation of log |g|.

    >>> round(float(np.linalg.norm(uneven_gradient())), 12)
    1.0
    """
    sizes = np.exp(spread * ndtri((np.arange(dimension) + 0.5) / dimension))
    return np.asarray(sizes / np.linalg.norm(sizes))


def coordinate_noise(gradient: Series, *, batch_size: float = 1000.0) -> Lines:
    """Standard deviation of the noise on g̃ against |g|, with clip norms that just clip nothing; σ = 1."""
    low, nu_hat = _resting(gradient, batch_size)
    scaled = theory.scaled_noise_stddev(1 / np.sqrt(nu_hat), clip_norm=low, noise_multiplier=1.0, batch_size=batch_size)
    flat = np.full(len(gradient), float(np.linalg.norm(gradient)) / batch_size)
    return Lines(x=gradient, y={"without noise": gradient, "post_processing": flat, "scale_then_privatize": scaled})


def update_noise_by_coordinate(gradient: Series, *, batch_size: float = 1000.0, beta1: float = 0.9) -> Lines:
    """Standard deviation of the noise in Adam's update against |g|, ν̂ at its mean, bias correction with ε_s = √φ/10."""
    noise = coordinate_noise(gradient, batch_size=batch_size).y
    flat = noise["post_processing"]
    _, nu_hat = _resting(gradient, batch_size)
    average = math.sqrt(theory.momentum_noise_variance(noise_variance=1.0, beta1=beta1))
    moved = theory.second_moment_mean(gradient, noise_variance=float(flat[0]) ** 2)
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
            theory.momentum_noise_variance(
                noise_variance=strategy.column_norm**2, step=step, beta1=float(beta1), strategy=strategy
            )
            for beta1 in decays
        ]
        found[name] = np.sqrt(variances)
    return Lines(x=decays, y=found)


def exponent_costs(gradient: Series) -> Lines:
    """Each of the three costs of the noise, over its minimum over all scales, against the exponent p."""
    exponents = np.linspace(0, 0.6, 61)
    return Lines(
        x=exponents,
        y={
            cost.value: np.array([theory.noise_cost(gradient, exponent=float(p), cost=cost) for p in exponents])
            / theory.least_noise_cost(gradient, cost=cost)
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
    """[clip norms, steps]: the mean of ν̂_t over coordinates with g = 1, with the reference scale and clipping."""
    norms, rng = torch.tensor(clip_norms, dtype=torch.float64)[:, None], np.random.default_rng(0)
    nu, means = torch.zeros(len(clip_norms), dimension, dtype=torch.float64), []
    nu_hat = torch.full_like(nu, start)
    for t in range(1, steps + 1):
        s = reference.scale_of(nu_hat, exponent=0.5, eps_scale=eps_scale, normalised=False)
        clipped = norms * reference.clip(s / norms, 1.0)  # s⊙g clipped to its norm; the mean of equal examples
        noise = norms * noise_over_batch * torch.from_numpy(rng.standard_normal(dimension))
        nu = beta2 * nu + (1 - beta2) * ((clipped + noise) / s) ** 2
        nu_hat = nu / (1 - beta2**t)
        means.append(nu_hat.mean(1))
    return np.asarray(torch.stack(means, 1).numpy())


def _resting(gradient: Series, batch_size: float) -> tuple[float, Series]:
    """The smallest clip norm with a steady state of scale-then-privatize, and ν̂ there."""
    low, _ = theory.clip_norm_window(dimension=len(gradient), noise_multiplier=1.0, batch_size=batch_size)
    return low, theory.steady_second_moment(gradient**2, clip_norm=low, noise_multiplier=1.0, batch_size=batch_size)


_NAMES = {
    "post_processing": "post-processing",
    "bias_correction": "bias correction",
    "independent_moments": "IME",
    "scale_then_privatize": "scale-then-privatize",
}


def draw_noise_bias() -> Any:
    """Post-processing's preconditioner against |g|; b_t of three kinds of noise against the step."""
    figure = style.new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    lines = preconditioners()
    for name, dashes in (("without noise", "--"), ("post_processing", "-")):
        left.plot(lines.x, lines.y[name], dashes, color=style.METHODS[name], lw=2)
    left.text(0.12, 12, "without noise: √φ/|g|", fontsize=8.5)
    left.text(0.012, 0.62, "post-processing: flat, like SGD", color=style.BLUE, fontsize=8.5)
    left.text(7, 0.2, "here it is Adam", fontsize=8.5)
    left.axvline(1, color=style.GREY, lw=0.8, ls=":")
    style.label(left, "Below the noise, no geometry is left", "|g| / √φ", "preconditioner √(φ/ν̂)", log="xy")
    biases, variances = noise_biases(), noise_variances()
    for name, values in biases.y.items():
        right.plot(biases.x, values, color=style.NOISES[name], lw=2)
        right.plot(variances.x, variances.y[name], ":", color=style.NOISES[name], lw=1.4)
        right.text(2000, values[-1] - 0.33, name, color=style.NOISES[name], ha="right", fontsize=8.5)
    right.text(1.3, 5.7, "dotted: variance of step t alone", fontsize=8.5)
    right.set_ylim(0, 6.3)
    style.label(right, "Correlated noise biases ν̂ more", "step", "b_t / φ of independent noise", log="x")
    return figure


def draw_negative() -> Any:
    """How often ν̂ − b is negative, against the gradient's size and against the step."""
    figure = style.new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    lines = negative_by_gradient()
    colours = (style.BLACK, style.ORANGE, style.SKY, style.GREEN, style.PURPLE)
    for (name, values), colour in zip(lines.y.items(), colours, strict=True):
        left.plot(lines.x, values, color=colour, lw=2, label=name)
    left.set_ylim(0, 0.75)
    left.legend(loc="upper right", frameon=False)
    style.label(left, "A small gradient is lost at any step", "|g| / √φ", "P(ν̂ − b < 0)", log="x")
    lines = negative_by_step()
    right.plot(lines.x, lines.y["step by step"], color=style.GREEN, lw=2)
    right.axhline(lines.y["limit"][0], color=style.GREEN, lw=1, ls="--")
    right.axhline(0.5, color=style.GREY, lw=1, ls=":")
    right.annotate(f"{lines.y['step by step'][0]:.3f}", (1, lines.y["step by step"][0]), (1.6, 0.685), fontsize=8.5)
    right.text(1.1, lines.y["limit"][0] + 0.004, f"limit {lines.y['limit'][0]:.4f}", fontsize=8.5)
    right.text(1.1, 0.496, "one half", fontsize=8.5, va="top", color=style.GREY)
    right.set_ylim(0.47, 0.72)
    style.label(right, "Pure noise: about half of them, for every σ", "step", "P(ν̂ − b < 0) at g = 0", log="x")
    return figure


def draw_dimensions() -> Any:
    """The largest dimension in which each method sees the gradient, against the batch size, in two cases."""
    figure = style.new_figure(10, 4.4)
    panels = figure.subplots(1, 2, sharey=True)
    titles = {Signal.OPTIMISTIC: "Optimistic: ‖g‖ = ζ", Signal.PESSIMISTIC: "Pessimistic: ‖g‖ = ζ/√B"}
    for axes, (signal, title) in zip(panels, titles.items(), strict=True):
        lines = largest_dimensions(signal)
        for name, values in lines.y.items():
            axes.plot(lines.x, values, color=style.METHODS[name], lw=2, label=_NAMES[name])
        right = theory.largest_dimension_bias_correction(
            batch_size=BATCH, noise_multiplier=1.0, beta2=BETA2, signal=signal
        )
        printed = PRINTED[signal]
        axes.plot(BATCH, right, "o", color=style.GREEN, markersize=7, label="bias correction at B = 2048")
        axes.plot(
            BATCH, printed, "x", color=style.BLACK, markersize=8, mew=2, label="the same, as printed in the paper"
        )
        axes.annotate(f"{right:.3g}", (BATCH, right), (-8, 5), textcoords="offset points", ha="right", fontsize=8.5)
        axes.annotate(f"{printed:.0e}", (BATCH, printed), (8, -4), textcoords="offset points", fontsize=8.5)
        axes.axhline(BERT_TINY, color=style.GREY, lw=0.9, ls=":")
        axes.text(17, BERT_TINY * 1.5, "BERT-Tiny, 4.4 million", color=style.GREY, fontsize=8.5)
        axes.set_ylim(1, 1e13)
        style.label(axes, title, "batch size B (examples), σ = 1", "m, coordinates", log="xy")
    style.legend_below(figure, *panels, columns=5)
    return figure


def draw_released_square() -> Any:
    """The noise of two second moments against the batch size; what one example does to a released square."""
    figure = style.new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    lines = second_moment_noise()
    for name, values in lines.y.items():
        left.plot(lines.x, values, color=style.METHODS[name], lw=2)
    left.text(700, 2.5e-4, "IME, ∝ 1/B", color=style.RED, fontsize=8.5)
    left.text(1500, 5e-8, "bias correction, ∝ 1/B²", color=style.GREEN, fontsize=8.5)
    for m, place in ((1e4, 7000), (1e6, 500), (1e8, 7000)):
        left.axhline(1 / m, color=style.GREY, lw=0.9, ls=":")
        left.text(place, 1.3 / m, f"g² at m = 1e{np.log10(m):.0f}, ‖g‖ = ζ", color=style.GREY, fontsize=8)
    style.label(left, "IME's noise falls slower than bias correction's", "batch size B (examples), σ = 1",
                "std of ν̂ at g = 0, over ζ²", log="xy")  # fmt: skip
    lines = square_changes()
    right.plot(lines.x, lines.y["not projected"], "o-", color=style.RED, ms=4, label="one example, not projected")
    right.plot(
        lines.x, lines.y["projected"], "s-", color=style.BLUE, ms=4, label="one example, projected (worst found)"
    )
    right.plot(lines.x, lines.y["allowed, Poisson"], "--", color=style.BLUE, lw=1.5, label="accounted: 2ζ²/B")
    right.plot(lines.x, lines.y["allowed, exactly B"], ":", color=style.BLACK, lw=1.5, label="accounted: (2B − 1)ζ²/B²")
    at = int(np.flatnonzero(lines.x == 12)[0])
    right.annotate(
        f"{lines.y['not projected'][at]:.2f}", (12, lines.y["not projected"][at]), (12.3, 1.27), fontsize=8.5
    )
    right.set_ylim(0, 3.1)
    right.legend(loc="upper left", frameon=False)
    style.label(right, "A Poisson batch above B breaks the bound", "examples in a batch of expected size B = 4",
                "change of the averaged square, over ζ²")  # fmt: skip
    return figure


def draw_window() -> Any:
    """ν̂ of scale-then-privatize over steps at five clip norms, from g² and from 0."""
    figure = style.new_figure(10, 4.6)
    panels = figure.subplots(1, 2)
    low, high = theory.clip_norm_window(dimension=400, noise_multiplier=1.0, batch_size=100)
    looks = ((1.0, "From ν̂₀ = g²", "y", (0.1, 100)), (0.0, "From ν̂₀ = 0, the default", "xy", (1e-7, 1e6)))
    colours = (style.RED, style.ORANGE, style.GREEN, style.BLUE, style.PURPLE)
    for axes, (start, title, log, limits) in zip(panels, looks, strict=True):
        field, simulated = window_paths(start=start)
        for (name, values), colour in zip(field.y.items(), colours, strict=True):
            regime = theory.predict(float(name), dimension=400, noise_multiplier=1.0, batch_size=100)
            axes.plot(
                simulated.x, simulated.y[name], color=colour, lw=4, alpha=0.4, label=f"ζ = {name}: {regime.value}"
            )
            axes.plot(field.x, values, "--", color=colour, lw=1.3)
        axes.plot([], [], "--", color=style.BLACK, lw=1.3, label="mean field (bands: simulated)")
        axes.set_ylim(*limits)
        style.label(
            axes, f"{title}; window {low:.1f} ≤ ζ < {high:g}", "step", "ν̂ / g², mean of 400 coordinates", log=log
        )
    style.legend_below(figure, *panels, columns=3)
    return figure


def draw_update_noise() -> Any:
    """The noise on each coordinate of the gradient and of the update; the noise that momentum leaves."""
    figure = style.new_figure(12.5, 4.3)
    raw, update, momentum = figure.subplots(1, 3)
    gradient = uneven_gradient()
    rms = float(np.sqrt(np.mean(gradient**2)))
    lines = coordinate_noise(gradient)
    for name, dashes in (("without noise", "--"), ("post_processing", "-"), ("scale_then_privatize", "-")):
        shown = "the gradient itself" if name == "without noise" else _NAMES[name]
        raw.plot(lines.x / rms, lines.y[name] / rms, dashes, color=style.METHODS[name], lw=2, label=shown)
    style.label(raw, "On the gradient", "|gᵢ| / rms of g", "noise std on g̃ᵢ / rms of g", log="xy")
    lines = update_noise_by_coordinate(gradient)
    for name, values in lines.y.items():
        update.plot(lines.x / rms, values, color=style.METHODS[name], lw=2, label=_NAMES[name])
    style.label(update, "In Adam's update, β₁ = .9", "|gᵢ| / rms of g", "noise std in μ̂/√ν̂ (no unit)", log="xy")
    inner = np.quantile(gradient, [0.05, 0.95]) / rms
    for axes in (raw, update):
        axes.axvspan(*inner, color=style.GREY, alpha=0.12, lw=0, label="90 % of the coordinates")
        axes.set_xlim(1e-4, 1e2)
    raw.set_ylim(1e-5, 1e2)
    update.set_ylim(1e-4, 1e1)
    lines = momentum_noise()
    for name, values in lines.y.items():
        momentum.plot(1 - lines.x, values, "o-", color=style.NOISES[name], lw=2, ms=4)
    momentum.text(0.022, 0.14, "independent", color=style.NOISES["independent"], fontsize=8.5)
    momentum.text(0.8, 2.2, "BandMF", color=style.NOISES["BandMF"], fontsize=8.5)
    momentum.text(0.035, 0.035, "BLT", color=style.NOISES["BLT"], fontsize=8.5)
    momentum.invert_xaxis()
    style.label(momentum, "In μ̂, by kind of noise", "1 − β₁ (steps averaged grow to the right)", "noise std in μ̂ / √φ",
                log="xy")  # fmt: skip
    momentum.set_xlim(1.3, 0.004)
    style.legend_below(figure, raw, update, columns=5)
    return figure


def draw_exponent() -> Any:
    """Three ways to measure the noise, each smallest at a different exponent."""
    figure = style.new_figure(7.5, 4.4)
    axes = figure.subplots()
    lines = exponent_costs(uneven_gradient(spread=1.0))
    looks = {
        Cost.GRADIENT: (style.GREEN, "variance on the gradient, Σ1/s²: AdaClip, p = ¼"),
        Cost.REGRET: (style.ORANGE, "(Σ1/s)², AdaGrad's regret: PAGAN, p = ⅓"),
        Cost.UPDATE: (style.PURPLE, "variance in Adam's update, Σ1/(s²g²): p = ½"),
    }
    for cost, (colour, name) in looks.items():
        axes.plot(lines.x, lines.y[cost.value], color=colour, lw=2, label=name)
        axes.plot(theory.best_exponent(cost), 1.0, "o", color=colour, markersize=8, clip_on=False, zorder=5)
    axes.set_ylim(1, 60)
    axes.set_xlim(0, 0.6)
    axes.set_xticks([0, 1 / 4, 1 / 3, 1 / 2], ["0", "¼", "⅓", "½"])
    title, y = "The best exponent depends on what is measured", "noise, over the least possible"
    style.label(axes, title, "exponent p, s = |g|^(−2p)", y, log="y")
    axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    style.legend_below(figure, axes, columns=1)
    return figure


PICTURES: dict[str, Callable[[], Any]] = {
    "noise-bias": draw_noise_bias,
    "negative": draw_negative,
    "dimensions": draw_dimensions,
    "released-square": draw_released_square,
    "window": draw_window,
    "update-noise": draw_update_noise,
    "exponent": draw_exponent,
}
"""By name on the command line."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make all pictures, or one."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.theory.pictures", description="The pictures of docs/theory.md"
    )
    parser.add_argument("folder", type=Path, help="where to write theory-NAME.png; created if missing")
    parser.add_argument("--only", choices=list(PICTURES), metavar="NAME", help=", ".join(PICTURES))
    chosen = parser.parse_args(arguments)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for name in [chosen.only] if chosen.only else PICTURES:
        file = chosen.folder / f"theory-{name}.png"
        try:
            style.save(PICTURES[name](), file)
        except ValueError as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
        print(file)


if __name__ == "__main__":
    main(sys.argv[1:])
