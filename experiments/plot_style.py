"""The look of the experiments' pictures: one colour per method and noise, labels, legends and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpoptim.app.plot_style import BLUE, GREY, ORANGE, RED, SKY, new_figure

__all__ = ["BLUE", "GREY", "ORANGE", "RED", "SKY", "new_figure"]

BLACK, GREEN, PURPLE = "#000000", "#009E73", "#CC79A7"
NAVY, OLIVE, WINE = "#1B2A6B", "#8C8000", "#882255"

METHODS: dict[str, str] = {
    "without noise": BLACK,
    "dp_sgd": ORANGE,
    "post_processing": BLUE,
    "post_processing_eps": NAVY,
    "bias_correction": GREEN,
    "independent_moments": RED,
    "joint_moments": SKY,
    "scale_then_privatize": PURPLE,
    "noiseless": GREY,
    "noiseless_scaled": OLIVE,
}
"""One colour per method, the same in all plots."""

NOISES: dict[str, str] = {"independent": BLACK, "BandMF": ORANGE, "BLT": SKY}


def label(axes: Any, title: str, x: str, y: str, *, log: str = "") -> None:
    """Set the title and both axes' labels; `log` names the logarithmic axes ("x", "y", "xy")."""
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left")
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    axes.grid(alpha=0.25, which="major", linewidth=0.6)


def legend_below(figure: Any, *axes: Any, columns: int) -> Any:
    """Draw one legend for all axes below them, with each name once."""
    found: dict[str, Any] = {}
    for one in axes:
        for handle, name in zip(*one.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    return figure.legend(found.values(), found.keys(), ncols=columns, loc="outside lower center", frameon=False)


def save(figure: Any, file: Path) -> None:
    """Write a PNG; the same figure gives the same bytes on one machine."""
    figure.savefig(file, dpi=120, metadata={"Software": None})
