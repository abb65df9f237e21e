"""The badly scaled quadratic in pictures: where the noise goes in two dimensions, and which optimizer ends lowest.

`python -m dpoptim.theory.pictures FOLDER --only quadratic` and `--only ranking` make them again.
Which optimizer wins depends on the setting. With spread examples scaling before the noise does; at spread=0 all
examples clip alike, a small clip norm costs nothing, and DP-SGD ends lowest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.noise import Strategy, StrategySpec
from dpoptim.noise.series import Series
from dpoptim.optim import twins
from dpoptim.theory import picture_style as style
from dpoptim.theory import second_moments, steady_state, update_noise
from dpoptim.theory.quadratic import VARIANTS, Path, Quadratic, simulate

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


def draw_ranking(figure: Any, results: Mapping[str, Sequence[Path]]) -> None:
    """Mean loss against step, a panel for each named setting, with the tuned settings beside the curves' ends."""
    if not results or not all(results.values()):
        raise ValueError("results is empty; give at least one path of simulate for each panel")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (name, paths) in zip(panels, results.items(), strict=True):
        private = [path for path in paths if "NOT private" not in VARIANTS[path.variant]]
        best = min(private or paths, key=last_loss).variant
        for path in paths:
            colour = style.METHODS.get(path.variant, style.BLACK)
            dashes, width = (
                "--" if "NOT private" in VARIANTS[path.variant] else "-",
                2.6 if path.variant == best else 1.3,
            )
            axes.plot(path.mean_loss, dashes, color=colour, linewidth=width, label=path.variant)
        style.label(axes, f"{name}: {best} ends lowest", "step", "mean of f(θ) − f(θ*), units of the loss", log="y")
        lowest = min(last_loss(path) for path in (private or paths))
        axes.set_ylim(bottom=lowest / 5)
    style.legend_below(figure, *panels, columns=4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plane:
    """The quadratic in two dimensions, at its start and on the way: arrays have two entries, the steep one first."""

    gradient: Series
    preconditioners: Mapping[str, Series]  # 1/√ν̂ with ν̂ at its mean
    noise: Mapping[str, Series]  # standard deviation on g̃ at the start
    trajectories: Mapping[str, Series]  # [runs, steps + 1, 2]


def plane(*, flat_curvature: float = 0.03, batch_size: int = 20, steps: int = 250, runs: int = 5) -> Plane:
    """f(θ) = ½(θ₁² + hθ₂²) from (1, 1), σ = 1: preconditioners and noise there, and runs of the slow twins.

    Flat clipping at the norm of the first gradient; scale-then-privatize at the least clip norm of its window. Equal
    examples.
    """
    curvatures = torch.tensor([1.0, flat_curvature], dtype=torch.float64)
    gradient = curvatures.numpy()
    norm = float(np.linalg.norm(gradient))
    setting: dict[str, float] = {"noise_multiplier": 1.0, "batch_size": batch_size}
    low, _ = steady_state.clip_norm_window(dimension=2, noise_multiplier=1.0, batch_size=batch_size)
    resting = steady_state.steady_state(gradient**2, clip_norm=low, **setting)
    phi = (norm / batch_size) ** 2
    noise = np.random.default_rng(1).standard_normal((runs, steps, 2))
    eps_scale, start = 1e-2, torch.ones(2, dtype=torch.float64)

    def gradients(theta: Tensor, t: int) -> Tensor:
        return (curvatures * theta).expand(batch_size, 2)

    adam = twins.Adam(lr=0.02, beta2=0.99)
    flat: dict[str, Any] = {"clip_norm": norm, "noise_stddev": norm, "batch_size": batch_size}
    scaled: dict[str, Any] = {"clip_norm": low, "noise_stddev": low, "batch_size": batch_size, "eps_scale": eps_scale}
    made: dict[str, list[Tensor]] = {"dp_sgd": [], "post_processing": [], "scale_then_privatize": []}
    for rows in torch.from_numpy(noise):
        made["dp_sgd"].append(twins.dp_sgd(start, gradients, rows, rule=twins.SGD(lr=0.02, momentum=0.9), **flat))
        made["post_processing"].append(twins.post_processing(start, gradients, rows, rule=adam, **flat))
        made["scale_then_privatize"].append(twins.scale_then_privatize(start, gradients, rows, rule=adam, **scaled))
    return Plane(
        gradient=gradient,
        preconditioners={
            "without noise": 1 / gradient,
            "post_processing": 1 / np.sqrt(second_moments.second_moment_mean(gradient, noise_variance=phi)),
            "scale_then_privatize": 1 / np.sqrt(resting),
        },
        noise={
            "post_processing": np.full(2, math.sqrt(phi)),
            "scale_then_privatize": update_noise.scaled_noise_stddev(1 / np.sqrt(resting), clip_norm=low, **setting),
        },
        trajectories={
            name: torch.stack([torch.cat([start[None], path]) for path in paths]).numpy()
            for name, paths in made.items()
        },
    )


def draw_plane(figure: Any, data: Plane) -> None:
    """Preconditioners as bars, noise as ellipses around the gradient, runs as paths over the level lines of f."""
    from matplotlib.patches import Ellipse

    bars, ellipses, runs = figure.subplots(1, 3, width_ratios=[3, 4, 4])
    for index, (name, values) in enumerate(data.preconditioners.items()):
        bars.bar(np.arange(2) + (index - 1) * 0.27, values, 0.25, color=style.METHODS[name], label=name)
    style.label(bars, "preconditioner 1/√ν̂", "", "1/√ν̂, θ-units / loss", log="y")
    bars.set_xticks([0, 1], [f"θ₁, g = {data.gradient[0]:g}", f"θ₂, g = {data.gradient[1]:g}"])
    for name, stddev in data.noise.items():
        colour = style.METHODS[name]
        for times, alpha in ((1, 0.35), (2, 0.15)):
            ellipses.add_patch(
                Ellipse((data.gradient[0], data.gradient[1]), *(2 * times * stddev), color=colour, alpha=alpha, lw=0)
            )
    ellipses.axhline(0, color=style.GREY, lw=0.8, ls=":")
    ellipses.plot(*data.gradient, "k+", markersize=9)
    reach = 2.6 * max(float(stddev.max()) for stddev in data.noise.values())
    ellipses.set(xlim=(data.gradient[0] - reach, data.gradient[0] + reach), ylim=(-reach, reach), aspect="equal")
    style.label(ellipses, "noise of one step, 1 and 2 std", "g̃₁, loss / θ-unit", "g̃₂, loss / θ-unit")
    for name, paths in data.trajectories.items():
        for index, path in enumerate(paths):
            runs.plot(*path.T, color=style.METHODS[name], lw=1.1, alpha=0.75, label=name if index == 0 else None)
    runs.plot(0, 0, "k*", markersize=10)
    style.label(runs, f"{data.trajectories['dp_sgd'].shape[1] - 1} steps from (1, 1)", "θ₁ (steep)", "θ₂ (flat)")
    style.legend_below(figure, bars, runs, columns=4)
