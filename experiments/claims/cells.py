"""The claims as cells. A result holds plain numbers; `table` rows of the report are made from them alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dpoptim import theory
from dpoptim.noise import BandedToeplitz, DecayedSums, Strategy
from dpoptim.noise.series import Series
from experiments.claims import simulations
from experiments.framework import Outcome
from experiments.quadratic.problem import GRIDS, Quadratic, last_loss, simulate, tuned

Cell = dict[str, Any]
SIZES: dict[str, dict[str, int]] = {
    "smoke": {"pair_steps": 60, "repeats": 20, "steps": 60, "draws": 50, "runs": 6, "tuning_runs": 3, "values": 1},
    "small": {
        "pair_steps": 2000, "repeats": 100, "steps": 500, "draws": 300, "runs": 200, "tuning_runs": 20, "values": 9,
    },
    "paper": {
        "pair_steps": 4000, "repeats": 400, "steps": 2000, "draws": 1000, "runs": 1000, "tuning_runs": 40, "values": 9,
    },
}  # fmt: skip
RATIO_STEPS = {"smoke": 60, "small": 300, "paper": 600}
BEGIN = 100  # steps; the ratio of second moments is reported from there on
COORDINATES = 9  # of which the error of a strategy is computed


def cells(scale: str) -> list[Cell]:
    """All cells of a scale."""
    size, found = SIZES[scale], list[Cell]()
    for variant, noise in (("noiseless_preconditioner", 0.1), ("post_processing", 0.1), ("scale_then_privatize", 0.7)):
        for kind in ("privacy", "data"):
            found.append({
                "quantity": "same gradients", "variant": variant, "noise_from": kind, "noise": noise,
                "curvatures": [1.0, 0.01], "lr": 0.01, "betas": [0.9, 0.999], "steps": size["pair_steps"],
                "repeats": size["repeats"], "seed": len(found),
            })  # fmt: skip
    for steps in (2, 3, 5):
        found.append({"quantity": "decayed sums", "case": "brute force", "steps": steps, "beta2": 0.8})
    for case in ("decayed sums", "prefix sums", "square of decayed sums"):
        found.append({"quantity": "decayed sums", "case": case, "steps": size["steps"], "beta2": 0.999,
                      "draws": size["draws"], "seed": len(found)})  # fmt: skip
    for profile in simulations.PROFILES:
        found.append({
            "quantity": "ratio", "profile": profile, "steps": RATIO_STEPS[scale], "dimension": 400, "clip_norm": 25.0,
            "noise_over_batch": 0.01, "beta2": 0.999, "seed": len(found),
        })  # fmt: skip
    for variant, spread in (
        ("post_processing", None), ("side_information", None), ("side_information", [0.1, 10.0]),
        ("scale_then_privatize", None), ("adadps", None), ("adadps", [0.1, 10.0]),
    ):  # fmt: skip
        found.append({
            "quantity": "side information", "variant": variant, "public_spread": spread, "spread": 1.0,
            "steps": 300 if scale != "smoke" else 20, "repeats": size["runs"], "tuning_repeats": size["tuning_runs"],
            "grid": {name: list(values[: size["values"]]) for name, values in GRIDS[variant].items()}, "seed": 0,
        })  # fmt: skip
    return found


def compute(cell: Cell) -> Outcome:
    """One cell."""
    return Outcome(result=_COMPUTE[cell["quantity"]](cell), note="public synthetic numbers; nothing here is private")


def _same_gradients(cell: Cell) -> dict[str, Any]:
    given = {name: cell[name] for name in ("noise", "lr", "steps", "repeats", "seed")}
    ratio, flat_rms, loss, error, _ = simulations.same_gradients(
        cell["variant"], private=cell["noise_from"] == "privacy", curvatures=tuple(cell["curvatures"]),
        betas=tuple(cell["betas"]), **given,
    )  # fmt: skip
    return {"preconditioner_ratio": ratio, "flat_rms": flat_rms, "loss": loss, "standard_error": error}


def strategy_for(case: str, *, steps: int, beta2: float) -> Strategy:
    """The optimal Toeplitz strategy for decayed sums, or for prefix sums."""
    if case == "prefix sums":
        return BandedToeplitz(bands=steps).optimize(steps=steps)
    return BandedToeplitz(bands=steps, workload=DecayedSums(beta=beta2, debiased=False)).optimize(steps=steps)


def _decayed_sums(cell: Cell) -> dict[str, Any]:
    """How many times less noise a strategy leaves on ν than independent noise; for brute force, the best one found."""
    steps, beta2 = cell["steps"], cell["beta2"]
    strategy = strategy_for(cell["case"], steps=steps, beta2=beta2)
    if cell["case"] == "brute force":
        best = simulations.best_gain(beta2=beta2, steps=steps)
        predicted, most = theory.averaging_gain(strategy, beta2=beta2), simulations.gain_bound(beta2=beta2, steps=steps)
        return {"predicted": predicted, "simulated": best, "standard_error": None, "bound": most}
    square = cell["case"].startswith("square")
    bound: float | None = None
    if square:
        law = {"step": steps, "beta2": beta2}
        own = theory.second_moment_variance(noise_variance=strategy.column_norm**2, strategy=strategy, **law)
        predicted = math.sqrt(theory.second_moment_variance(noise_variance=1.0, **law) / own)
    else:
        predicted = theory.averaging_gain(strategy, beta2=beta2)
        bound = simulations.gain_bound(beta2=beta2, steps=steps)
    found = simulations.noise_ratio(
        strategy.noising_matrix() * strategy.column_norm, beta2=beta2, square=square, draws=cell["draws"],
        seed=cell["seed"],
    )  # fmt: skip
    return {"predicted": predicted, "simulated": found.value, "standard_error": found.standard_error, "bound": bound}


def _ratio(cell: Cell) -> dict[str, Any]:
    """ν̂_t/ν̂_{t−1} of scale-then-privatize, and how much a strategy for plain prefix sums loses on real updates."""
    steps = cell["steps"]
    strategy = strategy_for("prefix sums", steps=steps, beta2=cell["beta2"])
    noising = strategy.noising_matrix() * strategy.column_norm
    gradient = simulations.gradients(cell["profile"], steps=steps, dimension=cell["dimension"], seed=cell["seed"])
    given = {name: cell[name] for name in ("clip_norm", "noise_over_batch", "beta2", "seed")}
    scaled, plain = (simulations.second_moments(gradient, noising, scaled=each, **given) for each in (True, False))
    ratios = scaled[1:] / scaled[:-1]
    late = ratios[min(BEGIN, steps // 2) :]
    picked = np.linspace(0, cell["dimension"] - 1, COORDINATES).astype(int)
    shown = np.unique(np.geomspace(1, steps, 40).round().astype(int)) - 1
    return {
        "quantiles": _quantiles(late),
        "outside_1_percent": float((np.abs(late - 1) > 0.01).mean()),
        "steps": [int(t) + 1 for t in shown],
        "by_step": [_quantiles(ratios[t]) for t in shown],
        "constant_excess": simulations.excess_error(noising, np.ones(steps)),
        "scaled_excess": [simulations.excess_error(noising, np.sqrt(1 / ratios[:, i])) for i in picked],
        "plain_excess": [simulations.excess_error(noising, 1 / np.sqrt(plain[1:, i])) for i in picked],
    }  # fmt: skip


def _quantiles(values: Series) -> list[float]:
    """The least, 5 %, the median, 95 % and the largest."""
    return [float(x) for x in np.quantile(values, (0.0, 0.05, 0.5, 0.95, 1.0))]


def _side_information(cell: Cell) -> dict[str, Any]:
    """Tuned with one seed, run with the next, as in the experiment on the quadratic."""
    problem = Quadratic(
        spread=cell["spread"], steps=cell["steps"], repeats=cell["tuning_repeats"], seed=cell["seed"],
        public_spread=None if cell["public_spread"] is None else tuple(cell["public_spread"]),
    )  # fmt: skip
    best = tuned(problem, cell["variant"], **cell["grid"])
    path = simulate(dataclasses.replace(best, repeats=cell["repeats"], seed=cell["seed"] + 1), cell["variant"])
    return {
        "tuned": {name: float(getattr(best, name)) for name in cell["grid"]},
        "at_edge": [name for name, values in cell["grid"].items() if getattr(best, name) in (values[0], values[-1])],
        "loss": last_loss(path),
    }


_COMPUTE: dict[str, Callable[[Cell], dict[str, Any]]] = {
    "same gradients": _same_gradients,
    "decayed sums": _decayed_sums,
    "ratio": _ratio,
    "side information": _side_information,
}
