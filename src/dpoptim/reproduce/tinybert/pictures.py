"""Pictures of the runs: loss against steps, gradients against the clip norm, second moments against the noise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dpoptim.optim.variants import noise_level
from dpoptim.privacy import Gradient
from dpoptim.reproduce.result_files import Line
from dpoptim.reproduce.tinybert.privacy import plan_of
from dpoptim.reproduce.tinybert.schedule import SWEEP
from dpoptim.reproduce.tinybert.table_of_cells import ROWS, WITH_NOISE, row
from dpoptim.theory import clip_norm_window
from dpoptim.theory import picture_style as style

COLOURS = {
    **style.METHODS,
    "post_processing_eps": style.BLUE,
    "noiseless": style.GREY,
    "noiseless_scaled": style.SKY,
    "non_private_adam": style.BLACK,
    "non_private_sgd": style.YELLOW,
}
NOISE_COLOURS = (style.BLUE, style.ORANGE, style.GREEN)  # of WITH_NOISE
TOP = 5.0  # of the clip norms' picture: above the loss without fine-tuning

CAPTIONS = {
    "curves": "Loss on held-out validation texts against steps, all optimizers, one panel a noise (seed 0); the test "
    "texts are looked at once, at the end.",
    "gradients": "Length of the clipped average gradient over the clip norm, at every hundredth part of a run. NOT "
    "private: read off the noiseless rows, which make it public.",
    "negative": "Share of coordinates whose second moment, without the noise's known part, is negative.",
    "moments": "Second moments at the end of a run, without noise in them, against φ = (σ/B)², the variance of "
    "independent noise at clip norm 1 (gradients without privacy are not clipped). NOT private.",
    "clipping": "Scale-then-privatize against the clip norm of the paper's parametrisation, in units of B/σ′, σ′ the "
    "standard deviation of a step's noise; all other settings as tuned, the learning rate too. Below, thick, the "
    "theory's window of each noise (for a constant gradient and independent noise). Triangles are runs that ended "
    "higher than the model began. Tuning runs, NOT private.",
}
"""Of each picture, in the page's order."""


def markdown(lines: Sequence[Line]) -> str:
    """Each picture with its caption."""
    own = pictures(lines)
    parts = [f"{text}\n\n![{text}](images/figures-{name}.png)" for name, text in CAPTIONS.items() if name in own]
    return "\n\n".join(parts) or "No run has been made yet that a picture shows."


def pictures(lines: Sequence[Line]) -> Mapping[str, Callable[[], Any]]:
    """Those that the lines have something for, by name."""
    final = [line for line in lines if line["cell"]["purpose"] == "final" and line["cell"]["seed"] == 0]
    wanted: dict[str, tuple[Callable[[Sequence[Line]], Any], list[Line]]] = {
        "curves": (curves, final),
        "gradients": (gradient_norms, _with(final, "gradient_norms")),
        "negative": (negative_fractions, _with(final, "negative_fractions")),
        "moments": (second_moments, _with(final, "second_moments")),
    }
    if swept := [line for line in lines if line["cell"]["purpose"] == SWEEP]:
        wanted["clipping"] = (clip_norms, swept + _with(final, "second_moments"))
    return {name: functools.partial(draw, own) for name, (draw, own) in wanted.items() if own}


def _with(lines: Sequence[Line], key: str) -> list[Line]:
    return [line for line in lines if key in line["result"]]


def curves(lines: Sequence[Line]) -> Any:
    """Validation loss against steps, one panel a noise, all optimizers."""
    figure = style.new_figure(9.5, 4.2)
    panels = figure.subplots(1, len(WITH_NOISE), sharey=True)
    for panel, kind in zip(panels, WITH_NOISE, strict=True):
        for each in ROWS:
            for line in lines:
                cell = line["cell"]
                if cell["row"] == each.name and cell["column"] in (kind.name, "none") and not each.beyond:
                    steps, losses = zip(*line["result"]["curve"], strict=True)
                    dashed = "--" if each.note else ":" if each.name == "post_processing_eps" else "-"
                    label = each.label + (" (NOT private)" if each.note else "")
                    panel.plot(steps, losses, dashed, color=COLOURS[each.name], label=label, linewidth=1.4)
        style.label(panel, kind.label, "step", "validation loss" if panel is panels[0] else "")
    panels[0].set_ylim(top=min(5.0, panels[0].get_ylim()[1]))
    style.legend_below(figure, *panels, columns=3)
    return figure


def gradient_norms(lines: Sequence[Line]) -> Any:
    """‖g_t‖/ζ of the clipped average without noise, which the noiseless rows make public: NOT private."""
    figure = style.new_figure(6.0, 3.6)
    panel = figure.subplots()
    for kind, colour in zip(WITH_NOISE, NOISE_COLOURS, strict=True):
        for line in lines:
            if line["cell"]["column"] == kind.name:
                steps, norms = zip(*line["result"]["gradient_norms"], strict=True)
                mean = float(np.mean(norms))
                panel.plot(steps, norms, color=colour, label=f"{kind.label}, mean {mean:.2f}", linewidth=1.2)
    style.label(panel, "length of the clipped average gradient, NOT private", "step", "‖g‖ / clip norm")
    panel.set_ylim(bottom=0)
    panel.legend(frameon=False)
    return figure


def negative_fractions(lines: Sequence[Line]) -> Any:
    """The share of coordinates whose second moment is negative."""
    figure = style.new_figure(9.5, 3.6)
    panels = figure.subplots(1, len(WITH_NOISE), sharey=True)
    for panel, kind in zip(panels, WITH_NOISE, strict=True):
        for line in lines:
            if line["cell"]["column"] == kind.name and not row(line["cell"]["row"]).beyond:
                steps, shares = zip(*line["result"]["negative_fractions"], strict=True)
                name = line["cell"]["row"]
                panel.plot(steps, shares, color=COLOURS[name], label=row(name).label, linewidth=1.2)
        style.label(panel, kind.label, "step", "share of negative ν̂" if panel is panels[0] else "")
        panel.set_ylim(0, 1)
    style.legend_below(figure, *panels, columns=3)
    return figure


def second_moments(lines: Sequence[Line]) -> Any:
    """Histograms of log10 ν̂ at the end of a run, with φ of the two noise multipliers."""
    figure = style.new_figure(6.5, 3.8)
    panel = figure.subplots()
    colours = dict(zip([each.name for each in WITH_NOISE], NOISE_COLOURS, strict=True))
    for line in lines:
        colour = colours.get(line["cell"]["column"], style.BLACK)
        spread = line["result"]["second_moments"]
        counts = np.array([spread["below"], *spread["counts"]], dtype=float)
        edges = spread["first_edge"] + spread["bin"] * np.arange(-1, len(counts))
        name = row(line["cell"]["row"]).label
        kind = next((each.label for each in WITH_NOISE if each.name == line["cell"]["column"]), "")
        panel.stairs(counts / counts.sum(), edges, color=colour, label=f"{name}{', ' + kind if kind else ''}")
    for sigma, dashes in ((0.134, ":"), (1.0, "--")):
        phi = np.log10((sigma / lines[0]["cell"]["standing_for"]) ** 2)
        panel.axvline(phi, color=style.GREY, linestyle=dashes, label=f"φ at σ = {sigma:g}")
    style.label(panel, "second moments without noise, NOT private", "log10 ν̂", "share of the coordinates")
    style.legend_below(figure, panel, columns=2)
    return figure


def clip_norms(lines: Sequence[Line]) -> Any:
    """Loss of scale-then-privatize against the paper's clip norm ζ, and the theory's window of each noise.

    ζ is in units of B/σ', σ' the standard deviation of a step's noise: σ, and more where it is correlated. The window
    is that of a constant gradient and independent noise; m counts the coordinates whose second moment without noise is
    not 0, where a run has kept them. Runs that end above TOP stand there as triangles.
    """
    figure = style.new_figure(6.0, 4.2)
    panel = figure.subplots()
    moments = next((line["result"]["second_moments"] for line in lines if "second_moments" in line["result"]), None)
    heights = (0.10, 0.06, 0.02)  # of the windows, as parts of the panel
    for kind, colour, height in zip(WITH_NOISE, NOISE_COLOURS, heights, strict=True):
        own = [line for line in lines if line["cell"]["purpose"] == SWEEP and line["cell"]["column"] == kind.name]
        if not own:
            continue
        points = sorted(
            (1 / line["cell"]["eps_over_noise"], TOP if line["result"]["validation"] is None
             else min(TOP, line["result"]["validation"])) for line in own
        )  # fmt: skip
        shown = [point for point in points if point[1] < TOP]
        xs, ys = [x for x, _ in shown], [y for _, y in shown]
        panel.plot(xs, ys, "o-", color=colour, label=kind.label, markersize=3.5)
        above = [point for point in points if point[1] >= TOP]
        aside = 1 + 2 * (height - heights[1])  # so that all can be seen
        panel.plot([x * aside for x, _ in above], [TOP] * len(above), "^", color=colour, clip_on=False)
        if moments is not None:
            low, high = clip_norm_window(
                dimension=sum(moments["counts"]), noise_multiplier=_deviation(own[0]["cell"]),
                batch_size=own[0]["cell"]["standing_for"],
            )  # fmt: skip
            panel.plot(
                [low / high, 1.0], [height] * 2, color=colour, linewidth=4, transform=panel.get_xaxis_transform()
            )
    panel.axvline(1.0, color=style.GREY, linestyle="--", label="upper end of the window")
    style.label(
        panel, "scale-then-privatize: the clip norm and the window (thick); NOT private",
        "clip norm ζ of the paper's parametrisation, over B/σ′", "validation loss", log="x",
    )  # fmt: skip
    panel.margins(y=0.16)
    panel.set_ylim(top=TOP)
    panel.legend(frameon=False)
    return figure


def _deviation(cell: Mapping[str, Any]) -> float:
    """The standard deviation of a step's noise on the sum of a full batch, over the clip norm."""
    return noise_level(plan_of(cell), Gradient()) * cell["standing_for"] / cell["clip_norm"]
