"""Does padding change a model's loss? Then the longest text of a batch would change the losses of the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-4}  # relative; 16-bit models round at each width otherwise
_CLOSE_IN_16_BITS = 5e-2


def same_losses(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether two losses of one example are the same but for rounding in `dtype`.

        |one − other| ≤ close·max(|one|, |other|, 1e-3),  close = 1e-4, or 0.05 in 16 bits

    >>> same_losses(torch.tensor(2.0), torch.tensor(2.0001), torch.float32)
    True
    >>> same_losses(torch.tensor(2.0), torch.tensor(2.01), torch.float32)
    False
    """
    close = _CLOSE.get(dtype, _CLOSE_IN_16_BITS)
    larger = torch.maximum(one.abs(), other.abs()).clamp(min=1e-3)
    return bool((((one - other).abs() <= close * larger) | (one.isnan() & other.isnan())).all())


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products and convolutions of 32-bit numbers as they are, not in TF32, for a while."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
