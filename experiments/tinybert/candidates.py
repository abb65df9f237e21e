"""What was tried against scale-then-privatize and is not in the library: second moments with less noise in them.

Only released values enter a second moment, so the guarantee is that of the plan.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from dpoptim.clipping import Released
from dpoptim.noise import NoiseKey
from dpoptim.optim import Adam, PrivateOptimizer
from dpoptim.optim.bundle import ParameterBundle
from dpoptim.optim.geometries import InverseRoot
from dpoptim.optim.rules import UpdateRule
from dpoptim.optim.second_moments import SecondMoment
from dpoptim.privacy import PrivacyPlan

FILTER = 0.9


class RowMeans(SecondMoment):
    """ν of g̃² minus the variance of its noise, averaged over a row of a matrix or a whole vector; denominator √ν̂ + ε.

    An average over a row contains little noise, so ε may lie far below the noise of a coordinate. With `noise_shares`,
    squares are those of a moving average of g̃ with decay .9, in which correlated noise is smaller by these shares.
    """

    def __init__(self, eps_scale: float, noise_shares: np.ndarray | None = None) -> None:
        self._eps, self._shares = eps_scale, noise_shares

    def denominator(self, bundle: ParameterBundle, rule: UpdateRule, gradient: Tensor, released: Released) -> Tensor:
        moment, decay, step = bundle.get("second_moment"), bundle.group["betas"][1], bundle.step
        before = moment / (1 - decay ** (step - 1)) if step > 1 else moment
        noise = released.noise_variance * ((before.sqrt() + self._eps) / self._eps).square()
        if self._shares is None:
            squares = gradient.square()
        else:
            squares = (bundle.get("filtered").lerp_(gradient, 1 - FILTER) / (1 - FILTER**step)).square()
            noise = noise * float(self._shares[step - 1])
        total = bundle.get("row_means")
        rule.accumulate(total, _averaged(bundle, squares - noise), bundle.group)
        torch.clamp(total, min=0, out=moment)
        return rule.estimate(moment, bundle.group, step).sqrt() + self._eps


def _averaged(bundle: ParameterBundle, vector: Tensor) -> Tensor:
    """Every value replaced by the mean over its row (of a vector: over the vector)."""
    parts = bundle.split(vector)
    return torch.cat([part.mean(-1, keepdim=True).expand_as(part).reshape(-1) for part in parts])


def noise_shares(plan: PrivacyPlan) -> np.ndarray:
    """By how much the moving average reduces the variance of Toeplitz noise, for each step."""
    row = plan.strategy.noising_row(plan.steps - 1)
    coefs = np.pad(row, (0, plan.steps - len(row)))
    weights = (1 - FILTER) * FILTER ** np.arange(plan.steps)
    filtered = np.convolve(weights, coefs)[: plan.steps]
    debias = 1 - FILTER ** np.arange(1, plan.steps + 1)
    return np.cumsum(filtered**2) / debias**2 / np.cumsum(coefs**2)


def rows_scaled(
    model: nn.Module, plan: PrivacyPlan, lr: float, *, eps_scale: float, filtered: bool, key: NoiseKey, run_id: str
) -> PrivateOptimizer:
    """Scale-then-privatize with `RowMeans` for the scale and for the update."""
    second = RowMeans(eps_scale, noise_shares(plan) if filtered else None)
    geometry = InverseRoot(eps_scale=eps_scale)
    return PrivateOptimizer(
        model, plan, lr=lr, rule=Adam(), second_moment=second, geometry=geometry, key=key, run_id=run_id
    )
