"""Gradients of PUBLIC data, for the variants that take their preconditioner from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.clipping.engine import public_data


class PublicGradients:
    """Mean gradients of public batches, one batch after the other, round and round.

    `loss_fn(model, batch)` gives one loss an example, as in private training; the batches must be PUBLIC: nothing
    here is clipped or noised, and no guarantee covers them. Calling it returns {parameter name: gradient of the mean
    loss}.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batches: Iterable[Any]) -> None:
        self.model, self.loss_fn = model, loss_fn
        self._batches = itertools.cycle(batches)

    def __call__(self) -> dict[str, Tensor]:
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        try:
            batch = next(self._batches)
        except StopIteration:
            raise ValueError("batches is empty; give at least one public batch") from None
        with public_data(), torch.enable_grad():
            loss = self.loss_fn(self.model, batch).mean()
            gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return {
            name: torch.zeros_like(p) if gradient is None else gradient
            for (name, p), gradient in zip(named.items(), gradients, strict=True)
        }
