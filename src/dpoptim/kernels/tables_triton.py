"""Many tensors in one launch of a Triton kernel: where they are, and which part of which a program works on."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def cdiv(number: int, by: int) -> int:
    """number / by, rounded up, as triton.cdiv has it, which takes ten times as long."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The least power of 2 that is no smaller; as quick beside Triton's.

    >>> [next_power_of_2(number) for number in (1, 2, 3, 128, 129)]
    [1, 2, 4, 128, 256]
    """
    return 1 << (number - 1).bit_length()


class HeldTables:
    """The tables that kernels of a CUDA graph read at every replay, in memory that outlives it.

    They are written once the graph is made: sent within it, as those are that find no more room, they would be sent
    again at every replay, and its kernels would wait for each. Their memory is none of the graph's own, which serves
    other tensors before and after.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._room: Tensor | None = None
        self._taken = 0  # bytes of the room
        self._unsent: list[tuple[Tensor, Tensor]] = []

    def keep(self, table: Tensor) -> None:
        self._kept.append(table)

    def made(self, numbers: tuple[object, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The numbers on a device; before the capture begins they are there at once."""
        if not torch.cuda.is_current_stream_capturing():
            if self._room is None:
                self._room = torch.empty(_ROOM, dtype=torch.uint8, device=device)
            return _table_on(torch.cuda.current_stream(device).cuda_stream, numbers, dtype, device)
        source = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=True)
        start, end = self._taken, self._taken + source.nbytes
        if self._room is None or end > _ROOM:
            self.keep(source)
            return source.to(device, non_blocking=True)
        self._taken = cdiv(end, _ALIGNED) * _ALIGNED
        table = self._room[start:end].view(dtype).view(source.shape)
        self._unsent.append((table, source))
        return table

    def send(self) -> None:
        """When the graph is made: write what it reads."""
        for table, source in self._unsent:
            table.copy_(source)
        self._unsent.clear()


_ROOM, _ALIGNED = 1 << 18, 128  # bytes

held: HeldTables | None = None
"""While a graph is made: its tables."""


def parts_of(sizes: tuple[tuple[int, int], ...], span: int, device: torch.device, *, first: int = 0) -> Tensor:
    """int64 [programs, 4]: number of the tensor, where in it the program begins, and the two numbers of its size.

    The first number of a size is how many elements a tensor has; tensors are numbered from `first` on. The same at
    every step, so it stays on the device.
    """
    parts = _parts_on(sizes, span, device, first)
    if held is not None:
        held.keep(parts)
    return parts


@functools.lru_cache(maxsize=64)
def _parts_on(sizes: tuple[tuple[int, int], ...], span: int, device: torch.device, first: int) -> Tensor:
    rows = [(i, start, *size) for i, size in enumerate(sizes, first) for start in range(0, size[0], span)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def table_of(numbers: tuple[object, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers on a device, sent without waiting for it, and only once on a stream where they come again.

    An ordinary copy of a list to the device would wait until all that was queued before is done.
    """
    if held is not None:
        return held.made(numbers, dtype, device)
    return _table_on(torch.cuda.current_stream(device).cuda_stream, numbers, dtype, device)


@functools.lru_cache(maxsize=256)
def _table_on(stream: int, numbers: tuple[object, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)


def addresses_of(*lists: Sequence[Tensor]) -> Tensor:
    """int64 [lists, tensors] on the tensors' device, sent without waiting for it."""
    numbers = tuple(tuple(tensor.data_ptr() for tensor in tensors) for tensors in lists)
    return table_of(numbers, torch.int64, lists[0][0].device)
