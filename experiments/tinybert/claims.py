"""What the paper says about its table, as differences of losses that our numbers can be held against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dpoptim.app.comparison.intervals import mean_interval
from experiments.markdown import spread, thousandths
from experiments.tinybert.scores import Scores

LEVEL = 0.005
"""Losses so near to each other are level; a judgement: the paper calls rows within .004 of each other equal."""


@dataclass(frozen=True)
class Claim:
    """A statement about the rows of one column; `needs` are the rows that decide it."""

    text: str
    needs: tuple[str, ...]
    margin: Callable[[Mapping[str, float]], float]  # by how much it holds
    holds_above: float = 0.0
    fails_below: float = LEVEL
    ours: bool = False  # not the paper's, which lacks one of the rows


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
        "(ours) and ahead of post-processing with ε_s tuned by",
        ("scale_then_privatize", "post_processing_eps"),
        _behind("post_processing_eps", "scale_then_privatize"),
        ours=True,
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
        holds_above=-LEVEL,
        fails_below=-LEVEL,
    ),
    Claim(
        "(ours) nor better than post-processing with ε_s tuned as its own is: behind by",
        ("noiseless", "post_processing_eps"),
        _behind("noiseless", "post_processing_eps"),
        holds_above=-LEVEL,
        fails_below=-LEVEL,
        ours=True,
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
    Claim(
        "(ours) and worse than post-processing with ε_s tuned: behind by",
        ("dp_sgd", "post_processing_eps"),
        _behind("dp_sgd", "post_processing_eps"),
        ours=True,
    ),
)


def compared(claim: Claim, found: Scores, column: str, paper: Mapping[str, float]) -> str | None:
    """Our margin, the mean over the seeds that all rows have, beside the paper's; None where there is none.

    Rows of one seed saw the same batches and normals, so margins are taken seed by seed. One seed decides nothing; with
    several the 95 % interval does: a claim that one row is ahead fails where the rows are level.

    >>> scores = {("independent_moments", "x"): {0: 4.0, 1: 4.1}, ("post_processing", "x"): {0: 3.5, 1: 3.59}}
    >>> paper = {"independent_moments": 3.6, "post_processing": 3.5}
    >>> compared(CLAIMS[2], scores, "x", paper), compared(CLAIMS[2], scores, "y", paper)
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
        holds, fails = margin.low > claim.holds_above, margin.high < claim.fails_below
        verdict = ", holds" if holds else ", fails" if fails else ", undecided"
    of_paper = "–" if claim.ours else thousandths(claim.margin(paper))
    return f"{spread(margin)} ({of_paper}){verdict}"
