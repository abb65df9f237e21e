"""The picture of `dpoptim advise`: four panels, each with a line that says what to see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dpoptim.app import plot_style as picture_style
from dpoptim.theory import Advice, Alternative, ScaleWindow, SecondMomentRegime
from dpoptim.theory.adviser import MANY_NEGATIVE
from dpoptim.theory.stability_window import rounded

_BINS = 24
_NARROW = 1.3  # high/low below which the window is also shown enlarged
_MARKERS = "ov^<>DPXdh"
_COLOURS = {
    SecondMomentRegime.DIVERGES: "#f4c7c3",
    SecondMomentRegime.STEADY: "#cfe8cf",
    SecondMomentRegime.COLLAPSES: "#e3e3e3",
}


def draw(advice: Advice, path: Path) -> None:
    """Negative second moments, gradients against noise, the window of eps_scale, error against memory."""
    figure = picture_style.new_figure(12, 9.4)
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
    axes.axhline(100 * MANY_NEGATIVE, color="0.4", linestyle="--", linewidth=1, label=f"{MANY_NEGATIVE:.0%}")
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
    _bands(axes, window, left, right)
    axes.plot(window.to_try, [0.38] * len(window.to_try), "o", color="C0", label="to try", markersize=8)
    axes.plot([window.default], [0.2], "D", color="C3", label="default", markersize=8)
    for index, value in enumerate(window.to_try):  # above and below in turn, so that near ones stay apart
        place = (0, 9 if index % 2 == 0 else -17)
        axes.annotate(f"{value:.4g}", (value, 0.38), textcoords="offset points", xytext=place, ha="center", fontsize=8)
    axes.set(xscale="log", xlim=(left, right), ylim=(0, 1), yticks=[])
    _few_ticks(axes, [rounded(float(value)) for value in np.geomspace(left, right, 7)[1:-1]])
    axes.set_xlabel(f"eps_scale of scale_then_privatize at clip norm {window.clip_norm:g}, gradient units")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    axes.set_title(
        f"(c) window {_factor(window.width)} wide; left of it noise feeds on itself, right of it scaling fades",
        fontsize=9,
    )
    if window.width < _NARROW:
        margin = 0.6 * (window.high - window.low)
        inset = axes.inset_axes((0.37, 0.6, 0.58, 0.24))
        _bands(inset, window, window.low - margin, window.high + margin)
        inset.set(xlim=(window.low - margin, window.high + margin), yticks=[])
        _few_ticks(inset, [window.low, window.high])
        inset.set_title("the window, enlarged", fontsize=8)


def _bands(axes: Any, window: ScaleWindow, left: float, right: float) -> None:
    for start, end, fate in (
        (left, max(left, window.low), SecondMomentRegime.DIVERGES),
        (max(left, window.low), window.high, SecondMomentRegime.STEADY),
        (window.high, right, SecondMomentRegime.COLLAPSES),
    ):
        axes.axvspan(
            start,
            end,
            color=_COLOURS[fate],
            label=f"ν̂ {fate.value if fate != SecondMomentRegime.STEADY else 'is steady'}",
        )
    axes.axvline(window.likely_high, color="C2", linestyle=":", label="upper end if examples disagree")


def _few_ticks(axes: Any, values: list[float]) -> None:
    axes.set_xticks(values, [f"{value:.5g}" for value in values], fontsize=8)
    axes.set_xticks([], minor=True)


def _factor(width: float) -> str:
    if width < 1.01:
        return f"{100 * (width - 1):.2g} %"
    return "without end" if np.isinf(width) else f"a factor of {width:.3g}"


def _errors(axes: Any, advice: Advice) -> None:
    """Points are small and hollow, so that none hides another; a ring marks the chosen one."""
    for index, row in enumerate(advice.alternatives):
        place = (row.candidate.memory_bytes / 1e6, row.candidate.rmse_mean)
        own = row.candidate in advice.choice.candidates
        marker = _MARKERS[index % len(_MARKERS)] if own else "s"
        colour = f"C{index % 10}"
        axes.plot(
            *place, marker=marker, markersize=8, mfc="none", mew=1.8, color=colour, ls="none", label=_named(row, own)
        )
        if row.chosen:
            axes.plot(*place, marker="o", markersize=20, mfc="none", mew=1.5, color="black", ls="none")
    largest = max(row.candidate.memory_bytes for row in advice.alternatives) / 1e6
    axes.set(yscale="log", xlabel="memory that the noise keeps, MB", ylabel="mean RMSE of prefix sums, clip norm 1")
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(-0.3, 3 + 3 * largest)
    axes.legend(
        fontsize=7,
        ncols=2,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        title="name: normals a step",
        title_fontsize=7,
    )
    axes.set_title("(d) lower is better, and few normals a step; ring: chosen; squares: the other sampling", fontsize=9)


def _named(row: Alternative, own: bool) -> str:
    name = row.name if own else f"{row.name}, {row.sampling}"
    return f"{name}: {row.candidate.normal_rows:.0f}"
