"""The paper's optimizers, each one expression: release, geometry, second moment, update rule.

Every variant takes `model`, a calibrated `plan`, `lr`, and the keyword arguments of `PrivateOptimizer` from
`param_groups` on. A `rule` is Adam(), AdamW(), AdaGrad() or RMSProp(), with betas, eps and weight_decay as its
arguments. Every variant raises ValueError for arguments of the wrong type or out of range.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict, Unpack

from torch import Tensor, nn

from dpoptim.arguments import check_number
from dpoptim.noise import NoiseKey, NoiseMemory, StrategySpec
from dpoptim.optim.geometries import Delayed, Flat, FromPublic, Geometry, InverseRoot
from dpoptim.optim.optimizer import PrivateOptimizer, check_plan
from dpoptim.optim.rules import SGD, AdaGrad, Adam, UpdateRule
from dpoptim.optim.second_moments import (
    NoiseCorrected,
    NoSecondMoment,
    OfNoisyGradient,
    OfPublicGradient,
    OfReleasedSquare,
    OfScale,
)
from dpoptim.privacy import Gradient, IndependentMoments, JointMoments, NoiselessSquare, PrivacyPlan, Release


class Common(TypedDict, total=False):
    """Keyword arguments that every variant takes; see `PrivateOptimizer`."""

    param_groups: Iterable[dict[str, Any]] | None
    loss_reduction: Literal["sum", "mean"]
    key: NoiseKey | None
    run_id: str | None
    noise_memory: NoiseMemory
    clipping_memory: int
    averaged: float | None
    external_batches: bool
    allow_mixing: str | None


ADAM = Adam()


def dp_sgd(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """Create DP-SGD: buf ← momentum·buf + g̃, θ ← θ − lr·buf. Under a plan with correlated noise this is DP-MF.

    Args:
        momentum: The momentum of the buffer.
        weight_decay: Added to the noisy gradient.
    """
    rule = SGD(momentum=momentum, weight_decay=weight_decay)
    return PrivateOptimizer(model, plan, lr=lr, rule=rule, second_moment=NoSecondMoment(), **common)


def post_processing(
    model: nn.Module, plan: PrivacyPlan, lr: float = 1e-3, *, rule: UpdateRule = ADAM, **common: Unpack[Common]
) -> PrivateOptimizer:
    """Create the rule on the noisy gradient: ν of g̃², update μ̂ / (√ν̂ + eps)."""
    return PrivateOptimizer(model, plan, lr=lr, rule=_adaptive(rule), second_moment=OfNoisyGradient(), **common)


def bias_correction(
    model: nn.Module, plan: PrivacyPlan, lr: float = 1e-3, *, rule: UpdateRule | None = None, **common: Unpack[Common]
) -> PrivateOptimizer:
    """Create post-processing with the noise's known bias removed from ν̂: update μ̂ / √max(ν̂ − b_t, eps²).

    Args:
        rule: The update rule; its eps is the floor and must be positive. None is Adam with eps at the noise's standard
            deviation (the paper's best value, 1e-4, is close to it). Then no coordinate moves by more than about
            g̃/noise·lr.
    """
    rule = _floored(rule, plan, Gradient())
    if not rule.eps > 0:
        raise ValueError(f"rule has eps={rule.eps}, but bias correction needs a positive floor. Try the noise's level.")
    return PrivateOptimizer(model, plan, lr=lr, rule=rule, second_moment=NoiseCorrected(), **common)


def independent_moments(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float = 1e-3,
    *,
    rule: UpdateRule | None = None,
    balance: float | Literal["equal", "mse"] | None = None,
    squares: Literal["of_average", "average_of"] | None = None,
    square_noise: StrategySpec | None = None,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """Create IME: release g and g² with separate noise at one joint sensitivity; update μ̂ / (√max(ν̂, 0) + eps).

    Omitted arguments default to those of `plan.release` if it is an `IndependentMoments`.

    Args:
        rule: The update rule. None is Adam with eps at the noise's standard deviation: ν̂ is negative for many
            coordinates, which are then divided by eps alone.
        balance: How to split the budget. "equal" is the paper's (default), "mse" minimizes the total error, and a
            number c puts the same noise on g and c·g².
        squares: "of_average", the square of the average gradient (the paper, default), or "average_of" the examples'
            squares.
        square_noise: The noise for the squares; defaults to the plan's. Noise that costs more than the plan was
            calibrated for is refused: put it into the plan first.
    """
    check_plan(plan)
    planned = plan.release if isinstance(plan.release, IndependentMoments) else IndependentMoments()
    release = IndependentMoments(
        balance=planned.balance if balance is None else balance,
        squares=planned.squares if squares is None else squares,
        square_noise=planned.square_noise if square_noise is None else square_noise,
    )
    rule = _floored(rule, plan, release)
    return PrivateOptimizer(model, plan, lr=lr, rule=rule, second_moment=OfReleasedSquare(), release=release, **common)


def joint_moments(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float = 1e-3,
    *,
    rule: UpdateRule | None = None,
    square_weight: float | None = None,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """Create JME: release (g, √λ·average of squares) as one vector with one sensitivity; update as in IME.

    Args:
        rule: The update rule. None is Adam with eps at the noise's standard deviation.
        square_weight: λ. None is 1/(2·clip_norm²). Up to this λ, the square is free under replace adjacency.
    """
    release = JointMoments(square_weight=square_weight)
    rule = _floored(rule, plan, release)
    return PrivateOptimizer(model, plan, lr=lr, rule=rule, second_moment=OfReleasedSquare(), release=release, **common)


def scale_then_privatize(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float = 1e-3,
    *,
    rule: UpdateRule = ADAM,
    eps_scale: float | None = None,
    exponent: float = 0.5,
    normalise: bool = True,
    debias: bool = True,
    start: float = 0.0,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """Create scale-then-privatize: scale gradients by s_t = ε/(√ν̂ + ε) before clipping, divide by s_t after the noise.

    `plan.clip_norm` bounds ‖s_t ⊙ g_j‖ with s_t ≤ 1. It is a raw gradient norm while ν̂ is small, and equals the paper's
    ζ·eps_scale.

    Args:
        rule: The update rule.
        eps_scale: ε. Below the noise's standard deviation, noise feeds on itself through ν̂ and training diverges. None
            is twice the smallest stable value. Large values approach post-processing; math.inf is post-processing.
        exponent: p of ν̂ᵖ in place of √ν̂; ε is then in the unit of ν̂ᵖ. With eps_scale=None, p = 0 is post-processing,
            and in pure noise every 0 < p ≤ ½ doubles the noise's standard deviation.
        normalise: False is the paper's parametrisation.
        debias: See `InverseRoot`.
        start: See `InverseRoot`.
    """
    eps_scale = _stable_eps_scale(plan, rule, eps_scale, exponent, normalise)
    geometry = InverseRoot(eps_scale=eps_scale, exponent=exponent, normalise=normalise, debias=debias, start=start)
    return PrivateOptimizer(
        model, plan, lr=lr, rule=_adaptive(rule), second_moment=OfNoisyGradient(), geometry=geometry, **common
    )


def side_information(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float = 1e-3,
    *,
    public_gradients: Callable[[], Mapping[str, Tensor]],
    rule: UpdateRule = ADAM,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """Create an optimizer with ν of the gradient of PUBLIC data.

    Args:
        public_gradients: Called at every step. A `PublicGradients`, or a function that returns
            {parameter name: gradient} and calls the model inside `with dpoptim.public_data():`.
        rule: The update rule.
    """
    return PrivateOptimizer(
        model, plan, lr=lr, rule=_adaptive(rule), second_moment=OfPublicGradient(public_gradients), **common
    )


def noiseless_preconditioner(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float = 1e-3,
    *,
    rule: UpdateRule = ADAM,
    scaled: bool = False,
    eps_scale: float | None = None,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """Create a baseline that is NOT PRIVATE: ν of the squared average gradient without noise.

    The plan must declare this, so that its statement prints it: `plan.with_release(dpoptim.NoiselessSquare())`.

    Args:
        plan: A calibrated plan that releases a `NoiselessSquare`.
        rule: The update rule.
        scaled: Also scale gradients before clipping, as in scale-then-privatize.
        eps_scale: ε of that scale; None is twice the smallest stable value.
    """
    check_plan(plan)
    if not isinstance(plan.release, NoiselessSquare):
        raise ValueError(
            "plan must declare that noiseless_preconditioner is not private. Pass "
            "plan.with_release(dpoptim.NoiselessSquare())."
        )
    warnings.warn(
        "noiseless_preconditioner is NOT PRIVATE. It trains on squares without noise, as a baseline for comparison.",
        stacklevel=2,
    )
    geometry: Geometry = Flat()
    if scaled:
        geometry = InverseRoot(eps_scale=_stable_eps_scale(plan, rule, eps_scale, exponent=0.5, normalise=True))
    moment, release = OfReleasedSquare(), plan.release
    return PrivateOptimizer(
        model, plan, lr=lr, rule=_adaptive(rule), second_moment=moment, release=release, geometry=geometry, **common
    )


def delayed_preconditioner(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float,
    *,
    plain_steps: int,
    scaled_steps: int | None = None,
    decay: float | None = 0.9,
    eps: float = 1e-7,
    scaled_clip_norm: float | None = None,
    momentum: float = 0.0,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """Create DP²: alternate plain steps, which build a preconditioner, with steps that clip and move in its space.

    Args:
        plain_steps: Steps that average their releases into the preconditioner.
        scaled_steps: Steps that use it; defaults to `plain_steps`.
        decay: A number averages the squares (RMSProp); None sums them (AdaGrad).
        eps: The constant in g/(√A + eps).
        scaled_clip_norm: The bound on ‖g/(√A + eps)‖; defaults to `plan.clip_norm`.
        momentum: The momentum of the steps.
    """
    if scaled_clip_norm is not None:
        check_number("scaled_clip_norm", scaled_clip_norm, above=0)
    geometry = Delayed(
        plain_steps=plain_steps,
        scaled_steps=plain_steps if scaled_steps is None else scaled_steps,
        decay=decay,
        eps=eps,
        clip_ratio=1.0 if scaled_clip_norm is None else scaled_clip_norm / plan.clip_norm,
    )
    return PrivateOptimizer(
        model, plan, lr=lr, rule=SGD(momentum=momentum), second_moment=OfScale(), geometry=geometry, **common
    )


def adadps(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float,
    *,
    public_gradients: Callable[[], Mapping[str, Tensor]],
    renew_every: int,
    decay: float = 0.0,
    eps: float = 1e-8,
    momentum: float = 0.0,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """Create AdaDPS: clip and move in the space g/√(A + eps), with A from PUBLIC data.

    Args:
        public_gradients: Returns {parameter name: gradient}, as for `side_information`.
        renew_every: How many steps use the same A.
        decay: The decay of A; 0 replaces it.
        eps: The constant in √(A + eps).
        momentum: The momentum of the steps.
    """
    geometry = FromPublic(public_gradients, renew_every=renew_every, decay=decay, eps=eps)
    return PrivateOptimizer(
        model, plan, lr=lr, rule=SGD(momentum=momentum), second_moment=OfScale(), geometry=geometry, **common
    )


def noise_level(plan: PrivacyPlan, release: Release) -> float:
    """Compute the standard deviation of the noise on one coordinate of the averaged gradient, at the noisiest step."""
    check_plan(plan)
    stddev = plan.with_release(release).noise_stddevs().gradient_sum
    return stddev * plan.strategy.column_norm * float(max(plan.strategy.row_norms())) / plan.batch_size


def _floored(rule: UpdateRule | None, plan: PrivacyPlan, release: Release) -> UpdateRule:
    """The rule; None is Adam with eps at the noise's level, for coordinates with a small or negative second moment."""
    return Adam(eps=max(noise_level(plan, release), ADAM.eps)) if rule is None else _adaptive(rule)


def _stable_eps_scale(
    plan: PrivacyPlan, rule: UpdateRule, eps_scale: float | None, exponent: float, normalise: bool
) -> float:
    """The given ε, with a warning if it is unstable (below a·noise^(2p)); by default (2·noise)^(2p)·a.

    The noise on g̃ has variance φ(ν̂ᵖ/ε + 1)², which feeds back into ν̂. Pure noise settles where y = √(ν̂/φ), the growth
    of its standard deviation, satisfies y = 1 + y^(2p)·φᵖ/ε. For p ≥ ½ such a y exists only from ε = a·φᵖ on, with
    a = (2p)^(2p)/(2p−1)^(2p−1). At ε = (4φ)ᵖ, y is 2 for every p ≤ ½. At p = 0 the scale is constant, so ε = ∞. A sum
    over T steps is an average with T·φ. (Not normalised, φ is ε² times larger.)
    """
    noise = noise_level(plan, Gradient()) * (math.sqrt(plan.steps) if isinstance(rule, AdaGrad) else 1.0)
    above = 2 * exponent - 1
    stable = (2 * exponent) ** (2 * exponent) / above**above if 0.5 < exponent <= 1 else 1.0
    if eps_scale is None:
        if not normalise:
            raise ValueError("eps_scale is required with normalise=False, where the clip norm is in its units.")
        return max(2 * noise, ADAM.eps) ** (2 * exponent) * stable if exponent else math.inf
    least = noise ** (2 * exponent) * stable
    if not normalise:
        least *= eps_scale ** (2 * exponent)
    if exponent >= 0.5 and least > eps_scale and plan.noise_multiplier:
        warnings.warn(
            f"eps_scale={eps_scale} with clip_norm={plan.clip_norm} lies outside the stable window: noise feeds on "
            f"itself and the second moment diverges. Use eps_scale > {least:.3g}." if normalise else
            f"clip_norm={plan.clip_norm} lies outside the stable window: the second moment diverges. Divide it by "
            f"{(least / eps_scale) ** (0.5 / exponent):.3g} or more.",
            stacklevel=3,
        )  # fmt: skip
    return eps_scale


def _adaptive(rule: UpdateRule) -> UpdateRule:
    if not isinstance(rule, UpdateRule):
        raise ValueError(
            f"rule={rule!r} must be an instance such as dpoptim.Adam(betas=(0.9, 0.999), weight_decay=0.0)."
        )
    if not rule.adaptive:
        raise ValueError(
            f"rule={rule} keeps no second moment. Use Adam(), AdamW(), AdaGrad() or RMSProp(), or the variant dp_sgd."
        )
    return rule
