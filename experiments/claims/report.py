"""The claims as tables, one summary table, and one picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dpoptim.theory import second_moment_ratios
from experiments import plot_style as style
from experiments.claims.cells import BEGIN, condition
from experiments.markdown import made_by, number, table
from experiments.results_file import Line

NAMES = {
    "noiseless_preconditioner": "noiseless preconditioner (NOT private)",
    "post_processing": "post-processing",
    "scale_then_privatize": "scale-then-privatize",
    "side_information": "public ν̂, after clipping and noise",
    "adadps": "public ν, before clipping and noise (AdaDPS)",
}
PAPERS_CONDITION = 0.032


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


def summary(lines: Sequence[Line]) -> str:
    """One row per finding, for the page on theory."""
    rows = []
    for variant, (private, data) in pairs(_of(lines, "same gradients")).items():
        values = " → ".join(
            f"{number(one['preconditioner_ratio'], 3)}, {number(one['loss'], 3)}" for one in (private, data)
        )
        rows.append(["4.2", f"ratio and loss, noise in the release → in the data: {NAMES[variant]}", values])
    gains = {line["cell"]["case"]: line["result"] for line in _of(lines, "decayed sums")}
    if "decayed sums" in gains:
        best, beta2 = gains["decayed sums"], _of(lines, "decayed sums")[-1]["cell"]["beta2"]
        conditions = [condition(gain, beta2=beta2) for gain in (1.0, best["predicted"])]
        rows += [
            ["4.4", "gain of correlated noise on IME's ν; bound for any strategy",
             f"{number(best['predicted'], 3)}; {number(best['bound'], 3)}"],
            ["4.4", "the same for bias correction's ν̂ (below 1: more noise)",
             number(gains["square of decayed sums"]["predicted"], 2)],
            ["4.4", "c in B/σ ≳ c√m: independent noise; with this gain; the paper's guess",
             f"{conditions[0]:.3f}; {conditions[1]:.3f}; {PAPERS_CONDITION}"],
        ]  # fmt: skip
    if ratios := [line["result"] for line in _of(lines, "ratio")]:
        low, high = min(one["quantiles"][1] for one in ratios), max(one["quantiles"][3] for one in ratios)
        excesses = [
            sorted(float(np.median(one[name])) for one in ratios)
            for name in ("constant_excess", "scaled_excess", "plain_excess")
        ]
        rows += [
            ["4.5", f"range of 90 % of ν̂_t/ν̂_{{t−1}} from step {BEGIN} on, {len(ratios)} kinds of gradients",
             f"{low:.3f} to {high:.3f}"],
            ["4.5", "error over the least possible: SGD; scale-then-privatize; post-processing",
             "; ".join(f"{one[0]:.2f}" + (f" to {one[-1]:.2f}" if one[-1] > one[0] else "") for one in excesses)],
        ]  # fmt: skip
    losses = {
        (line["cell"]["variant"], _public(line)): line["result"]["loss"] for line in _of(lines, "side information")
    }
    for text, places in {
        "loss without public data: post-processing; scale-then-privatize":
            (("post_processing", "none"), ("scale_then_privatize", "none")),
        "loss with public ν̂ after clipping and noise: same distribution; other spread":
            (("side_information", "same distribution"), ("side_information", "other spread")),
        "loss with public ν before clipping and noise (AdaDPS): same distribution; other spread":
            (("adadps", "same distribution"), ("adadps", "other spread")),
    }.items():  # fmt: skip
        if all(place in losses for place in places):
            rows.append(["3.5", text, "; ".join(number(losses[place], 3) for place in places)])
    return table(["section", "finding", "value"], rows, left=2)


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
    steps = np.arange(2, cell["steps"] + 1)
    bound = [
        second_moment_ratios(
            step=int(t), clip_norm=cell["clip_norm"], noise_multiplier=cell["noise_over_batch"], batch_size=1.0,
            beta2=cell["beta2"],
        )[0]
        for t in steps
    ]  # fmt: skip
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
