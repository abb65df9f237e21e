"""Helpers for modules whose forward is rewritten so that every layer inside has the examples on its first axis.

Some modules of transformers fold examples and positions into one axis, or run shared rows through the layers of the
batch. The first call of each module is compared with the original, so a different version is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.clipping.layers.rule import GradientSink, plain
from dpoptim.validation.temporary_changes import in_eval_mode

_compared: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_TOLERANCE = 2e-2  # relative; a different computation differs by far more, 16-bit rounding by less


def check_same(
    sink: GradientSink, name: str, module: nn.Module, ours: Callable[[], Any], theirs: Callable[[], Any]
) -> None:
    """Compare once per module, without gradients or dropout; raise if our result differs."""
    if module in _compared:
        return
    with in_eval_mode(module), plain(sink):
        found, expected = torch.as_tensor(ours()), torch.as_tensor(theirs())
    if not _same(found, expected):
        raise ValueError(
            f"layer '{name}' ({type(module).__name__}) does not compute what its rule does in this version of "
            "transformers. Freeze its parameters, or install transformers 5.22"
        )
    if expected.numel():
        _compared.add(module)


def _same(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    found, expected = (torch.nan_to_num(tensor.double(), posinf=0.0, neginf=0.0) for tensor in (found, expected))
    return bool((found - expected).norm() <= _TOLERANCE * expected.norm())
