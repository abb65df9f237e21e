"""Colours and fonts that all plots share. The colours can be distinguished by colour-blind people.

Matplotlib is optional (`pip install 'dpoptim[plots]'`) and is imported when the first figure is made.
"""

from __future__ import annotations

from typing import Any

from dpoptim.integrations.optional import require

ORANGE, SKY, BLUE, RED, GREY = "#E69F00", "#56B4E9", "#0072B2", "#D55E00", "#777777"
"""Four of Okabe and Ito's colours, and a grey for annotations."""

FONTS = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
}


def new_figure(width: float, height: float) -> Any:
    """Make a matplotlib Figure of that size in inches, without a window."""
    matplotlib = require("matplotlib", "a plot")
    matplotlib.use("agg")
    matplotlib.rcParams.update(FONTS)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
