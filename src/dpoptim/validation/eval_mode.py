"""Run a module in eval mode for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


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
