"""Second moments: which released values ν is made of, and what the update divides by.

The rule accumulates (average or sum) and debiases. A second moment chooses what to accumulate and turns it into the
denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpoptim.clipping import Released
from dpoptim.data.processes import Processes
from dpoptim.optim.bundle import ParameterBundle
from dpoptim.optim.rules import UpdateRule


class SecondMoment:
    """The third slot: turns a release into the denominator of the update."""

    def denominator(
        self, bundle: ParameterBundle, rule: UpdateRule, gradient: Tensor, released: Released
    ) -> Tensor | None:
        return None


@dataclass(frozen=True)
class NoSecondMoment(SecondMoment):
    """The update divides by nothing (SGD)."""


@dataclass(frozen=True)
class OfNoisyGradient(SecondMoment):
    """ν of g̃², as in Adam on the noisy gradient; denominator √ν̂ + eps. The noise's variance biases it upwards."""

    def denominator(self, bundle: ParameterBundle, rule: UpdateRule, gradient: Tensor, released: Released) -> Tensor:
        nu_hat = _accumulate(bundle, rule, gradient.square())
        return nu_hat.sqrt() + bundle.group["eps"]


@dataclass(frozen=True)
class NoiseCorrected(SecondMoment):
    """ν of g̃² minus the noise's known share b_t of it; denominator √max(ν̂ − b_t, eps²).

    b_t accumulates the variances φ·‖row i of C⁻¹‖² exactly as ν accumulates squares, so it is exact for every rule and
    mechanism. The floor eps bounds the update: without it, coordinates with an estimate near 0 or below would explode.
    It follows an adaptive clip norm.
    """

    def denominator(self, bundle: ParameterBundle, rule: UpdateRule, gradient: Tensor, released: Released) -> Tensor:
        nu_hat = _accumulate(bundle, rule, gradient.square())
        if "noise_moment" not in bundle.state:
            bundle.state["noise_moment"] = torch.zeros((), dtype=torch.float64)
        total = bundle.state["noise_moment"]
        rule.accumulate(total, torch.tensor(released.noise_variance, dtype=torch.float64), bundle.group)
        bias = float(rule.estimate(total, bundle.group, bundle.step))
        floor = bundle.group["eps"] * released.clip_factor
        return (nu_hat - bias).clamp_(min=floor**2).sqrt_()


@dataclass(frozen=True)
class OfReleasedSquare(SecondMoment):
    """ν of the second release (IME, JME; without noise under the non-private plan); denominator √max(ν̂, 0) + eps."""

    def denominator(self, bundle: ParameterBundle, rule: UpdateRule, gradient: Tensor, released: Released) -> Tensor:
        assert released.square is not None
        nu_hat = _accumulate(bundle, rule, bundle.flat(released.square))
        return nu_hat.clamp(min=0).sqrt_() + bundle.group["eps"]


class OfPublicGradient(SecondMoment):
    """ν of the squared gradient of PUBLIC data, recomputed at every step; denominator √ν̂ + eps."""

    def __init__(self, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        self._source = CachedPublicGradients(gradients)

    def denominator(self, bundle: ParameterBundle, rule: UpdateRule, gradient: Tensor, released: Released) -> Tensor:
        public = bundle.flat(self._source.at(bundle.step))
        nu_hat = _accumulate(bundle, rule, public.square())
        return nu_hat.sqrt() + bundle.group["eps"]


@dataclass(frozen=True)
class OfScale(SecondMoment):
    """DP², AdaDPS: divide by what the gradient was divided by before clipping: the update stays in the scaled space."""

    def denominator(
        self, bundle: ParameterBundle, rule: UpdateRule, gradient: Tensor, released: Released
    ) -> Tensor | None:
        return bundle.transient.get("divided_by")


class CachedPublicGradients:
    """Calls `gradients` once per step, with autograd enabled (`optimizer.step()` disables it).

    All processes use the gradients of process 0, since their public batches may differ.
    """

    def __init__(self, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        self._gradients = gradients
        self._step: int | None = None
        self._latest: Mapping[str, Tensor] = {}

    def at(self, step: int) -> Mapping[str, Tensor]:
        if step != self._step:
            with torch.enable_grad():
                latest = self._gradients()
            for name, value in latest.items():
                if value is None:
                    raise ValueError(
                        f"public_gradients gave None for '{name}'. Compute them inside `with dpoptim.public_data():`."
                    )
            self._latest, self._step = {name: value.detach().contiguous() for name, value in latest.items()}, step
            Processes.current().copy_from_first(self._latest.values())
        return self._latest


def _accumulate(bundle: ParameterBundle, rule: UpdateRule, value: Tensor) -> Tensor:
    total = bundle.get("second_moment")
    rule.accumulate(total, value, bundle.group)
    return rule.estimate(total, bundle.group, bundle.step)
