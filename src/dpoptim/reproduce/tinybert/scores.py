"""The test losses of the final runs, by place and seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dpoptim.reproduce.result_files import Line

Losses = Mapping[int, float]  # by seed
Scores = Mapping[tuple[str, str], Losses]  # by (row, column)


def scores(lines: Sequence[Line]) -> Scores:
    """("none", "none") is the model as it comes; a run that diverged counts as infinite. Of two runs of one seed the
    later one counts.
    """
    found: dict[tuple[str, str], dict[int, float]] = {}
    for line in lines:
        cell, result = line["cell"], line["result"]
        if cell["purpose"] in ("final", "no fine-tuning"):
            loss = result["test"]["tokens"]
            place = found.setdefault((cell["row"], cell["column"]), {})
            place[cell["seed"]] = math.inf if loss is None or result["ended"] == "diverged" else loss
    return found
