"""The badly scaled quadratic with every optimizer at its best: settings on grids, tuned by the loss at the end.

Which optimizer wins depends on the setting. With spread examples scaling before the noise does; at spread=0 all
examples clip alike, a small clip norm costs nothing, and DP-SGD ends lowest. `quadratic_plot` draws it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpoptim.noise import Strategy, StrategySpec
from experiments.quadratic.problem import Path, Quadratic, simulate

_FLAT: dict[str, tuple[float, ...]] = {"lr": (0.003, 0.01, 0.03, 0.1), "clip_norm": (0.01, 0.03, 0.1, 0.3)}
_SCALED: dict[str, tuple[float, ...]] = {
    "lr": (0.01, 0.03),
    "clip_norm": (0.01, 0.03, 0.1),
    "eps_scale": (0.003, 0.01, 0.03),
}
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "adam": {"lr": _FLAT["lr"]},
    "dp_sgd": {"lr": (0.03, 0.1, 0.3, 1.0), "clip_norm": _FLAT["clip_norm"]},
    "post_processing": _FLAT,
    "bias_correction": _FLAT,
    "independent_moments": _FLAT,
    "joint_moments": _FLAT,
    "scale_then_privatize": _SCALED,
    "noiseless_preconditioner": _FLAT,
    "noiseless_scale_then_privatize": _SCALED,
}
"""Among which settings `compared` chooses, for the curvatures 1 and 0.01.

With spread examples, a clip norm below 0.03 clips them all and is but another unit for Adam; with equal ones a smaller
clip norm is less noise and nothing else, so that the least of the grid wins.
"""
_NEAR_FLAT: dict[str, tuple[float, ...]] = {"lr": (0.01, 0.03), "clip_norm": (0.01, 0.03)}
NEAR: dict[str, dict[str, tuple[float, ...]]] = {
    "adam": {"lr": (0.01, 0.1)},
    "dp_sgd": {"lr": (0.3, 1.0), "clip_norm": (0.01, 0.03)},
    "post_processing": _NEAR_FLAT,
    "bias_correction": _NEAR_FLAT,
    "independent_moments": _NEAR_FLAT,
    "joint_moments": _NEAR_FLAT,
    "scale_then_privatize": {"lr": (0.01,), "clip_norm": (0.01, 0.03), "eps_scale": (0.01, 0.03)},
}
"""The part of GRIDS around what it chooses at spread 1 and at spread 0, for a picture in seconds."""


def tuned(
    problem: Quadratic, variant: str, noise: StrategySpec | Strategy | None = None, **choices: Sequence[Any]
) -> Quadratic:
    """The problem with those values of the named fields that give the least mean loss over the last tenth of the steps.

    Edge cases: settings that diverge lose; if all do, the first stay.

    >>> tuned(Quadratic(steps=100, repeats=50), "adam", lr=(1e-4, 0.02)).lr
    0.02
    """
    best, least = problem, math.inf
    for index, values in enumerate(itertools.product(*choices.values())):
        candidate = dataclasses.replace(problem, **dict(zip(choices, values, strict=True)))
        loss = last_loss(simulate(candidate, variant, noise))
        if index == 0 or loss < least:
            best, least = candidate, loss
    return best


def compared(
    problem: Quadratic,
    noise: StrategySpec | Strategy | None = None,
    *,
    grids: Mapping[str, Mapping[str, Sequence[Any]]] = GRIDS,
    tuning_repeats: int = 40,
) -> list[Path]:
    """Every variant of `grids` at the best settings there for it, tuned with one seed and run with the next.

    >>> paths = compared(Quadratic(steps=30, repeats=2), grids={"adam": {"lr": (0.01, 0.1)}, "post_processing": {}})
    >>> [(path.variant, path.problem.lr) for path in paths]
    [('adam', 0.1), ('post_processing', 0.02)]
    """
    trial = dataclasses.replace(problem, repeats=tuning_repeats)
    best = {variant: tuned(trial, variant, noise, **grid) for variant, grid in grids.items()}
    return [
        simulate(dataclasses.replace(settings, repeats=problem.repeats, seed=problem.seed + 1), variant, noise)
        for variant, settings in best.items()
    ]


def last_loss(path: Path) -> float:
    """Mean loss over the last tenth of the steps; ∞ where it is not finite."""
    loss = float(path.mean_loss[-max(1, path.problem.steps // 10) :].mean())
    return loss if math.isfinite(loss) else math.inf
