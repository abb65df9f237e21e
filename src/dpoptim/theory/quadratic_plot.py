"""The picture of the badly scaled quadratic: every optimizer at its best settings, and what its ν̂ is made of.

Make it again with `python -m dpoptim.theory.quadratic_plot quadratic.png` (a minute on one core).
The picture is for spread examples. What wins depends on that: at spread=0 all examples clip alike, a small clip norm
costs nothing, and scale-then-privatize, tuned, is no better than post-processing (at 300 steps DP-SGD ends lowest).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpoptim.noise import Strategy, StrategySpec
from dpoptim.theory.quadratic import VARIANTS, Path, Quadratic, simulate

_FLAT: dict[str, tuple[float, ...]] = {"lr": (0.003, 0.01, 0.03, 0.1), "clip_norm": (0.01, 0.03, 0.1, 0.3)}
_SCALED: dict[str, tuple[float, ...]] = {
    "lr": (0.01, 0.03),
    "clip_norm": (0.01, 0.03, 0.1),
    "eps_scale": (0.003, 0.01, 0.03),
}
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "adam": {"lr": _FLAT["lr"]},
    "dp_sgd": {"lr": (0.03, 0.1, 0.3, 1.0), "clip_norm": _FLAT["clip_norm"]},
    "post_processing": _FLAT,
    "bias_correction": _FLAT,
    "independent_moments": _FLAT,
    "joint_moments": _FLAT,
    "scale_then_privatize": _SCALED,
    "noiseless_preconditioner": _FLAT,
    "noiseless_scale_then_privatize": _SCALED,
}
"""Among which settings `compared` chooses, for the curvatures 1 and 0.01.

With examples this spread, a clip norm below 0.03 clips them all and is but another unit for Adam.
"""


def tuned(
    problem: Quadratic, variant: str, noise: StrategySpec | Strategy | None = None, **choices: Sequence[Any]
) -> Quadratic:
    """The problem with those values of the named fields that give the least mean loss over the last tenth of the steps.

    Edge cases: settings that diverge lose; if all do, the first stay.

    >>> tuned(Quadratic(steps=100, repeats=50), "adam", lr=(1e-4, 0.02)).lr
    0.02
    """
    last = max(1, problem.steps // 10)
    best, least = problem, math.inf
    for index, values in enumerate(itertools.product(*choices.values())):
        candidate = dataclasses.replace(problem, **dict(zip(choices, values, strict=True)))
        loss = float(simulate(candidate, variant, noise).mean_loss[-last:].mean())
        if index == 0 or loss < least:
            best, least = candidate, loss if math.isfinite(loss) else math.inf
    return best


def compared(
    problem: Quadratic,
    noise: StrategySpec | Strategy | None = None,
    *,
    grids: Mapping[str, Mapping[str, Sequence[Any]]] = GRIDS,
    tuning_repeats: int = 40,
) -> list[Path]:
    """Every variant of `grids` at the best settings there for it, tuned with one seed and run with the next.

    >>> paths = compared(Quadratic(steps=30, repeats=2), grids={"adam": {"lr": (0.01, 0.1)}, "post_processing": {}})
    >>> [(path.variant, path.problem.lr) for path in paths]
    [('adam', 0.1), ('post_processing', 0.02)]
    """
    trial = dataclasses.replace(problem, repeats=tuning_repeats)
    best = {variant: tuned(trial, variant, noise, **grid) for variant, grid in grids.items()}
    return [
        simulate(dataclasses.replace(settings, repeats=problem.repeats, seed=problem.seed + 1), variant, noise)
        for variant, settings in best.items()
    ]


def plot(
    paths: Sequence[Path],
    file: str | os.PathLike[str],
    *,
    moments_of: Sequence[str] = ("post_processing", "scale_then_privatize"),
) -> None:
    """Draw mean loss against step for all paths, and for those of `moments_of` ν̂ against g² and φ.

    One panel for the steepest coordinate and one for the flattest. The φ drawn is that of the path's own clip norm,
    before scale-then-privatize divides its noise by s_t. Edge cases: a negative mean ν̂ is not on the logarithmic axis.
    """
    if not paths:
        raise ValueError("paths is empty; give at least one result of simulate")
    try:
        import matplotlib
    except ImportError as missing:
        raise ValueError("plot needs matplotlib; install it with: pip install matplotlib") from missing
    matplotlib.use("agg")
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(13, 6.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=[5, 4])
    loss = figure.add_subplot(grid[:, 0])
    colours = {variant: f"C{index % 10}" for index, variant in enumerate(VARIANTS)}
    for path in paths:
        colour, line = colours[path.variant], "--" if "NOT private" in VARIANTS[path.variant] else "-"
        steps = np.arange(len(path.mean_loss))
        loss.plot(steps, path.mean_loss, line, color=colour, label=f"{path.variant} ({_settings(path)})")
        if path.variant in moments_of:
            loss.fill_between(steps, path.loss_quantiles[0], path.loss_quantiles[2], color=colour, alpha=0.12, lw=0)
    problem = paths[0].problem
    best = min((path for path in paths if "NOT private" not in VARIANTS[path.variant]), default=paths[0], key=_end)
    loss.set(xlabel="step", ylabel="mean of f(θ) − f(θ*), units of the loss", yscale="log")
    loss.set_title(f"{best.variant} ends lowest of the private ones (dashed: not private; bands: 10–90 %)", fontsize=10)
    shown = [path for path in paths if path.variant in moments_of]
    for row, pick in enumerate((np.argmax, np.argmin)):
        axes = figure.add_subplot(grid[row, 1], sharex=loss)
        coordinate = int(pick(problem.curvatures))
        for path in shown:
            colour, steps = colours[path.variant], np.arange(1, len(path.mean_loss))
            nu_hat = np.where(path.second_moment[:, coordinate] > 0, path.second_moment[:, coordinate], np.nan)
            axes.plot(steps, nu_hat, color=colour)
            axes.plot(steps, path.squared_gradient[:, coordinate], "--", color=colour, linewidth=1)
            alike = all(np.array_equal(path.noise_variance, other.noise_variance) for other in shown)
            axes.plot(steps, path.noise_variance, ":", color="black" if alike else colour, linewidth=1.5)
        axes.set(ylabel="gradient², (loss/unit of θ)²", yscale="log")
        which = ("steepest", "flattest")[row]
        ratios = [path.second_moment[-1, coordinate] / path.squared_gradient[-1, coordinate] for path in shown]
        ends = ": ν̂/g² ends at " + ", ".join(f"{ratio:.2g}" for ratio in ratios) if shown else ""
        axes.set_title(f"{which} coordinate, h = {problem.curvatures[coordinate]:g}{ends}", fontsize=10)
        axes.grid(alpha=0.3)
        if row == 1:
            axes.set_xlabel("step")
        elif shown:
            kinds = {"-": "ν̂", "--": "g², clipped, no noise", ":": "φ, noise variance at scale 1"}
            lines = [Line2D([], [], color="black", linestyle=style) for style in kinds]
            lines += [Line2D([], [], color=colours[path.variant], linewidth=4) for path in shown]
            axes.legend(lines, [*kinds.values(), *(path.variant for path in shown)], fontsize=8, ncols=2)
    loss.grid(alpha=0.3, which="major")
    figure.legend(*loss.get_legend_handles_labels(), fontsize=8, ncols=3, loc="outside lower center")
    figure.suptitle(
        f"Noise swamps ν̂ where the curvature is low; h = {problem.curvatures}, σ = {problem.noise_multiplier:g}, "
        f"B = {problem.batch_size}, spread {problem.spread:g}, {problem.repeats} repeats"
    )
    figure.savefig(file, dpi=150)


def _end(path: Path) -> float:
    """Mean loss over the last tenth of the steps."""
    loss = float(path.mean_loss[-max(1, path.problem.steps // 10) :].mean())
    return loss if math.isfinite(loss) else math.inf


def _settings(path: Path) -> str:
    settings = [f"lr {path.problem.lr:g}"]
    if path.variant != "adam":
        settings.append(f"ζ {path.problem.clip_norm:g}")
    if path.variant.endswith("scale_then_privatize") and path.problem.eps_scale is not None:
        settings.append(f"ε {path.problem.eps_scale:g}")
    return ", ".join(settings)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m dpoptim.theory.quadratic_plot FILE")
    plot(compared(Quadratic(spread=1.0, repeats=500)), sys.argv[1])
