"""The paper's claims about its table, as comparisons that our numbers decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dpoptim.reproduce.tinybert.scores import Score

Losses = Mapping[str, float]
SAME = 0.005
"""Losses that differ by less are called the same. A judgement: how much another seed changes has not been measured."""


@dataclass(frozen=True)
class Claim:
    """A statement about the rows of one column; `needs` are the rows that decide it."""

    text: str
    needs: tuple[str, ...]
    margin: Callable[[Losses], float]  # by how much it holds; below 0 it does not


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
        lambda loss: loss["noiseless"] - loss["post_processing"] + SAME,
    ),
    Claim(
        "with scale-then-privatize a noiseless one helps",
        ("noiseless_scaled", "scale_then_privatize"),
        lambda loss: loss["scale_then_privatize"] - loss["noiseless_scaled"],
    ),
)


def holds(claim: Claim, found: Mapping[tuple[str, str], Score], column: str) -> str | None:
    """ "yes", "no" or "about the same", with the difference of losses; None where a row has no run.

    >>> scores = {("independent_moments", "x"): Score((4.0,)), ("post_processing", "x"): Score((3.5,))}
    >>> holds(CLAIMS[1], scores, "x"), holds(CLAIMS[1], scores, "y")
    ('yes (0.500)', None)
    """
    if any((name, column) not in found for name in claim.needs):
        return None
    margin = claim.margin({name: found[name, column].mean for name in claim.needs})
    if abs(margin) < SAME:
        return f"about the same ({margin:.3f})"
    return f"yes ({margin:.3f})" if margin > 0 else f"no ({margin:.3f})"
