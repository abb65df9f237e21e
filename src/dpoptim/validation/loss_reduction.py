"""Notice a loop that averages the losses of a batch where their sum is expected.

A mean makes the gradient of each example smaller by the size of the batch. Nothing fails: gradients are then rarely
clipped, and drown in the noise. Where the size of the batch is private (add-remove, users), dividing by it also lets
one example change the gradients of the others.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_MEAN = 1  # how torch stores reduction="mean"
_PASSED = ("Add", "Sub", "Neg", "Div", "ToCopy", "Squeeze", "View", "Reshape", "Clone", "Alias")
_MAX_NODES = 32


AVERAGED = "losses are averaged. Use losses.sum().backward(), or pass the optimizer loss_reduction='mean'"


def is_averaging() -> bool:
    """Return whether the running backward began at a mean over the batch.

    False if this cannot be seen: in `losses.sum() / len(losses)`, or if the mean is multiplied by something.
    """
    frames = list(sys._current_frames().values())  # on a GPU, this runs in a different thread than the caller's
    frame: FrameType | None = None
    try:
        for frame in frames:
            while frame is not None:
                if frame.f_code is torch.autograd.backward.__code__:
                    tensors = frame.f_locals["tensors"]
                    return any(is_mean(loss) for loss in ([tensors] if isinstance(tensors, Tensor) else tensors))
                frame = frame.f_back
        return False
    finally:
        del frames, frame  # which refer to this one: a cycle would keep the tensors of all callers alive


def is_mean(loss: Tensor) -> bool:
    """Return whether a loss is a mean, or a sum of means; operations in `_PASSED` may follow.

    >>> losses = torch.ones(3, requires_grad=True) * 2
    >>> is_mean(losses.mean()), is_mean(losses.sum()), is_mean(losses.mean() * 3)
    (True, False, False)
    """
    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:
        if node is None or len(nodes) > _MAX_NODES:
            continue
        name = node.name()
        if getattr(node, "_saved_reduction", None) == _MEAN or name.startswith("MeanBackward"):
            return True
        if name.startswith(_PASSED):
            nodes += [before for before, _ in node.next_functions]
    return False
