"""Pictures of the runs: loss against steps, gradients against the clip norm, second moments against the noise."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dpoptim.app import plot_style as style
from dpoptim.noise.series import Series
from dpoptim.optim.variants import noise_level
from dpoptim.privacy import Gradient
from dpoptim.theory import clip_norm_window
from experiments.markdown import thousandths
from experiments.result_files import Line
from experiments.tinybert.privacy import plan_of
from experiments.tinybert.schedule import SWEEP
from experiments.tinybert.table_of_cells import COLUMNS, NON_PRIVATE, WITH_NOISE, Column, column, row

MULTIPLIERS = sorted({each.noise_multiplier for each in WITH_NOISE if each.noise_multiplier is not None})
LOOKS = {
    "non_private_sgd": (style.BLACK, ":", "x"),
    "non_private_adam": (style.BLACK, ":", "+"),
    "noiseless": (style.METHODS["noiseless"], ":", "o"),
    "noiseless_scaled": (style.METHODS["noiseless_scaled"], ":", "s"),
    "post_processing": (style.METHODS["post_processing"], "-", "o"),
    "post_processing_eps": (style.METHODS["post_processing_eps"], "-.", "v"),
    "independent_moments": (style.METHODS["independent_moments"], "-", "^"),
    "bias_correction": (style.METHODS["bias_correction"], "-", "D"),
    "scale_then_privatize": (style.METHODS["scale_then_privatize"], "-", "s"),
    "dp_sgd": (style.METHODS["dp_sgd"], "--", "P"),
}
"""Colour, dashes and marker of each row of the table, in its order: what is NOT private is dotted."""
NOISE_LOOKS = {
    "independent_low": (style.SKY, "-", "o"),
    "banded": (style.WINE, "--", "s"),
    "independent": (style.BLACK, "-", "^"),
}
CUT_OFF = 2e-3  # of a run's second moments, at most, on either side of the axis


def shown(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines that each picture shows, by its name; a picture that there are none for is left out."""
    places = {}
    for line in lines:
        cell = line["cell"]
        if cell["purpose"] == "final" and cell["seed"] == 0:
            places[cell["column"], cell["row"]] = line
    in_order = [(kind.name, name) for kind in COLUMNS if not kind.beyond for name in LOOKS]
    final = [places[place] for place in in_order if place in places]
    found = {
        "curves": final,
        "gradients": _with(final, "gradient_norms"),
        "negative": _with(final, "negative_fractions"),
        "moments": _with(final, "second_moments"),
    }
    if swept := [line for line in lines if line["cell"]["purpose"] == SWEEP]:
        start = [line for line in lines if line["cell"]["purpose"] == "no fine-tuning"]
        found["clipping"] = swept + start + _with(final, "second_moments")
    return {name: own for name, own in found.items() if own}


def pictures(lines: Sequence[Line]) -> Mapping[str, Callable[[], Any]]:
    """Those that the lines have something for, by name."""
    draw = {"curves": curves, "gradients": gradient_norms, "negative": negative_fractions, "moments": second_moments,
            "clipping": clip_norms}  # fmt: skip
    return {name: functools.partial(draw[name], own) for name, own in shown(lines).items()}


def _with(lines: Sequence[Line], key: str) -> list[Line]:
    return [line for line in lines if key in line["result"]]


def of_column(lines: Sequence[Line], kind: Column) -> list[Line]:
    """The lines with this noise."""
    return [line for line in lines if line["cell"]["column"] == kind.name]


def curves(lines: Sequence[Line]) -> Any:
    """Validation loss against steps, one panel a noise, all optimizers; the fourth place has their names."""
    figure = style.new_figure(9.5, 8.0)
    *panels, names = np.ravel(figure.subplots(2, 2))
    without_noise = of_column(lines, column("none"))
    handles = {}
    for panel, kind in zip(panels, WITH_NOISE, strict=True):
        for index, line in enumerate(without_noise + of_column(lines, kind)):
            each = row(line["cell"]["row"])
            colour, dashes, marker = LOOKS[each.name]
            steps, losses = _curve(line)
            untold = each.note and each.name not in NON_PRIVATE
            (handles[each.label + (" (NOT private)" if untold else "")],) = panel.plot(
                steps, losses, dashes, color=colour, marker=marker, markersize=5, markevery=(index % 5, 5),
                linewidth=2.4 if each.name == "post_processing" else 1.3,
            )  # fmt: skip
        style.label(panel, kind.label, "step", "validation loss")
        _fit_to_noisy(panel, of_column(lines, kind), without_noise)
    names.axis("off")
    names.legend(handles.values(), handles.keys(), loc="center left", frameon=False, fontsize=9.5, handlelength=3.5)
    return figure


def _curve(line: Line) -> tuple[Series, Series]:
    """Steps and losses; not a number where a loss was not finite."""
    steps, losses = zip(*line["result"]["curve"], strict=True)
    return np.array(steps), np.array(losses, dtype=float)


def _fit_to_noisy(panel: Any, noisy: Sequence[Line], without_noise: Sequence[Line]) -> None:
    """Limits by the runs with noise that ended well; the others that leave the panel below are told in it."""
    losses = [_curve(line)[1] for line in noisy if line["result"]["ended"] == "finished"]
    if not losses:
        return
    low, high = np.min(np.concatenate(losses)), np.max(np.concatenate(losses))
    space = max(0.05 * (high - low), 0.01)
    bottom = low - space
    panel.set_ylim(bottom, high + space)
    told = [f"{row(line['cell']['row']).label}, to {thousandths(loss)}" for line in without_noise
            if (loss := _curve(line)[1][-1]) < bottom]  # fmt: skip
    if told:
        text = "\n".join(["leaving the panel below:", *told])
        panel.text(0.98, 0.97, text, transform=panel.transAxes, ha="right", va="top", fontsize=8.5)


def gradient_norms(lines: Sequence[Line]) -> Any:
    """‖g_t‖/ζ of the clipped average without noise, which the noiseless rows make public: NOT private."""
    figure = style.new_figure(7.0, 3.8)
    panel = figure.subplots()
    for kind in WITH_NOISE:
        for line in of_column(lines, kind):
            colour, dashes, _ = NOISE_LOOKS[kind.name]
            steps, norms = zip(*line["result"]["gradient_norms"], strict=True)
            name = f"{kind.label}: mean {thousandths(float(np.mean(norms)))}"
            panel.plot(steps, norms, dashes, color=colour, label=name, linewidth=1.3)
    style.label(panel, "length of the clipped average gradient, NOT private", "step", "‖g‖ / clip norm")
    panel.set_ylim(bottom=0)
    panel.legend(frameon=False)
    return figure


def negative_fractions(lines: Sequence[Line]) -> Any:
    """The share of coordinates whose second moment is negative."""
    figure = style.new_figure(9.5, 3.8)
    panels = figure.subplots(1, len(WITH_NOISE), sharey=True)
    for panel, kind in zip(panels, WITH_NOISE, strict=True):
        panel.axhline(0.5, color=style.GREY, linewidth=0.8, linestyle=":", label="one half")
        for line in of_column(lines, kind):
            name = line["cell"]["row"]
            colour, dashes, marker = LOOKS[name]
            steps, shares = zip(*line["result"]["negative_fractions"], strict=True)
            panel.plot(
                steps, shares, dashes, color=colour, label=row(name).label, marker=marker, markersize=4, markevery=0.1
            )
        style.label(panel, kind.label, "step", "share of negative ν̂" if panel is panels[0] else "", log="x")
    style.legend_below(figure, *panels, columns=3)
    return figure


def second_moments(lines: Sequence[Line]) -> Any:
    """Histograms of log10 ν̂ at the end of a run, one panel a run, with φ of the noise multipliers."""
    figure = style.new_figure(7.5, 0.9 + 1.25 * len(lines))
    panels = np.ravel(figure.subplots(len(lines), 1, sharex=True, sharey=True, squeeze=False))
    spreads = [_spread(line) for line in lines]
    ends = [np.interp((CUT_OFF, 1 - CUT_OFF), cumulated, edges) for edges, cumulated in spreads]
    left, right = math.floor(min(low for low, _ in ends)), math.ceil(max(high for _, high in ends))
    for panel, line, (edges, cumulated) in zip(panels, lines, spreads, strict=True):
        kind = line["cell"]["column"]
        colour = NOISE_LOOKS.get(kind, (style.GREY,))[0]
        panel.stairs(np.diff(cumulated), edges, color=colour, fill=True, alpha=0.3)
        panel.stairs(np.diff(cumulated), edges, color=colour, linewidth=1.2)
        noise = f", {column(kind).label}" if kind in NOISE_LOOKS else ""
        style.label(panel, row(line["cell"]["row"]).label + noise, "", "share")
        for sigma, dashes in zip(MULTIPLIERS, (":", "--"), strict=False):
            panel.axvline(_log_phi(line, sigma), color=style.BLACK, linestyle=dashes, linewidth=1.4)
            above = f" φ, σ = {sigma:g}\n {100 * share_above_phi(line, sigma):.2g} % above"
            panel.text(
                _log_phi(line, sigma), 0.95, above, transform=panel.get_xaxis_transform(), va="top", fontsize=8.5
            )
    outside = max(1 - np.diff(np.interp((left, right), *spread))[0] for spread in spreads)
    panels[-1].set(
        xlim=(left, right), xlabel=f"log10 ν̂ (at most {100 * outside:.1g} % of a run's coordinates lie outside)"
    )
    return figure


def _spread(line: Line) -> tuple[Series, Series]:
    """Edges of the histogram of log10 ν̂, and the share of coordinates below each edge; 0 lies in its first part."""
    spread = line["result"]["second_moments"]
    counts = np.array([spread["below"], *spread["counts"]], dtype=float)
    edges = spread["first_edge"] + spread["bin"] * np.arange(-1, len(counts))
    return edges, np.concatenate([[0.0], np.cumsum(counts) / counts.sum()])


def _log_phi(line: Line, sigma: float) -> float:
    """log10 of φ = (σ/B)², the variance of independent noise at clip norm 1."""
    return 2 * math.log10(sigma / line["cell"]["standing_for"])


def share_above_phi(line: Line, sigma: float) -> float:
    """The share of a run's coordinates whose second moment is larger than φ; within a part it is taken as even."""
    return 1 - float(np.interp(_log_phi(line, sigma), *_spread(line)))


def swept(lines: Sequence[Line], kind: Column) -> list[tuple[float, float]]:
    """(clip norm over B/σ′, validation loss at the end) of the runs with this noise, by clip norm; no loss is ∞."""
    own = [line for line in of_column(lines, kind) if line["cell"]["purpose"] == SWEEP]
    losses = [line["result"]["validation"] for line in own]
    return sorted(
        (1 / line["cell"]["eps_over_noise"], math.inf if loss is None else loss)
        for line, loss in zip(own, losses, strict=True)
    )


def loss_before(lines: Sequence[Line]) -> float:
    """Validation loss of the model as it comes; infinite where the file has it not."""
    found = [line["result"]["validation"] for line in lines if line["cell"]["purpose"] == "no fine-tuning"]
    return found[0] if found else math.inf


def clip_norms(lines: Sequence[Line]) -> Any:
    """Loss of scale-then-privatize against the paper's clip norm ζ, and the theory's window of each noise.

    ζ is in units of B/σ', σ' the standard deviation of a step's noise: σ, and more where it is correlated. The window
    is that of a constant gradient and independent noise; m counts the coordinates whose second moment without noise is
    not 0, where a run has kept them.
    """
    figure = style.new_figure(7.5, 6.2)
    above, panel, window = figure.subplots(3, 1, sharex=True, height_ratios=[0.8, 3.6, 0.8])
    before = loss_before(lines)
    kinds = [kind for kind in WITH_NOISE if swept(lines, kind)]
    for height, kind in enumerate(kinds):
        colour, dashes, marker = NOISE_LOOKS[kind.name]
        points = swept(lines, kind)
        kept = [point for point in points if point[1] <= before]
        if kept:
            panel.plot(*zip(*kept, strict=True), dashes, color=colour, marker=marker, markersize=5, label=kind.label)
            panel.plot(*min(kept, key=lambda point: point[1]), "o", markersize=12, markerfacecolor="none", color=colour)
        lost = [x for x, loss in points if loss > before]
        above.plot(lost, [height] * len(lost), "X", color=colour, markersize=8)
        if ends := _window(lines, kind):
            window.plot(ends, [height] * 2, color=colour, linewidth=7, solid_capstyle="butt")
    panel.plot([], [], "o", markersize=12, markerfacecolor="none", color=style.GREY, linestyle="", label="the best")
    if math.isfinite(before):
        panel.axhline(before, color=style.GREY, linewidth=1, linestyle=":", label="before fine-tuning")
    for strip in (above, window):
        strip.set_yticks(range(len(kinds)), [kind.label for kind in kinds])
        strip.set_ylim(len(kinds) - 0.4, -0.6)
    for part in (above, panel, window):
        part.axvline(1.0, color=style.GREY, linewidth=1)
    style.label(above, "runs that ended higher than the model began", "", "")
    style.label(panel, "scale-then-privatize, tuning runs, NOT private", "", "validation loss")
    style.label(window, "the theory's window of clip norms", "clip norm ζ of the paper, over B/σ′", "")
    window.set_xscale("log", base=2)
    window.xaxis.set_major_formatter("{x:g}")
    panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.93))
    return figure


def _window(lines: Sequence[Line], kind: Column) -> tuple[float, float] | None:
    """The theory's window of clip norms, over B/σ′; None where no run has kept its second moments."""
    moments = next((line["result"]["second_moments"] for line in lines if "second_moments" in line["result"]), None)
    if moments is None:
        return None
    cell = next(line["cell"] for line in of_column(lines, kind) if line["cell"]["purpose"] == SWEEP)
    deviation = noise_level(plan_of(cell), Gradient()) * cell["standing_for"] / cell["clip_norm"]  # σ′
    low, high = clip_norm_window(
        dimension=sum(moments["counts"]), noise_multiplier=deviation, batch_size=cell["standing_for"]
    )
    return low / high, 1.0
