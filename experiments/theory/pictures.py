"""The pictures of docs/theory.md, made again: `python -m experiments.theory.pictures FOLDER [--only NAME]`.

Writes theory-NAME.png into the folder, all of them in one to two minutes on one core. The numbers come from
`picture_data`, `quadratic_plane` and `quadratic_tuning`, which call the theory's functions; here they are only drawn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpoptim.app import plot_style as style
from dpoptim.theory import regimes, steady_state
from dpoptim.theory.exponents import Cost, best_exponent
from dpoptim.theory.regimes import Signal
from experiments.quadratic import plane as quadratic_plane
from experiments.quadratic import plot as quadratic_plot
from experiments.quadratic import tuning as quadratic_tuning
from experiments.quadratic.problem import Quadratic
from experiments.theory import picture_data as data

_NAMES = {
    "post_processing": "post-processing",
    "bias_correction": "bias correction",
    "independent_moments": "IME",
    "scale_then_privatize": "scale-then-privatize",
}


def noise_bias() -> Any:
    """Post-processing's preconditioner against |g|; b_t of three kinds of noise against the step."""
    figure = style.new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    lines = data.preconditioners()
    for name, dashes in (("without noise", "--"), ("post_processing", "-")):
        left.plot(lines.x, lines.y[name], dashes, color=style.METHODS[name], lw=2)
    left.text(0.12, 12, "without noise: √φ/|g|", fontsize=8.5)
    left.text(0.012, 0.62, "post-processing: flat, like SGD", color=style.BLUE, fontsize=8.5)
    left.text(7, 0.2, "here it is Adam", fontsize=8.5)
    left.axvline(1, color=style.GREY, lw=0.8, ls=":")
    style.label(left, "Below the noise, no geometry is left", "|g| / √φ", "preconditioner √(φ/ν̂)", log="xy")
    biases, variances = data.noise_biases(), data.noise_variances()
    for name, values in biases.y.items():
        right.plot(biases.x, values, color=style.NOISES[name], lw=2)
        right.plot(variances.x, variances.y[name], ":", color=style.NOISES[name], lw=1.4)
        right.text(2000, values[-1] - 0.33, name, color=style.NOISES[name], ha="right", fontsize=8.5)
    right.text(1.3, 5.7, "dotted: variance of step t alone", fontsize=8.5)
    right.set_ylim(0, 6.3)
    style.label(right, "Correlated noise biases ν̂ more", "step", "b_t / φ of independent noise", log="x")
    return figure


def negative() -> Any:
    """How often ν̂ − b is negative, against the gradient's size and against the step."""
    figure = style.new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    lines = data.negative_by_gradient()
    colours = (style.BLACK, style.ORANGE, style.SKY, style.GREEN, style.PURPLE)
    for (name, values), colour in zip(lines.y.items(), colours, strict=True):
        left.plot(lines.x, values, color=colour, lw=2, label=name)
    left.set_ylim(0, 0.75)
    left.legend(loc="upper right", frameon=False)
    style.label(left, "A small gradient is lost at any step", "|g| / √φ", "P(ν̂ − b < 0)", log="x")
    lines = data.negative_by_step()
    right.plot(lines.x, lines.y["step by step"], color=style.GREEN, lw=2)
    right.axhline(lines.y["limit"][0], color=style.GREEN, lw=1, ls="--")
    right.axhline(0.5, color=style.GREY, lw=1, ls=":")
    right.annotate(f"{lines.y['step by step'][0]:.3f}", (1, lines.y["step by step"][0]), (1.6, 0.685), fontsize=8.5)
    right.text(1.1, lines.y["limit"][0] + 0.004, f"limit {lines.y['limit'][0]:.4f}", fontsize=8.5)
    right.text(1.1, 0.496, "one half", fontsize=8.5, va="top", color=style.GREY)
    right.set_ylim(0.47, 0.72)
    style.label(right, "Pure noise: half of them, whatever σ", "step", "P(ν̂ − b < 0) at g = 0", log="x")
    return figure


def dimensions() -> Any:
    """The most coordinates in which each method sees the gradient, against the batch size, in two cases."""
    figure = style.new_figure(10, 4.4)
    panels = figure.subplots(1, 2, sharey=True)
    titles = {Signal.OPTIMISTIC: "Optimistic: ‖g‖ = ζ", Signal.PESSIMISTIC: "Pessimistic: ‖g‖ = ζ/√B"}
    for axes, (signal, title) in zip(panels, titles.items(), strict=True):
        lines = data.largest_dimensions(signal)
        for name, values in lines.y.items():
            axes.plot(lines.x, values, color=style.METHODS[name], lw=2, label=_NAMES[name])
        right = regimes.largest_dimension_bias_correction(
            batch_size=data.BATCH, noise_multiplier=1.0, beta2=data.BETA2, signal=signal
        )
        printed = data.PRINTED[signal]
        axes.plot(data.BATCH, right, "o", color=style.GREEN, markersize=7, label="bias correction at B = 2048")
        axes.plot(
            data.BATCH, printed, "x", color=style.BLACK, markersize=8, mew=2, label="the same, as the paper prints it"
        )
        axes.annotate(
            f"{right:.3g}", (data.BATCH, right), (-8, 5), textcoords="offset points", ha="right", fontsize=8.5
        )
        axes.annotate(f"{printed:.0e}", (data.BATCH, printed), (8, -4), textcoords="offset points", fontsize=8.5)
        axes.axhline(data.BERT_TINY, color=style.GREY, lw=0.9, ls=":")
        axes.text(17, data.BERT_TINY * 1.5, "BERT-Tiny, 4.4 million", color=style.GREY, fontsize=8.5)
        axes.set_ylim(1, 1e13)
        style.label(axes, title, "batch size B (examples), σ = 1", "m, coordinates", log="xy")
    style.legend_below(figure, *panels, columns=5)
    return figure


def released_square() -> Any:
    """The noise of two second moments against the batch size; what one example does to a released square."""
    figure = style.new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    lines = data.second_moment_noise()
    for name, values in lines.y.items():
        left.plot(lines.x, values, color=style.METHODS[name], lw=2)
    left.text(700, 2.5e-4, "IME, ∝ 1/B", color=style.RED, fontsize=8.5)
    left.text(1500, 5e-8, "bias correction, ∝ 1/B²", color=style.GREEN, fontsize=8.5)
    for m, place in ((1e4, 7000), (1e6, 500), (1e8, 7000)):
        left.axhline(1 / m, color=style.GREY, lw=0.9, ls=":")
        left.text(place, 1.3 / m, f"g² at m = 1e{np.log10(m):.0f}, ‖g‖ = ζ", color=style.GREY, fontsize=8)
    style.label(left, "IME's noise falls slower than bias correction's", "batch size B (examples), σ = 1",
                "std of ν̂ at g = 0, over ζ²", log="xy")  # fmt: skip
    lines = data.square_changes()
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


def window() -> Any:
    """ν̂ of scale-then-privatize over steps at five clip norms, from g² and from 0."""
    figure = style.new_figure(10, 4.6)
    panels = figure.subplots(1, 2)
    low, high = steady_state.clip_norm_window(dimension=400, noise_multiplier=1.0, batch_size=100)
    looks = ((1.0, "From ν̂₀ = g²", "y", (0.1, 100)), (0.0, "From ν̂₀ = 0, the default", "xy", (1e-7, 1e6)))
    colours = (style.RED, style.ORANGE, style.GREEN, style.BLUE, style.PURPLE)
    for axes, (start, title, log, limits) in zip(panels, looks, strict=True):
        field, simulated = data.window_paths(start=start)
        for (name, values), colour in zip(field.y.items(), colours, strict=True):
            fate = steady_state.predict(float(name), dimension=400, noise_multiplier=1.0, batch_size=100)
            axes.plot(simulated.x, simulated.y[name], color=colour, lw=4, alpha=0.4, label=f"ζ = {name}: {fate.value}")
            axes.plot(field.x, values, "--", color=colour, lw=1.3)
        axes.plot([], [], "--", color=style.BLACK, lw=1.3, label="mean field (bands: simulated)")
        axes.set_ylim(*limits)
        style.label(
            axes, f"{title}; window {low:.1f} ≤ ζ < {high:g}", "step", "ν̂ / g², mean of 400 coordinates", log=log
        )
    style.legend_below(figure, *panels, columns=3)
    return figure


def update_noise() -> Any:
    """The noise on each coordinate of the gradient and of the update; the noise that momentum leaves."""
    figure = style.new_figure(12.5, 4.3)
    raw, update, momentum = figure.subplots(1, 3)
    gradient = data.uneven_gradient()
    rms = float(np.sqrt(np.mean(gradient**2)))
    lines = data.coordinate_noise(gradient)
    for name, dashes in (("without noise", "--"), ("post_processing", "-"), ("scale_then_privatize", "-")):
        shown = "the gradient itself" if name == "without noise" else _NAMES[name]
        raw.plot(lines.x / rms, lines.y[name] / rms, dashes, color=style.METHODS[name], lw=2, label=shown)
    style.label(raw, "On the gradient", "|gᵢ| / rms of g", "noise std on g̃ᵢ / rms of g", log="xy")
    lines = data.update_noise_by_coordinate(gradient)
    for name, values in lines.y.items():
        update.plot(lines.x / rms, values, color=style.METHODS[name], lw=2, label=_NAMES[name])
    style.label(update, "In Adam's update, β₁ = .9", "|gᵢ| / rms of g", "noise std in μ̂/√ν̂ (no unit)", log="xy")
    inner = np.quantile(gradient, [0.05, 0.95]) / rms
    for axes in (raw, update):
        axes.axvspan(*inner, color=style.GREY, alpha=0.12, lw=0, label="90 % of the coordinates")
        axes.set_xlim(1e-4, 1e2)
    raw.set_ylim(1e-5, 1e2)
    update.set_ylim(1e-4, 1e1)
    lines = data.momentum_noise()
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


def quadratic() -> Any:
    """Preconditioners, noise ellipses and runs on a quadratic in two dimensions."""
    figure = style.new_figure(12.5, 4.4)
    quadratic_plot.draw_plane(figure, quadratic_plane.plane())
    return figure


def ranking(*, repeats: int = 200, tuning_repeats: int = 20, steps: int = 300) -> Any:
    """Mean loss of every optimizer, tuned, on the quadratic with spread and with equal examples."""
    figure = style.new_figure(11, 4.8)
    results = {
        name: quadratic_tuning.compared(
            Quadratic(spread=spread, repeats=repeats, steps=steps),
            grids=quadratic_tuning.NEAR,
            tuning_repeats=tuning_repeats,
        )
        for name, spread in (("Spread examples", 1.0), ("Equal examples", 0.0))
    }
    quadratic_plot.draw_ranking(figure, results)
    return figure


def exponent() -> Any:
    """Three ways to count the noise, each least at an exponent of its own."""
    figure = style.new_figure(7.5, 4.4)
    axes = figure.subplots()
    lines = data.exponent_costs(data.uneven_gradient(spread=1.0))
    looks = {
        Cost.GRADIENT: (style.GREEN, "variance on the gradient, Σ1/s²: AdaClip, p = ¼"),
        Cost.REGRET: (style.ORANGE, "(Σ1/s)², AdaGrad's regret: PAGAN, p = ⅓"),
        Cost.UPDATE: (style.PURPLE, "variance in Adam's update, Σ1/(s²g²): p = ½"),
    }
    for cost, (colour, name) in looks.items():
        axes.plot(lines.x, lines.y[cost.value], color=colour, lw=2, label=name)
        axes.plot(best_exponent(cost), 1.0, "o", color=colour, markersize=8, clip_on=False, zorder=5)
    axes.set_ylim(1, 60)
    axes.set_xlim(0, 0.6)
    axes.set_xticks([0, 1 / 4, 1 / 3, 1 / 2], ["0", "¼", "⅓", "½"])
    title, y = "The best exponent depends on what is counted", "noise, over the least possible"
    style.label(axes, title, "exponent p, s = |g|^(−2p)", y, log="y")
    axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    style.legend_below(figure, axes, columns=1)
    return figure


PICTURES: dict[str, Callable[[], Any]] = {
    "noise-bias": noise_bias,
    "negative": negative,
    "dimensions": dimensions,
    "released-square": released_square,
    "window": window,
    "update-noise": update_noise,
    "quadratic": quadratic,
    "ranking": ranking,
    "exponent": exponent,
}
"""What the command makes, by name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make all pictures, or one."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.theory.pictures", description="The pictures of docs/theory.md"
    )
    parser.add_argument("folder", type=Path, help="where theory-NAME.png goes; made if it is not there")
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
