"""Tables for Triton kernels on many tensors: their addresses, and which part of which tensor a program works on."""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def cdiv(number: int, by: int) -> int:
    """number / by, rounded up; ten times faster than triton.cdiv."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number`; faster than Triton's."""
    return 1 << (number - 1).bit_length()


@functools.cache
def processors(device: torch.device) -> int:
    """The number of streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class HeldTables:
    """Tables that the kernels of a CUDA graph read at every replay, in memory outside of the graph's pool.

    They are written once, after the capture. Tables that do not fit are copied inside the graph, at every replay.
    """

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self._memory: Tensor | None = None
        self._taken = 0  # bytes in use
        self._unsent: list[tuple[Tensor, Tensor]] = []

    def made(self, numbers: tuple[object, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the numbers on a device; before the capture begins they are sent at once."""
        if not torch.cuda.is_current_stream_capturing():
            if self._memory is None:
                self._memory = torch.empty(_BYTES, dtype=torch.uint8, device=device)
            return _table_on(torch.cuda.current_stream(device).cuda_stream, numbers, dtype, device)
        source = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=True)
        start, end = self._taken, self._taken + source.nbytes
        if self._memory is None or end > _BYTES:
            self.kept.append(source)
            return source.to(device, non_blocking=True)
        self._taken = cdiv(end, _ALIGNED) * _ALIGNED
        table = self._memory[start:end].view(dtype).view(source.shape)
        self._unsent.append((table, source))
        return table

    def send(self) -> None:
        """Write the tables, after the capture."""
        for table, source in self._unsent:
            table.copy_(source)
        self._unsent.clear()


_BYTES, _ALIGNED = 1 << 18, 128  # bytes

held: HeldTables | None = None
"""The tables of the graph that is being captured."""


def parts_of(sizes: tuple[tuple[int, int], ...], span: int, device: torch.device, *, first: int = 0) -> Tensor:
    """int64 [programs, 4]: number of the tensor, from `first` on, where the program begins in it, and its size.

    A size is the number of elements and one more number. The table stays on the device: no step changes it.
    """
    parts = _parts_on(sizes, span, device, first)
    if held is not None:
        held.kept.append(parts)
    return parts


@functools.lru_cache(maxsize=64)
def _parts_on(sizes: tuple[tuple[int, int], ...], span: int, device: torch.device, first: int) -> Tensor:
    numels = np.array(sizes, np.int64)[:, 0]
    programs = -(-numels // span)
    tensor = np.repeat(np.arange(len(sizes)), programs)
    start = (np.arange(programs.sum()) - (programs.cumsum() - programs)[tensor]) * span
    rows = np.column_stack([tensor + first, start, np.array(sizes, np.int64)[tensor]])
    return torch.from_numpy(rows).to(device)


def table_of(numbers: tuple[object, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Send numbers to a device without waiting for its queue, as an ordinary copy would; repeated tables are cached."""
    if held is not None:
        return held.made(numbers, dtype, device)
    return _table_on(torch.cuda.current_stream(device).cuda_stream, numbers, dtype, device)


@functools.lru_cache(maxsize=256)
def _table_on(stream: int, numbers: tuple[object, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)


def shift_of(tensor: Tensor, base: Tensor) -> int:
    """How many elements `tensor` begins after `base`: addresses change at every step, such differences do not."""
    return (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()
