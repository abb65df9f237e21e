"""The picture of `dpoptim audit`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpoptim.app import plot_style as picture_style
from dpoptim.app.audit import PlanAudit
from dpoptim.app.audit.tradeoff import TradeOff
from dpoptim.app.plot_style import BLUE, GREY, ORANGE, RED, SKY
from dpoptim.privacy.format_epsilon import format_epsilon


def draw(found: PlanAudit, path: Path) -> None:
    """Scores of canaries that were in and out, and the attack's errors beside what the claim allows."""
    figure = picture_style.new_figure(11, 4.6)
    histogram, errors = figure.subplots(1, 2)
    inside, outside = found.scores[found.included], found.scores[~found.included]
    edges = np.histogram_bin_edges(found.scores, bins=60)
    histogram.hist(outside, edges, color=ORANGE, alpha=0.6, label="out")
    histogram.hist(inside, edges, color=BLUE, alpha=0.6, label="in")
    histogram.set(xlabel="score: ln of how much likelier the releases are with the canary", ylabel="canaries")
    histogram.set_title(f"{found.canaries:,} canaries, each in or out by a coin")
    histogram.legend()

    thresholds = np.sort(found.scores)
    missed = np.searchsorted(np.sort(inside), thresholds, side="right") / len(inside)
    wrong = 1.0 - np.searchsorted(np.sort(outside), thresholds, side="right") / len(outside)
    seen = (missed > 0) & (wrong > 0)
    errors.plot(wrong[seen], missed[seen], color=SKY, linewidth=4, label="the attack, measured")
    least = 0.3 / len(inside)
    grid = np.geomspace(least, 1.0, 400)
    one_pair = TradeOff(epsilons=np.array([found.epsilon]), deltas=np.array([found.delta]))
    for curve, color, style, label in (
        (found.allowed, RED, "-", "the least that the plan allows, at any δ"),
        (one_pair, GREY, "--", f"what ε = {format_epsilon(found.epsilon)}, δ = {found.delta:g} alone allows"),
    ):
        allowed = curve.least_missed(grid)
        kept = allowed > least
        errors.plot(grid[kept], allowed[kept], color=color, linestyle=style, label=label)
    errors.set(xscale="log", yscale="log", xlim=(least, 1.5), ylim=(least, 1.5))
    errors.set(xlabel="out, and taken for in", ylabel="in, and taken for out")
    errors.set_title("errors below the red line would contradict the claim")
    errors.legend(loc="lower left")
    errors.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=150)
