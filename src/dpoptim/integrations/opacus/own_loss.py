"""A classifier's own loss, from `labels=`: taken apart into one term an example while the model trains privately."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_hooks: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


@contextlib.contextmanager
def own_loss_taken_apart(module: nn.Module, *, wanted: bool) -> Iterator[None]:
    """Make the private optimizer inside: the hook comes before those of its engine, and goes again if that fails."""
    is_new = module not in _hooks
    if wanted and is_new:
        _hooks[module] = module.register_forward_hook(_mean_of_own_losses, with_kwargs=True)
    try:
        yield
    except BaseException:
        if is_new:
            leave_own_loss(module)
        raise
    if not wanted:
        leave_own_loss(module)


def leave_own_loss(module: nn.Module) -> None:
    """From now on the module returns its loss as it computes it."""
    hook = _hooks.pop(module, None)
    if hook is not None:
        hook.remove()


def _mean_of_own_losses(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
    """A forward hook: loss = (1/n)·Σ_j cross_entropy(logits_j, label_j), where that is the loss that came.

    Hugging Face's classifiers return this value as a scalar, of which nothing tells from outside whether it mixes
    examples. Here each term is of one example. Any other loss (smoothed labels, a regulariser, a mean over tokens) is
    left as it is, and the engine refuses it; where all logits are equal, before training, smoothed labels have the
    same value, and are refused from the first step on that has moved them. Copies of the module are left alone.
    """
    labels = kwargs.get("labels")
    if module not in _hooks or not torch.is_grad_enabled():
        return output
    if not (isinstance(output, dict) and isinstance(labels, Tensor)):
        return output
    own, logits = output.get("loss"), output.get("logits")
    if not (isinstance(own, Tensor) and own.ndim == 0 and isinstance(logits, Tensor) and logits.ndim == 2):
        return output
    if labels.shape != logits.shape[:1] or labels.is_floating_point() or bool((labels < 0).any()):
        return output  # a label below 0 is left out of the model's mean, whose divisor is then of the batch
    with torch.no_grad():  # the model's own call in its own precision, so that rounding agrees
        mean = F.cross_entropy(logits.to(own.dtype), labels)
    if torch.allclose(mean, own, rtol=1e-6, atol=0.0, equal_nan=True):
        losses = F.cross_entropy(logits, labels, reduction="none")
        output["loss"] = losses.mean().reshape(1)  # one element, as `backward` and `item` take it, and no scalar
    return output
