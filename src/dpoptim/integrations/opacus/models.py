"""`ModuleValidator`, and the loss that Hugging Face classifiers compute themselves."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle

_hooks: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


class ModuleValidator:
    """Find and replace layers that cannot be trained privately: BatchNorm, and InstanceNorm with running statistics.

    Recurrent and attention layers need no replacement. `make_private` refuses other unsupported layers.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> ModuleValidator.is_valid(model), type(ModuleValidator.fix(model)[1]).__name__
    (False, 'GroupNorm')
    """

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[ValueError]:
        """Return one error per unsupported layer; raise them together if `strict`."""
        errors = [
            ValueError(
                f"layer '{name}' ({type(part).__name__}) {_problem(part)}. ModuleValidator.fix(module) replaces it."
            )
            for name, part in module.named_modules()
            if _problem(part)
        ]
        if strict and errors:
            raise ValueError("\n".join(map(str, errors)))
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Return whether every layer can be trained privately."""
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, *, num_groups: int | None = None, replace_bn_with_in: bool = False) -> nn.Module:
        """Return a copy without unsupported layers. Create the optimizer for the copy.

        Args:
            module: The module to copy.
            num_groups: The groups of a GroupNorm that replaces a BatchNorm. Defaults to the largest of 1, 2, 4, ..., 32
                that divides the channels.
            replace_bn_with_in: Replace BatchNorm by InstanceNorm instead.
        """
        module = copy.deepcopy(module)
        if _problem(module):
            return _replacement(module, num_groups, replace_bn_with_in)
        for parent in list(module.modules()):
            for name, part in parent.named_children():
                if _problem(part):
                    setattr(parent, name, _replacement(part, num_groups, replace_bn_with_in))
        return module

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **options: Any) -> nn.Module:
        """Return `fix(module, **options)`, or raise if it still has unsupported layers."""
        module = cls.fix(module, **options)
        cls.validate(module, strict=True)
        return module


def _problem(part: nn.Module) -> str:
    """Why a layer cannot be trained privately; empty if it can. A frozen BatchNorm in eval mode can."""
    if isinstance(part, _BatchNorm) and (part.training or any(p.requires_grad for p in part.parameters())):
        return "normalises over the batch, which mixes examples"
    if isinstance(part, _InstanceNorm) and part.track_running_stats:
        return "keeps running statistics of private data"
    return ""


def _replacement(part: nn.Module, num_groups: int | None, replace_bn_with_in: bool) -> nn.Module:
    assert isinstance(part, _BatchNorm | _InstanceNorm)
    channels = part.num_features
    instance_norm = getattr(nn, type(part).__name__.replace("Batch", "Instance"), None)
    new: nn.Module
    if instance_norm is not None and (replace_bn_with_in or isinstance(part, _InstanceNorm)):
        new = instance_norm(channels, affine=part.affine)
    else:
        new = nn.GroupNorm(num_groups or math.gcd(32, channels), channels, affine=part.affine)
    like = next(part.parameters(), part.running_mean)
    new = new if like is None else new.to(like.device, like.dtype)
    if isinstance(part, _InstanceNorm):
        new.load_state_dict(dict(part.named_parameters()))
    return new.train(part.training)


@contextlib.contextmanager
def split_own_loss(module: nn.Module, *, wanted: bool) -> Iterator[None]:
    """Create the private optimizer inside, because the hook must come first; a failure removes the hook."""
    is_new = module not in _hooks
    if wanted and is_new:
        _hooks[module] = module.register_forward_hook(_mean_of_own_losses, with_kwargs=True)
    try:
        yield
    except BaseException:
        if is_new:
            restore_own_loss(module)
        raise
    if not wanted:
        restore_own_loss(module)


def restore_own_loss(module: nn.Module) -> None:
    """Let the module return its own loss again."""
    hook = _hooks.pop(module, None)
    if hook is not None:
        hook.remove()


def _mean_of_own_losses(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
    """A forward hook: recompute the loss as (1/n)·Σ_j cross_entropy(logits_j, label_j) if it has this value.

    The scalar mean of a Hugging Face classifier does not show whether it mixes examples; recomputed, each term belongs
    to one example. A different loss (smoothed labels, a regulariser, a mean over tokens) stays, and the engine refuses
    it; smoothed labels only after the first step if all logits are equal. Copies of the module are left alone.
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
        return output  # labels below 0 are ignored, so the model divides by the number of the others
    with torch.no_grad():  # in the model's own precision, so that rounding agrees
        mean = F.cross_entropy(logits.to(own.dtype), labels)
    if torch.allclose(mean, own, rtol=1e-6, atol=0.0, equal_nan=True):
        losses = F.cross_entropy(logits, labels, reduction="none")
        output["loss"] = losses.mean().reshape(1)  # one element, so that `backward` and `item` work, but not a scalar
    return output
