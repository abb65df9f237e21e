"""Clip and sum: Σ_j c_j g_j with c_j = min(1, clip_norm / ‖scale ⊙ g_j‖).

Formal guarantee: one example adds to the sum a vector v with ‖scale ⊙ v‖ ≤ clip_norm (up to the rounding of the
sum), whatever the example is; an example whose gradient is not finite adds nothing. So under zero-out or add-remove
adjacency the sum, measured in the scaled norm, changes by at most clip_norm, and by at most 2·clip_norm when one
example replaces another. The scale enters the norm only: dividing the noise by it is the same as scaling, noising
and unscaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpoptim.gradients.engine import Engine, PhysicalBatch


@dataclass
class ClippingCounts:
    """What clipping did since the last release. NOT private: it depends on single examples and carries no noise."""

    examples: int = 0
    clipped: int = 0
    nonfinite: int = 0


class ClippedSums:
    """Accumulates Σ_j c_j g_j (and, where asked, Σ_j (c_j g_j)²) over the physical batches of one step.

    `scale` maps parameter names to positive tensors s_t of the parameter's shape; None is 1 everywhere. It must be a
    function of released values alone and stays fixed from one `take` to the next.
    `mean_loss` says that the loop reduces the losses of a physical batch by their mean, which is undone here.
    """

    def __init__(self, model: nn.Module, *, clip_norm: float, squares: bool = False, mean_loss: bool = False) -> None:
        if not clip_norm > 0 or math.isnan(clip_norm):
            raise ValueError(f"clip_norm={clip_norm} must be positive (math.inf for no clipping)")
        self.clip_norm = clip_norm
        self.mean_loss = mean_loss
        self.scale: Mapping[str, Tensor] | None = None
        self.sums: dict[str, Tensor] = {}
        self.square_sums: dict[str, Tensor] | None = {} if squares else None
        self.counts = ClippingCounts()
        self.norms: list[Tensor] = []
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.engine = Engine(model, self._add)

    def take(self) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        """(Σ c_j g_j, Σ (c_j g_j)² or None) by parameter name, zeros where nothing arrived; the accumulator is
        emptied.
        """
        self.engine.flush()
        sums = {name: self.sums.get(name, _zeros(p)) for name, p in self.parameters.items()}
        squares = None
        if self.square_sums is not None:
            squares = {name: self.square_sums.get(name, _zeros(p)) for name, p in self.parameters.items()}
        self.clear_sums()
        return sums, squares

    def clear_sums(self) -> None:
        """Forget every physical batch that has been summed since the last `take`."""
        self.sums = {}
        if self.square_sums is not None:
            self.square_sums = {}
        self.norms = []

    def _add(self, batch: PhysicalBatch) -> None:
        try:
            self._clip_and_sum(batch)
        except BaseException:  # out of memory, an interrupt: half a batch must never be released
            self.clear_sums()
            raise

    def _clip_and_sum(self, batch: PhysicalBatch) -> None:
        factor = batch.examples if self.mean_loss else 1
        squared: Tensor | None = None
        for name, gradients in batch.gradients.items():
            scale = None if self.scale is None else self.scale[name]
            part = gradients.squared_norms(scale)
            squared = part if squared is None else squared + part
        assert squared is not None
        norms = squared.sqrt() * factor
        finite = norms.isfinite()
        weights = (self.clip_norm / norms).clamp(max=1.0)  # a norm of 0 gives inf, clamped to 1
        weights = weights.masked_fill(~finite, 0) * factor
        self.counts.examples += batch.examples
        self.counts.clipped += int((norms > self.clip_norm).sum())
        self.counts.nonfinite += batch.examples - int(finite.sum())
        self.norms.append(norms)
        everything_finite = bool(finite.all())
        for name, gradients in batch.gradients.items():
            kept, kept_weights = gradients, weights
            if not everything_finite:  # 0 · NaN is NaN: leave the examples out instead
                kept, kept_weights = gradients.select(finite), weights[finite]
            _accumulate(self.sums, name, kept.weighted_sum(kept_weights))
            if self.square_sums is not None:
                _accumulate(self.square_sums, name, kept.weighted_square_sum(kept_weights))


def _accumulate(into: dict[str, Tensor], name: str, value: Tensor) -> None:
    if name in into:
        into[name] += value
    else:
        into[name] = value


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.float64 if parameter.dtype == torch.float64 else torch.float32)
