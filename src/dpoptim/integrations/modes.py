"""Models in eval mode for a while, and without the wrapper of peft."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards each module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def without_peft(model: Any) -> Any:
    """The model inside the wrapper of peft, with its LoRA layers; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
