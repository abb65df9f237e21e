"""Decide where Triton kernels run."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dpoptim import kernels


@functools.cache
def _has_triton() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def available(device: str | torch.device) -> bool:
    """Return whether kernels run for tensors on this device. They are launched only on the current device."""
    device = torch.device(device)
    if device.type != "cuda" or not _has_triton():
        return False
    return device.index is None or device.index == torch.cuda.current_device()


def on_current_device(*tensors: Tensor | None) -> bool:
    """Return whether kernels can be launched for these tensors, which only the current device allows."""
    if not torch.cuda.is_initialized() or not _has_triton():
        return False
    here = torch._C._cuda_getDevice()  # torch.cuda.current_device() takes longer, and this runs for every layer
    for tensor in tensors:  # noqa: SIM110 - all() takes longer too
        if tensor is not None and tensor.get_device() != here:
            return False
    return True


@functools.cache
def _has_tensor_descriptors() -> bool:
    """Kernels of outer products load through tensor descriptors, which exist since Hopper."""
    return torch.cuda.get_device_capability() >= (9, 0)


def on_gpu(*tensors: Tensor | None) -> bool:
    """Return whether kernels run for these tensors; float64 stays with the plain functions."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype == torch.float64:
            return False
    return on_current_device(*tensors)


def outer_on_gpu(*tensors: Tensor | None) -> bool:
    """Return whether kernels of outer products run for these tensors; they store no product."""
    return on_gpu(*tensors) and _has_tensor_descriptors()


@functools.cache
def has_wide_products() -> bool:
    """Return whether torch can multiply bfloat16 matrices into float32."""
    return "dtype" in torch.ops.aten.bmm.overloads()


@contextlib.contextmanager
def held_tables() -> Iterator[Any]:
    """Capture a graph in this context; keep the yielded tables, which its kernels read, as long as the graph."""
    if not _has_triton():
        yield None
        return
    held = kernels.tables_triton.held = kernels.tables_triton.HeldTables()
    try:
        yield held
    finally:
        kernels.tables_triton.held = None
    held.send()
