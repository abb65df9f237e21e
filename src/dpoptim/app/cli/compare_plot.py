"""The picture of `dpoptim compare`: a dot a seed, and an interval a variant."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dpoptim.app import plot_style as picture_style
from dpoptim.privacy.format_epsilon import format_epsilon


def draw(result: dict[str, Any], path: Path) -> None:
    """Scores across, one line a variant, the best on top; references are grey."""
    metric = result["metric"]
    rows = sorted(result["variants"], key=lambda row: _order(row, metric)) + result["references"]
    figure = picture_style.new_figure(8, 1.4 + 0.5 * len(rows))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        values = [value for value in row[metric]["values"] if math.isfinite(value)]
        color = "0.5" if row in result["references"] else f"C{place % 10}"
        if len(values) == len(row[metric]["values"]):
            width = row[metric]["half_width"] or 0.0
            axes.errorbar(
                row[metric]["mean"], place, xerr=width, fmt="D", color=color, capsize=5, linewidth=2, markersize=6
            )
        axes.plot(values, [place + 0.22] * len(values), "o", color=color, alpha=0.6, markersize=5)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(f"held-out {metric} (outside the guarantee)")
    epsilon, delta = result["epsilon"]["one_run"], result["delta"]
    spread = f", bars: {100 * result['confidence']:g} % intervals" if len(result["seeds"]) > 1 else ""
    title = f"ε = {format_epsilon(epsilon)}, δ = {delta:g} for one run; dots: seeds{spread}"
    if result["tuning"]["kind"] == "none":
        title += "\nTUNING ON THE PRIVATE RECORDS IS NOT COVERED"
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _order(row: dict[str, Any], metric: str) -> float:
    mean = float(row[metric]["mean"])
    return -mean if metric == "accuracy" and math.isfinite(mean) else mean


def _label(row: dict[str, Any]) -> str:
    return str(row["label"]).replace("_", " ")
