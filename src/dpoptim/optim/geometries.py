"""Geometries: the scale s_t that multiplies gradients before clipping and divides the noise.

A geometry is a function of released values only. `begin` prepares the state before the first step. `observe` sees what
a step released. `scale` returns s for the next step and reads only the state, so it can be recomputed after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpoptim.arguments import check_number, check_whole, set_whole
from dpoptim.kernels.inverse_root import LazyInverseRoot
from dpoptim.optim.bundle import ParameterBundle
from dpoptim.optim.rules import UpdateRule
from dpoptim.optim.second_moments import CachedPublicGradients


class Geometry:
    """The first slot: the shape of the clipping ball and of the noise."""

    def begin(self, bundle: ParameterBundle) -> None:
        pass

    def observe(self, bundle: ParameterBundle, noisy_grads: Mapping[str, Tensor]) -> None:
        pass

    def scale(self, bundle: ParameterBundle, rule: UpdateRule) -> Tensor | None:
        lazy = self.lazy_scale(bundle, rule)
        return None if lazy is None else lazy.tensor()

    def lazy_scale(self, bundle: ParameterBundle, rule: UpdateRule) -> LazyInverseRoot | None:
        """Return `scale`, not computed yet, if it is an inverse root of a state vector that only `step()` changes."""
        return None


@dataclass(frozen=True)
class Flat(Geometry):
    """s = 1: plain clipping and isotropic noise."""


@dataclass(frozen=True, kw_only=True)
class InverseRoot(Geometry):
    """s = ε/(ν̂ᵖ + ε), in (0, 1]: scale-then-privatize at p = ½.

    Args:
        exponent: p. 0 is post-processing with clip norm ζ/s for the constant s = ε/(1 + ε), which is ζ at ε = ∞.
            ¼ is the noise optimum of AdaClip, ⅓ is PAGAN, ½ is the paper.
        eps_scale: ε_s1, in the unit of ν̂ᵖ; it follows an adaptive clip norm.
            Where ν̂ᵖ is far below it the scale is 1; at math.inf it is 1 everywhere.
        normalise: True keeps `clip_norm` in the units of a raw gradient norm and never overflows. False is the paper's
            s = 1/(ν̂ᵖ + ε). Both are the same algorithm, with clip norms ζ·ε and ζ.
        debias: Use ν̂ = ν/(1−β₂ᵗ), as in the paper, or ν itself.
        start: ν̂ before the first step; 0 makes the first (normalised) scale 1.
    """

    exponent: float = 0.5
    eps_scale: float = 1e-3
    normalise: bool = True
    debias: bool = True
    start: float = 0.0

    def __post_init__(self) -> None:
        check_number("exponent", self.exponent, low=0, high=1)
        hint = "It bounds the scale where the second moment is 0."
        check_number("eps_scale", self.eps_scale, above=0, infinity=True, hint=hint)
        check_number("start", self.start, low=0)
        if math.isinf(self.eps_scale) and not self.normalise:
            raise ValueError("eps_scale=inf with normalise=False makes the scale 0. Use normalise=True, where it is 1.")

    def begin(self, bundle: ParameterBundle) -> None:
        bundle.get("second_moment")

    def lazy_scale(self, bundle: ParameterBundle, rule: UpdateRule) -> LazyInverseRoot | None:
        if math.isinf(self.eps_scale):
            return None
        total = bundle.get("second_moment")
        share, start = 1.0, self.start if bundle.step == 0 else 0.0
        if self.debias and bundle.step > 0:
            share = float(rule.estimate(torch.ones((), dtype=torch.float64), bundle.group, bundle.step))
        eps = self.eps_scale * bundle.clip_factor ** (2 * self.exponent)
        top = eps if self.normalise else 1.0
        return LazyInverseRoot(total, self.exponent, share**self.exponent / top, eps / top, start)


@dataclass(frozen=True, kw_only=True)
class Delayed(Geometry):
    """DP²: alternate `plain_steps` of plain private SGD, which average their releases, and `scaled_steps` that clip
    g/(√A + ε).

    Args:
        plain_steps: Steps that build the preconditioner.
        scaled_steps: Steps that use it.
        decay: A ← decay·A + (1−decay)·(average release)²; None sums instead, A + (average release)² (AdaGrad).
        eps: ε.
        clip_ratio: Clip norm of the scaled steps over that of the plain ones. The noise scales with it.
    """

    plain_steps: int
    scaled_steps: int
    decay: float | None = 0.9
    eps: float = 1e-7
    clip_ratio: float = 1.0

    def __post_init__(self) -> None:
        set_whole(self, "plain_steps", hint="They build the preconditioner.")
        set_whole(self, "scaled_steps")
        if self.decay is not None:
            check_number("decay", self.decay, low=0, below=1, hint="None sums instead.")
        check_number("eps", self.eps, above=0)
        check_number("clip_ratio", self.clip_ratio, above=0)

    def begin(self, bundle: ParameterBundle) -> None:
        bundle.get("preconditioner")
        bundle.get("release_sum")

    def observe(self, bundle: ParameterBundle, noisy_grads: Mapping[str, Tensor]) -> None:
        position = (bundle.step - 1) % (self.plain_steps + self.scaled_steps)  # of the step just completed
        if position >= self.plain_steps:
            return
        total = bundle.get("release_sum").add_(bundle.flat(noisy_grads))
        if position == self.plain_steps - 1:
            squares = (total / self.plain_steps).square()
            preconditioner = bundle.get("preconditioner")
            if self.decay is None:
                preconditioner.add_(squares)
            else:
                preconditioner.lerp_(squares, 1 - self.decay)
            total.zero_()

    def scale(self, bundle: ParameterBundle, rule: UpdateRule) -> Tensor | None:
        if bundle.step % (self.plain_steps + self.scaled_steps) < self.plain_steps:
            bundle.transient.pop("divided_by", None)
            return None
        bundle.transient["divided_by"] = bundle.get("preconditioner").sqrt() + self.eps
        return 1 / (self.clip_ratio * bundle.transient["divided_by"])


class FromPublic(Geometry):
    """AdaDPS: s = 1/√(A + ε), where A ← decay·A + (1−decay)·g_pub² comes from PUBLIC data.

    Args:
        gradients: Returns {parameter name: gradient} of public data.
        renew_every: How many steps use the same A.
        decay: The decay of A; 0 replaces it.
        eps: ε.
    """

    def __init__(
        self, gradients: Callable[[], Mapping[str, Tensor]], *, renew_every: int, decay: float = 0.0, eps: float = 1e-8
    ) -> None:
        check_number("decay", decay, low=0, below=1)
        check_number("eps", eps, above=0)
        self.renew_every, self.decay, self.eps = check_whole("renew_every", renew_every), decay, eps
        self._source = CachedPublicGradients(gradients)

    def begin(self, bundle: ParameterBundle) -> None:
        self._renew(bundle)

    def observe(self, bundle: ParameterBundle, noisy_grads: Mapping[str, Tensor]) -> None:
        if bundle.step % self.renew_every == 0:
            self._renew(bundle)

    def _renew(self, bundle: ParameterBundle) -> None:
        public = bundle.flat(self._source.at(bundle.step))
        bundle.get("preconditioner").lerp_(public.square(), 1 - self.decay)

    def scale(self, bundle: ParameterBundle, rule: UpdateRule) -> Tensor:
        bundle.transient["divided_by"] = (bundle.get("preconditioner") + self.eps).sqrt()
        return 1 / bundle.transient["divided_by"]
