"""What tutorials do to the module before training: find the layers that cannot be trained privately, and mend them."""

from __future__ import annotations

import copy
import math
from typing import Any

from torch import nn
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
