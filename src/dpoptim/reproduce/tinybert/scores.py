"""The test losses of the final runs, by place, with intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from dpoptim.reproduce.result_files import Line


@dataclass(frozen=True)
class Score:
    """Test losses of one place, one a seed; a run that diverged counts as infinite."""

    losses: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.losses))

    def half_width(self) -> float | None:
        """Half of Student's 95 % interval of the mean; None for a single run.

        >>> round(Score((1.0, 2.0, 3.0)).half_width(), 3)
        2.484
        """
        if len(self.losses) < 2 or not all(map(math.isfinite, self.losses)):
            return None
        error = float(np.std(self.losses, ddof=1)) / math.sqrt(len(self.losses))
        return float(stats.t.ppf(0.975, len(self.losses) - 1)) * error


def scores(lines: Sequence[Line]) -> dict[tuple[str, str], Score]:
    """By (row, column); ("none", "none") is the model as it comes. Of two runs of one seed the later one counts."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for line in lines:
        cell, result = line["cell"], line["result"]
        if cell["purpose"] in ("final", "no fine-tuning"):
            loss = result["test"]["tokens"]
            place = found.setdefault((cell["row"], cell["column"]), {})
            place[cell["seed"]] = math.inf if loss is None or result["ended"] == "diverged" else loss
    return {place: Score(tuple(losses[seed] for seed in sorted(losses))) for place, losses in found.items()}
