"""The precision of norms and sums."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_precision(device: str) -> Iterator[None]:
    """Turn off autocast and reduced matmul precision, which the loop may have set for its forward.

    Gradients that a backward formed keep the precision of the loop; norms and sums see the same numbers.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
