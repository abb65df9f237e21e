"""Temporary changes to modules."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Use eval mode without gradients, then restore the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def steady(module: nn.Module) -> Iterator[None]:
    """Keep the vectors of spectral norms: how often they are updated must not depend on the batch."""
    if parametrize._cache_enabled and any(map(parametrize.is_parametrized, module.modules())):
        raise ValueError("parametrize.cached() reuses a weight whose gradient was not recorded. Train without it")
    for part in module.modules():
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            raise ValueError(
                f"torch.func.vmap trains the padding row of {part} in {type(module).__name__}. Set its padding_idx to "
                "None, and its row to 0 if you need that"
            )
    norms = [part for part in module.modules() if isinstance(part, _SpectralNorm) and part.training]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


def update_spectral_norms(model: nn.Module) -> None:
    """Update them once, as a forward in training does without privacy; they read parameters only."""
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList) and any(
            isinstance(own, _SpectralNorm) for own in module
        ):
            with torch.no_grad():
                module()


@contextlib.contextmanager
def replaced(module: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a Python module, or methods and parts of an `nn.Module`."""
    own = module.__dict__
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


@contextlib.contextmanager
def no_masks_from_values() -> Iterator[None]:
    """Let the masks of transformers depend on which arguments are given, never on their values.

    A capture cannot read values, and a run without a graph must round like a replay. No mask is built unless given.
    """
    with contextlib.ExitStack() as stack:
        for name in ("masking_utils", "modeling_attn_mask_utils"):
            module: Any = sys.modules.get(f"transformers.{name}")
            if hasattr(module, "is_tracing"):
                stack.enter_context(replaced(module, is_tracing=lambda tensor=None: tensor is not None))
        yield
