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

from dpoptim.gradients import kernels
from dpoptim.gradients.engine import Engine, PhysicalBatch
from dpoptim.gradients.forms import ExampleGradients, joined_small
from dpoptim.gradients.kernels import wide, wide_dtype

CANCELLATION = {torch.float32: 1e3, torch.float64: 1e11}
"""Examples whose parts exceed their sum by this factor are measured and summed from one and the same rounded vector."""


@dataclass
class ClippingCounts:
    """What clipping did since the start. NOT private: it depends on single examples and carries no noise."""

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
        taken = self._complete(self.sums), None if self.square_sums is None else self._complete(self.square_sums)
        self.clear_sums()
        return taken

    def _complete(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: sums[name] if name in sums else _zeros(p) for name, p in self.parameters.items()}

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
        squared: Tensor | float = 0.0
        bounds: Tensor | float = 0.0
        joined = joined_small(batch.gradients)
        together = {name for names, _ in joined for name in names}
        alone = {name: gradients for name, gradients in batch.gradients.items() if name not in together}
        for name, gradients in alone.items():
            more, bound = gradients.measured(None if self.scale is None else self.scale[name])
            squared, bounds = squared + more, bounds + bound
        for names, grads in joined:
            scale = None if self.scale is None else torch.cat([self.scale[name].reshape(-1) for name in names])
            squared = squared + kernels.squares(grads, scale)
        assert isinstance(squared, Tensor)
        norms = squared.sqrt() * factor
        precision = wide_dtype(next(iter(self.parameters.values())).dtype)
        finite = norms.isfinite()
        apart = finite & (torch.as_tensor(bounds, device=norms.device) * factor > CANCELLATION[precision] * norms)
        plain = finite & ~apart
        weights = self._weights(norms) * factor
        # What is summed for all examples is used if none must be left out, which the host learns behind it: so an
        # accelerator is never kept waiting. 0 · NaN is NaN: examples are left out, not weighted by 0.
        sums = {name: self._sums_of(name, gradients, weights) for name, gradients in alone.items()}
        for names, grads in joined:
            sums.update(self._joined_sums(names, grads, weights))
        clipped, kept, single = torch.stack([norms > self.clip_norm, plain, apart]).sum(1).tolist()
        self.counts.examples += batch.examples
        self.counts.clipped += clipped
        self.counts.nonfinite += batch.examples - kept - single
        self.norms.append(norms.to(precision))
        for name, gradients in batch.gradients.items():
            if kept < batch.examples:
                sums[name] = self._sums_of(name, gradients.select(plain), weights[plain])
            self._accumulate(name, sums[name])
        for j in torch.nonzero(apart).flatten().tolist() if single else []:
            self._clip_and_sum_one(batch, j, factor)

    def _clip_and_sum_one(self, batch: PhysicalBatch, j: int, factor: int) -> None:
        """An example whose positions nearly cancel: the very vector that is measured is the one that is summed."""
        own = {name: gradients.example(j) for name, gradients in batch.gradients.items()}
        scaled = own if self.scale is None else {name: g * self.scale[name] for name, g in own.items()}
        norm = torch.stack([g.double().square().sum() for g in scaled.values()]).sum().sqrt() * factor
        weight = self._weights(norm[None]) * factor
        for name, g in own.items():
            alone = ExampleGradients(g.shape, dense=g[None])
            self._accumulate(name, self._sums_of(name, alone, weight))

    def _weights(self, norms: Tensor) -> Tensor:
        """min(1, clip_norm/norm); a norm of 0 gives 1."""
        return (self.clip_norm / norms).clamp(max=1.0)

    def _sums_of(self, name: str, gradients: ExampleGradients, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Σ_j c_j g_j, and Σ_j (c_j g_j)² where asked."""
        weights = weights.to(wide_dtype(self.parameters[name].dtype))
        squares = None if self.square_sums is None else gradients.weighted_square_sum(weights)
        return gradients.weighted_sum(weights), squares

    def _joined_sums(self, names: list[str], grads: Tensor, weights: Tensor) -> dict[str, tuple[Tensor, Tensor | None]]:
        """`_sums_of` for small parameters that stand side by side in one tensor."""
        shapes = [self.parameters[name].shape for name in names]
        weights = weights.to(wide_dtype(grads.dtype))

        def by_name(total: Tensor) -> list[Tensor]:
            parts = total.split([shape.numel() for shape in shapes])
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

        totals = by_name(kernels.weighted_sum(grads, weights))
        if self.square_sums is None:
            return {name: (total, None) for name, total in zip(names, totals, strict=True)}
        squares = by_name(torch.tensordot(weights.square(), wide(grads).square(), dims=1))
        return {name: both for name, *both in zip(names, totals, squares, strict=True)}  # type: ignore[misc]

    def _accumulate(self, name: str, sums: tuple[Tensor, Tensor | None]) -> None:
        total, squares = sums
        _add_to(self.sums, name, total)
        if self.square_sums is not None and squares is not None:
            _add_to(self.square_sums, name, squares)


def _add_to(into: dict[str, Tensor], name: str, value: Tensor) -> None:
    if name in into:
        into[name] += value
    else:
        into[name] = value


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=wide_dtype(parameter.dtype))
