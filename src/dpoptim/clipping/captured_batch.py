"""A batch of examples as a captured function is given it, and what is computed of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Batch:
    """A batch with what is to be computed of it; tensors and other arguments by their places."""

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
    def is_plain(self) -> bool:
        """Whether the key tells batches apart, and there are few: numbers and texts may be other ones in each."""
        return all(other is None or isinstance(other, bool) for other in self.others.values())

    @property
    def key(self) -> Hashable:
        """What two batches that one graph serves have in common."""
        shapes = tuple((i, tensor.shape[1:], tensor.dtype) for i, tensor in self.tensors.items())
        return shapes, tuple(self.others.items()), self.structure

    def losses(self) -> Tensor:
        given = self.tensors | self.others
        args, kwargs = pytree.tree_unflatten([given[i] for i in range(len(given))], self.structure)
        losses = self.function(*args, **kwargs)
        if not isinstance(losses, Tensor) or losses.shape != (self.examples,):
            found = f"a tensor of {losses.ndim} axes" if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(  # without sizes: that of a Poisson sample is secret
                f"losses must return one loss an example, a vector as long as the batch, got {found}; take "
                "reduction='none', and the mean over an example's own tokens"
            )
        return losses

    def padded(self, rows: int) -> Batch:
        """A copy of so many rows, filled up by the first one."""
        own = {i: tensor.new_empty(rows, *tensor.shape[1:]) for i, tensor in self.tensors.items()}
        filled = replace(self, tensors=own)
        filled.fill(self)
        return filled

    def chosen(self, rows: list[int]) -> Batch:
        """These rows alone, in this order."""
        return replace(self, tensors={i: tensor[rows] for i, tensor in self.tensors.items()})

    def fill(self, batch: Batch) -> None:
        """Overwrite the rows by those of a smaller batch, and those beyond them by its first one."""
        for i, tensor in batch.tensors.items():
            self.tensors[i][: len(tensor)].copy_(tensor, non_blocking=True)
            self.tensors[i][len(tensor) :] = tensor[:1]


def batch_of(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Batch:
    """What a captured function was called with, on the device; ValueError where its tensors are no batch."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    given = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    tensors = {i: _copied(tensor.detach(), device) for i, tensor in given.items()}
    if not tensors:
        raise ValueError("a captured function found no tensor among its arguments; pass a batch's tensors, or **batch")
    first_axes = {tensor.shape[:1] for tensor in tensors.values()}
    if len(first_axes) != 1 or first_axes == {torch.Size([])}:
        raise ValueError(
            "a captured function takes tensors that have the examples as their first axis, as many in each; of the "
            f"{len(tensors)} that it was given one has another number. What all examples share (class weights, "
            "position ids) is not passed: let the function read it from outside, and write new values into it in place"
        )
    return Batch(function, tensors, {i: leaf for i, leaf in enumerate(leaves) if i not in given}, structure)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, and the loop may write to its own at once: what must run again does so when the loop has gone on,
    and a pinned buffer would be read when the device comes to it.
    """
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True, copy=True)
