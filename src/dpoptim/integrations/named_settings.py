"""Settings by name: from the words of a recipe or of PrivacyArguments to sampling, noise, plan and optimizer."""

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
    AdaptiveClipNorm,
    Adjacency,
    ColumnCounts,
    CyclicPoisson,
    FixedClipNorm,
    Gradient,
    IndependentMoments,
    JointMoments,
    NormalizedGradients,
    Poisson,
    PrivacyPlan,
    Release,
    Sampling,
    Shuffled,
)
from dpoptim.theory import choose_noise

CLIP_NORM = 0.1
"""The default: below the norm of nearly every gradient, so that only directions count. Adam undoes the scale."""

_NOISE: dict[str, tuple[Callable[..., StrategySpec], str | None]] = {
    "independent": (Independent, None),
    "square-root": (SquareRoot, None),
    "banded-toeplitz": (BandedToeplitz, "bands"),
    "banded-inverse": (BandedInverse, "bands"),
    "buffered-toeplitz": (BufferedToeplitz, "buffers"),
}
ADAPTIVE: dict[str, Callable[..., PrivateOptimizer]] = {
    "scale_then_privatize": scale_then_privatize,
    "post_processing": post_processing,
    "bias_correction": bias_correction,
    "independent_moments": independent_moments,
    "joint_moments": joint_moments,
}
_RELEASES: dict[str, Release] = {"independent_moments": IndependentMoments(), "joint_moments": JointMoments()}
_FLOORED = ("bias_correction", "independent_moments", "joint_moments")  # their default eps is the noise level

VARIANTS = (*ADAPTIVE, "dp_sgd")
CLIPPING: dict[str, FixedClipNorm] = {
    "fixed": FixedClipNorm(),
    "adaptive": AdaptiveClipNorm(),
    "normalized": NormalizedGradients(),
}
"""How gradients are bounded, by name. `GroupClipNorms` has no name, because it names parameters."""


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
    records_per_user: int | None = None,
    release: Release = Gradient(),  # noqa: B008
    counts: ColumnCounts | None = None,
    clipping: str = "fixed",
    exact_noise: bool = False,
    progress: Callable[[str], None] | None = None,
) -> PrivacyPlan:
    """Build a plan from numbers and names, and calibrate it if `epsilon` is given.

    noise="auto" chooses the noise with the least error among those with a privacy proof for the sampling. Without
    epsilon there is nothing to compare by, so "auto" is independent noise. sampling="auto" follows the noise: cyclic
    for banded noise, Poisson for independent noise, otherwise shuffled. Any other sampling is kept: "poisson" allows
    independent noise only, "cyclic:8" eight bands, and "cyclic" gets as many groups as the chosen noise has bands.
    """
    if sampling == "shuffled" and adjacency is Adjacency.ADD_REMOVE:
        raise ValueError(
            "sampling='shuffled' with adjacency='add_remove' has no proof. Set sampling to poisson, or adjacency to "
            "zero_out."
        )
    automatic = noise == "auto"
    kind = Independent() if automatic else noise_of(noise)
    try:
        plan = PrivacyPlan(
            num_examples=num_examples, batch_size=batch_size, steps=steps, clip_norm=clip_norm,
            sampling=sampling_of(sampling, kind), noise=kind, release=release, adjacency=adjacency,
            noise_multiplier=noise_multiplier, delta=delta, records_per_user=records_per_user,
            unit="example" if records_per_user is None else "user", counts=counts, clipping=CLIPPING[clipping],
            exact_noise=exact_noise,
        )  # fmt: skip
    except ValueError as error:
        if "amplification" not in str(error):
            raise
        raise ValueError(  # in the words of a recipe
            f"noise={noise!r} with sampling={sampling!r} has no proof. Leave sampling out: poisson is "
            "proved for independent noise, cyclic for banded-toeplitz with at most as many bands as groups."
        ) from error
    if epsilon is None:
        return plan
    if automatic and isinstance(plan.sampling, CyclicPoisson) and sampling != "cyclic" and plan.sampling.bands > 1:
        plan = plan.replace(noise=BandedToeplitz(bands=plan.sampling.bands))
    elif automatic and sampling in ("auto", "shuffled", "cyclic"):
        free = plan.replace(sampling=Poisson()) if sampling == "cyclic" else plan
        found = choose_noise(free, epsilon=epsilon, delta=delta, parameters=parameters, progress=progress).plan
        one_group = sampling == "cyclic" and isinstance(found.sampling, Poisson)
        return found.replace(sampling=CyclicPoisson(bands=1)) if one_group else found
    return plan.calibrate(epsilon=epsilon, delta=delta)


def noise_of(name: str) -> StrategySpec:
    """The noise with this name, such as "buffered-toeplitz:3"."""
    kind, _, number = name.partition(":")
    if kind not in _NOISE:
        raise ValueError(f"noise={name!r} must be auto or one of {', '.join(noise_words())}")
    make, argument = _NOISE[kind]
    if (argument is None) != (not number) or (number and not re.fullmatch("[1-9][0-9]{0,8}", number)):
        raise ValueError(f"noise={name!r} must be written as {_usage(kind)}")
    return make() if argument is None else make(**{argument: int(number)})


def has_correlated_noise(noise: str, sampling: str, *, has_epsilon: bool = True) -> bool:
    """Whether noise is strongly correlated, so that the learning rate should be larger.

    Adam divides by the noise of a step. Correlated noise is larger in each step and cancels over several. Secret
    batches leave little to correlate.
    """
    is_independent = noise == "independent" or (noise == "auto" and not has_epsilon)
    return sampling == "shuffled" and not is_independent


def noise_words() -> list[str]:
    """The names of all noises except "auto", such as "banded-toeplitz:BANDS"."""
    return [_usage(kind) for kind in _NOISE]


def name_of_noise(noise: Any) -> str:
    """The name of a noise, the reverse of `noise_of`."""
    for name, (make, argument) in _NOISE.items():
        if type(noise) is make:
            return name if argument is None else f"{name}:{getattr(noise, argument)}"
    raise ValueError(f"noise={noise!r} has no name")


def sampling_of(name: str, noise: StrategySpec) -> Sampling:
    """The sampling with this name; "cyclic" has as many groups as the noise has bands, and "auto" follows the noise."""
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
    """The name of a sampling, the reverse of `sampling_of`."""
    if isinstance(sampling, CyclicPoisson):
        return f"cyclic:{sampling.bands}"
    return "shuffled" if isinstance(sampling, Shuffled) else "poisson"


def release_of(variant: str) -> Release:
    """What each step of a variant releases."""
    return _RELEASES.get(variant, Gradient())


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
    **options: Any,  # averaged, external_batches, param_groups, run_id
) -> PrivateOptimizer:
    """Create the optimizer of a variant.

    Weight decay is decoupled, except in dp_sgd. The momentum of dp_sgd is betas[0]. eps=None is the variant's default:
    variants that need a floor use the noise level of the averaged gradient.
    """
    if eps_scale is not None and variant != "scale_then_privatize":
        raise ValueError(f"eps_scale={eps_scale} applies only to variant='scale_then_privatize'. Leave it out.")
    options["key"] = key
    if variant == "dp_sgd":
        return dp_sgd(model, plan, learning_rate, momentum=betas[0], weight_decay=weight_decay, **options)
    if eps is None:
        floor = noise_level(plan, release_of(variant)) if variant in _FLOORED else 0.0
        eps = max(floor, Adam().eps)
    if variant == "scale_then_privatize":
        options["eps_scale"] = eps_scale
    rule = Adam(betas=betas, eps=eps, weight_decay=weight_decay, decoupled=True)
    return ADAPTIVE[variant](model, plan, learning_rate, rule=rule, **options)


def steps_of(epochs: float, num_examples: int, batch_size: int) -> int:
    """⌈epochs·n/batch_size⌉, at least one."""
    return max(1, math.ceil(epochs * num_examples / batch_size - 1e-9))


def _usage(kind: str) -> str:
    argument = _NOISE[kind][1]
    return kind if argument is None else f"{kind}:{argument.upper()}"
