"""The picture of `dpoptim advise`: four panels, each with a line that says what to see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dpoptim.theory import Advice, Fate

try:
    import matplotlib
except ImportError as missing:
    raise ValueError("--plot needs matplotlib; install it with: pip install matplotlib") from missing

matplotlib.use("agg")
from matplotlib.figure import Figure

_BINS = 24
_COLOURS = {Fate.DIVERGES: "#f4c7c3", Fate.STEADY: "#cfe8cf", Fate.COLLAPSES: "#e3e3e3"}


def draw(advice: Advice, path: Path) -> None:
    """Negative second moments, gradients against noise, the window of eps_scale, error against memory."""
    figure = Figure(figsize=(12, 9), layout="constrained")
    panels = figure.subplots(2, 2)
    plan = advice.plan
    kind = f"measured on {advice.signal.examples} public examples" if advice.signal.measured else "assumed"
    figure.suptitle(
        f"advice: {advice.variant} with {advice.choice.chosen.name}\n"
        f"ε = {advice.epsilon:g}, δ = {advice.delta:g}; {plan.steps:,} steps of {plan.batch_size:,} from "
        f"{plan.num_examples:,}; {advice.signal.parameters:,} parameters; gradients {kind}",
        fontsize=11,
    )
    _negative(panels[0, 0], advice)
    _squares(panels[0, 1], advice)
    _window(panels[1, 0], advice)
    _errors(panels[1, 1], advice)
    for axes in panels.flat:
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def _negative(axes: Any, advice: Advice) -> None:
    steps = [forecast.step for forecast in advice.forecasts]
    kinds = (("bias correction", "bias_correction", "C0"), ("IME", "independent_moments", "C1"))
    for label, name, colour in kinds:
        values = [getattr(forecast, name) for forecast in advice.forecasts]
        if None not in values:
            axes.plot(steps, [100 * value for value in values], marker="o", label=label, color=colour)
    axes.axhline(25, color="0.4", linestyle="--", linewidth=1, label="25 %")
    axes.set(xscale="log", xlabel="step", ylabel="coordinates with ν̂ below 0, %", ylim=(-2, 72))
    axes.legend(fontsize=8)
    axes.set_title("(a) above the dashed line, too few second moments see a gradient", fontsize=9)


def _squares(axes: Any, advice: Advice) -> None:
    unit = advice.plan.clip_norm**2
    squares, weights = np.asarray(advice.signal.squares) * unit, np.asarray(advice.signal.weights)
    shown = squares > 0
    ends = (min(squares[shown].min(initial=np.inf), advice.noise_variance), max(squares.max(), advice.noise_variance))
    low, high = (np.log10(end) if end > 0 else -12.0 for end in ends)
    edges = np.logspace(low - 0.6, high + 0.6, 1 + _BINS)
    axes.hist(squares[shown], bins=edges, weights=100 * weights[shown], color="C0", label="squared gradient g²")
    if advice.noise_variance:
        axes.axvline(advice.noise_variance, color="C3", linewidth=2, label="variance φ of the noise")
    axes.set(xscale="log", xlabel="g² of a coordinate (averaged clipped gradient), gradient units²")
    axes.set_ylabel("coordinates, %")
    axes.legend(fontsize=8)
    axes.set_title(f"(b) left of φ, noise exceeds the gradient; on average g² is {advice.snr:.2g} φ", fontsize=9)


def _window(axes: Any, advice: Advice) -> None:
    window = advice.window
    points = [*window.to_try, window.default, window.high, *([window.low] if window.low else [])]
    left, right = 0.5 * min(points), 2 * max(points)
    for start, end, fate in (
        (left, max(left, window.low), Fate.DIVERGES),
        (max(left, window.low), window.high, Fate.STEADY),
        (window.high, right, Fate.COLLAPSES),
    ):
        axes.axvspan(start, end, color=_COLOURS[fate], label=f"ν̂ {fate.value if fate != Fate.STEADY else 'is steady'}")
    axes.axvline(window.likely_high, color="C2", linestyle=":", label="upper end if examples disagree")
    axes.plot(window.to_try, [0.6] * len(window.to_try), "o", color="C0", label="to try", markersize=8)
    axes.plot([window.default], [0.4], "D", color="C3", label="default", markersize=8)
    for index, value in enumerate(window.to_try):  # above and below in turn, so that near ones stay apart
        place = (0, 9 if index % 2 == 0 else -17)
        axes.annotate(f"{value:.2g}", (value, 0.6), textcoords="offset points", xytext=place, ha="center", fontsize=8)
    axes.set(xscale="log", xlim=(left, right), ylim=(0, 1), yticks=[])
    axes.set_xlabel(f"eps_scale of scale_then_privatize at clip norm {window.clip_norm:g}, gradient units")
    axes.legend(fontsize=8, loc="lower right")
    axes.set_title(
        f"(c) window {_factor(window.width)} wide; left of it noise feeds on itself, right of it scaling fades",
        fontsize=9,
    )


def _factor(width: float) -> str:
    return "without end" if np.isinf(width) else f"a factor of {width:.3g}"


def _errors(axes: Any, advice: Advice) -> None:
    largest = 0.0
    for index, row in enumerate(advice.alternatives):
        megabytes = row.candidate.memory_bytes / 1e6
        largest = max(largest, megabytes)
        plain = row.sampling == repr(advice.plan.sampling) or row.candidate in advice.choice.candidates
        axes.plot(
            megabytes,
            row.candidate.rmse_mean,
            marker=("o" if plain else "s"),
            markersize=13 if row.chosen else 7,
            color=f"C{index % 10}",
            linestyle="none",
            label=row.name if plain else f"{row.name}, {row.sampling}",
        )
    axes.set(yscale="log", xlabel="memory that the noise keeps, MB", ylabel="mean RMSE of prefix sums, clip norm 1")
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(-0.3, 3 + 3 * largest)
    axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    axes.set_title("(d) lower is better; large: chosen; squares: the other sampling", fontsize=9)
