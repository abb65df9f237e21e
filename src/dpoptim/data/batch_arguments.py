"""The arguments of a captured function: one batch, padded so that few shapes occur."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def padded_rows(examples: int, multiple: int | None) -> int:
    """Return the number of rows of a graph for this many examples: by default, at most an eighth more.

    A single example gets no padding: copies of it would not show whether the model mixes examples.
    """
    if examples == 1:
        return 1
    multiple = multiple or 1 << max(examples.bit_length() - 4, 0)
    return -(-examples // multiple) * multiple


@dataclass(frozen=True)
class BatchArguments:
    """The arguments of one call, by position, and the function that takes them."""

    function: Callable[..., Tensor]
    tensors: dict[int, Tensor]
    others: dict[int, Any]
    structure: Any

    @property
    def examples(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def key(self) -> Hashable:
        """What batches of one graph have in common."""
        shapes = tuple((i, tensor.shape[1:], tensor.dtype) for i, tensor in self.tensors.items())
        return shapes, tuple(self.others.items()), self.structure

    def losses(self) -> Tensor:
        given = self.tensors | self.others
        args, kwargs = pytree.tree_unflatten([given[i] for i in range(len(given))], self.structure)
        losses = self.function(*args, **kwargs)
        if not isinstance(losses, Tensor) or losses.shape != (self.examples,):
            found = f"a tensor of {losses.ndim} axes" if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(  # without sizes, because the size of a Poisson sample is secret
                f"losses must return a vector with one loss per example, got {found}. Use reduction='none' and average "
                "over the tokens of each example"
            )
        return losses

    def padded(self, rows: int) -> BatchArguments:
        """Return a copy that is padded to this many rows."""
        own = {i: tensor.new_empty(rows, *tensor.shape[1:]) for i, tensor in self.tensors.items()}
        filled = replace(self, tensors=own)
        filled.fill(self)
        return filled

    def fill(self, batch: BatchArguments) -> None:
        """Overwrite the rows with those of a smaller batch, padded with its first row."""
        for i, tensor in batch.tensors.items():
            self.tensors[i][: len(tensor)].copy_(tensor, non_blocking=True)
            self.tensors[i][len(tensor) :] = tensor[:1]


def read_arguments(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> BatchArguments:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = {i: _copy_to(device, leaf.detach()) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    if not tensors:
        raise ValueError("a captured function got no tensor. Pass the batch's tensors, or **batch")
    first_axes = {tensor.shape[:1] for tensor in tensors.values()}
    if len(first_axes) != 1 or first_axes == {torch.Size([])}:
        raise ValueError(
            f"the first axes of the {len(tensors)} tensors differ, and each must hold the examples. Read what all "
            "examples share (class weights) inside the function, and update it in place"
        )
    return BatchArguments(function, tensors, {i: leaf for i, leaf in enumerate(leaves) if i not in tensors}, structure)


def _copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Copy a tensor, even a pinned one: the loop may overwrite it at once, and rows may be recomputed later."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True, copy=True)
