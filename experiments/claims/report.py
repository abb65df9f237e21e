"""The claims as tables, and one picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import plot_style as style
from experiments.claims.cells import BEGIN
from experiments.markdown import made_by, number, table
from experiments.results_file import Line

NAMES = {
    "noiseless_preconditioner": "noiseless preconditioner (NOT private)",
    "post_processing": "post-processing",
    "scale_then_privatize": "scale-then-privatize",
    "side_information": "public ν̂, after clipping and noise",
    "adadps": "public ν, before clipping and noise (AdaDPS)",
}


def markdown(lines: Sequence[Line]) -> str:
    """A table for each claim, and the picture."""
    parts = [
        made_by(lines, f"python -m experiments claims --scale {lines[0]['scale']}"),
        _same_gradients(_of(lines, "same gradients")),
        _decayed_sums(_of(lines, "decayed sums")),
        _ratio(_of(lines, "ratio")),
        _side_information(_of(lines, "side information")),
        "![ratio of consecutive second moments by step; losses with public data](images/claims-ratio-and-public.png)"
        * len(pictures(lines)),
    ]
    return "\n\n".join(part for part in parts if part)


def _of(lines: Sequence[Line], quantity: str) -> list[Line]:
    return [line for line in lines if line["cell"]["quantity"] == quantity]


def pairs(lines: Sequence[Line]) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """By variant: with privacy noise, and with data noise of the same distribution; only where both were run."""
    found = {(line["cell"]["variant"], line["cell"]["noise_from"]): line["result"] for line in lines}
    return {
        variant: (found[variant, "privacy"], found[variant, "data"])
        for variant in NAMES
        if (variant, "privacy") in found and (variant, "data") in found
    }


def apart(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """The difference of two losses in standard errors."""
    return float(abs(first["loss"] - second["loss"]) / math.hypot(first["standard_error"], second["standard_error"]))


def _same_gradients(lines: Sequence[Line]) -> str:
    rows = []
    for variant, (private, data) in pairs(lines).items():
        ratios, flats, losses = (
            f"{number(private[name], 3)}; {number(data[name], 3)}"
            for name in ("preconditioner_ratio", "flat_rms", "loss")
        )
        rows.append([NAMES[variant], ratios, flats, losses, f"{apart(private, data):.1f}"])
    titles = ["privacy noise; data noise", "preconditioner, flat over steep", "rms of the flat coordinate",
              "mean loss", "losses apart, in standard errors"]  # fmt: skip
    return table(titles, rows) if rows else ""


def _decayed_sums(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        cell, result = line["cell"], line["result"]
        simulated = number(result["simulated"], 7 if cell["case"] == "brute force" else 3)
        if result["standard_error"] is not None:
            simulated += f" ± {number(result['standard_error'], 1)}"
        digits = 7 if cell["case"] == "brute force" else 3
        rows.append([cell["case"], f"{cell['beta2']:g}", f"{cell['steps']:,}", number(result["predicted"], digits),
                     simulated, number(result["bound"], 3)])  # fmt: skip
    titles = ["noise on ν: independent over correlated", "β₂", "steps", "formula", "simulated, or by brute force",
              "bound for any strategy"]  # fmt: skip
    return table(titles, rows) if rows else ""


def _ratio(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        result = line["result"]
        least, low, middle, high, most = (f"{x:.4f}" for x in result["quantiles"])
        scaled, plain = (
            f"{np.median(result[name]):.2f} ({min(result[name]):.2f} to {number(max(result[name]), 3)})"
            for name in ("scaled_excess", "plain_excess")
        )
        rows.append([line["cell"]["profile"], f"{middle} ({low} to {high})", f"{least} to {most}",
                     f"{result['constant_excess']:.2f}", scaled, plain])  # fmt: skip
    titles = ["gradient", f"ν̂_t/ν̂_{{t−1}} from step {BEGIN}: median (5 to 95 %)", "all of them", "excess for SGD",
              "for scale-then-privatize", "for post-processing"]  # fmt: skip
    return table(titles, rows) if rows else ""


def _public(line: Line) -> str:
    cell = line["cell"]
    if cell["variant"] not in ("side_information", "adadps"):
        return "none"
    return "same distribution" if cell["public_spread"] is None else "other spread"


def _side_information(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        result = line["result"]
        tuned = ", ".join(f"{name} {value:g}" for name, value in result["tuned"].items())
        edge = f"{', '.join(result['at_edge'])} at the edge" if result["at_edge"] else ""
        rows.append([NAMES[line["cell"]["variant"]], _public(line), number(result["loss"], 3), tuned, edge])
    titles = ["preconditioner", "public data", "mean loss, last tenth", "tuned to", "grid"]
    return table(titles, rows, left=2) if rows else ""


def pictures(lines: Sequence[Line]) -> Mapping[str, Callable[[], Any]]:
    """One picture: the ratio by step, and losses with public data."""
    shown = {line["cell"]["quantity"] for line in lines}
    return {"ratio-and-public": lambda: draw(lines)} if shown >= {"ratio", "side information"} else {}


def draw(lines: Sequence[Line]) -> Any:
    """ν̂_t/ν̂_{t−1} against the step for each profile, with the bound; and the losses with public data."""
    figure = style.new_figure(11, 4.2)
    ratio, public = figure.subplots(1, 2, width_ratios=[3, 2])
    shown = _of(lines, "ratio")
    colours = (style.BLUE, style.GREEN, style.ORANGE, style.PURPLE)
    for line, colour in zip(shown, colours, strict=False):
        result, steps = line["result"], np.array(line["result"]["steps"])
        _, low, middle, high, _ = np.array(result["by_step"]).T
        ratio.fill_between(steps, low, high, color=colour, alpha=0.18, lw=0)
        ratio.plot(steps, middle, color=colour, lw=1.6, label=f"gradient {line['cell']['profile']}")
    cell = shown[0]["cell"]
    steps, beta2 = np.arange(2, cell["steps"] + 1), cell["beta2"]
    bound = (beta2 - beta2**steps) / (1 - beta2**steps)
    ratio.plot(steps, bound, "--", color=style.BLACK, lw=1.3, label="lower bound, (β₂−β₂ᵗ)/(1−β₂ᵗ)")
    ratio.set_ylim(0.4, 2.6)
    ratio.legend(loc="upper right", frameon=False)
    style.label(ratio, "Scale-then-privatize: median and 5 to 95 %", "step", "ν̂_t / ν̂_{t−1}", log="x")
    rows = sorted(_of(lines, "side information"), key=lambda line: line["result"]["loss"])
    for index, line in enumerate(rows):
        public.plot(
            line["result"]["loss"], index, "o", ms=8, color=style.BLACK if _public(line) == "none" else style.RED
        )
    names = {"side_information": "public ν̂ after noise", "adadps": "AdaDPS"}
    public.set_yticks(
        range(len(rows)),
        [
            names.get(line["cell"]["variant"], NAMES[line["cell"]["variant"]])
            + ("" if _public(line) == "none" else f",\n{_public(line)}")
            for line in rows
        ],
    )
    public.invert_yaxis()
    public.set_xlim(left=0)
    style.label(public, "Quadratic: public data (red) or none", "mean loss, last tenth", "")
    return figure
