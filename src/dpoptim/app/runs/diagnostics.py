"""What released values tell about a run: lengths of gradient and noise, second moments, scales, updates.

Everything here is computed from what a step made public (and from the plan's public numbers), so it may be shown to
anyone who may see the model.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from dpoptim.clipping import Released
from dpoptim.integrations.released_norms import norm_of, released_norms
from dpoptim.optim import Adam, NoiseCorrected, OfNoisyGradient, OfReleasedSquare, PrivateOptimizer
from dpoptim.theory import second_moment_bias

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_MOST_SORTED = 1 << 20


class Diagnostics:
    """Watches an optimizer for the steps that are asked for.

        watch.before()          # then the step
        watch.after()           # the values, as plain numbers

    `gradient_norm` is ‖g̃‖, `noise_norm` = √(φ·Σ 1/s²) what the noise alone would have, `signal_norm` =
    √max(‖g̃‖² − noise_norm², 0) an estimate of the un-noised norm that reads released values alone,
    `negative_fraction` the share of coordinates whose second moment, without the noise's known part, is negative (None
    where gradients are scaled, or no second moment is kept), `scale_quantiles` those of s, and `update_norm` how far
    the parameters moved.
    """

    def __init__(self, optimizer: PrivateOptimizer) -> None:
        self._optimizer = optimizer
        self._wanted = False
        self._found: dict[str, Any] = {}
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._old: list[Tensor] = []
        optimizer.observers.append(self._observe)

    def before(self) -> None:
        """Watch the next step."""
        self._wanted = True
        self._old = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def after(self) -> dict[str, Any]:
        """The values of the step that was watched."""
        moved = [parameter.detach() - old for parameter, old in zip(self._parameters, self._old, strict=True)]
        found = {**self._found, "negative_fraction": self._negative_fraction(), "update_norm": float(norm_of(moved))}
        self._wanted, self._old, self._found = False, [], {}
        return found

    @torch.no_grad()
    def _observe(self, released: Released) -> None:
        if not self._wanted:
            return
        scale = self._optimizer.mechanism.scale
        gradient, noise = map(float, released_norms(released, scale))
        signal = math.sqrt(max(gradient**2 - noise**2, 0.0))
        self._found = {
            "gradient_norm": gradient,
            "noise_norm": noise,
            "signal_norm": signal,
            "signal_over_clip": signal / self._optimizer.plan.clip_norm,
            "noise_to_signal": noise / signal if signal > 0 else None,
            "scale_quantiles": None if scale is None else _quantiles(list(scale.values())),
        }

    def _negative_fraction(self) -> float | None:
        optimizer = self._optimizer
        if not isinstance(optimizer.rule, Adam) or optimizer.mechanism.scale is not None:
            return None
        bias = 0.0
        if isinstance(optimizer.second_moment, OfNoisyGradient | NoiseCorrected):
            bias = self._noise_share() * (1 - optimizer.param_groups[0]["betas"][1] ** optimizer.mechanism.step)
        elif not isinstance(optimizer.second_moment, OfReleasedSquare):
            return None
        moments = [optimizer.state[parameter]["second_moment"] for parameter in self._parameters]
        negative = sum(int((moment < bias).sum()) for moment in moments)
        return negative / sum(moment.numel() for moment in moments)

    def _noise_share(self) -> float:
        """b_t: what the noise adds to the debiased second moment on average."""
        return float(self._noise_shares[self._optimizer.mechanism.step - 1])

    @functools.cached_property
    def _noise_shares(self) -> Any:
        optimizer = self._optimizer
        plan, beta2 = optimizer.plan, optimizer.param_groups[0]["betas"][1]
        unit = plan.noise_stddevs().gradient_sum * plan.strategy.column_norm / plan.batch_size
        return unit**2 * second_moment_bias(plan.strategy, beta2=beta2)


def _quantiles(tensors: list[Tensor]) -> list[float]:
    """Of at most a million evenly spaced coordinates; the ends are exact."""
    flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
    some = flat[:: -(-flat.numel() // _MOST_SORTED)]
    inner = torch.quantile(some, torch.tensor(QUANTILES[1:-1], device=flat.device))
    return [float(flat.min()), *inner.tolist(), float(flat.max())]
