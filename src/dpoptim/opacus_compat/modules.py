"""What tutorials do to the module before and during training: mend its layers, and let it compute its own loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


class ModuleValidator:
    """Finds and replaces layers that cannot be trained privately: BatchNorm, and InstanceNorm with running statistics.

    Recurrent and attention layers need no replacement here. Other refusals come from `make_private`, by name.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> ModuleValidator.is_valid(model), type(ModuleValidator.fix(model)[1]).__name__
    (False, 'GroupNorm')
    """

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[ValueError]:
        """What stands in the way, one error a layer; raised together if `strict`."""
        errors = [
            ValueError(
                f"layer '{name}' ({type(part).__name__}) {_fault(part)}; ModuleValidator.fix(module) replaces it"
            )
            for name, part in module.named_modules()
            if _fault(part)
        ]
        if strict and errors:
            raise ValueError("\n".join(map(str, errors)))
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, *, num_groups: int | None = None, replace_bn_with_in: bool = False) -> nn.Module:
        """A copy with GroupNorm for BatchNorm (InstanceNorm, if asked for); make the optimizer after it.

        num_groups: by default the largest of 1, 2, 4, ..., 32 that divides the channels.
        """
        module = copy.deepcopy(module)
        if _fault(module):
            return _mended(module, num_groups, replace_bn_with_in)
        for parent in list(module.modules()):
            for name, part in parent.named_children():
                if _fault(part):
                    setattr(parent, name, _mended(part, num_groups, replace_bn_with_in))
        return module

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **options: Any) -> nn.Module:
        module = cls.fix(module, **options)
        cls.validate(module, strict=True)
        return module


def _fault(part: nn.Module) -> str:
    """Why a layer cannot be trained privately; empty if it can, as a BatchNorm can that is frozen and in eval mode."""
    if isinstance(part, _BatchNorm) and (part.training or any(p.requires_grad for p in part.parameters())):
        return "normalises over the batch and so mixes examples"
    if isinstance(part, _InstanceNorm) and part.track_running_stats:
        return "keeps running statistics of private data"
    return ""


def _mended(part: nn.Module, num_groups: int | None, replace_bn_with_in: bool) -> nn.Module:
    assert isinstance(part, _BatchNorm | _InstanceNorm)
    by_axes = {nn.BatchNorm1d: nn.InstanceNorm1d, nn.BatchNorm2d: nn.InstanceNorm2d, nn.BatchNorm3d: nn.InstanceNorm3d}
    kind = type(part) if isinstance(part, _InstanceNorm) else by_axes.get(type(part)) if replace_bn_with_in else None
    channels = part.num_features
    mended: nn.Module
    if kind is None:
        mended = nn.GroupNorm(num_groups or math.gcd(32, channels), channels, affine=part.affine)
    else:
        mended = kind(channels, affine=part.affine)
    like = next(part.parameters(), part.running_mean)
    mended = mended if like is None else mended.to(like.device, like.dtype)
    if isinstance(part, _InstanceNorm):
        mended.load_state_dict(dict(part.named_parameters()))
    return mended.train(part.training)


def mean_of_own_losses(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
    """A forward hook: a classifier's own loss, from `labels=`, becomes the mean of one cross-entropy an example.

        loss = (1/n)·Σ_j cross_entropy(logits_j, label_j)

    Hugging Face's classifiers return that value themselves, as a scalar in which examples could be mixed; there is no
    telling from outside, so it is computed here, where each term is of one example. Where the value is another, by
    more than rounding in bfloat16, the model's own is left as it is, and the engine refuses it: a loss over tokens,
    say, is divided by their number in the batch.
    """
    labels = kwargs.get("labels")
    if not (isinstance(output, dict) and torch.is_grad_enabled() and isinstance(labels, Tensor)):
        return output
    own, logits = output.get("loss"), output.get("logits")
    if not (isinstance(own, Tensor) and own.ndim == 0 and isinstance(logits, Tensor) and logits.ndim == 2):
        return output
    if labels.shape != logits.shape[:1] or labels.is_floating_point():
        return output
    mean = F.cross_entropy(logits, labels, reduction="none").mean()
    if torch.allclose(mean.detach().to(own.dtype), own.detach(), rtol=0.02, equal_nan=True):
        output["loss"] = mean.reshape(1)  # one element, as `backward` and `item` take it, and no scalar
    return output
