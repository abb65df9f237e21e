"""From a recipe's words to what trains under a guarantee: sampling, noise, plan, optimizer, learning rate."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from dpoptim.app.recipes.defaults import CLIP_NORM
from dpoptim.app.recipes.recipe import Recipe
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
_RELEASES: dict[str, Release] = {"independent_moments": IndependentMoments(), "joint_moments": JointMoments()}
_FLOORED = ("bias_correction", "independent_moments", "joint_moments")  # their own eps is the noise's level


def plan_of(
    recipe: Recipe, *, parameters: int | nn.Module, progress: Callable[[str], None] | None = None
) -> PrivacyPlan:
    """The calibrated plan of a complete recipe.

    noise="auto" asks `choose_noise`, which tries only what is proved for the sampling; with a noise multiplier in place
    of ε there is nothing to compare by, and it is independent noise. A sampling that is named is the plan's sampling;
    "auto" leaves it to the noise: cyclic for banded noise, Poisson for independent noise, else shuffled.
    Edge cases: one ValueError line for words that name no noise or sampling, and for pairs without a proof.
    """
    assert recipe.num_examples is not None  # filled in
    assert recipe.batch_size is not None
    assert recipe.steps is not None
    assert recipe.delta is not None
    if recipe.batch_size > recipe.num_examples:
        raise ValueError(
            f"batch_size={recipe.batch_size} is larger than the {recipe.num_examples} training records; give less, "
            f"such as {max(1, recipe.num_examples // 8)}, or leave it out"
        )
    return make_plan(
        num_examples=recipe.num_examples,
        batch_size=recipe.batch_size,
        steps=recipe.steps,
        clip_norm=recipe.clip_norm or CLIP_NORM,
        sampling=recipe.sampling,
        noise=recipe.noise,
        adjacency=Adjacency(recipe.adjacency),
        epsilon=recipe.epsilon,
        noise_multiplier=recipe.noise_multiplier,
        delta=recipe.delta,
        parameters=parameters,
        progress=progress,
    )


def make_plan(
    *,
    num_examples: int,
    batch_size: int,
    steps: int,
    clip_norm: float,
    sampling: str,
    noise: str,
    adjacency: Adjacency,
    epsilon: float | None,
    noise_multiplier: float | None,
    delta: float,
    parameters: int | nn.Module,
    release: Release = Gradient(),  # noqa: B008
    progress: Callable[[str], None] | None = None,
) -> PrivacyPlan:
    """The plan of these numbers and words, calibrated to ε where that is given: one for every front end.

    Edge cases: a pair of noise and sampling without a proof is refused in these words.
    """
    automatic = noise == "auto"
    kind = Independent() if automatic else noise_of(noise)
    try:
        plan = PrivacyPlan(
            num_examples=num_examples, batch_size=batch_size, steps=steps, clip_norm=clip_norm,
            sampling=sampling_of(sampling, kind), noise=kind, release=release, adjacency=adjacency,
            noise_multiplier=noise_multiplier, delta=delta,
        )  # fmt: skip
    except ValueError as error:
        if "no proof" not in str(error):
            raise
        raise ValueError(
            f"noise={noise!r} with sampling={sampling!r} has no proof of its privacy: secret sampling is proved for "
            "independent noise, and cyclic for banded-toeplitz with at most as many bands as groups; leave sampling "
            "out, or use shuffled, which goes with every noise"
        ) from error
    if epsilon is None:
        return plan
    return calibrated(
        plan, sampling=sampling, automatic=automatic, epsilon=epsilon, parameters=parameters, progress=progress
    )


def calibrated(
    plan: PrivacyPlan,
    *,
    sampling: str,
    automatic: bool,
    epsilon: float,
    parameters: int | nn.Module,
    progress: Callable[[str], None] | None = None,
) -> PrivacyPlan:
    """The plan with the noise for ε; with `automatic`, of the least error that is proved for the sampling.

    Guarantee: the sampling is the one that was named. "poisson" leaves independent noise alone, "cyclic:8" eight bands,
    and "cyclic" as many groups as the chosen noise has bands, one where that is independent.
    """
    delta = plan.delta
    assert delta is not None
    if automatic and isinstance(plan.sampling, CyclicPoisson) and sampling != "cyclic" and plan.sampling.bands > 1:
        plan = plan.replace(noise=BandedToeplitz(bands=plan.sampling.bands))
    elif automatic and sampling in ("auto", "shuffled", "cyclic"):
        free = plan.replace(sampling=Poisson()) if sampling == "cyclic" else plan
        found = choose_noise(free, epsilon=epsilon, delta=delta, parameters=parameters, progress=progress).plan
        one_group = sampling == "cyclic" and isinstance(found.sampling, Poisson)
        return found.replace(sampling=CyclicPoisson(bands=1)) if one_group else found
    return plan.calibrate(epsilon=epsilon, delta=delta)


def noise_of(name: str) -> StrategySpec:
    """The noise that a recipe names.

    >>> noise_of("buffered-toeplitz:3")
    BufferedToeplitz(buffers=3)
    """
    kind, _, number = name.partition(":")
    if kind not in _NOISE:
        raise ValueError(f"noise={name!r} must be auto or one of {', '.join(noise_words())}")
    make, argument = _NOISE[kind]
    if (argument is None) != (not number) or (number and not re.fullmatch("[1-9][0-9]{0,8}", number)):
        raise ValueError(f"noise={name!r} must be written as {_usage(kind)}")
    return make() if argument is None else make(**{argument: int(number)})


def noise_words() -> list[str]:
    """How a recipe names each noise; "auto" is left out.

    >>> noise_words()
    ['independent', 'square-root', 'banded-toeplitz:BANDS', 'banded-inverse:BANDS', 'buffered-toeplitz:BUFFERS']
    """
    return [_usage(kind) for kind in _NOISE]


def name_of_noise(noise: Any) -> str:
    """The word for a noise, the reverse of `noise_of`.

    >>> name_of_noise(BandedToeplitz(bands=8))
    'banded-toeplitz:8'
    """
    for name, (make, argument) in _NOISE.items():
        if type(noise) is make:
            return name if argument is None else f"{name}:{getattr(noise, argument)}"
    raise ValueError(f"noise={noise!r} has no word in a recipe")


def sampling_of(name: str, noise: StrategySpec) -> Sampling:
    """The sampling that a recipe names; "cyclic" has as many groups as the noise has bands.

    "auto" is the secret sampling that is proved for the noise (Poisson for independent noise, cyclic for banded), and
    shuffled where none is.

    >>> sampling_of("cyclic", BandedToeplitz(bands=8)), sampling_of("auto", BufferedToeplitz(buffers=2))
    (CyclicPoisson(bands=8), Shuffled())
    """
    kind, _, number = name.partition(":")
    if kind == "cyclic" and (not number or re.fullmatch("[1-9][0-9]{0,8}", number)):
        bands = int(number) if number else int(getattr(noise, "bands", 1))
        return CyclicPoisson(bands=bands)
    if name == "auto" and isinstance(noise, BandedToeplitz):
        return CyclicPoisson(bands=noise.bands)
    if name == "poisson" or (name == "auto" and isinstance(noise, Independent)):
        return Poisson()
    if name in ("shuffled", "auto"):
        return Shuffled()
    raise ValueError(f"sampling={name!r} must be auto, poisson, shuffled, cyclic or cyclic:GROUPS")


def name_of_sampling(sampling: Sampling) -> str:
    """The word for a sampling, the reverse of `sampling_of`."""
    if isinstance(sampling, CyclicPoisson):
        return f"cyclic:{sampling.bands}"
    return "shuffled" if isinstance(sampling, Shuffled) else "poisson"


def release_of(variant: str) -> Release:
    """What a variant's steps release: for most of them the gradient alone.

    >>> release_of("bias_correction"), release_of("joint_moments")
    (Gradient(), JointMoments(square_weight=None))
    """
    return _RELEASES.get(variant, Gradient())


def optimizer_of(
    recipe: Recipe, model: nn.Module, plan: PrivacyPlan, *, key: NoiseKey | None = None, **options: Any
) -> PrivateOptimizer:
    """The optimizer of a complete recipe; the model's layers are then watched by it."""
    assert recipe.learning_rate is not None
    return make_optimizer(
        recipe.variant,
        model,
        plan,
        learning_rate=recipe.learning_rate,
        betas=recipe.betas,
        eps=recipe.eps,
        eps_scale=recipe.eps_scale,
        weight_decay=recipe.weight_decay,
        key=key,
        **options,
    )


def make_optimizer(
    variant: str,
    model: nn.Module,
    plan: PrivacyPlan,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float | None,
    eps_scale: float | None,
    weight_decay: float,
    key: NoiseKey | None,
    **options: Any,  # external_batches, param_groups, run_id
) -> PrivateOptimizer:
    """The optimizer of a variant by name: one for every front end.

    Weight decay is decoupled (in dp_sgd it is not), the momentum of dp_sgd is betas[0]. eps=None is the variant's own:
    for those that need a floor, the noise's level on the averaged gradient.
    """
    if eps_scale is not None and variant != "scale_then_privatize":
        raise ValueError(f"eps_scale={eps_scale} is for variant='scale_then_privatize' alone; leave it out")
    options["key"] = key
    if variant == "dp_sgd":
        return dp_sgd(model, plan, learning_rate, momentum=betas[0], weight_decay=weight_decay, **options)
    if eps is None:
        floor = noise_level(plan, release_of(variant)) if variant in _FLOORED else 0.0
        eps = max(floor, Adam().eps)
    if variant == "scale_then_privatize":
        options["eps_scale"] = eps_scale
    rule = Adam(betas=betas, eps=eps, weight_decay=weight_decay, decoupled=True)
    return _VARIANTS[variant](model, plan, learning_rate, rule=rule, **options)


def learning_rate_at(recipe: Recipe, step: int) -> float:
    """The learning rate of step `step` (from 0) of a complete recipe: a pure function, so that nothing is to be saved.

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
