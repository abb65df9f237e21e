"""The paper's optimizers, each one expression over the slots: what is released, the geometry, the second moment, the update rule.

Common arguments: `model`, a calibrated `plan`, `lr`, and by keyword
`rule` (Adam(), AdamW(), AdaGrad(), RMSProp()), `param_groups` (dicts as for torch.optim), `loss_reduction` ("sum" or "mean",
how the loop reduces the loss vector before backward) and `key` (a NoiseKey, to continue a run).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict, Unpack

from torch import Tensor, nn

from dpoptim.noise import NoiseKey
from dpoptim.optim.geometries import Delayed, Flat, FromPublic, InverseRoot
from dpoptim.optim.optimizer import PrivateOptimizer
from dpoptim.optim.rules import SGD, Adam, UpdateRule
from dpoptim.optim.second_moments import (
    NoiseCorrected,
    NoSecondMoment,
    OfNoisyGradient,
    OfPublicGradient,
    OfReleasedSquare,
    OfScale,
)
from dpoptim.privacy import Gradient, IndependentMoments, JointMoments, NoiselessSquare, PrivacyPlan


class Common(TypedDict, total=False):
    """Keyword arguments that every variant takes."""

    param_groups: Iterable[dict[str, Any]] | None
    loss_reduction: Literal["sum", "mean"]
    key: NoiseKey | None


ADAM = Adam()
FLOORED_ADAM = Adam(eps=1e-4)
"""The paper's best stability constant where the second moment may come out negative."""


def dp_sgd(
    model: nn.Module, plan: PrivacyPlan, lr: float, *, momentum: float = 0.0, weight_decay: float = 0.0, **common: Unpack[Common]
) -> PrivateOptimizer:
    """θ ← θ − lr·buf, buf ← momentum·buf + g̃: DP-SGD, and DP-MF under a plan with correlated noise."""
    return PrivateOptimizer(
        model, plan, release=Gradient(), lr=lr, rule=SGD(momentum=momentum, weight_decay=weight_decay),
        geometry=Flat(), second_moment=NoSecondMoment(), **common,
    )  # fmt: skip


def post_processing(
    model: nn.Module, plan: PrivacyPlan, lr: float = 1e-3, *, rule: UpdateRule = ADAM, **common: Unpack[Common]
) -> PrivateOptimizer:
    """The rule on the noisy gradient as it is: ν of g̃², update μ̂ / (√ν̂ + eps)."""
    return PrivateOptimizer(
        model, plan, release=Gradient(), lr=lr, rule=_adaptive(rule),
        geometry=Flat(), second_moment=OfNoisyGradient(), **common,
    )  # fmt: skip


def bias_correction(
    model: nn.Module, plan: PrivacyPlan, lr: float = 1e-3, *, rule: UpdateRule = FLOORED_ADAM, **common: Unpack[Common]
) -> PrivateOptimizer:
    """Post-processing with the noise's known bias taken out of ν̂: update μ̂ / √max(ν̂ − b_t, eps²).

    The rule's eps is the floor and must be positive; the paper's best is 1e-4, the default here.
    """
    if not rule.eps > 0:
        raise ValueError(f"rule has eps={rule.eps}; bias correction needs a positive floor (try 1e-4)")
    return PrivateOptimizer(
        model, plan, release=Gradient(), lr=lr, rule=_adaptive(rule),
        geometry=Flat(), second_moment=NoiseCorrected(), **common,
    )  # fmt: skip


def independent_moments(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float = 1e-3,
    *,
    rule: UpdateRule = FLOORED_ADAM,
    balance: float | Literal["equal", "mse"] = "equal",
    squares: Literal["of_average", "average_of"] = "of_average",
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """IME: g and g² are released with noise of their own, at one joint sensitivity; update μ̂ / (√max(ν̂, 0) + eps).

    balance: how the budget is split; "equal" is the paper's, "mse" the least total error, a number c noises (g, c·g²) alike.
    squares: the square of the average gradient (the paper), or the average of the examples' squares.
    """
    release = IndependentMoments(balance=balance, squares=squares)
    return PrivateOptimizer(
        model, plan, release=release, lr=lr, rule=_adaptive(rule),
        geometry=Flat(), second_moment=OfReleasedSquare(), **common,
    )  # fmt: skip


def joint_moments(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float = 1e-3,
    *,
    rule: UpdateRule = FLOORED_ADAM,
    square_weight: float | None = None,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """JME: (g, √λ·average of squares) is one vector with one sensitivity; update as in IME.

    square_weight: λ; None is 1/(2·clip_norm²), up to which the square comes free under replace adjacency.
    """
    return PrivateOptimizer(
        model, plan, release=JointMoments(square_weight=square_weight), lr=lr, rule=_adaptive(rule),
        geometry=Flat(), second_moment=OfReleasedSquare(), **common,
    )  # fmt: skip


def scale_then_privatize(
    model: nn.Module,
    plan: PrivacyPlan,
    lr: float = 1e-3,
    *,
    rule: UpdateRule = ADAM,
    eps_scale: float = 1e-3,
    exponent: float = 0.5,
    normalise: bool = True,
    debias: bool = True,
    start: float = 0.0,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """Gradients are scaled by s_t = ε/(√ν̂ + ε) before clipping and the noise is divided by it; ν of g̃².

    `plan.clip_norm` bounds ‖s_t ⊙ g_j‖ and s_t ≤ 1: it is the raw gradient norm while ν̂ is small, and the paper's ζ·eps_scale.
    normalise=False is the paper's own parametrisation. exponent, debias, start: see `InverseRoot`.
    """
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
    """ν of the gradient of PUBLIC data, taken at every step by `public_gradients()`, for example a `PublicGradients`."""
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
    scale_then_privatize: bool = False,
    eps_scale: float = 1e-3,
    **common: Unpack[Common],
) -> PrivateOptimizer:
    """NOT PRIVATE, a baseline: ν of the un-noised average gradient's square, optionally also as the geometry.

    The plan must say so itself, so that its statement does: `plan.releasing(dpoptim.NoiselessSquare())`.
    """
    if not isinstance(plan.release, NoiselessSquare):
        raise ValueError(
            "plan: noiseless_preconditioner is not private and takes only a plan that says so; "
            "pass plan.releasing(dpoptim.NoiselessSquare())"
        )
    warnings.warn(
        "noiseless_preconditioner is NOT PRIVATE: it trains on un-noised squares and is a baseline for comparison only",
        stacklevel=2,
    )
    geometry = InverseRoot(eps_scale=eps_scale) if scale_then_privatize else Flat()
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
    """DP²: plain private steps average their releases into a preconditioner, then as many steps clip and move in its space.

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


def _adaptive(rule: UpdateRule) -> UpdateRule:
    if not rule.adaptive:
        raise ValueError(f"rule={rule} keeps no second moment; use Adam(), AdamW(), AdaGrad() or RMSProp(), or the variant dp_sgd")
    return rule
