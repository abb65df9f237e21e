"""Tables and pictures of the quadratic: which variant ends lowest, where the noise goes, and a few runs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import plot_style as style
from experiments.markdown import epsilon_shown, made_by, number, table
from experiments.results_file import Line

NAMES = {
    "adam": "Adam, no noise (NOT private)",
    "dp_sgd": "DP-SGD",
    "post_processing": "post-processing",
    "bias_correction": "bias correction",
    "independent_moments": "IME",
    "joint_moments": "JME",
    "scale_then_privatize": "scale-then-privatize",
    "noiseless_preconditioner": "noiseless preconditioner (NOT private)",
    "noiseless_scale_then_privatize": "noiseless + scale-then-privatize (NOT private)",
}
COLOURS = {**style.METHODS, "adam": style.BLACK, "noiseless_preconditioner": style.METHODS["noiseless"],
           "noiseless_scale_then_privatize": style.METHODS["noiseless_scaled"]}  # fmt: skip

CAPTIONS = {
    "loss": "final loss of every variant, with spread and with equal examples",
    "noise": "spread examples: preconditioners of every variant, shapes of the noise on the gradient and in the update",
    "trajectories": "spread examples: four runs of every variant over the level lines of the loss",
}
"""By picture, in the page's order."""


def markdown(lines: Sequence[Line]) -> str:
    """A finding and a table for each spread, and the pictures."""
    parts = [made_by(lines, f"python -m experiments quadratic --scale {lines[0]['scale']}")]
    for spread in _spreads(lines):
        here = [line for line in lines if line["cell"]["spread"] == spread]
        parts += [f"**{_title(spread)}**", _finding(here), _table(here)]
    drawn = pictures(lines)
    parts += [f"![{text}](images/quadratic-{name}.png)" for name, text in CAPTIONS.items() if name in drawn]
    return "\n\n".join(parts)


def _spreads(lines: Sequence[Line]) -> list[float]:
    return sorted({line["cell"]["spread"] for line in lines}, reverse=True)


def _title(spread: float) -> str:
    return f"Spread examples (standard deviation {spread:g})" if spread else "Equal examples"


def is_private(line: Line) -> bool:
    """Whether the cell has a privacy guarantee."""
    return line["epsilon"] is not None


def _order(lines: Sequence[Line]) -> list[Line]:
    """By the mean loss of the last tenth, the criterion of the tuning; diverged ones last."""
    return sorted(lines, key=lambda line: _or_infinite(line["result"]["mean_loss_last_tenth"]))


def _or_infinite(value: float | None) -> float:
    return float("inf") if value is None else value


def _finding(lines: Sequence[Line]) -> str:
    private = [line for line in _order(lines) if is_private(line)]
    if len(private) < 2:
        return "Fewer than two private variants are in the file."
    first, second, last = private[0], private[1], private[-1]
    losses = [_or_infinite(line["result"]["mean_loss_last_tenth"]) for line in (first, second, last)]
    at_edge = sum(bool(line["result"]["at_edge"]) for line in lines)
    text = (
        f"Of the private variants {_name(first)} ends lowest ({number(losses[0], 3)}), {_name(second)} next "
        f"({number(losses[1], 3)}, {losses[1] / losses[0]:.2f} times as high), {_name(last)} highest "
        f"({number(losses[2], 3)})."
    )
    return text + (
        f" The best setting is at an edge of the grid for {at_edge} of {len(lines)} variants." if at_edge else ""
    )


def _name(line: Line) -> str:
    return NAMES[line["cell"]["variant"]]


def _table(lines: Sequence[Line]) -> str:
    rows = []
    for line in _order(lines):
        result = line["result"]
        low, middle, high = (number(result["final_loss_quantiles"][key], 3) for key in ("0.1", "0.5", "0.9"))
        steep, flat = result["preconditioner"]
        axes = result["noise_stddev"]
        tuned = ", ".join(f"{name} {value:g}" for name, value in result["tuned"].items())
        rows.append([
            _name(line), epsilon_shown(line["epsilon"]), number(result["mean_loss_last_tenth"], 3),
            f"{middle} ({low} to {high})", "–" if steep is None else number(flat / steep, 3),
            " × ".join(number(axis, 2) for axis in axes), tuned,
        ])  # fmt: skip
    titles = ["variant", "ε", "mean loss, last tenth", "final loss, median (10 to 90 %)", "preconditioner, flat over "
              "steep", "noise on g̃ (std, steep × flat)", "tuned to"]  # fmt: skip
    return table(titles, rows)


def pictures(lines: Sequence[Line]) -> Mapping[str, Callable[[], Any]]:
    """Losses, noise, and trajectories."""
    found = {"loss": lambda: draw_losses(lines), "trajectories": lambda: draw_trajectories(lines)}
    return found | ({"noise": lambda: draw_noise(lines)} if _with_noise(_of_first_spread(lines)) else {})


def draw_losses(lines: Sequence[Line]) -> Any:
    """Median and 10 to 90 % of the final loss, one row per variant, one panel per spread."""
    spreads = _spreads(lines)
    figure = style.new_figure(8.5, 0.4 + 3.3 * len(spreads))
    panels = np.ravel(figure.subplots(len(spreads), 1, squeeze=False))
    for axes, spread in zip(panels, spreads, strict=True):
        here = _order([line for line in lines if line["cell"]["spread"] == spread])
        lows = [line["result"]["final_loss_quantiles"]["0.1"] for line in here if is_private(line)]
        left = min((low for low in lows if low), default=1e-12) / 10
        for index, line in enumerate(here):
            quantiles = line["result"]["final_loss_quantiles"]
            low, middle, high = (quantiles[key] for key in ("0.1", "0.5", "0.9"))
            if None in (low, middle, high):
                continue
            colour = COLOURS[line["cell"]["variant"]]
            if middle < left:
                axes.annotate(f"← {middle:.1e}", (left, index), (6, -3), textcoords="offset points", fontsize=8.5)
                continue
            axes.plot([low, high], [index, index], color=colour, lw=4, alpha=0.5, solid_capstyle="round")
            axes.plot(middle, index, "o", color=colour, ms=7, mfc=colour if is_private(line) else "white")
        axes.set_yticks(range(len(here)), [_name(line) for line in here])
        axes.set_ylim(len(here) - 0.5, -0.5)
        style.label(axes, _title(spread), "f(θ) at the end: median, 10 to 90 % of the runs", "", log="x")
        axes.set_xlim(left=left)
    return figure


def draw_noise(lines: Sequence[Line]) -> Any:
    """1/(√ν̂ + ε) of both coordinates late in the run; below, the shape of the noise on g̃ and in the update."""
    here = _of_first_spread(lines)
    figure = style.new_figure(12, 7.4)
    noisy = _with_noise(here)
    grid = figure.add_gridspec(3, len(noisy), height_ratios=[2.2, 1, 1])
    _draw_preconditioners(figure.add_subplot(grid[0, :]), here)
    for column, line in enumerate(noisy):
        result = line["result"]
        axes = np.array(result["noise_stddev"])
        title = textwrap.fill(_name(line), width=18)
        for row, shape in ((1, axes), (2, axes * np.array(result["preconditioner"]))):
            _draw_ellipse(figure.add_subplot(grid[row, column]), shape, COLOURS[line["cell"]["variant"]], title, row)
    return figure


def _with_noise(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if all(line["result"]["noise_stddev"])]


def _draw_preconditioners(axes: Any, lines: Sequence[Line]) -> None:
    shown = [line for line in lines if line["cell"]["variant"] != "dp_sgd"]
    for index, line in enumerate(shown):
        steep, flat = line["result"]["preconditioner"]
        colour = COLOURS[line["cell"]["variant"]]
        if steep is not None:
            axes.plot([steep, flat], [index, index], color=colour, lw=2.5)
            axes.plot(steep, index, "o", color=colour, ms=7)
            axes.plot(flat, index, "D", color=colour, ms=7)
            axes.annotate(f"× {flat / steep:.3g}", (flat, index), (8, -3), textcoords="offset points", fontsize=8.5)
    axes.plot([], [], "o", color=style.BLACK, label="θ₁, steep")
    axes.plot([], [], "D", color=style.BLACK, label="θ₂, flat")
    axes.set_yticks(range(len(shown)), [_name(line) for line in shown])
    axes.invert_yaxis()
    axes.legend(loc="upper right", frameon=False)
    style.label(
        axes, "Preconditioner, last tenth of the steps, spread examples", "1/(√ν̂ + ε_s), θ-units / loss", "", log="x"
    )
    axes.set_xlim(right=1.6 * axes.get_xlim()[1])


def _draw_ellipse(axes: Any, half_axes: Any, colour: str, name: str, row: int) -> None:
    """An ellipse with a fixed longer axis, and the ratio of the steep axis to the flat one."""
    from matplotlib.patches import Ellipse

    width, height = 1.8 * half_axes / half_axes.max()
    axes.add_patch(Ellipse((0, 0), width, max(height, 0.02), facecolor=colour, alpha=0.6, edgecolor=colour, lw=1.5))
    axes.set(xlim=(-1, 1), ylim=(-1, 1), aspect="equal", xticks=[], yticks=[])
    what = "noise on g̃" if row == 1 else "noise in the update"
    axes.set_title(name if row == 1 else "", fontsize=8)
    axes.set_xlabel(f"{what}\nθ₁ : θ₂ = {half_axes[0] / half_axes[1]:.2g} : 1", fontsize=8)


def draw_trajectories(lines: Sequence[Line]) -> Any:
    """Four runs of each variant, over level lines."""
    here = _of_first_spread(lines)
    figure = style.new_figure(11, 9.2)
    panels = np.ravel(figure.subplots(3, 3, sharex=True, sharey=True))
    for axes, line in zip(panels, here, strict=False):
        curvatures = line["cell"]["curvatures"]
        x, y = np.meshgrid(np.linspace(-0.6, 1.3, 400), np.linspace(-0.6, 1.3, 400))
        levels = np.geomspace(1e-4, 1, 9)
        f = (curvatures[0] * x**2 + curvatures[1] * y**2) / 2
        axes.contour(x, y, f, levels=levels, colors=style.GREY, linewidths=0.5)
        for run in line["result"]["trajectories"]["theta"]:
            points = np.array([[np.nan if v is None else v for v in point] for point in run])
            axes.plot(*points.T, "-o", color=COLOURS[line["cell"]["variant"]], lw=1.1, ms=2.2, alpha=0.8)
        axes.plot(0, 0, "k*", ms=9)
        axes.set(xlim=(-0.6, 1.3), ylim=(-0.6, 1.3))
        style.label(axes, _name(line), "", "")
    for axes in panels[len(here) :]:
        axes.set_visible(False)
    figure.supxlabel("θ₁ (steep); from (1, 1), the star is the minimum; spread examples", fontsize=9.5)
    figure.supylabel("θ₂ (flat)", fontsize=9.5)
    return figure


def _of_first_spread(lines: Sequence[Line]) -> list[Line]:
    """The lines with spread examples if there are any."""
    spread = _spreads(lines)[0]
    found = {line["cell"]["variant"]: line for line in lines if line["cell"]["spread"] == spread}
    return [found[variant] for variant in NAMES if variant in found]
