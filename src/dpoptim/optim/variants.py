"""The paper's optimizers, each one expression: release, geometry, second moment, update rule.

Common arguments: `model`, a calibrated `plan`, `lr`, and by keyword
- `rule`: Adam(), AdamW(), AdaGrad() or RMSProp(), with betas, eps and weight_decay as its arguments;
- `param_groups`: dicts as for torch.optim;
- `loss_reduction`: "sum" or "mean", how the loop reduces the loss vector before backward;
- `key`: a NoiseKey, to continue a run;
- `run_id`: public, new for every optimizer and restored by load_state_dict; given only to make the same noise again;
- `noise_memory`: NoiseMemory(bits=16, on_host=True), say: how correlated noise keeps its past;
- `clipping_memory`: bytes that a physical batch may take beyond what it needs, to clip faster (64 MiB; see
  `optimizer.explain()`);
- `external_batches`: True says that the caller draws batches as the plan says, without a private_loader.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict, Unpack

from torch import Tensor, nn

from dpoptim.noise import NoiseKey, NoiseMemory, StrategySpec
from dpoptim.optim.geometries import Delayed, Flat, FromPublic, Geometry, InverseRoot
from dpoptim.optim.optimizer import PrivateOptimizer
from dpoptim.optim.rules import SGD, AdaGrad, Adam, UpdateRule
from dpoptim.optim.second_moments import (
    NoiseCorrected,
    NoSecondMoment,
    OfNoisyGradient,
    OfPublicGradient,
    OfReleasedSquare,
    OfScale,
)
from dpoptim.privacy import (
    Gradient,
    IndependentMoments,
    JointMoments,
    NoiselessSquare,
    PrivacyPlan,
    Release,
)


class Common(TypedDict, total=False):
    """Keyword arguments that every variant takes."""

    param_groups: Iterable[dict[str, Any]] | None
    loss_reduction: Literal["sum", "mean"]
    key: NoiseKey | None
    run_id: str | None
    noise_memory: NoiseMemory
    clipping_memory: int
    external_batches: bool


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
    """θ ← θ − lr·buf, buf ← momentum·buf + g̃: DP-SGD, and DP-MF under a plan with correlated noise."""
    return PrivateOptimizer(
        model, plan, release=Gradient(), lr=lr, rule=SGD(momentum=momentum, weight_decay=weight_decay),
        geometry=Flat(), second_moment=NoSecondMoment(), **common,
    )  # fmt: skip


def post_processing(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float = 1e-3,
    *,
    rule: UpdateRule = ADAM,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """The rule on the noisy gradient as it is: ν of g̃², update μ̂ / (√ν̂ + eps)."""
    return PrivateOptimizer(
        model, plan, release=Gradient(), lr=lr, rule=_adaptive(rule),
        geometry=Flat(), second_moment=OfNoisyGradient(), **common,
    )  # fmt: skip


def bias_correction(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float = 1e-3,
    *,
    rule: UpdateRule | None = None,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """Post-processing with the noise's known bias taken out of ν̂: update μ̂ / √max(ν̂ − b_t, eps²).

    The rule's eps is the floor and must be positive. rule=None is Adam with eps at the noise's standard deviation
    (the paper's best, 1e-4, lies near it), so that no coordinate moves by more than about g̃/noise·lr.
    """
    rule = _floored_adam(plan, Gradient()) if rule is None else _adaptive(rule)
    if not rule.eps > 0:
        raise ValueError(f"rule has eps={rule.eps}; bias correction needs a positive floor: try the noise's level")
    return PrivateOptimizer(
        model, plan, release=Gradient(), lr=lr, rule=_adaptive(rule),
        geometry=Flat(), second_moment=NoiseCorrected(), **common,
    )  # fmt: skip


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
    """IME: g and g² are released with noise of their own, at one joint sensitivity; update μ̂ / (√max(ν̂, 0) + eps).

    rule=None is Adam with eps at the noise's standard deviation: ν̂ is negative for many coordinates, and eps is all
    they divide by. What is not given is as in `plan.release` where that is an `IndependentMoments`, else as follows.
    balance: how the budget is split; "equal" is the paper's (default), "mse" the least total error, a number c noises
        (g, c·g²) alike.
    squares: "of_average", the square of the average gradient (the paper, default), or "average_of" the examples'
        squares.
    square_noise: a kind of noise for the squares; by default the plan's. One that costs more than what the plan was
        calibrated for is refused: put it into the plan first.
    """
    _check_plan(plan)
    planned = plan.release if isinstance(plan.release, IndependentMoments) else IndependentMoments()
    release = IndependentMoments(
        balance=planned.balance if balance is None else balance,
        squares=planned.squares if squares is None else squares,
        square_noise=planned.square_noise if square_noise is None else square_noise,
    )
    rule = _floored_adam(plan, release) if rule is None else rule
    return PrivateOptimizer(
        model, plan, release=release, lr=lr, rule=_adaptive(rule),
        geometry=Flat(), second_moment=OfReleasedSquare(), **common,
    )  # fmt: skip


def joint_moments(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float = 1e-3,
    *,
    rule: UpdateRule | None = None,
    square_weight: float | None = None,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """JME: (g, √λ·average of squares) is one vector with one sensitivity; update as in IME.

    square_weight: λ; None is 1/(2·clip_norm²), up to which the square comes free under replace adjacency.
    """
    release = JointMoments(square_weight=square_weight)
    rule = _floored_adam(plan, release) if rule is None else rule
    return PrivateOptimizer(
        model, plan, release=release, lr=lr, rule=_adaptive(rule),
        geometry=Flat(), second_moment=OfReleasedSquare(), **common,
    )  # fmt: skip


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
    """Gradients are scaled by s_t = ε/(√ν̂ + ε) before clipping and the noise is divided by it; ν of g̃².

    `plan.clip_norm` bounds ‖s_t ⊙ g_j‖ with s_t ≤ 1: a raw gradient norm while ν̂ is small, the paper's ζ·eps_scale.
    eps_scale: ε. Below the noise's standard deviation the noise feeds on itself through ν̂ and training diverges;
        None is twice the least stable value. Large values approach post-processing, math.inf is it.
    exponent: p of ν̂ᵖ in place of √ν̂; ε is then in the unit of ν̂ᵖ. With eps_scale=None, p = 0 is post-processing
        itself, and where there is nothing but noise, 0 < p ≤ ½ doubles its standard deviation, whatever p.
    normalise=False is the paper's own parametrisation. debias, start: see `InverseRoot`.
    """
    eps_scale = _stable_eps_scale(plan, rule, eps_scale, exponent, normalise)
    geometry = InverseRoot(eps_scale=eps_scale, exponent=exponent, normalise=normalise, debias=debias, start=start)
    return PrivateOptimizer(
        model, plan, release=Gradient(), lr=lr, rule=_adaptive(rule),
        geometry=geometry, second_moment=OfNoisyGradient(), **common,
    )  # fmt: skip


def side_information(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float = 1e-3,
    *,
    public_gradients: Callable[[], Mapping[str, Tensor]],
    rule: UpdateRule = ADAM,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """ν of the gradient of PUBLIC data, taken at every step by `public_gradients()`: a `PublicGradients`, or a function
    that gives {parameter name: gradient} and calls the model inside `with dpoptim.public_data():`.
    """
    return PrivateOptimizer(
        model, plan, release=Gradient(), lr=lr, rule=_adaptive(rule),
        geometry=Flat(), second_moment=OfPublicGradient(public_gradients), **common,
    )  # fmt: skip


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
    """NOT PRIVATE, a baseline: ν of the un-noised average gradient's square; `scaled` adds scale-then-privatize.

    The plan must say so itself, so that its statement does: `plan.with_release(dpoptim.NoiselessSquare())`.
    """
    _check_plan(plan)
    if not isinstance(plan.release, NoiselessSquare):
        raise ValueError(
            "plan: noiseless_preconditioner is not private and takes only a plan that says so; "
            "pass plan.with_release(dpoptim.NoiselessSquare())"
        )
    warnings.warn(
        "noiseless_preconditioner is NOT PRIVATE: it trains on un-noised squares and is a baseline for comparison only",
        stacklevel=2,
    )
    geometry: Geometry = Flat()
    if scaled:
        geometry = InverseRoot(eps_scale=_stable_eps_scale(plan, rule, eps_scale, exponent=0.5, normalise=True))
    return PrivateOptimizer(
        model, plan, release=NoiselessSquare(), lr=lr, rule=_adaptive(rule),
        geometry=geometry, second_moment=OfReleasedSquare(), **common,
    )  # fmt: skip


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
    """DP²: plain private steps average their releases into a preconditioner, then as many steps clip and move in its
    space.

    `scaled_steps` defaults to `plain_steps`, `scaled_clip_norm` (of g/(√A + eps)) to `plan.clip_norm`.
    decay=None sums the squares (AdaGrad); a number averages them (RMSProp).
    """
    if scaled_clip_norm is not None and not scaled_clip_norm > 0:
        raise ValueError(f"scaled_clip_norm={scaled_clip_norm} must be positive")
    geometry = Delayed(
        plain_steps=plain_steps,
        scaled_steps=plain_steps if scaled_steps is None else scaled_steps,
        decay=decay,
        eps=eps,
        clip_ratio=1.0 if scaled_clip_norm is None else scaled_clip_norm / plan.clip_norm,
    )
    return PrivateOptimizer(
        model, plan, release=Gradient(), lr=lr, rule=SGD(momentum=momentum),
        geometry=geometry, second_moment=OfScale(), **common,
    )  # fmt: skip


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
    """AdaDPS: clip and move in the space g/√(A + eps), with A from PUBLIC data renewed every `renew_every` steps."""
    geometry = FromPublic(public_gradients, renew_every=renew_every, decay=decay, eps=eps)
    return PrivateOptimizer(
        model, plan, release=Gradient(), lr=lr, rule=SGD(momentum=momentum),
        geometry=geometry, second_moment=OfScale(), **common,
    )  # fmt: skip


def noise_level(plan: PrivacyPlan, release: Release) -> float:
    """Standard deviation of the noise on one coordinate of the averaged gradient, at the noisiest step.

    >>> plan = PrivacyPlan(num_examples=1000, batch_size=100, steps=30, clip_norm=2.0, noise_multiplier=0.5)
    >>> noise_level(plan, Gradient())
    0.01
    """
    _check_plan(plan)
    stddev = plan.with_release(release).noise_stddevs().gradient_sum
    return stddev * plan.strategy.column_norm * float(max(plan.strategy.row_norms())) / plan.batch_size


def _floored_adam(plan: PrivacyPlan, release: Release) -> Adam:
    """Adam whose eps keeps coordinates with a small or negative second moment at the noise's own level."""
    return Adam(eps=max(noise_level(plan, release), ADAM.eps))


def _check_plan(plan: PrivacyPlan) -> None:
    if not isinstance(plan, PrivacyPlan):
        raise ValueError(f"plan must be a PrivacyPlan, got {type(plan).__name__}; the order is (model, plan, lr)")


def _stable_eps_scale(
    plan: PrivacyPlan, rule: UpdateRule, eps_scale: float | None, exponent: float, normalise: bool
) -> float:
    """(2·noise)^(2p)·a, with a·noise^(2p) the least stable ε, or the given one, with a warning below the least.

    Noise on g̃ has variance φ/s² = φ(ν̂ᵖ/ε + 1)², which returns into ν̂. An average of it alone rests where
    y = √(ν̂/φ) is 1 + y^(2p)·φᵖ/ε, and y is by what its standard deviation grows. For p < ½ there is always such a y;
    for p ≥ ½ only from ε = a·φᵖ on, a = (2p)^(2p)/(2p−1)^(2p−1), which is 1 at ½ and 4 at 1. At ε = (4φ)ᵖ, y is 2
    whatever p ≤ ½; above ½ that would be unstable, hence times a. p = 0 compares nothing: there ε = ∞, s = 1.
    A sum over T steps is an average with T·φ. (Not normalised, φ is ε² times larger.)
    """
    noise = noise_level(plan, Gradient()) * (math.sqrt(plan.steps) if isinstance(rule, AdaGrad) else 1.0)
    above = 2 * exponent - 1
    stable = (2 * exponent) ** (2 * exponent) / above**above if 0.5 < exponent <= 1 else 1.0
    if eps_scale is None:
        if not normalise:
            raise ValueError("eps_scale must be given with normalise=False: there the clip norm is in its units")
        return max(2 * noise, ADAM.eps) ** (2 * exponent) * stable if exponent else math.inf
    least = noise ** (2 * exponent) * stable
    if not normalise:
        least *= eps_scale ** (2 * exponent)
    if exponent >= 0.5 and least > eps_scale and plan.noise_multiplier:
        warnings.warn(
            f"eps_scale={eps_scale} with clip_norm={plan.clip_norm} lies outside the stable window: the noise feeds on "
            f"itself and the second moment diverges; use eps_scale > {least:.3g}" if normalise else
            f"clip_norm={plan.clip_norm} lies outside the stable window: the second moment diverges; divide it by "
            f"{(least / eps_scale) ** (0.5 / exponent):.3g} or more",
            stacklevel=3,
        )  # fmt: skip
    return eps_scale


def _adaptive(rule: UpdateRule) -> UpdateRule:
    if isinstance(rule, type) or not hasattr(rule, "adaptive"):
        raise ValueError(
            f"rule={rule!r} must be an instance such as dpoptim.Adam(betas=(0.9, 0.999), weight_decay=0.0)"
        )
    if not rule.adaptive:
        raise ValueError(
            f"rule={rule} keeps no second moment; use Adam(), AdamW(), AdaGrad() or RMSProp(), or the variant dp_sgd"
        )
    return rule
