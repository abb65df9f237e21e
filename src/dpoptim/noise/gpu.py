"""Noise on a CUDA device: where Triton is there, one kernel in place of many, with the same bits."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch


@functools.cache
def _has_triton() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def available(device: str | torch.device) -> bool:
    """Whether tensors on this device go through the kernels, which are launched on the current one alone."""
    device = torch.device(device)
    if device.type != "cuda" or not _has_triton():
        return False
    return device.index is None or device.index == torch.cuda.current_device()


def hold_tables(held: list[torch.Tensor] | None) -> None:
    """From now on put the small tables that kernels read into `held`, which a graph reads again; None: no longer."""
    if _has_triton():
        from dpoptim.noise import triton_tables

        triton_tables.held = held


def device_normals(subkeys: Sequence[bytes], ranges: Sequence[tuple[int, int]], device: str | torch.device) -> Any:
    """The normals of elements [start, stop) of several tensors; has `combined(step, coefs, dtype)`."""
    from dpoptim.noise.triton_normals import DeviceNormals

    return DeviceNormals(subkeys, ranges, torch.device(device))


def add_products(row: torch.Tensor, ring: torch.Tensor, slots: Sequence[int], coefs: Sequence[float]) -> None:
    """row += coefs[i]·ring[slots[i]] for each i in turn, in one pass over the ring."""
    from dpoptim.noise import triton_normals

    triton_normals.add_products(row, ring, slots, coefs)
