"""What the paper says about its table, as differences of losses that our numbers can be held against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dpoptim.reproduce.markdown import spread, thousandths
from dpoptim.reproduce.tinybert.scores import Scores
from dpoptim.training.comparison.intervals import mean_interval


@dataclass(frozen=True)
class Claim:
    """A statement about the rows of one column; `needs` are the rows that decide it."""

    text: str
    needs: tuple[str, ...]
    margin: Callable[[Mapping[str, float]], float]  # by how much it holds
    least: float = 0.0  # margins below this contradict it


_PRIVATE = ("post_processing", "independent_moments", "bias_correction", "scale_then_privatize", "dp_sgd")


def _behind(worse: str, better: str) -> Callable[[Mapping[str, float]], float]:
    return lambda loss: loss[worse] - loss[better]


CLAIMS = (
    Claim(
        "scale-then-privatize is the best private row: ahead of the next by",
        _PRIVATE,
        lambda loss: (
            min(loss[name] for name in _PRIVATE if name != "scale_then_privatize") - loss["scale_then_privatize"]
        ),
    ),
    Claim(
        "IME is worse than post-processing: behind by",
        ("independent_moments", "post_processing"),
        _behind("independent_moments", "post_processing"),
    ),
    Claim(
        "a noiseless preconditioner is no better than post-processing: behind by",
        ("noiseless", "post_processing"),
        _behind("noiseless", "post_processing"),
        least=-0.005,
    ),
    Claim(
        "with scale-then-privatize a noiseless one helps: ahead by",
        ("noiseless_scaled", "scale_then_privatize"),
        _behind("scale_then_privatize", "noiseless_scaled"),
    ),
    Claim(
        "DP-SGD is worse than post-processing: behind by",
        ("dp_sgd", "post_processing"),
        _behind("dp_sgd", "post_processing"),
    ),
)
"""The least of the third is a judgement: the paper has both within .004."""


def compared(claim: Claim, found: Scores, column: str, paper: Mapping[str, float]) -> str | None:
    """Our margin, the mean over the seeds that all rows have, beside the paper's; None where there is none.

    Rows of one seed saw the same batches and normals, so margins are taken seed by seed. One seed decides nothing; with
    several the 95 % interval does.

    >>> scores = {("independent_moments", "x"): {0: 4.0, 1: 4.1}, ("post_processing", "x"): {0: 3.5, 1: 3.59}}
    >>> paper = {"independent_moments": 3.6, "post_processing": 3.5}
    >>> compared(CLAIMS[1], scores, "x", paper), compared(CLAIMS[1], scores, "y", paper)
    ('0.505 ± 0.064 (0.100), holds', None)
    """
    rows = {name: found.get((name, column), {}) for name in claim.needs}
    seeds = sorted(set.intersection(*map(set, rows.values())))
    if not seeds:
        return None
    margins = [claim.margin({name: rows[name][seed] for name in rows}) for seed in seeds]
    if not all(map(math.isfinite, margins)):
        return "a run diverged"
    margin = mean_interval(margins)
    verdict = ""
    if margin.half_width is not None:
        verdict = ", holds" if margin.low > claim.least else ", fails" if margin.high < claim.least else ", undecided"
    return f"{spread(margin)} ({thousandths(claim.margin(paper))}){verdict}"
