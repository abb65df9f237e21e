"""Rows of C⁻¹z for the tensors of a model, made step by step from the key, and the memory of past rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dpoptim.arguments import check_choice
from dpoptim.kernels import choose, elementwise_c
from dpoptim.kernels.flat import flatten
from dpoptim.kernels.inverse_root import LazyInverseRoot
from dpoptim.kernels.threads import in_chunks_on
from dpoptim.noise.normals import NormalSource

_REACH = 16.0  # standard deviations that a 16-bit number spans on either side; 1e-57 of the noise lies beyond

Scale = Sequence[torch.Tensor | LazyInverseRoot] | None


@dataclass(frozen=True, kw_only=True)
class NoiseMemory:
    """How correlated noise stores its past rows.

    With 16 bits, rows are integers on an even grid, with a secret dither made from the key. Reading a row back adds an
    error that is uniform, independent of everything else and about 2^-12 of the noise.

    Args:
        bits: 32 for float32 (float64 for float64 parameters), or 16.
        on_host: Whether rows are made and stored in host memory, and only finished rows go to the device.

    Guarantee: with either setting the noise is C⁻¹(z + something independent of the data), so ε does not change.
    Rounding to bfloat16 would break this: neighbouring datasets round to different multiples in some coordinates,
    and the squared sensitivity grows with the number of parameters (two to three times too large at a million).

    >>> NoiseMemory(bits=16).bytes_per_number
    2
    """

    bits: int = 32
    on_host: bool = False

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, (16, 32))

    @property
    def bytes_per_number(self) -> int:
        return self.bits // 8


class RowMemory:
    """Store the rows of the last `count` steps of a stream, written and read in parts.

    `stddev` is the largest standard deviation of what is written. `part` names the dither.
    """

    def __init__(self, source: NormalSource, memory: NoiseMemory, *, count: int, stddev: float, part: str) -> None:
        self._source = source
        self._part = part
        self._dithered = memory.bits == 16
        self.dtype = torch.float64 if source.dtype == torch.float64 else torch.float32
        stored = torch.int16 if self._dithered else self.dtype
        self._rows = torch.zeros(count, source.numel, dtype=stored, device=source.device)
        # A power of two, so that dividing by it is exact.
        self._grid = 2.0 ** math.ceil(math.log2(_REACH * stddev / 2**15))

    @property
    def memory_bytes(self) -> int:
        return self._rows.numel() * self._rows.element_size()

    def write(self, part: torch.Tensor, *, step: int, start: int = 0) -> None:
        """Store `part` from element `start` on, in place of the row of step - count."""
        stored = self._rows[step % len(self._rows), start : start + len(part)]
        if not self._dithered:
            stored.copy_(part)
            return
        codes = (part / self._grid).add_(self._dither(step, start, start + len(part))).round_()
        stored.copy_(codes.clamp_(-(2**15) + 1, 2**15 - 1))

    def read(self, *, step: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return elements [start, stop) of the row of `step`. Do not modify the result."""
        part = self._rows[step % len(self._rows), start:stop]
        if not self._dithered:
            return part
        dither = self._dither(step, start, start + len(part))
        return part.to(self.dtype).sub_(dither).mul_(self._grid)

    def add_products(self, row: torch.Tensor, steps: Sequence[int], coefs: Sequence[float]) -> None:
        """Add coefs[i]·(the row of steps[i]) to `row` for each i in turn."""
        if not self._dithered and choose.available(row.device):
            from dpoptim.kernels import normals_triton

            normals_triton.add_products(row, self._rows, [step % len(self._rows) for step in steps], coefs)
            return

        def add(begin: int, end: int) -> None:
            total = row[begin:end]
            scratch = torch.empty_like(total)
            for step, coef in zip(steps, coefs, strict=True):
                add_product(total, self.read(step=step, start=begin, stop=end), coef, scratch)

        in_chunks_on(row.device, add, len(row))

    def _dither(self, step: int, start: int, stop: int) -> torch.Tensor:
        """Return uniform numbers in [-½, ½) grid steps, a function of the key, the step and the element."""
        use = f"{self._part}/{step % len(self._rows)}"
        shorts = self._source.uniform_shorts(use, step, start=start, count=stop - start)
        return shorts.to(self.dtype).mul_(2.0**-16)


def add_product(total: torch.Tensor, row: torch.Tensor, coef: float, scratch: torch.Tensor) -> None:
    """Compute total += coef·row.

    Product and sum are separate operations, because a fused multiply-add would round differently. On the CPU they
    are numpy's, so that only `in_chunks` starts threads.
    """
    if total.device.type == "cpu":
        product = np.multiply(row.numpy(), coef, out=scratch.numpy())
        np.add(total.numpy(), product, out=total.numpy())
    else:
        total += torch.mul(row, coef, out=scratch)


class NoiseStream(ABC):
    """Rows of C⁻¹z, for z iid standard normal."""

    @property
    def memory_bytes(self) -> int:
        """Bytes stored between steps."""
        return 0

    @abstractmethod
    def row(self, step: int) -> torch.Tensor:
        """Return row `step` (from 0) of C⁻¹z, flat; a pure function of the key and the step."""

    def add_to(self, sums: torch.Tensor, step: int, *, stddev: float, scale: Scale, divisor: float) -> None:
        """Compute sums ← (sums + stddev·row(step) / scale) / divisor in place; the scale has one entry per part."""
        row, divided_by = self.row(step), None
        if scale is not None:
            tensors = [own.tensor() if isinstance(own, LazyInverseRoot) else own for own in scale]
            divided_by = flatten(tensors, sums.dtype)
        if elementwise_c.add_noise(sums, row, divided_by, stddev=stddev, divisor=divisor):
            return
        if divided_by is None:
            sums.add_(row, alpha=stddev)
        else:
            sums.addcdiv_(row, divided_by, value=stddev)
        if divisor != 1:
            sums /= divisor


class HostStream(NoiseStream):
    """A stream that makes its rows in host memory and returns them on a device."""

    def __init__(self, stream: NoiseStream, device: str | torch.device) -> None:
        self._stream = stream
        self._device = device

    @property
    def memory_bytes(self) -> int:
        return self._stream.memory_bytes

    def row(self, step: int) -> torch.Tensor:
        return self._stream.row(step).to(self._device)


class ConvolvedStream(NoiseStream):
    """Compute rows of C⁻¹z from the rows of C⁻¹, and recompute the old normals: no memory at all.

        row(t) = Σ_i noising_row(t)[i]·z_{t-i}

    `noising_row(t)` returns C⁻¹[t, t], C⁻¹[t, t-1], ... up to the last non-zero entry. Independent noise has one
    coefficient. Sums are float64, rounded once to the source's dtype.

    Guarantee: rows may be requested in any order. Products and sums are separate, correctly rounded operations on
    each element, so shards and devices agree bit for bit.

    >>> from dpoptim.noise import NoiseKey
    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> source = NormalSource.of_tensor(key, "weight", numel=3, dtype=torch.float64)
    >>> stream = ConvolvedStream(source, noising_row=lambda step: [1.0, -0.5][: step + 1], steps=10)
    >>> z = [source.normals(step, dtype=torch.float64) for step in range(2)]
    >>> torch.equal(stream.row(1), z[1] + -0.5 * z[0]), stream.memory_bytes
    (True, 0)
    """

    def __init__(self, source: NormalSource, *, noising_row: Callable[[int], Sequence[float]], steps: int) -> None:
        self.source = source
        self.steps = steps
        self._noising_row = noising_row

    def row(self, step: int) -> torch.Tensor:
        check_step(step, self.steps)
        return self.source.combined(step, self._noising_row(step))

    def add_to(self, sums: torch.Tensor, step: int, *, stddev: float, scale: Scale, divisor: float) -> None:
        """On a GPU, make the row in registers and add it in one pass: the same noise, without a row in memory."""
        check_step(step, self.steps)
        on_gpu, coefs = self.source.on_gpu, self._noising_row(step)
        if on_gpu is None or not on_gpu.add_to(sums, step, coefs, stddev=stddev, scale=scale, divisor=divisor):
            super().add_to(sums, step, stddev=stddev, scale=scale, divisor=divisor)


class _StreamWithPast(NoiseStream):
    """A stream that stores past rows. `_advance(step)` makes a row from them and stores it.

    Requests must come in order to be cheap: any other step, including the same one again, replays the steps before it
    from the key, at one row of normals each.

    Guarantee: row(t) has the same bits in every run. Products and sums are separate, correctly rounded operations on
    each element in a fixed order, in float32 (float64 for a float64 source).
    """

    def __init__(self, source: NormalSource, steps: int) -> None:
        self.source = source
        self.steps = steps
        self._next = 0

    def row(self, step: int) -> torch.Tensor:
        check_step(step, self.steps)
        if step < self._next:
            self._next = 0
        for at in range(self._next, step + 1):
            self._next = self.steps + 1  # if this step is interrupted, the next request replays from the key
            row = self._advance(at)
            self._next = at + 1
        return row

    @abstractmethod
    def _advance(self, step: int) -> torch.Tensor: ...


class RecurrentStream(_StreamWithPast):
    """Compute rows y = C⁻¹z for a banded C by forward substitution on a ring of the last bands-1 rows.

        y_t = (z_t - Σ_{i=1}^{bands-1} C[t, t-i]·y_{t-i}) / C[t, t]

    `strategy_row(t)` returns C[t, t], C[t, t-1], ..., C[t, t-bands+1]. `row_norm` is the largest ‖row of C⁻¹‖.

    >>> from dpoptim.noise import NoiseKey
    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> source = NormalSource.of_tensor(key, "weight", numel=3)
    >>> a = RecurrentStream(source, strategy_row=lambda step: [1.0, 0.5], bands=2, steps=10, row_norm=1.2)
    >>> b = RecurrentStream(source, strategy_row=lambda step: [1.0, 0.5], bands=2, steps=10, row_norm=1.2)
    >>> rows = [a.row(step) for step in range(4)]
    >>> torch.equal(b.row(3), rows[3]), b.memory_bytes
    (True, 12)
    """

    def __init__(
        self,
        source: NormalSource,
        *,
        strategy_row: Callable[[int], Sequence[float]],
        bands: int,
        steps: int,
        row_norm: float,
        memory: NoiseMemory = NoiseMemory(),  # noqa: B008
    ) -> None:
        super().__init__(source, steps)
        self._strategy_row = strategy_row
        # Row t overwrites row t-(bands-1), which no later row needs.
        self._ring = RowMemory(source, memory, count=max(bands - 1, 1), stddev=row_norm, part="ring")

    @property
    def memory_bytes(self) -> int:
        return self._ring.memory_bytes

    def _advance(self, step: int) -> torch.Tensor:
        diagonal, *lagged = self._strategy_row(step)
        row = self.source.normals(step, dtype=self._ring.dtype)
        if diagonal != 1.0:
            row *= 1.0 / diagonal
        coefs = [-coef / diagonal for coef in lagged[:step]]
        self._ring.add_products(row, range(step - 1, step - 1 - len(coefs), -1), coefs)
        self._ring.write(row, step=step)
        return row


class BufferedStream(_StreamWithPast):
    """Compute rows y = C⁻¹z for a buffered C from the buffers s_j = Σ_{i≥1} decays[j]^(i-1)·y_{t-i}.

        y_t = z_t - Σ_j weights[j]·s_j,    then    s_j ← decays[j]·s_j + y_t

    Because c_i = Σ_j weights[j]·decays[j]^(i-1), the first line is row t of Cy = z, solved for y_t. `buffer_norms`
    are the largest standard deviations of the buffers.
    """

    def __init__(
        self,
        source: NormalSource,
        *,
        decays: Sequence[float],
        weights: Sequence[float],
        buffer_norms: Sequence[float],
        steps: int,
        memory: NoiseMemory = NoiseMemory(),  # noqa: B008
    ) -> None:
        super().__init__(source, steps)
        self._decays, self._weights = list(decays), list(weights)
        self._buffers = [
            RowMemory(source, memory, count=1, stddev=norm, part=f"buffer {index}")
            for index, norm in enumerate(buffer_norms)
        ]

    @property
    def memory_bytes(self) -> int:
        return sum(buffer.memory_bytes for buffer in self._buffers)

    def _advance(self, step: int) -> torch.Tensor:
        row = self.source.normals(step, dtype=self._buffers[0].dtype)

        def advance(begin: int, end: int) -> None:
            total = row[begin:end]
            scratch = torch.empty_like(total)
            sums = [buffer.read(step=step - 1, start=begin, stop=end) for buffer in self._buffers if step > 0]
            for past, weight in zip(sums, self._weights, strict=False):
                add_product(total, past, -weight, scratch)
            for index, buffer in enumerate(self._buffers):
                following = total.clone()
                if step > 0:
                    add_product(following, sums[index], self._decays[index], scratch)
                buffer.write(following, step=step, start=begin)

        in_chunks_on(row.device, advance, len(row))
        return row


def check_step(step: int, steps: int) -> None:
    if not 0 <= step < steps:
        raise ValueError(f"Expected step in [0, {steps}), got {step}. Optimize the strategy for more steps.")
