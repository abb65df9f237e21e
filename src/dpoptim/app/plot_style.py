"""Colours and fonts that all plots share. The colours can be distinguished by colour-blind people.

Matplotlib is optional (`pip install 'dpoptim[plots]'`) and is imported when the first figure is made.
"""

from __future__ import annotations

import importlib
from typing import Any

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
