"""The precision in which norms and sums are taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_precision(device: str) -> Iterator[None]:
    """Norms and sums are not taken in a reduced precision that the loop has set for its forward.

    A gradient that is formed in the backward has the precision of the loop, as a weight gradient would; its norm and
    its sum are both of what was formed.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
