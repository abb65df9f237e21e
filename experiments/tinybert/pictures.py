"""Pictures of the runs, each with a caption and a finding: losses, gradients, second moments, clip norms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpoptim.noise.series import Series
from dpoptim.optim.variants import noise_level
from dpoptim.privacy import Gradient
from dpoptim.theory import clip_norm_window
from experiments import plot_style as style
from experiments.markdown import made_by, thousandths
from experiments.results_file import Line
from experiments.tinybert.grid import COLUMNS, NON_PRIVATE, WITH_NOISE, Column, column, plan_of, row
from experiments.tinybert.report import LEVEL, command
from experiments.tinybert.schedule import SWEEP

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
"""Colour, dashes and marker of each row of the table, in its order; what is NOT private is dotted."""
NOISE_LOOKS = {
    "independent_low": (style.SKY, "-", "o"),
    "banded": (style.WINE, "--", "s"),
    "independent": (style.BLACK, "-", "^"),
}
CUT_OFF = 2e-3  # the share of a run's second moments that may lie beyond either end of the axis


def shown(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines that each picture shows, by name, without pictures that have none."""
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
    """The pictures that have lines, by name."""
    draw = {"curves": curves, "gradients": gradient_norms, "negative": negative_fractions, "moments": second_moments,
            "clipping": clip_norms}  # fmt: skip
    return {name: functools.partial(draw[name], own) for name, own in shown(lines).items()}


def _with(lines: Sequence[Line], key: str) -> list[Line]:
    return [line for line in lines if key in line["result"]]


def of_column(lines: Sequence[Line], kind: Column) -> list[Line]:
    """The lines with this noise."""
    return [line for line in lines if line["cell"]["column"] == kind.name]


def curves(lines: Sequence[Line]) -> Any:
    """Validation loss against steps, one panel per noise, all optimizers; the fourth panel holds the legend."""
    figure = style.new_figure(9.5, 8.0)
    *panels, names = np.ravel(figure.subplots(2, 2))
    without_noise = of_column(lines, column("none"))
    handles = {}
    for panel, kind in zip(panels, WITH_NOISE, strict=True):
        for index, line in enumerate(without_noise + of_column(lines, kind)):
            each = row(line["cell"]["row"])
            colour, dashes, marker = LOOKS[each.name]
            steps, losses = _curve(line)
            marked = each.note and each.name not in NON_PRIVATE
            (handles[each.label + (" (NOT private)" if marked else "")],) = panel.plot(
                steps, losses, dashes, color=colour, marker=marker, markersize=5, markevery=(index % 5, 5),
                linewidth=2.4 if each.name == "post_processing" else 1.3,
            )  # fmt: skip
        style.label(panel, kind.label, "step", "validation loss")
        _fit_to_noisy(panel, of_column(lines, kind), without_noise)
    names.axis("off")
    names.legend(handles.values(), handles.keys(), loc="center left", frameon=False, fontsize=9.5, handlelength=3.5)
    return figure


def _curve(line: Line) -> tuple[Series, Series]:
    """Steps and losses; NaN where a loss was not finite."""
    steps, losses = zip(*line["result"]["curve"], strict=True)
    return np.array(steps), np.array(losses, dtype=float)


def _fit_to_noisy(panel: Any, noisy: Sequence[Line], without_noise: Sequence[Line]) -> None:
    """Set limits by the finished runs with noise, and name those that leave the panel below."""
    losses = [_curve(line)[1] for line in noisy if line["result"]["ended"] == "finished"]
    if not losses:
        return
    low, high = np.min(np.concatenate(losses)), np.max(np.concatenate(losses))
    space = max(0.05 * (high - low), 0.01)
    bottom = low - space
    panel.set_ylim(bottom, high + space)
    leaving = [f"{row(line['cell']['row']).label}, to {thousandths(loss)}" for line in without_noise
            if (loss := _curve(line)[1][-1]) < bottom]  # fmt: skip
    if leaving:
        text = "\n".join(["leaving the panel below:", *leaving])
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
    style.label(panel, "norm of the clipped average gradient, NOT private", "step", "‖g‖ / clip norm")
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
    """Histograms of log10 ν̂ at the end of a run, one panel per run, with φ of the noise multipliers."""
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
    """Edges of the histogram of log10 ν̂, and the share of coordinates below each edge; 0 is in the first bin."""
    spread = line["result"]["second_moments"]
    counts = np.array([spread["below"], *spread["counts"]], dtype=float)
    edges = spread["first_edge"] + spread["bin"] * np.arange(-1, len(counts))
    return edges, np.concatenate([[0.0], np.cumsum(counts) / counts.sum()])


def _log_phi(line: Line, sigma: float) -> float:
    """log10 of φ = (σ/B)², the variance of independent noise at clip norm 1."""
    return 2 * math.log10(sigma / line["cell"]["standing_for"])


def share_above_phi(line: Line, sigma: float) -> float:
    """The share of a run's coordinates with a second moment above φ, interpolated within a bin."""
    return 1 - float(np.interp(_log_phi(line, sigma), *_spread(line)))


def share_holding_half(line: Line) -> float:
    """The smallest share of a run's coordinates that holds half of the sum of second moments, from bin centres."""
    edges, below = _spread(line)
    held = (np.diff(below) * 10 ** ((edges[1:] + edges[:-1]) / 2))[::-1]
    return float(np.interp(held.sum() / 2, np.cumsum([0.0, *held]), 1 - below[::-1]))


def swept(lines: Sequence[Line], kind: Column) -> list[tuple[float, float]]:
    """(clip norm over B/σ′, validation loss at the end) of the runs with this noise, by clip norm; ∞ without a loss."""
    own = [line for line in of_column(lines, kind) if line["cell"]["purpose"] == SWEEP]
    losses = [line["result"]["validation"] for line in own]
    return sorted(
        (1 / line["cell"]["eps_over_noise"], math.inf if loss is None else loss)
        for line, loss in zip(own, losses, strict=True)
    )


def loss_before(lines: Sequence[Line]) -> float:
    """Validation loss without fine-tuning; infinite if the file lacks it."""
    found = [line["result"]["validation"] for line in lines if line["cell"]["purpose"] == "no fine-tuning"]
    return found[0] if found else math.inf


def clip_norms(lines: Sequence[Line]) -> Any:
    """Loss of scale-then-privatize against the paper's clip norm ζ, and the theory's window of each noise.

    ζ is in units of B/σ′, with σ′ the standard deviation of a step's noise: σ, or more if it is correlated. The window
    assumes a constant gradient and independent noise; m counts the coordinates whose second moment without noise is
    not 0, from a run that recorded them.
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
    panel.plot([], [], "o", markersize=12, markerfacecolor="none", color=style.GREY, linestyle="", label="best")
    if math.isfinite(before):
        panel.axhline(before, color=style.GREY, linewidth=1, linestyle=":", label="before fine-tuning")
    for strip in (above, window):
        strip.set_yticks(range(len(kinds)), [kind.label for kind in kinds])
        strip.set_ylim(len(kinds) - 0.4, -0.6)
    for part in (above, panel, window):
        part.axvline(1.0, color=style.GREY, linewidth=1)
    style.label(above, "runs that ended above the initial loss", "", "")
    style.label(panel, "scale-then-privatize, tuning runs, NOT private", "", "validation loss")
    style.label(window, "the theory's window of clip norms", "clip norm ζ of the paper, over B/σ′", "")
    window.set_xscale("log", base=2)
    window.xaxis.set_major_formatter("{x:g}")
    panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.93))
    return figure


def _window(lines: Sequence[Line], kind: Column) -> tuple[float, float] | None:
    """The theory's window of clip norms, over B/σ′; None if no run recorded its second moments."""
    moments = next((line["result"]["second_moments"] for line in lines if "second_moments" in line["result"]), None)
    if moments is None:
        return None
    cell = next(line["cell"] for line in of_column(lines, kind) if line["cell"]["purpose"] == SWEEP)
    deviation = noise_level(plan_of(cell), Gradient()) * cell["standing_for"] / cell["clip_norm"]  # σ′
    low, high = clip_norm_window(
        dimension=sum(moments["counts"]), noise_multiplier=deviation, batch_size=cell["standing_for"]
    )
    return low / high, 1.0


@dataclass(frozen=True)
class Words:
    """`title` is the picture's alternative text; `finding` is computed from its lines."""

    title: str
    caption: str
    finding: Callable[[Sequence[Line]], str]


def markdown(lines: Sequence[Line]) -> str:
    """Where the lines come from, and each picture with its caption and finding."""
    own = shown(lines)
    if not own:
        return "There are no runs for a picture yet."
    in_pictures = list({id(line): line for some in own.values() for line in some}.values())
    parts = [made_by(in_pictures, command("experiments tinybert figures", in_pictures))]
    for name, words in WORDS.items():
        if name in own:
            parts += [f"![{words.title}](images/figures-{name}.png)", words.caption, words.finding(own[name])]
    return "\n\n".join(part for part in parts if part)


def _by_noise(begin: str, lines: Sequence[Line], describe: Callable[[list[Line], Column], str]) -> str:
    """A sentence with a part for each noise that `describe` has a text for."""
    texts = [(describe(of_column(lines, kind), kind), kind.label) for kind in WITH_NOISE]
    parts = [f"{text} ({label})" for text, label in texts if text]
    return f"**{begin}:** {'; '.join(parts)}." if parts else ""


def _of_curves(lines: Sequence[Line]) -> str:
    def order(own: list[Line], kind: Column) -> str:
        private = [line for line in own if not row(line["cell"]["row"]).note and line["result"]["ended"] == "finished"]
        losses = {row(line["cell"]["row"]).label: line["result"]["validation"] for line in private}
        if len(losses) < 2:
            return ""
        best, *others = sorted(losses, key=lambda name: losses[name])
        text = f"{best} at {thousandths(losses[best])}"
        for place, name in (("next", others[0]), ("last", others[-1]))[: len(others)]:
            text += f", {place} {name}, {thousandths(losses[name] - losses[best])} behind"
        plain = row("post_processing").label
        level = [name for name in losses if name != plain and abs(losses[name] - losses.get(plain, math.inf)) <= LEVEL]
        return text + (f", {' and '.join(level)} level with {plain}" if level else "")

    return _by_noise("Lowest private optimizer at the end (validation texts, seed 0)", lines, order)


def _of_gradients(lines: Sequence[Line]) -> str:
    def fall(own: list[Line], kind: Column) -> str:
        norms = [norm for line in own for _, norm in line["result"]["gradient_norms"]]
        if not norms:
            return ""
        return f"{thousandths(norms[0])} to {thousandths(float(np.mean(norms[len(norms) // 2 :])))}"

    return _by_noise("From the first step to the mean of the second half", lines, fall)


def _of_negatives(lines: Sequence[Line]) -> str:
    def ends(own: list[Line], kind: Column) -> str:
        shares = {row(line["cell"]["row"]).label: line["result"]["negative_fractions"] for line in own}
        return ", ".join(f"{name} {seen[0][1]:.3f} to {seen[-1][1]:.3f}" for name, seen in shares.items())

    return _by_noise("From the first step to the last recorded one", lines, ends)


def _of_moments(lines: Sequence[Line]) -> str:
    def above(own: list[Line], kind: Column) -> str:
        assert kind.noise_multiplier is not None
        return ", ".join(f"{100 * share_above_phi(line, kind.noise_multiplier):.2g} %" for line in own)

    def holding_half(own: list[Line], kind: Column) -> str:
        return ", ".join(f"{100 * share_holding_half(line):.2g} %" for line in own)

    half = _by_noise("Coordinates that hold half of their sum", lines, holding_half)
    return _by_noise("Second moments above φ at the run's σ", lines, above) + " " + half


def _of_clip_norms(lines: Sequence[Line]) -> str:
    before = loss_before(lines)

    def best_and_lost(own: list[Line], kind: Column) -> str:
        points = swept(own, kind)
        if not points:
            return ""
        best, loss = min(points, key=lambda point: point[1])
        lost = [f"{x:g}" for x, own_loss in points if own_loss > before]
        text = f"best at {best:g}, with a loss of {thousandths(loss)}"
        return text + (f", failed at {' and '.join(lost)}" if lost else "")

    return _by_noise("The clip norm over B/σ′", lines, best_and_lost)


WORDS = {
    "curves": Words(
        "loss on validation texts against steps, all optimizers, one panel per noise",
        "Loss on held-out validation texts against steps, for all optimizers (seed 0), one panel per noise. Dotted: "
        "NOT private. Test texts are used once, at the end.",
        _of_curves,
    ),
    "gradients": Words(
        "norm of the clipped average gradient over the clip norm, against steps",
        "Norm of the clipped average gradient over the clip norm, at every hundredth part of a run. NOT private: from "
        "the noiseless rows, which make it public.",
        _of_gradients,
    ),
    "negative": Words(
        "share of negative second moments against steps",
        "Share of coordinates whose second moment, minus the noise's known part, is negative.",
        _of_negatives,
    ),
    "moments": Words(
        "histograms of second moments, and φ",
        "Second moments at the end of a run, without noise in them, against φ = (σ/B)², the variance of independent "
        "noise at clip norm 1 (gradients without privacy are not clipped). NOT private.",
        _of_moments,
    ),
    "clipping": Words(
        "loss of scale-then-privatize against the clip norm, and the theory's window",
        "Scale-then-privatize against the clip norm of the paper's parametrisation, in units of B/σ′, where σ′ is the "
        "standard deviation of a step's noise. All other settings are as tuned. Top: failed runs, which ended above "
        "the initial loss or were stopped there. Bottom: the theory's window of each noise, for a constant gradient "
        "and independent noise. Tuning runs, NOT private.",
        _of_clip_norms,
    ),
}
"""By picture, in the page's order."""
