"""The cells of the logistic regression: every variant, both kinds of noise, three settings; tuned, then reported.

For each draw, the learning rate (and ε, if tuned) is chosen by the mean loss of validation samples over the first half
of the trials. The reported test losses are those of the other half. For comparison, the paper's way is also reported:
choose by the mean test loss of all trials, and report the same losses.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from functools import lru_cache
from typing import Any

import numpy as np

from dpoptim.noise.series import Series
from experiments.framework import Outcome
from experiments.logistic.problem import VARIANTS, Datasets, Problem, datasets, evaluate, plan_of, population_loss, walk

Cell = dict[str, Any]
DELTA = 1e-5
TINY_EPS = 1e-10  # AdaGrad's own
SETTINGS: dict[str, dict[str, Any]] = {
    "sparse": {"present": 0.1, "batch_size": 10, "steps": 1000},
    "one example a step": {"present": 0.3, "batch_size": 1, "steps": 1000},
    "not sparse": {"present": 1.0, "batch_size": 10, "steps": 1000},
}
"""Assumed, because the paper's sizes are not known. The first is the main one. Committed results have these names."""
_GRID = {"lrs": 13, "eps": (TINY_EPS, 0.01, 0.1, 1.0, 10.0, 100.0)}
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"lrs": 3, "eps": (1.0, 10.0), "test_samples": 400, "draws": (3,), "trials": (4,), "steps": 40},
    "small": {**_GRID, "test_samples": 10_000, "draws": (20,), "trials": (10,), "steps": 1000},
    "paper": {**_GRID, "test_samples": 10_000, "draws": (100, 40, 40), "trials": (30, 16, 16), "steps": 1000},
}
"""`draws` and `trials` have an entry for each setting to run."""


def cells(scale: str) -> list[Cell]:
    """Ground truth and non-private once per setting, the others once per kind of noise."""
    size, found = SIZES[scale], []
    for setting, draws, trials in zip(SETTINGS, size["draws"], size["trials"], strict=False):
        shared = {"draws": draws, "trials": trials, "test_samples": size["test_samples"], "steps": size["steps"]}
        problem = Problem(**(SETTINGS[setting] | shared))
        for noise in ("none", "independent", "dense"):
            for variant in VARIANTS:
                if (variant in ("ground_truth", "non_private")) != (noise == "none"):
                    continue
                lrs = [] if variant == "ground_truth" else _rates(size["lrs"])
                eps = list(size["eps"]) if _tunes_eps(variant) else [TINY_EPS]
                found.append({"setting": setting, "variant": variant, "noise": noise, **dataclasses.asdict(problem),
                              "lrs": lrs, "eps": eps})  # fmt: skip
    return found


def _rates(count: int) -> list[float]:
    """From 10^-1.5 to 10^1.5, rounded so that all machines agree.

    >>> _rates(3)
    [0.03162, 1.0, 31.62]
    """
    return [float(f"{rate:.4g}") for rate in np.geomspace(10**-1.5, 10**1.5, count)]


def _tunes_eps(variant: str) -> bool:
    return variant.startswith("independent_moments") or variant.endswith("eps_tuned")


def compute(cell: Cell) -> Outcome:
    """One variant with one kind of noise: losses above the ground truth, draw by draw."""
    problem = Problem(**{field.name: cell[field.name] for field in dataclasses.fields(Problem)})
    data, variant, noise = _datasets(problem), cell["variant"], cell["noise"]
    truth = np.array([float(test(1.0)) for test in data.test])
    if variant == "ground_truth":
        return Outcome(result={"test_loss": _plain(truth), "population_loss": float(population_loss()(1.0))},
                       note=VARIANTS[variant])  # fmt: skip
    (final,) = deque(walk(problem, data, variant, noise, lrs=cell["lrs"], eps=cell["eps"]), maxlen=1)
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
