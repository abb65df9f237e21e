"""The theory's statements as tables and one picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import plot_style as style
from experiments.markdown import made_by, number, table
from experiments.results_file import Line

SCALARS = (
    "dimension limit", "IME condition", "contraction", "negative fraction", "update size", "noise's share",
    "prefix error", "epsilon", "change of a square", "logistic regression",
)  # fmt: skip
WINDOW_COLOURS = (style.RED, style.ORANGE, style.GREEN, style.BLUE, style.PURPLE)


def markdown(lines: Sequence[Line]) -> str:
    """Limits, window and values, each predicted and simulated, and how many agree."""
    parts = [
        made_by(lines, f"python -m experiments theory --scale {lines[0]['scale']}"),
        _agreement(lines),
        _limits([line for line in lines if line["cell"]["quantity"] == "dimension limit"]),
        _window([line for line in lines if line["cell"]["quantity"] == "window"]),
        "![ν̂ of scale-then-privatize at five clip norms, the negative fraction by step, and the deviation of every "
        "simulated value from its prediction in standard errors](images/theory-agreement.png)" * len(pictures(lines)),
        _values([line for line in lines if line["cell"]["quantity"] not in ("dimension limit", "window")]),
    ]
    return "\n\n".join(part for part in parts if part)


def deviation(line: Line) -> float | None:
    """(simulated − predicted) in standard errors; None without a simulation or its error."""
    result = line["result"]
    if not result["standard_error"]:
        return None
    return float((result["simulated"] - result["predicted"]) / result["standard_error"])


def _agreement(lines: Sequence[Line]) -> str:
    """How far simulations are from predictions, compared with chance."""
    found = [abs(value) for value in map(deviation, lines) if value is not None]
    known = [line["result"] for line in lines if line["result"]["known"] is not None]
    same = sum(agrees(one["predicted"], one["known"]) for one in known)
    windows = [line["result"] for line in lines if line["cell"]["quantity"] == "window"]
    alike = sum(one["predicted_fate"] == one["simulated_fate"] for one in windows)
    expected = math.erf(2 / math.sqrt(2)) * len(found)
    if not found:
        return f"Of {len(windows)} runs around the window, {alike} end as predicted." if windows else ""
    return (
        f"Of {len(found)} simulated values, {sum(x <= 2 for x in found)} lie within two standard errors of the "
        f"prediction ({expected:.0f} are expected if all are right); the farthest is {max(found):.1f} away. Of "
        f"{len(windows)} runs around the window, {alike} end as predicted. Of {len(known)} values known from "
        f"independent programs, the formulas reproduce {same} to all recorded digits."
    )


def agrees(value: float, known: float) -> bool:
    """Whether a value equals the known one, to as many decimals as that has.

    >>> agrees(0.06326, 0.0633), agrees(0.06324, 0.0633)
    (True, False)
    """
    return round(value, len(repr(known).split(".")[1])) == known


def _limits(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        result = line["result"]
        rows.append([line["cell"]["case"], line["cell"]["signal"], number(result["predicted"], 4),
                     _simulated(result), number(result["printed"], 2)])  # fmt: skip
    titles = ["largest dimension", "signal", "formula", "with simulated noise", "the paper prints"]
    return table(titles, rows, left=2) if rows else ""


def _window(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        cell, result = line["cell"], line["result"]
        rows.append([f"{cell['clip_norm']:g}", "g²" if cell["start"] else "0", result["predicted_fate"],
                     result["simulated_fate"], number(result["rest"], 4), number(result["predicted"], 4),
                     number(result["simulated"], 4)])  # fmt: skip
    titles = ["ζ", "ν̂₀", "predicted", "simulated", "1/(1−φ)", "mean field at the end", "simulated at the end"]
    return table(titles, rows) if rows else ""


def _values(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        cell, result = line["cell"], line["result"]
        other = number(result["known"], 7)
        if result["printed"] is not None:
            other += f" (the paper prints {number(result['printed'], 4)})"
        rows.append([cell["quantity"], cell["case"], number(result["predicted"], 7), _simulated(result), other])
    return table(["quantity", "case", "formula", "simulated ± standard error", "known"], rows, left=2) if rows else ""


def _simulated(result: Mapping[str, Any]) -> str:
    if result["simulated"] is None:
        return "–"
    text = number(result["simulated"], 4)
    return f"{text} ± {number(result['standard_error'], 1)}" if result["standard_error"] else text


def pictures(lines: Sequence[Line]) -> Mapping[str, Callable[[], Any]]:
    """One picture: the window over steps, the negative fraction, and deviations in standard errors."""
    shown = {line["cell"]["quantity"] for line in lines}
    return {"agreement": lambda: draw(lines)} if shown >= {"window", "negative fraction"} else {}


def draw(lines: Sequence[Line]) -> Any:
    """Simulated against predicted, three ways."""
    figure = style.new_figure(9.5, 8.0)
    panels = figure.subplot_mosaic([["window", "negative"], ["away", "away"]], height_ratios=[4, 3])
    window, negative, away = panels["window"], panels["negative"], panels["away"]
    windows = [line for line in lines if line["cell"]["quantity"] == "window"]
    paths = [line for line in windows if line["cell"]["start"]]
    for line, colour in zip(paths, WINDOW_COLOURS, strict=False):
        result = line["result"]
        name = f"{line['cell']['case']}: {result['simulated_fate']}"
        window.plot(result["steps"], result["simulated_path"], color=colour, lw=4, alpha=0.4, label=name)
        window.plot(result["steps"], result["predicted_path"], "--", color=colour, lw=1.3)
    window.plot([], [], "--", color=style.BLACK, lw=1.3, label="mean field (bands: simulated)")
    window.set_ylim(1e-4, 1e4)
    window.legend(loc="lower left", frameon=False)
    what = f"ν̂ / g², mean of {windows[0]['cell']['dimension']} coordinates"
    style.label(window, "Scale-then-privatize, from ν̂₀ = g²", "step", what, log="xy")
    steps = [line for line in lines if line["cell"]["quantity"] == "negative fraction"]
    x = [line["cell"]["steps"] for line in steps]
    negative.plot(x, [line["result"]["predicted"] for line in steps], "--", color=style.BLACK, lw=1.3, label="formula")
    negative.errorbar(
        x, [line["result"]["simulated"] for line in steps], [2 * line["result"]["standard_error"] for line in steps],
        fmt="o", color=style.GREEN, ms=5, capsize=3, label="simulated ± 2 standard errors",
    )  # fmt: skip
    negative.legend(loc="upper right", frameon=False)
    style.label(negative, "Bias correction in pure noise", "step", "share of negative ν̂ minus its bias", log="x")
    shown = [(line, value) for line in lines if (value := deviation(line)) is not None]
    groups = [name for name in SCALARS if any(line["cell"]["quantity"] == name for line, _ in shown)]
    away.axvspan(-2, 2, color=style.GREY, alpha=0.12, lw=0)
    for index, name in enumerate(groups):
        values = [value for line, value in shown if line["cell"]["quantity"] == name]
        away.plot(values, [index] * len(values), "o", color=style.BLUE, alpha=0.6, ms=5)
    away.set_yticks(range(len(groups)), groups)
    away.invert_yaxis()
    away.axvline(0, color=style.GREY, lw=0.8, ls=":")
    style.label(away, "All values; grey: ± 2", "(simulated − predicted) / standard error", "")
    return figure
