"""Models in eval mode for a while, and without the wrapper of peft."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards each module has its own mode again.

    >>> model = nn.Sequential(nn.Dropout().eval(), nn.Dropout())
    >>> with in_eval_mode(model):
    ...     print([module.training for module in model.modules()], torch.is_grad_enabled())
    [False, False, False] False
    >>> [module.training for module in model.modules()], torch.is_grad_enabled()
    ([True, False, True], True)
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def without_peft(model: Any) -> Any:
    """The model inside the wrapper of peft, with its LoRA layers; any other model as it is.

    >>> model = nn.Linear(1, 1)
    >>> without_peft(model) is model
    True
    """
    return model.get_base_model() if hasattr(model, "get_base_model") else model
