"""Second moments: which released values ν is made of, and what the update divides by.

The rule accumulates (EMA or sum) and debiases; a second moment says what it accumulates and how the denominator
comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpoptim.gradients import Released
from dpoptim.optim.rules import UpdateRule
from dpoptim.optim.slot import Slot


class SecondMoment(Protocol):
    """The third slot: turns a release into the denominator of the update."""

    def denominator(self, slot: Slot, rule: UpdateRule, gradient: Tensor, released: Released) -> Tensor | None: ...


@dataclass(frozen=True)
class NoSecondMoment:
    """The update divides by nothing (SGD)."""

    def denominator(self, slot: Slot, rule: UpdateRule, gradient: Tensor, released: Released) -> None:
        return None


@dataclass(frozen=True)
class OfNoisyGradient:
    """ν of g̃², as Adam on the noisy gradient has it; denominator √ν̂ + eps. Biased upwards by the noise's variance."""

    def denominator(self, slot: Slot, rule: UpdateRule, gradient: Tensor, released: Released) -> Tensor:
        nu_hat = _accumulate(slot, rule, gradient.square())
        return nu_hat.sqrt() + slot.group["eps"]


@dataclass(frozen=True)
class NoiseCorrected:
    """ν of g̃² minus the noise's known share b_t of it; denominator √max(ν̂ − b_t, eps²).

    b_t accumulates the variances φ·‖row i of C⁻¹‖² as ν accumulates squares, so it is exact for every rule and
    mechanism. The floor eps bounds the update: without one, coordinates whose estimate is near 0 or negative explode.
    """

    def denominator(self, slot: Slot, rule: UpdateRule, gradient: Tensor, released: Released) -> Tensor:
        nu_hat = _accumulate(slot, rule, gradient.square())
        if "noise_moment" not in slot.state:
            slot.state["noise_moment"] = torch.zeros((), dtype=torch.float64)
        total = slot.state["noise_moment"]
        rule.accumulate(total, torch.tensor(released.noise_variance, dtype=torch.float64), slot.group)
        bias = float(rule.estimate(total, slot.group, slot.step))
        return (nu_hat - bias).clamp_(min=slot.group["eps"] ** 2).sqrt_()


@dataclass(frozen=True)
class OfReleasedSquare:
    """ν of the second release (IME, JME; un-noised under the non-private plan); denominator √max(ν̂, 0) + eps."""

    def denominator(self, slot: Slot, rule: UpdateRule, gradient: Tensor, released: Released) -> Tensor:
        assert released.square is not None
        nu_hat = _accumulate(slot, rule, released.square[slot.name])
        return nu_hat.clamp(min=0).sqrt_() + slot.group["eps"]


class OfPublicGradient:
    """ν of the squared gradient of PUBLIC data, taken anew at every step; denominator √ν̂ + eps."""

    def __init__(self, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        self._source = OncePerStep(gradients)

    def denominator(self, slot: Slot, rule: UpdateRule, gradient: Tensor, released: Released) -> Tensor:
        public = self._source.at(slot.step)[slot.name].to(gradient.dtype)
        nu_hat = _accumulate(slot, rule, public.square())
        return nu_hat.sqrt() + slot.group["eps"]


@dataclass(frozen=True)
class OfScale:
    """The denominator is what the gradient was divided by before clipping: the update stays in the scaled space
    (DP², AdaDPS).
    """

    def denominator(self, slot: Slot, rule: UpdateRule, gradient: Tensor, released: Released) -> Tensor | None:
        return slot.state.get("divided_by")


class OncePerStep:
    """Calls `gradients` once a step, however many parameters ask."""

    def __init__(self, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        self._gradients = gradients
        self._step: int | None = None
        self._latest: Mapping[str, Tensor] = {}

    def at(self, step: int) -> Mapping[str, Tensor]:
        if step != self._step:
            self._latest, self._step = self._gradients(), step
        return self._latest


def _accumulate(slot: Slot, rule: UpdateRule, value: Tensor) -> Tensor:
    total = slot.get("second_moment")
    rule.accumulate(total, value, slot.group)
    return rule.estimate(total, slot.group, slot.step)
