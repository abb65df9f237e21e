"""The rows that a mechanism keeps between steps: in how many bits, and where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dpoptim.kernels import choose as gpu
from dpoptim.kernels.threads import in_chunks_on
from dpoptim.noise.source import NormalSource

_REACH = 16.0  # standard deviations that a 16-bit number spans on either side; beyond lies 1e-57 of the noise


@dataclass(frozen=True, kw_only=True)
class NoiseMemory:
    """How the past of correlated noise is kept: `bits` a number (32 or 16), and whether in the host's memory.

    32 bits are float32 (float64 for float64 parameters). 16 bits are integers on an even grid with a secret
    dither that the key makes again: what is read back is the row plus an error that is uniform, independent of
    all else and about 2^-12 of the noise. So noise stays C⁻¹(z + something independent of the data), and ε is
    untouched. Rounding to bfloat16 would not do: two neighbouring datasets round to different
    multiples in some coordinates, which adds up over the parameters: at a million the squared sensitivity is two to
    three times what was accounted for, and it grows without bound.

    On the host, rows are also made there, and only the finished row goes to the device.

    >>> NoiseMemory(bits=16).bytes_per_number
    2
    """

    bits: int = 32
    on_host: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (16, 32):
            raise ValueError(f"bits={self.bits!r} must be 32 or 16")

    @property
    def bytes_per_number(self) -> int:
        return self.bits // 8


class KeptTerm(NamedTuple):
    """A multiple of a kept row: where it is kept, the step that it was written for, and by what it is multiplied."""

    slot: int
    step: int
    coef: float


class RowMemory:
    """`count` rows of a stream's tensor, written and read in parts.

    `stddev` is the largest standard deviation of what is written, and `part` names the dither.

    >>> from dpoptim.noise import NoiseKey, NormalSource
    >>> source = NormalSource.of_tensor(NoiseKey.from_bytes(bytes(32)), "weight", numel=4)
    >>> rows = RowMemory(source, NoiseMemory(bits=16), count=1, stddev=1.0, part="ring")
    >>> row = source.normals(0, dtype=torch.float32)
    >>> rows.write(0, row, step=0)
    >>> bool((rows.read(0, step=0) - row).abs().max() <= 2**-12), rows.memory_bytes
    (True, 8)
    """

    def __init__(self, source: NormalSource, memory: NoiseMemory, *, count: int, stddev: float, part: str) -> None:
        self._source = source
        self._part = part
        self._dithered = memory.bits == 16
        self.dtype = torch.float64 if source.dtype == torch.float64 else torch.float32
        kept = torch.int16 if self._dithered else self.dtype
        self._rows = torch.zeros(count, source.numel, dtype=kept, device=source.device)
        # A power of two, so that dividing by it is exact.
        self._grid = 2.0 ** math.ceil(math.log2(_REACH * stddev / 2**15))

    @property
    def memory_bytes(self) -> int:
        return self._rows.numel() * self._rows.element_size()

    def write(self, index: int, part: torch.Tensor, *, step: int, start: int = 0) -> None:
        """Keep `part` from element `start` on; `step` names its dither, and must be given again to read it."""
        kept = self._rows[index, start : start + len(part)]
        if not self._dithered:
            kept.copy_(part)
            return
        codes = (part / self._grid).add_(self._dither(index, step, start, start + len(part))).round_()
        kept.copy_(codes.clamp_(-(2**15) + 1, 2**15 - 1))

    def read(self, index: int, *, step: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the row written at `index` for `step`; not to be changed."""
        part = self._rows[index, start:stop]
        if not self._dithered:
            return part
        dither = self._dither(index, step, start, start + len(part))
        return part.to(self.dtype).sub_(dither).mul_(self._grid)

    def add_products(self, row: torch.Tensor, terms: Sequence[KeptTerm]) -> None:
        """row += coef·(kept row) for each term in turn."""
        if not self._dithered and gpu.available(row.device):
            gpu.add_products(row, self._rows, [term.slot for term in terms], [term.coef for term in terms])
            return

        def add(begin: int, end: int) -> None:
            total = row[begin:end]
            scratch = torch.empty_like(total)
            for term in terms:
                add_product(total, self.read(term.slot, step=term.step, start=begin, stop=end), term.coef, scratch)

        in_chunks_on(row.device, add, len(row))

    def _dither(self, index: int, step: int, start: int, stop: int) -> torch.Tensor:
        """Uniform on [-½, ½) grid steps, in 2^16 values: a function of the key, the step and the element."""
        shorts = self._source.uniform_shorts(f"{self._part}/{index}", step, start=start, count=stop - start)
        return shorts.to(self.dtype).mul_(2.0**-16)


def add_product(total: torch.Tensor, row: torch.Tensor, coef: float, scratch: torch.Tensor) -> None:
    """total += coef·row.

    Product and sum are two operations: one fused multiply-add would round otherwise, where there is one. On the
    processor they are numpy's, which leave the threads to `in_chunks`.
    """
    if total.device.type == "cpu":
        product = np.multiply(row.numpy(), coef, out=scratch.numpy())
        np.add(total.numpy(), product, out=total.numpy())
    else:
        total += torch.mul(row, coef, out=scratch)
