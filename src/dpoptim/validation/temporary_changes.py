"""Temporary changes to modules."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrize


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
def steady(module: nn.Module, *, update: bool) -> Iterator[None]:
    """Keep the state of parametrizations, such as the vectors of a spectral norm; with `update`, change it once first.

    They read parameters only, so one update stands for those of all examples.
    """
    computed = [
        own
        for part in module.modules()
        if parametrize.is_parametrized(part)
        for own in cast(nn.ModuleDict, part.parametrizations).values()
    ]
    if update:
        with torch.no_grad():
            for one in computed:
                one()
    modes = [(part, part.training) for one in computed for part in one.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


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
