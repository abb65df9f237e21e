"""The cells of the logistic regression: every variant with both kinds of noise; tuned, then reported.

For each draw, the learning rate (and ε, if tuned) is chosen by the mean loss of validation samples over the first half
of the trials. The reported test losses are those of the other half. For comparison, the paper's way is also reported:
choose by the mean test loss of all trials, and report the same losses.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dpoptim.noise.series import Series
from experiments.framework import Outcome
from experiments.logistic.problem import (
    FLOORED,
    VARIANTS,
    Datasets,
    Problem,
    datasets,
    evaluate,
    plan_of,
    population_loss,
    walk,
)

Cell = dict[str, Any]
DELTA = 1e-5
TINY_EPS = 1e-10  # AdaGrad's own
LOWEST_RATE, HIGHEST_RATE = 0.01, 30.0
_GRID = {"lrs": 15, "eps": (TINY_EPS, 0.01, 0.1, 1.0, 10.0), "test_samples": 10_000, "steps": 1000}
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"lrs": 3, "eps": (1.0, 10.0), "test_samples": 400, "draws": 3, "trials": 4, "steps": 40},
    "small": {**_GRID, "draws": 20, "trials": 10},
    "paper": {**_GRID, "draws": 200, "trials": 30},
}


def cells(scale: str) -> list[Cell]:
    """Ground truth and non-private once, the others once per kind of noise; in the setting that the paper states."""
    size, found = SIZES[scale], []
    problem = Problem(**{name: size[name] for name in ("draws", "trials", "test_samples", "steps")})
    for noise in ("none", "dense", "independent"):
        for variant in VARIANTS:
            if (variant in ("ground_truth", "non_private")) != (noise == "none"):
                continue
            lrs = [] if variant == "ground_truth" else _rates(size["lrs"])
            found.append({"variant": variant, "noise": noise, **dataclasses.asdict(problem), "lrs": lrs,
                          **_denominator(variant, size["eps"])})  # fmt: skip
    return found


def _denominator(variant: str, eps: Sequence[float]) -> Cell:
    """The values of ε to try, and the floor, in max(floor, √ν + ε)."""
    if variant in FLOORED:
        return {"eps": [0.0], "floor": 1.0}
    return {"eps": list(eps) if variant.endswith("eps_tuned") else [TINY_EPS], "floor": 0.0}


def _rates(count: int) -> list[float]:
    """Rounded so that all machines agree.

    >>> _rates(3)
    [0.01, 0.5477, 30.0]
    """
    return [float(f"{rate:.4g}") for rate in np.geomspace(LOWEST_RATE, HIGHEST_RATE, count)]


def compute(cell: Cell) -> Outcome:
    """One variant with one kind of noise: losses above the ground truth, draw by draw."""
    problem = Problem(**{field.name: cell[field.name] for field in dataclasses.fields(Problem)})
    data, variant, noise = _datasets(problem), cell["variant"], cell["noise"]
    truth = np.array([float(test(1.0)) for test in data.test])
    if variant == "ground_truth":
        return Outcome(result={"test_loss": _plain(truth), "population_loss": float(population_loss()(1.0))},
                       note=VARIANTS[variant])  # fmt: skip
    rates = {name: cell[name] for name in ("lrs", "eps", "floor")}
    (final,) = deque(walk(problem, data, variant, noise, **rates), maxlen=1)
    result = scores(final.numpy().reshape(problem.draws, -1, len(cell["lrs"]) * len(cell["eps"])), data, truth)
    best = np.array(result.pop("best"))
    result["lr"] = _plain(np.array(cell["lrs"])[best // len(cell["eps"])])
    result["eps"] = _plain(np.array(cell["eps"])[best % len(cell["eps"])])
    plan = plan_of(problem, variant, noise)
    private = plan is not None and "NOT private" not in VARIANTS[variant]
    return Outcome(
        result=result,
        plan=plan.to_dict() if plan is not None and private else None,
        epsilon=plan.epsilon(delta=DELTA) if plan is not None and private else None,
        adjacency=plan.adjacency.value if plan is not None and private else None,
        note=f"delta {DELTA:g}; one run at the tuned settings, tuning not counted" if private else VARIANTS[variant],
    )


@lru_cache(maxsize=1)
def _datasets(problem: Problem) -> Datasets:
    """The draws of the last problem: all variants see the same ones."""
    return datasets(problem)


def scores(final: Series, data: Datasets, truth: Series) -> dict[str, Any]:
    """What is reported of θ_T [draws, trials, choices], draw by draw, in units of the loss.

    excess: mean test loss of the second half of the trials minus that of θ = 1, at the choice with the least mean
        validation loss over the first half; population_excess: the same for the mean loss over all x.
    as_paper: the least mean test loss of all trials over the choices, minus that of θ = 1.
    spread: standard deviation of the test loss over the reported trials.
    best: the choice. A single trial (no noise) serves as both halves.
    """
    half, population = final.shape[1] // 2, population_loss()
    found: dict[str, list[float]] = {
        name: [] for name in ("excess", "population_excess", "as_paper", "spread", "theta", "best")
    }
    for theta, validation, test, loss in zip(final, data.validation, data.test, truth, strict=True):
        chosen = int(np.argmin(evaluate(validation, theta[: max(half, 1)]).mean(0)))
        reported = theta[half:, chosen]
        losses = evaluate(test, reported)
        found["excess"].append(float(losses.mean() - loss))
        found["population_excess"].append(float(evaluate(population, reported).mean() - population(1.0)))
        found["as_paper"].append(float(evaluate(test, theta).mean(0).min() - loss))
        found["spread"].append(float(losses.std()))
        found["theta"].append(float(reported.mean()))
        found["best"].append(chosen)
    return {name: values if name == "best" else _plain(np.array(values)) for name, values in found.items()}


def _plain(values: Series) -> list[float | None]:
    """Seven significant digits; None if not finite."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]
