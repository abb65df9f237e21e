"""Rows of C⁻¹z for the tensors of a model, made step by step from the key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from dpoptim.kernels.threads import in_chunks_on
from dpoptim.noise.memory import KeptTerm, NoiseMemory, RowMemory, add_product
from dpoptim.noise.source import NormalSource


class NoiseStream(Protocol):
    """What every mechanism gives for one tensor: `row(t)` is row t of C⁻¹z, for z iid standard normal."""

    @property
    def memory_bytes(self) -> int:
        """Bytes kept between steps."""
        ...

    def row(self, step: int) -> torch.Tensor:
        """Row `step` (from 0) of C⁻¹z, flat; a pure function of the key and the step."""
        ...


class HostStream:
    """A stream whose rows are made in the host's memory and handed out on a device."""

    def __init__(self, stream: NoiseStream, device: str | torch.device) -> None:
        self._stream = stream
        self._device = device

    @property
    def memory_bytes(self) -> int:
        return self._stream.memory_bytes

    def row(self, step: int) -> torch.Tensor:
        return self._stream.row(step).to(self._device)


class ConvolvedStream:
    """Rows of C⁻¹z from the rows of C⁻¹, with the old normals made again: no memory at all.

        row(t) = Σ_i noising_row(t)[i]·z_{t-i}

    `noising_row(t)` gives C⁻¹[t, t], C⁻¹[t, t-1], ... up to the last that is not zero. Independent noise is the
    case of one coefficient. Sums are float64 and rounded once to the source's dtype.

    Guarantee: rows may be asked in any order; products and sums are separate, correctly rounded operations on
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

    @property
    def memory_bytes(self) -> int:
        return 0

    def row(self, step: int) -> torch.Tensor:
        check_step(step, self.steps)
        return self.source.combined(step, self._noising_row(step))


class _Replaying(ABC):
    """A stream that keeps its past: `_advanced(step)` makes a row of it and keeps that.

    Asked for a step that is not the next one, the same one again included, it replays the steps before it.
    """

    steps: int
    _next: int

    def row(self, step: int) -> torch.Tensor:
        check_step(step, self.steps)
        if step < self._next:
            self._next = 0
        for at in range(self._next, step + 1):
            self._next = self.steps + 1  # until all is done: an interrupted step is replayed from the key
            row = self._advanced(at)
            self._next = at + 1
        return row

    @abstractmethod
    def _advanced(self, step: int) -> torch.Tensor: ...


class RecurrentStream(_Replaying):
    """Rows y = C⁻¹z for a banded C, by forward substitution on a ring of the last bands-1 rows.

        y_t = (z_t - Σ_{i=1}^{bands-1} C[t, t-i]·y_{t-i}) / C[t, t]

    `strategy_row(t)` gives C[t, t], C[t, t-1], ...; `row_norm` is the largest norm of a row of C⁻¹. Sums are
    float32, or float64 where the dtype is. The rounding of a kept row feeds back into later rows as a change of z
    by as much; with float32 that is 1e-7 of the noise.

    Guarantee: row(t) has the same bits in every run: products and sums are separate, correctly rounded
    operations on each element, in one order, whatever the device or the shard. Asked for a step that is
    not the next one (after a restart, or going back), the stream replays the steps before it from the
    key, which costs one row of normals and one substitution for each.

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
        self.source = source
        self.steps = steps
        self._strategy_row = strategy_row
        # Row t is kept at index t % (bands-1), over row t-(bands-1), which no later row needs.
        self._size = max(bands - 1, 1)
        self._ring = RowMemory(source, memory, count=self._size, stddev=row_norm, part="ring")
        self._next = 0

    @property
    def memory_bytes(self) -> int:
        return self._ring.memory_bytes

    def _advanced(self, step: int) -> torch.Tensor:
        """Row `step`, put into the ring; the ring must hold the rows before it."""
        diagonal, *lagged = self._strategy_row(step)
        row = self.source.normals(step, dtype=self._ring.dtype)
        if diagonal != 1.0:
            row *= 1.0 / diagonal
        terms = [
            KeptTerm(slot=(step - lag) % self._size, step=step - lag, coef=-coef / diagonal)
            for lag, coef in enumerate(lagged[:step], start=1)
        ]
        self._ring.add_products(row, terms)
        self._ring.write(step % self._size, row, step=step)
        return row


class BufferedStream(_Replaying):
    """Rows y = C⁻¹z for a buffered C, from the buffers s_j = Σ_{i≥1} decays[j]^(i-1)·y_{t-i}.

        y_t = z_t - Σ_j weights[j]·s_j,    then    s_j ← decays[j]·s_j + y_t

    As c_i = Σ_j weights[j]·decays[j]^(i-1), the first line is row t of Cy = z, solved for y_t. `buffer_norms` are
    the largest standard deviations of the buffers. Sums are float32, or float64 where the dtype is.

    Guarantee: row(t) has the same bits in every run: products and sums are separate, correctly rounded
    operations on each element, in one order. Asked for a step that is not the next one, the same one again
    included, the stream replays the steps before it from the key, at one row of normals for each.

    >>> from dpoptim.noise import NoiseKey
    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> source = NormalSource.of_tensor(key, "weight", numel=3)
    >>> buffers = dict(decays=[0.9, 0.5], weights=[0.1, 0.3], buffer_norms=[2.0, 1.2])
    >>> a, b = BufferedStream(source, **buffers, steps=10), BufferedStream(source, **buffers, steps=10)
    >>> rows = [a.row(step) for step in range(4)]
    >>> torch.equal(b.row(3), rows[3]), b.memory_bytes
    (True, 24)
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
        self.source = source
        self.steps = steps
        self._decays, self._weights = list(decays), list(weights)
        self._buffers = [
            RowMemory(source, memory, count=1, stddev=norm, part=f"buffer {index}")
            for index, norm in enumerate(buffer_norms)
        ]
        self._next = 0

    @property
    def memory_bytes(self) -> int:
        return sum(buffer.memory_bytes for buffer in self._buffers)

    def _advanced(self, step: int) -> torch.Tensor:
        """Row `step`, which the buffers then hold; they must hold the rows before it."""
        row = self.source.normals(step, dtype=self._buffers[0].dtype)

        def advance(begin: int, end: int) -> None:
            total = row[begin:end]
            scratch = torch.empty_like(total)
            sums = [buffer.read(0, step=step - 1, start=begin, stop=end) for buffer in self._buffers if step > 0]
            for past, weight in zip(sums, self._weights, strict=False):
                add_product(total, past, -weight, scratch)
            for index, buffer in enumerate(self._buffers):
                following = total.clone()
                if step > 0:
                    add_product(following, sums[index], self._decays[index], scratch)
                buffer.write(0, following, step=step, start=begin)

        in_chunks_on(row.device, advance, len(row))
        return row


def check_step(step: int, steps: int) -> None:
    if not 0 <= step < steps:
        raise ValueError(f"step={step} is not in [0, steps={steps}); optimize the strategy for more steps")
