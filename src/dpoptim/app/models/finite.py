"""Whether a model's parameters are finite numbers.

What a step leaves in the parameters is released, so looking at it costs no privacy.
"""

from __future__ import annotations

import torch
from torch import nn


def not_finite(model: nn.Module) -> list[str]:
    """The names of the parameters that hold a NaN or an infinity; a GPU is waited for once.

    >>> model = nn.Linear(2, 1)
    >>> _ = nn.init.constant_(model.bias, float("nan"))
    >>> not_finite(model)
    ['bias']
    """
    named = list(model.named_parameters())
    if not named:
        return []
    fine = torch.stack([parameter.detach().isfinite().all() for _, parameter in named]).tolist()
    return [name for (name, _), finite in zip(named, fine, strict=True) if not finite]


def check_finite(model: nn.Module, name: str) -> None:
    """One ValueError line for a model that nothing can be learnt with, before anything is released; `name` is its own.

    >>> check_finite(nn.Linear(2, 1), "mine")
    """
    found = not_finite(model)
    if found:
        count = f"{len(found)} parameter{'s' * (len(found) != 1)}"
        raise ValueError(
            f"model={name!r} has {count} with NaN or infinite values (first: {found[0]!r}) before any training; "
            "give weights that are finite"
        )
