"""From a recipe's words to what trains under a guarantee: sampling, noise, plan, optimizer, learning rate."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from dpoptim.noise import (
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    Independent,
    NoiseKey,
    SquareRoot,
    StrategySpec,
)
from dpoptim.optim import (
    Adam,
    PrivateOptimizer,
    bias_correction,
    dp_sgd,
    independent_moments,
    joint_moments,
    post_processing,
    scale_then_privatize,
)
from dpoptim.optim.variants import noise_level
from dpoptim.privacy import (
    Adjacency,
    CyclicPoisson,
    Gradient,
    IndependentMoments,
    JointMoments,
    Poisson,
    PrivacyPlan,
    Release,
    Sampling,
    Shuffled,
)
from dpoptim.theory import choose_noise
from dpoptim.training.recipes.recipe import Recipe

_NOISE: dict[str, tuple[Callable[..., StrategySpec], str | None]] = {
    "independent": (Independent, None),
    "square-root": (SquareRoot, None),
    "banded-toeplitz": (BandedToeplitz, "bands"),
    "banded-inverse": (BandedInverse, "bands"),
    "buffered-toeplitz": (BufferedToeplitz, "buffers"),
}
_VARIANTS: dict[str, Callable[..., PrivateOptimizer]] = {
    "scale_then_privatize": scale_then_privatize,
    "post_processing": post_processing,
    "bias_correction": bias_correction,
    "independent_moments": independent_moments,
    "joint_moments": joint_moments,
}
_FLOORED: dict[str, Release] = {
    "bias_correction": Gradient(),
    "independent_moments": IndependentMoments(),
    "joint_moments": JointMoments(),
}


def plan_of(
    recipe: Recipe, *, parameters: int | nn.Module, progress: Callable[[str], None] | None = None
) -> PrivacyPlan:
    """The calibrated plan of a settled recipe.

    noise="auto" asks `choose_noise`, which tries only what is proved for the sampling; with a noise multiplier in place
    of ε there is nothing to compare by, and it is independent noise.
    Edge cases: one ValueError line for words that name no noise or sampling, and for pairs without a proof.
    """
    assert recipe.num_examples is not None  # settled
    assert recipe.batch_size is not None
    assert recipe.steps is not None
    assert recipe.delta is not None
    if recipe.batch_size > recipe.num_examples:
        raise ValueError(
            f"batch_size={recipe.batch_size} is larger than the {recipe.num_examples} training records; give at most "
            f"{max(1, recipe.num_examples // 8)} or leave it out"
        )
    automatic = recipe.noise == "auto"
    noise = Independent() if automatic else noise_of(recipe.noise)
    plan = PrivacyPlan(
        num_examples=recipe.num_examples,
        batch_size=recipe.batch_size,
        steps=recipe.steps,
        clip_norm=recipe.clip_norm or 1.0,
        sampling=sampling_of(recipe.sampling, noise, automatic=automatic),
        noise=noise,
        adjacency=Adjacency(recipe.adjacency),
        noise_multiplier=recipe.noise_multiplier,
        delta=recipe.delta,
    )
    if recipe.epsilon is None:
        return plan
    if not automatic:
        return plan.calibrate(epsilon=recipe.epsilon, delta=recipe.delta)
    return choose_noise(plan, epsilon=recipe.epsilon, delta=recipe.delta, parameters=parameters, progress=progress).plan


def noise_of(name: str) -> StrategySpec:
    """The noise that a recipe names.

    >>> noise_of("buffered-toeplitz:3")
    BufferedToeplitz(buffers=3)
    """
    kind, _, number = name.partition(":")
    if kind not in _NOISE:
        raise ValueError(f"noise={name!r} must be auto or one of {', '.join(map(_usage, _NOISE))}")
    make, argument = _NOISE[kind]
    if (argument is None) != (not number) or (number and not re.fullmatch("[1-9][0-9]{0,8}", number)):
        raise ValueError(f"noise={name!r} must be written as {_usage(kind)}")
    return make() if argument is None else make(**{argument: int(number)})


def name_of_noise(noise: Any) -> str:
    """The word for a noise, the reverse of `noise_of`.

    >>> name_of_noise(BandedToeplitz(bands=8))
    'banded-toeplitz:8'
    """
    for name, (make, argument) in _NOISE.items():
        if type(noise) is make:
            return name if argument is None else f"{name}:{getattr(noise, argument)}"
    raise ValueError(f"noise={noise!r} has no word in a recipe")


def sampling_of(name: str, noise: StrategySpec, *, automatic: bool = False) -> Sampling:
    """The sampling that a recipe names; "cyclic" has as many groups as the noise has bands.

    >>> sampling_of("cyclic", BandedToeplitz(bands=8))
    CyclicPoisson(bands=8)
    """
    kind, _, number = name.partition(":")
    if kind == "cyclic" and (not number or re.fullmatch("[1-9][0-9]{0,8}", number)):
        bands = int(number) if number else int(getattr(noise, "bands", 1))
        return Poisson() if automatic and not number else CyclicPoisson(bands=bands)
    if name == "poisson":
        return Poisson()
    if name == "shuffled":
        return Shuffled()
    raise ValueError(f"sampling={name!r} must be poisson, shuffled, cyclic or cyclic:GROUPS")


def name_of_sampling(sampling: Sampling) -> str:
    """The word for a sampling, the reverse of `sampling_of`."""
    if isinstance(sampling, CyclicPoisson):
        return f"cyclic:{sampling.bands}"
    return "shuffled" if isinstance(sampling, Shuffled) else "poisson"


def optimizer_of(
    recipe: Recipe, model: nn.Module, plan: PrivacyPlan, *, key: NoiseKey | None = None, own_batches: bool = False
) -> PrivateOptimizer:
    """The optimizer of a settled recipe; the model's layers are then watched by it."""
    assert recipe.learning_rate is not None
    options: dict[str, Any] = {"key": key, "own_batches": own_batches}
    if recipe.eps_scale is not None and recipe.variant != "scale_then_privatize":
        raise ValueError(f"eps_scale={recipe.eps_scale} is for variant='scale_then_privatize' alone; leave it out")
    if recipe.variant == "dp_sgd":
        momentum, decay = recipe.betas[0], recipe.weight_decay
        return dp_sgd(model, plan, recipe.learning_rate, momentum=momentum, weight_decay=decay, **options)
    floored = recipe.variant in _FLOORED
    plain = recipe.betas == Adam().betas and not recipe.weight_decay
    if recipe.eps is not None or not (floored and plain):
        eps = recipe.eps if recipe.eps is not None else (_floor(recipe, plan) if floored else Adam().eps)
        options["rule"] = Adam(
            betas=recipe.betas, eps=eps, weight_decay=recipe.weight_decay, decoupled=recipe.weight_decay > 0
        )
    if recipe.variant == "scale_then_privatize":
        options["eps_scale"] = recipe.eps_scale
    return _VARIANTS[recipe.variant](model, plan, recipe.learning_rate, **options)


def _floor(recipe: Recipe, plan: PrivacyPlan) -> float:
    """What the variants that need a floor take by themselves: the noise's own level on the averaged gradient."""
    return max(noise_level(plan, _FLOORED[recipe.variant]), Adam().eps)


def learning_rate_at(recipe: Recipe, step: int) -> float:
    """The learning rate of step `step` (from 0) of a settled recipe: a pure function, so that nothing is to be saved.

        rate · min(1, (step + 1)/warm) · decay,  decay = 1, 1 − x or (1 + cos πx)/2,  x = (step − warm)/(steps − warm)

    >>> recipe = Recipe(model="m", data="d", epsilon=1.0, steps=4, learning_rate=1.0, warmup=0.0)
    >>> [learning_rate_at(recipe, step) for step in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    assert recipe.learning_rate is not None
    assert recipe.steps is not None
    warm = int(recipe.warmup * recipe.steps)
    if step < warm:
        return recipe.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, recipe.steps - warm)
    decay = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}
    return recipe.learning_rate * decay[recipe.schedule]


def _usage(kind: str) -> str:
    argument = _NOISE[kind][1]
    return kind if argument is None else f"{kind}:{argument.upper()}"
