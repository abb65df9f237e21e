"""The badly scaled quadratic in pictures: where the noise goes in two dimensions, and which optimizer ends lowest.

`python -m experiments.theory.pictures FOLDER --only quadratic` and `--only ranking` draw them, from the numbers of
`plane` and `tuning`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpoptim.app import plot_style as style
from experiments.quadratic.plane import Plane
from experiments.quadratic.problem import VARIANTS, Path
from experiments.quadratic.tuning import last_loss


def draw_ranking(figure: Any, results: Mapping[str, Sequence[Path]]) -> None:
    """Mean loss against step, a panel for each named setting, with the tuned settings beside the curves' ends."""
    if not results or not all(results.values()):
        raise ValueError("results is empty; give at least one path of simulate for each panel")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (name, paths) in zip(panels, results.items(), strict=True):
        private = [path for path in paths if "NOT private" not in VARIANTS[path.variant]]
        best = min(private or paths, key=last_loss).variant
        for path in paths:
            colour = style.METHODS.get(path.variant, style.BLACK)
            dashes = "--" if "NOT private" in VARIANTS[path.variant] else "-"
            width = 2.6 if path.variant == best else 1.3
            axes.plot(path.mean_loss, dashes, color=colour, linewidth=width, label=path.variant)
        style.label(axes, f"{name}: {best} ends lowest", "step", "mean of f(θ) − f(θ*), units of the loss", log="y")
        lowest = min(last_loss(path) for path in (private or paths))
        axes.set_ylim(bottom=lowest / 5)
    for line in style.legend_below(figure, *panels, columns=4).get_lines():
        line.set_linewidth(1.8)


def draw_plane(figure: Any, data: Plane) -> None:
    """Preconditioners as bars, noise as ellipses around the gradient, runs as paths over the level lines of f."""
    from matplotlib.patches import Ellipse

    bars, ellipses, runs = figure.subplots(1, 3, width_ratios=[3, 4, 4])
    for index, (name, values) in enumerate(data.preconditioners.items()):
        bars.bar(np.arange(2) + (index - 1) * 0.27, values, 0.25, color=style.METHODS[name], label=name)
    style.label(bars, "preconditioner 1/√ν̂", "", "1/√ν̂, θ-units / loss", log="y")
    bars.set_xticks([0, 1], [f"θ₁, g = {data.gradient[0]:g}", f"θ₂, g = {data.gradient[1]:g}"])
    for name, stddev in data.noise.items():
        colour = style.METHODS[name]
        for times, alpha in ((1, 0.35), (2, 0.15)):
            ellipses.add_patch(
                Ellipse((data.gradient[0], data.gradient[1]), *(2 * times * stddev), color=colour, alpha=alpha, lw=0)
            )
    ellipses.axhline(0, color=style.GREY, lw=0.8, ls=":")
    ellipses.plot(*data.gradient, "k+", markersize=9)
    reach = 2.6 * max(float(stddev.max()) for stddev in data.noise.values())
    ellipses.set(xlim=(data.gradient[0] - reach, data.gradient[0] + reach), ylim=(-reach, reach), aspect="equal")
    style.label(ellipses, "noise of one step, 1 and 2 std", "g̃₁, loss / θ-unit", "g̃₂, loss / θ-unit")
    for name, paths in data.trajectories.items():
        for index, path in enumerate(paths):
            runs.plot(*path.T, color=style.METHODS[name], lw=1.1, alpha=0.75, label=name if index == 0 else None)
    runs.plot(0, 0, "k*", markersize=10)
    style.label(runs, f"{data.trajectories['dp_sgd'].shape[1] - 1} steps from (1, 1)", "θ₁ (steep)", "θ₂ (flat)")
    style.legend_below(figure, bars, runs, columns=4)
