"""The badly scaled quadratic in two dimensions, one cell per variant: tuned on one seed, run on the next.

    f(θ) = ½(h₁θ₁² + h₂θ₂²),   g_j = h⊙(θ − x_j),   x_j ~ N(0, spread²)

The setting is our own, because the paper shows its example in pictures only.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from dpoptim import optim
from dpoptim.noise.series import Series
from dpoptim.optim import reference
from dpoptim.optim.variants import noise_level
from dpoptim.privacy import (
    Gradient,
    IndependentMoments,
    JointMoments,
    NoiselessSquare,
    PrivacyPlan,
    Release,
)
from experiments.framework import Outcome
from experiments.quadratic.problem import GRIDS, QUANTILES, VARIANTS, Path, Quadratic, simulate, tuned

Cell = dict[str, Any]
DELTA = 1e-5
SIZES: dict[str, dict[str, int]] = {
    "smoke": {"steps": 20, "repeats": 6, "tuning_repeats": 3, "values": 1},
    "small": {"steps": 300, "repeats": 200, "tuning_repeats": 20, "values": 9},
    "paper": {"steps": 300, "repeats": 1000, "tuning_repeats": 40, "values": 9},
}
RUNS, POINTS = 4, 24  # trajectories kept, and points on each
_RELEASES: dict[str, Release] = {
    "independent_moments": IndependentMoments(),
    "joint_moments": JointMoments(),
    "noiseless_preconditioner": NoiselessSquare(),
    "noiseless_scale_then_privatize": NoiselessSquare(),
}


def cells(scale: str) -> list[Cell]:
    """Every variant, with spread examples and with equal ones."""
    size = SIZES[scale]
    problem = Quadratic(steps=size["steps"], repeats=size["repeats"])
    found = []
    for spread in (1.0, 0.0):
        for variant in VARIANTS:
            grid = {name: list(values[: size["values"]]) for name, values in GRIDS[variant].items()}
            found.append(
                {
                    "variant": variant, "spread": spread, "curvatures": list(problem.curvatures),
                    "start": list(problem.start), "batch_size": problem.batch_size,
                    "noise_multiplier": problem.noise_multiplier, "noise": "independent", "steps": problem.steps,
                    "betas": list(problem.betas), "grid": grid, "tuning_repeats": size["tuning_repeats"],
                    "repeats": problem.repeats, "seed": problem.seed,
                }
            )  # fmt: skip
    return found


def compute(cell: Cell) -> Outcome:
    """Tune on the grid, run with the next seed, and keep what the tables and pictures show."""
    problem = Quadratic(
        curvatures=tuple(cell["curvatures"]), start=tuple(cell["start"]), spread=cell["spread"],
        batch_size=cell["batch_size"], noise_multiplier=cell["noise_multiplier"], steps=cell["steps"],
        betas=tuple(cell["betas"]), repeats=cell["tuning_repeats"], seed=cell["seed"],
    )  # fmt: skip
    variant = cell["variant"]
    best = tuned(problem, variant, **cell["grid"])
    path = simulate(dataclasses.replace(best, repeats=cell["repeats"], seed=cell["seed"] + 1), variant)
    plan = plan_of(path.problem, variant)
    last = max(1, cell["steps"] // 10)
    nu_hat = path.second_moment[-last:].mean(0)
    result = {
        "tuned": {name: float(getattr(best, name)) for name in cell["grid"]},
        "at_edge": [name for name, values in cell["grid"].items() if getattr(best, name) in (values[0], values[-1])],
        "final_loss_quantiles": dict(zip(map(str, QUANTILES), _plain(path.loss_quantiles[:, -1]), strict=True)),
        "final_mean_loss": _plain(path.mean_loss[-1:])[0],
        "mean_loss_last_tenth": _plain(path.mean_loss[-last:].mean(keepdims=True))[0],
        "second_moment": _plain(nu_hat),
        "gradient_rms": _plain(np.sqrt(path.squared_gradient[-last:].mean(0))),
        "negative": _plain(path.negative[-last:].mean(0)),
        "preconditioner": _plain(preconditioner(path, nu_hat, plan)),
        "noise_stddev": _plain(noise_axes(path, nu_hat)),
        "trajectories": trajectories(path),
    }
    private = plan.is_private
    return Outcome(
        result=result,
        plan=None if math.isinf(plan.clip_norm) else plan.to_dict(),
        epsilon=plan.epsilon(delta=DELTA) if private else None,
        adjacency=plan.adjacency.value if private else None,
        note=f"delta {DELTA:g}; one run at the tuned settings, tuning not counted" if private else VARIANTS[variant],
    )


def plan_of(problem: Quadratic, variant: str) -> PrivacyPlan:
    """The simulation's plan with the variant's release."""
    if variant == "adam":
        problem = dataclasses.replace(problem, clip_norm=math.inf, noise_multiplier=0.0)
    return problem.plan().with_release(_RELEASES.get(variant, Gradient()))


def preconditioner(path: Path, nu_hat: Series, plan: PrivacyPlan) -> Series:
    """1/(√max(ν̂, 0) + ε), for bias correction 1/√max(ν̂, ε²), and 1 for DP-SGD, with ν̂ at its mean over repeats."""
    if path.variant == "dp_sgd":
        return np.ones_like(nu_hat)
    eps = optim.Adam.eps
    if path.variant in ("bias_correction", "independent_moments", "joint_moments"):
        eps = max(eps, noise_level(plan, plan.release))  # the library's floor, which the simulation also uses
    if path.variant == "bias_correction":
        return np.asarray(1 / np.sqrt(np.maximum(nu_hat, eps**2)))
    return np.asarray(1 / (np.sqrt(np.maximum(nu_hat, 0.0)) + eps))


def noise_axes(path: Path, nu_hat: Series) -> Series:
    """The half axes of the noise ellipse on g̃: √φ, divided by s if gradients are scaled, with ν̂ at its mean."""
    level = np.full(len(nu_hat), math.sqrt(path.noise_variance[-1]))
    if not path.variant.endswith("scale_then_privatize"):
        return level
    assert path.problem.eps_scale is not None
    scale = reference.scale_of(
        torch.from_numpy(nu_hat), exponent=0.5, eps_scale=path.problem.eps_scale, normalised=True
    ).numpy()
    return np.asarray(level / scale)


def trajectories(path: Path) -> dict[str, Any]:
    """A few runs at steps evenly spaced in logarithm: {"steps", "theta" [runs][points][coordinates]}.

    The state after t steps is the end of a run of t steps with the same key, because normals depend only on the step.
    """
    problem = dataclasses.replace(path.problem, repeats=RUNS)
    steps = np.unique(np.geomspace(1, problem.steps, POINTS).round().astype(int)).tolist()
    ends = [simulate(dataclasses.replace(problem, steps=t), path.variant).final for t in steps]
    start = np.tile(np.array(problem.start), (RUNS, 1))
    theta = np.stack([start, *ends], axis=1)
    return {"steps": [0, *steps], "theta": [[_plain(point, 6) for point in run] for run in theta]}


def _plain(values: Series, digits: int | None = None) -> list[float | None]:
    """Plain values for JSON: None if not finite, optionally rounded to significant digits."""
    found = [float(value) for value in np.asarray(values).ravel()]
    if digits is not None:
        found = [float(f"{value:.{digits}g}") for value in found]
    return [value if math.isfinite(value) else None for value in found]
