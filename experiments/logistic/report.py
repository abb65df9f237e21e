"""Tables and a picture of the logistic regression: distributions over draws, and how often the paper's order holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dpoptim.noise.series import Series
from experiments import plot_style as style
from experiments.markdown import epsilon_shown, made_by, percent, table
from experiments.results_file import Line

NAMES = {
    "ground_truth": "θ = 1, the ground truth (NOT private)",
    "non_private": "AdaGrad, no noise (NOT private)",
    "post_processing": "post-processing",
    "post_processing_floored": "post-processing, rate η/max{1, √ν}",
    "post_processing_eps_tuned": "post-processing, ε_s tuned",
    "independent_moments": "IME",
    "independent_moments_for_free": "IME for free (NOT private)",
}
PRINTED = {
    "ground_truth": 0.5976,
    "non_private": 0.5976,
    "post_processing": 0.6010,
    "independent_moments": 0.5981,
    "independent_moments_for_free": 0.5980,
}
"""Test losses as the paper prints them, from one dataset draw."""
ORDER = ("non_private", "independent_moments_for_free", "independent_moments", "post_processing")
"""From the least to the largest of them."""
NOISES = ("dense", "independent")
COLOURS = {
    "non_private": style.BLACK,
    "post_processing": style.METHODS["post_processing"],
    "post_processing_floored": style.METHODS["post_processing"],
    "post_processing_eps_tuned": style.METHODS["post_processing_eps"],
    "independent_moments": style.METHODS["independent_moments"],
    "independent_moments_for_free": style.METHODS["independent_moments"],
}


def markdown(lines: Sequence[Line]) -> str:
    """Losses next to the printed ones, and how often each part of the printed order holds."""
    parts = [
        made_by(lines, f"python -m experiments logistic --scale {lines[0]['scale']}"),
        _sizes(lines[0]),
        _table(lines),
        _orders(lines),
        _finding(lines),
        "![test loss above the ground truth's, over draws, for both kinds of noise](images/logistic-draws.png)",
    ]
    return "\n\n".join(part for part in parts if part)


def excess_of(lines: Sequence[Line], variant: str, noise: str, name: str = "excess") -> Series | None:
    """[draws] of one variant with one kind of noise, ∞ where it diverged; None if the file lacks it."""
    wanted = "none" if variant in ("ground_truth", "non_private") else noise
    for line in lines:
        if (line["cell"]["variant"], line["cell"]["noise"]) == (variant, wanted):
            return np.array([np.inf if value is None else value for value in line["result"][name]])
    return None


def holds(lines: Sequence[Line], noise: str, order: Sequence[str]) -> Series | None:
    """[draws]: whether the excesses of these variants are in this order, the least first."""
    found = [excess_of(lines, variant, noise) for variant in order]
    there = [values for values in found if values is not None]
    return np.all(np.diff(np.stack(there), axis=0) >= 0, axis=0) if len(there) == len(order) else None


def _sizes(line: Line) -> str:
    cell = line["cell"]
    return (
        f"x ≠ 0 in {percent(cell['present'])} of {cell['batch_size'] * cell['steps']:,} examples, B = "
        f"{cell['batch_size']}, T = {cell['steps']:,}, σ = {cell['noise_multiplier']:g}, ζ = {cell['clip_norm']:g}; "
        f"{cell['draws']} draws × {cell['trials']} trials."
    )


def _table(lines: Sequence[Line]) -> str:
    """Mean test loss and excess of every cell, next to the paper's."""
    truth = excess_of(lines, "ground_truth", "none", "test_loss")
    if truth is None:
        return "Losses are relative to the ground truth, whose cell is missing: run `--only variant=ground_truth`."
    base = PRINTED["ground_truth"]
    rows = [[NAMES["ground_truth"], "none", "–", f"{truth.mean():.4f}", "0", "–", "–", "–", f"{base:.4f}", "0"]]
    for line in lines:
        variant = line["cell"]["variant"]
        if variant == "ground_truth":
            continue
        values = excess_of(lines, variant, line["cell"]["noise"])
        as_paper = excess_of(lines, variant, line["cell"]["noise"], "as_paper")
        population = excess_of(lines, variant, line["cell"]["noise"], "population_excess")
        assert values is not None
        assert as_paper is not None
        assert population is not None
        low, middle, high = (_short(x) for x in np.quantile(values, (0.1, 0.5, 0.9)))
        error = values.std(ddof=1) / np.sqrt(len(values))
        printed = PRINTED.get(variant)
        rows.append([
            NAMES[variant], line["cell"]["noise"],
            epsilon_shown(line["epsilon"]), f"{truth.mean() + values.mean():.4f}",
            f"{_short(values.mean())} ± {_short(error)}", f"{middle} ({low} to {high})", _short(population.mean()),
            _short(as_paper.mean()), "–" if printed is None else f"{printed:.4f}",
            "–" if printed is None else _short(printed - base),
        ])  # fmt: skip
    titles = ["variant", "noise", "ε", "mean test loss", "excess", "median draw (10 to 90 %)", "population excess",
              "excess, tuned as in the paper", "the paper's loss", "the paper's excess"]  # fmt: skip
    return table(titles, rows, left=2)


def _short(value: float) -> str:
    """In the units of the table, to a hundred-thousandth.

    >>> _short(0.00123), _short(-0.00002)
    ('.00123', '−.00002')
    """
    text = f"{abs(value):.5f}"
    text = text[1:] if text.startswith("0") else text
    return f"−{text}" if value < 0 else text


def _orders(lines: Sequence[Line]) -> str:
    """How often each statement holds, draw by draw."""
    free, ime, post = "independent_moments_for_free", "independent_moments", "post_processing"
    statements: list[tuple[str, Sequence[str], str]] = [
        ("non-private ≤ IME for free ≤ IME ≤ post-processing, the paper's order", ORDER, "4 %"),
        ("IME ≤ post-processing", (ime, post), "50 %"),
        ("IME for free ≤ IME", (free, ime), "50 %"),
        ("IME ≤ post-processing with IME's rate", (ime, f"{post}_floored"), "50 %"),
        ("IME ≤ post-processing, ε_s tuned", (ime, f"{post}_eps_tuned"), "50 %"),
        ("IME for free ≤ post-processing, ε_s tuned", (free, f"{post}_eps_tuned"), "50 %"),
    ]
    rows = []
    for text, order, chance in statements:
        found = [holds(lines, noise, order) for noise in NOISES]
        rows.append([text, *("–" if one is None else percent(float(one.mean())) for one in found), chance])
    return table(["holds in what share of the draws", *(f"{noise} noise" for noise in NOISES), "by chance"], rows)


def _finding(lines: Sequence[Line]) -> str:
    """How the means compare, and how often a draw is as bad as the printed one."""
    parts = []
    gap = PRINTED["post_processing"] - PRINTED["ground_truth"]
    for noise in NOISES:
        post, ime = (excess_of(lines, name, noise) for name in ("post_processing", "independent_moments"))
        if post is None or ime is None:
            continue
        difference = ime - post
        error = difference.std(ddof=1) / np.sqrt(len(difference))
        parts.append(
            f"With {noise} noise IME's mean excess is {ime.mean() / post.mean():.2f} times post-processing's "
            f"(difference {_short(difference.mean())} ± {_short(error)}); post-processing's excess reaches the printed "
            f"{_short(gap)} in {percent(float((post >= gap).mean()))} of the draws."
        )
    return " ".join(parts)


def pictures(lines: Sequence[Line]) -> Mapping[str, Callable[[], Any]]:
    """One picture: one panel per kind of noise."""
    return {"draws": lambda: draw(lines)}


def draw(lines: Sequence[Line]) -> Any:
    """The excess of every draw, its median and 10 to 90 %, and the excess that the paper prints."""
    figure = style.new_figure(9.5, 3.8)
    panels = figure.subplots(1, 2, sharey=True)
    heights = {name: height for height, name in enumerate(COLOURS)}
    panels[0].set_yticks(list(heights.values()), [NAMES[name] for name in heights])
    panels[0].set_ylim(len(heights) - 0.5, -0.5)
    base = PRINTED["ground_truth"]
    jitter = np.random.default_rng(0)
    for axes, noise in zip(panels, NOISES, strict=True):
        shown = [(name, values) for name in COLOURS if (values := excess_of(lines, name, noise)) is not None]
        if not shown:
            axes.set_visible(False)
            continue
        for name, values in shown:
            kept, height, colour = values[np.isfinite(values)], heights[name], COLOURS[name]
            axes.plot(kept, height + jitter.uniform(-0.25, 0.25, len(kept)), ".", color=colour, alpha=0.35, ms=4)
            low, middle, high = np.quantile(kept, (0.1, 0.5, 0.9))
            axes.plot([low, high], [height, height], color=colour, lw=2.5)
            inside = "white" if "NOT private" in NAMES[name] else colour
            axes.plot(middle, height, "o", color=colour, ms=8, mfc=inside)
            if name in PRINTED and noise == "dense":
                axes.plot(PRINTED[name] - base, height, "x", color=style.BLACK, ms=8, mew=2)
        if noise == "dense":
            axes.plot([], [], "x", color=style.BLACK, ms=8, mew=2, ls="", label="the paper's one draw")
        axes.plot([], [], "o-", color=style.GREY, lw=2.5, label="median and 10 to 90 % of the draws (dots)")
        axes.axvline(0, color=style.GREY, lw=0.8, ls=":")
        everything = np.concatenate([values for _, values in shown])
        finite = everything[np.isfinite(everything)]
        right = max(float(np.quantile(finite, 0.985)), PRINTED["post_processing"] - base) * 1.05
        left = min(float(np.quantile(finite, 0.005)), 0.0) - 0.03 * right
        axes.set_xlim(left, right)
        axes.locator_params(axis="x", nbins=5)
        outside = f"{np.sum((everything < left) | (everything > right))} of {len(everything)} dots are outside"
        style.label(axes, f"{noise} noise ({outside})", "test loss minus that of θ = 1", "")
    style.legend_below(figure, *panels, columns=2)
    return figure
