"""The plots of `plan`, `advise`, `compare` and `audit`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpoptim.app.audit import PlanAudit
from dpoptim.app.audit.statistics import TradeOff
from dpoptim.app.comparison.request import UNCOVERED
from dpoptim.app.plot_style import BLUE, GREY, ORANGE, RED, SKY, new_figure
from dpoptim.privacy.statement import format_epsilon
from dpoptim.theory import Advice, Candidate, Choice
from dpoptim.theory.adviser import MANY_NEGATIVE
from dpoptim.theory.stability_window import rounded


def draw_plan(choice: Choice, candidates: Sequence[Candidate]) -> Any:
    """Draw the error at each step, and the mean error against memory; the chosen mechanism is thick."""
    figure = new_figure(11, 5)
    by_step, by_memory = figure.subplots(1, 2, width_ratios=[3, 2])
    for index, candidate in enumerate(candidates):
        colour, is_chosen = f"C{index % 10}", candidate is choice.chosen
        steps = np.arange(1, len(candidate.errors) + 1)
        by_step.plot(steps, candidate.errors, label=candidate.name, color=colour, linewidth=3.0 if is_chosen else 1.3)
        place = (candidate.memory_bytes / 1e6, candidate.rmse_mean)
        by_memory.plot(*place, marker="o", markersize=10 if is_chosen else 6, color=colour)
    plan = choice.plan
    by_step.set(xlabel="step", ylabel="RMSE, prefix sums of averaged gradients", yscale="log")
    by_step.set_title(f"noise at ε = {format_epsilon(plan.epsilon())}, δ = {plan.delta:g}, clip norm 1", fontsize=10)
    figure.legend(*by_step.get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside lower center")
    by_memory.set(xlabel="memory for the noise, MB", ylabel="mean RMSE", yscale="log")
    by_memory.set_xscale("symlog", linthresh=1.0)
    by_memory.set_xlim(-0.3, 3 + 3 * max(candidate.memory_bytes for candidate in candidates) / 1e6)
    by_memory.set_title(f"{choice.chosen.parameters:,} parameters; the large dot is the choice", fontsize=10)
    for axes in (by_step, by_memory):
        axes.grid(alpha=0.3, which="both")
    return figure


def draw_advice(advice: Advice) -> Any:
    """Draw how many second moments turn negative, and the window of eps_scale with the values to try."""
    figure = new_figure(12, 5)
    negative, window = figure.subplots(1, 2)
    plan = advice.plan
    kind = f"measured on {advice.signal.examples} public examples" if advice.signal.measured else "assumed"
    figure.suptitle(
        f"advice: {advice.variant} with {advice.choice.chosen.name}\n"
        f"ε = {advice.epsilon:g}, δ = {advice.delta:g}; {plan.steps:,} steps of {plan.batch_size:,} from "
        f"{plan.num_examples:,}; {advice.signal.parameters:,} parameters; gradients {kind}",
        fontsize=11,
    )
    _negative(negative, advice)
    _window(window, advice)
    for axes in (negative, window):
        axes.grid(alpha=0.25)
    return figure


def _negative(axes: Any, advice: Advice) -> None:
    steps = [forecast.step for forecast in advice.forecasts]
    for label, name, colour in (("bias correction", "bias_correction", "C0"), ("IME", "independent_moments", "C1")):
        values = [getattr(forecast, name) for forecast in advice.forecasts]
        if None not in values:
            axes.plot(steps, [100 * value for value in values], marker="o", label=label, color=colour)
    axes.axhline(100 * MANY_NEGATIVE, color="0.4", linestyle="--", linewidth=1, label=f"{MANY_NEGATIVE:.0%}")
    axes.set(xscale="log", xlabel="step", ylabel="coordinates with ν̂ below 0, %", ylim=(-2, 72))
    axes.legend(fontsize=8)
    axes.set_title("(a) above the dashed line, too few second moments see a gradient", fontsize=9)


def _window(axes: Any, advice: Advice) -> None:
    window = advice.window
    points = [*window.to_try, window.default, window.high, *([window.low] if window.low else [])]
    left, right = 0.5 * min(points), 2 * max(points)
    low = max(left, window.low)
    axes.axvspan(left, low, color="#f4c7c3", label="ν̂ diverges")
    axes.axvspan(low, window.high, color="#cfe8cf", label="ν̂ is steady")
    axes.axvspan(window.high, right, color="#e3e3e3", label="ν̂ collapses")
    axes.axvline(window.likely_high, color="C2", linestyle=":", label="upper end if examples disagree")
    axes.plot(window.to_try, [0.38] * len(window.to_try), "o", color="C0", label="to try", markersize=8)
    axes.plot([window.default], [0.2], "D", color="C3", label="default", markersize=8)
    for index, value in enumerate(window.to_try):  # alternate above and below, so that close labels do not overlap
        place = (0, 9 if index % 2 == 0 else -17)
        axes.annotate(f"{value:.4g}", (value, 0.38), textcoords="offset points", xytext=place, ha="center", fontsize=8)
    ticks = [rounded(float(value)) for value in np.geomspace(left, right, 7)[1:-1]]
    axes.set(xscale="log", xlim=(left, right), ylim=(0, 1), yticks=[])
    axes.set_xticks(ticks, [f"{value:.5g}" for value in ticks], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"eps_scale of scale_then_privatize at clip norm {window.clip_norm:g}, gradient units")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    axes.set_title("(b) left of the window noise feeds on itself, right of it scaling fades", fontsize=9)


def draw_comparison(result: dict[str, Any]) -> Any:
    """Draw a dot per seed and an interval per variant; the best is on top, and references are grey."""
    metric = result["metric"]

    def badness(row: dict[str, Any]) -> float:
        mean = float(row[metric]["mean"])  # ∞ if a run diverged
        return -mean if metric == "accuracy" and math.isfinite(mean) else mean

    rows = sorted(result["variants"], key=badness) + result["references"]
    figure = new_figure(8, 1.4 + 0.5 * len(rows))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        values = [value for value in row[metric]["values"] if math.isfinite(value)]
        colour = "0.5" if row in result["references"] else f"C{place % 10}"
        if len(values) == len(row[metric]["values"]):
            width = row[metric]["half_width"] or 0.0
            bar = {"fmt": "D", "color": colour, "capsize": 5, "linewidth": 2, "markersize": 6}
            axes.errorbar(row[metric]["mean"], place, xerr=width, **bar)
        axes.plot(values, [place + 0.22] * len(values), "o", color=colour, alpha=0.6, markersize=5)
    axes.set_yticks(range(len(rows)), [str(row["label"]).replace("_", " ") for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(f"held-out {metric} (outside the guarantee)")
    spread = f", bars: {100 * result['confidence']:g} % intervals" if len(result["seeds"]) > 1 else ""
    epsilon = format_epsilon(result["epsilon"]["one_run"])
    title = f"ε = {epsilon}, δ = {result['delta']:g} for one run; dots: seeds{spread}"
    if result["tuning"]["kind"] == UNCOVERED:
        title += "\nTUNING ON THE PRIVATE RECORDS IS NOT COVERED"
    axes.set_title(title, fontsize=10)
    return figure


def draw_audit(found: PlanAudit) -> Any:
    """Draw the scores of canaries that were in and out, and the attack's errors against what the claim allows."""
    figure = new_figure(11, 4.6)
    histogram, errors = figure.subplots(1, 2)
    inside, outside = found.scores[found.included], found.scores[~found.included]
    edges = np.histogram_bin_edges(found.scores, bins=60)
    histogram.hist(outside, edges, color=ORANGE, alpha=0.6, label="out")
    histogram.hist(inside, edges, color=BLUE, alpha=0.6, label="in")
    histogram.set(xlabel="score: log likelihood ratio of in against out", ylabel="canaries")
    histogram.set_title(f"{found.canaries:,} canaries, each in or out by a coin flip")
    histogram.legend()

    thresholds = np.sort(found.scores)
    missed = np.searchsorted(np.sort(inside), thresholds, side="right") / len(inside)
    wrong = 1.0 - np.searchsorted(np.sort(outside), thresholds, side="right") / len(outside)
    seen = (missed > 0) & (wrong > 0)
    errors.plot(wrong[seen], missed[seen], color=SKY, linewidth=4, label="the attack, measured")
    least = 0.3 / len(inside)
    grid = np.geomspace(least, 1.0, 400)
    one_pair = TradeOff(epsilons=np.array([found.epsilon]), deltas=np.array([found.delta]))
    for curve, colour, style, label in (
        (found.allowed, RED, "-", "the least that the plan allows, at any δ"),
        (one_pair, GREY, "--", f"what ε = {format_epsilon(found.epsilon)}, δ = {found.delta:g} alone allows"),
    ):
        allowed = curve.least_missed(grid)
        kept = allowed > least
        errors.plot(grid[kept], allowed[kept], color=colour, linestyle=style, label=label)
    errors.set(xscale="log", yscale="log", xlim=(least, 1.5), ylim=(least, 1.5))
    errors.set(xlabel="false positives: out, classified as in", ylabel="false negatives: in, classified as out")
    errors.set_title("errors below the red line would contradict the claim")
    errors.legend(loc="lower left")
    errors.grid(alpha=0.3, which="both")
    return figure
