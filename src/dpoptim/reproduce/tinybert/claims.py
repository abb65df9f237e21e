"""The paper's claims about its table, as comparisons that our numbers decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dpoptim.reproduce.markdown import spread
from dpoptim.reproduce.tinybert.scores import Scores
from dpoptim.training.comparison.intervals import mean_interval

SAME = 0.005
"""Losses that differ by less are the same to a claim that two are, and where one seed has to decide: a judgement."""


@dataclass(frozen=True)
class Claim:
    """A statement about the rows of one column; `needs` are the rows that decide it."""

    text: str
    needs: tuple[str, ...]
    margin: Callable[[Mapping[str, float]], float]  # by how much it holds; below -slack it does not
    slack: float = 0.0


_PRIVATE = ("post_processing", "independent_moments", "bias_correction", "scale_then_privatize", "dp_sgd")

CLAIMS = (
    Claim(
        "scale-then-privatize is the best private row",
        _PRIVATE,
        lambda loss: (
            min(loss[name] for name in _PRIVATE if name != "scale_then_privatize") - loss["scale_then_privatize"]
        ),
    ),
    Claim(
        "IME is worse than post-processing",
        ("independent_moments", "post_processing"),
        lambda loss: loss["independent_moments"] - loss["post_processing"],
    ),
    Claim(
        "a noiseless preconditioner is no better than post-processing",
        ("noiseless", "post_processing"),
        lambda loss: loss["noiseless"] - loss["post_processing"],
        slack=SAME,
    ),
    Claim(
        "with scale-then-privatize a noiseless one helps",
        ("noiseless_scaled", "scale_then_privatize"),
        lambda loss: loss["scale_then_privatize"] - loss["noiseless_scaled"],
    ),
)


def holds(claim: Claim, found: Scores, column: str) -> str | None:
    """Whether it holds, with the margin: the mean over the seeds that all its rows have; None where there is none.

    Rows of one seed saw the same batches, masks and normals, so margins are taken seed by seed. With several seeds the
    95 % interval decides, with one a margin below SAME decides nothing.

    >>> scores = {("independent_moments", "x"): {0: 4.0}, ("post_processing", "x"): {0: 3.5}}
    >>> holds(CLAIMS[1], scores, "x"), holds(CLAIMS[1], scores, "y")
    ('yes (0.500)', None)
    """
    rows = {name: found.get((name, column), {}) for name in claim.needs}
    seeds = sorted(set.intersection(*map(set, rows.values())))
    if not seeds:
        return None
    margins = [claim.margin({name: rows[name][seed] for name in rows}) for seed in seeds]
    if not all(map(math.isfinite, margins)):
        return "a run diverged"
    margin, lead = mean_interval(margins), mean_interval([each + claim.slack for each in margins])
    if lead.half_width is None:
        undecided = "about the same" if abs(lead.mean) < SAME else ""
    else:
        undecided = "" if lead.excludes_zero else "not decided"
    answer = undecided or ("yes" if lead.mean > 0 else "no")
    return f"{answer} ({spread(margin)})"
