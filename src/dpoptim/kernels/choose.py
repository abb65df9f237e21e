"""Noise on a CUDA device: where Triton is there, one kernel in place of many, with the same bits."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator, Sequence
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


@contextlib.contextmanager
def held_tables() -> Iterator[Any]:
    """Within this context a graph is captured; what it yields are the small tables that its kernels read, to be kept
    as long as the graph is.
    """
    if not _has_triton():
        yield None
        return
    from dpoptim.kernels import tables_triton as triton_tables

    held = triton_tables.held = triton_tables.HeldTables()
    try:
        yield held
    finally:
        triton_tables.held = None
    held.send()


def device_normals(subkeys: Sequence[bytes], ranges: Sequence[tuple[int, int]], device: str | torch.device) -> Any:
    """The normals of elements [start, stop) of several tensors; has `combined(step, coefs, dtype)`."""
    from dpoptim.kernels.normals_triton import DeviceNormals

    return DeviceNormals(subkeys, ranges, torch.device(device))


def add_products(row: torch.Tensor, ring: torch.Tensor, slots: Sequence[int], coefs: Sequence[float]) -> None:
    """row += coefs[i]·ring[slots[i]] for each i in turn, in one pass over the ring."""
    from dpoptim.kernels import normals_triton as triton_normals

    triton_normals.add_products(row, ring, slots, coefs)
