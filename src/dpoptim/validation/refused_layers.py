"""Refuse modules that mix examples or store statistics of them without noise."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle

_COMPUTING_HOOKS = {
    WeightNorm: "use torch.nn.utils.parametrizations.weight_norm",
    SpectralNorm: "use torch.nn.utils.parametrizations.spectral_norm",
    BasePruningMethod: "make it a parameter again with torch.nn.utils.prune.remove",
}


def refuse_mixing(model: nn.Module) -> list[RemovableHandle]:
    """Raise for modules that mix examples; return the handles of hooks on modules that could start to."""
    watches = []
    for name, module in model.named_modules():
        label = f"layer '{name}' ({type(module).__name__})"
        if isinstance(module, _BatchNorm):
            watch = partial(_refuse_batch_norm, label)
            watch(module, ())
            watches.append(module.register_forward_pre_hook(watch))
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            raise ValueError(f"{label} stores running statistics of private data. Set track_running_stats=False")
        if isinstance(module, nn.Embedding) and module.weight.requires_grad:
            if module.max_norm is not None:
                raise ValueError(
                    f"{label} has max_norm={module.max_norm}, which rewrites rows the batch looks up; set it to None"
                )
            if module.scale_grad_by_freq:
                raise ValueError(f"{label} has scale_grad_by_freq=True, which mixes examples; set it to False")
        if isinstance(module, nn.EmbeddingBag) and module.weight.requires_grad:
            raise ValueError(f"{label} flattens examples into bags; use nn.Embedding and a mean over positions")
        if any(parameter.is_complex() and parameter.requires_grad for parameter in module.parameters(recurse=False)):
            raise ValueError(
                f"{label} has complex parameters, whose gradients would lose their imaginary part. Use a real "
                "parameter and torch.view_as_complex in the forward"
            )
        sources = [p for own, p in module.named_parameters(recurse=False) if own.endswith(("_orig", "_g", "_v"))]
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, tuple(_COMPUTING_HOOKS))]
        if hooks and any(p.requires_grad for p in sources):
            fix = next(text for kind, text in _COMPUTING_HOOKS.items() if isinstance(hooks[0], kind))
            raise ValueError(
                f"{label} computes a weight in each forward ({type(hooks[0]).__name__}), so its per-example gradients "
                f"cannot be seen; {fix}, or freeze the layer"
            )
    return watches


def _refuse_batch_norm(label: str, module: Any, args: Any) -> None:
    """Raise if a BatchNorm is in training mode, now or in a later forward: it would mix examples."""
    if module.training or (module.running_mean is None and torch.is_grad_enabled()):
        raise ValueError(
            f"{label} normalises over the batch and so mixes examples; replace it by nn.GroupNorm, or freeze its "
            "statistics with .eval()"
        )
