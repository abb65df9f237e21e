"""The test losses of the final runs, by place and seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from experiments.result_files import Line
from experiments.tinybert.schedule import setting_of
from experiments.tinybert.search import Setting

Losses = Mapping[int, float]  # by seed
Scores = Mapping[tuple[str, str], Losses]  # by (row, column)


def scores(lines: Sequence[Line]) -> Scores:
    """("none", "none") is the model as it comes; a run that diverged counts as infinite. Of two runs of one seed the
    later one counts, and of two settings that of the later runs.
    """
    found: dict[tuple[str, str], dict[int, float]] = {}
    settings: dict[tuple[str, str], Setting] = {}
    for line in lines:
        cell, result = line["cell"], line["result"]
        if cell["purpose"] in ("final", "no fine-tuning"):
            place = (cell["row"], cell["column"])
            setting = setting_of(cell) if cell["purpose"] == "final" else ()
            if settings.setdefault(place, setting) != setting:
                settings[place], found[place] = setting, {}
            loss = result["test"]["tokens"]
            own = found.setdefault(place, {})
            own[cell["seed"]] = math.inf if loss is None or result["ended"] == "diverged" else loss
    return found


def mean(losses: Losses) -> float:
    """Over the seeds."""
    return sum(losses.values()) / len(losses)
