"""The picture of `dpoptim plan`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpoptim.app import plot_style as picture_style
from dpoptim.noise import PrefixSums
from dpoptim.privacy.format_epsilon import format_epsilon
from dpoptim.theory import Candidate, Choice


def draw(choice: Choice, path: Path) -> None:
    """Error at each step, and mean error against memory, one colour a mechanism; the chosen one is thick."""
    figure = picture_style.new_figure(11, 5)
    by_step, by_memory = figure.subplots(1, 2, width_ratios=[3, 2])
    shown = _shown(choice)
    for index, candidate in enumerate(shown):
        style = {"color": f"C{index % 10}", "linewidth": 3.0 if candidate is choice.chosen else 1.3}
        steps = np.arange(1, len(candidate.errors) + 1)
        by_step.plot(steps, candidate.errors, label=candidate.name, **style)
        megabytes = candidate.memory_bytes / 1e6
        by_memory.plot(
            megabytes,
            candidate.rmse_mean,
            marker="o",
            markersize=10 if candidate is choice.chosen else 6,
            color=style["color"],
        )
    plan = choice.plan
    workload = choice.chosen.workload
    what = "prefix sums" if workload == PrefixSums() else repr(workload)
    by_step.set(xlabel="step", ylabel=f"RMSE, {what} of averaged gradients", yscale="log")
    by_step.set_title(f"noise at ε = {format_epsilon(plan.epsilon())}, δ = {plan.delta:g}, clip norm 1", fontsize=10)
    figure.legend(*by_step.get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside lower center")
    by_memory.set(xlabel="memory for the noise, MB", ylabel="mean RMSE", yscale="log")
    by_memory.set_xscale("symlog", linthresh=1.0)
    by_memory.set_xlim(-0.3, 3 + 3 * max(candidate.memory_bytes for candidate in shown) / 1e6)
    by_memory.set_title(f"{choice.chosen.parameters:,} parameters; the large one is chosen", fontsize=10)
    for axes in (by_step, by_memory):
        axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=150)


def _shown(choice: Choice) -> list[Candidate]:
    """At most ten: the first, the chosen, and those of least error."""
    best = sorted(choice.candidates, key=lambda c: c.rmse_mean)[:8]
    return [c for c in choice.candidates if c in best or c is choice.chosen or c is choice.independent]
