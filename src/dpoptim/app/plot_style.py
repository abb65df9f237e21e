"""Colours and fonts that all plots share. The colours can be distinguished by colour-blind people.

Matplotlib is optional (`pip install 'dpoptim[plots]'`) and is imported when the first figure is made.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PURPLE, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#777777"
NAVY, OLIVE, WINE = "#1B2A6B", "#8C8000", "#882255"
"""Okabe and Ito's colours, a grey for annotations, and three darker colours."""

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

FONTS = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
}


def check_matplotlib(what: str = "plots need") -> None:
    """Raise ValueError if matplotlib is not installed; `what` begins the message."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as missing:
        raise ValueError(f"{what} matplotlib; install it with: pip install matplotlib") from missing


def new_figure(width: float, height: float) -> Any:
    """Make a matplotlib Figure of that size in inches, without a window."""
    check_matplotlib()
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update(FONTS)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


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
