"""Rows of C⁻¹z for one named tensor, made step by step from the key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from dpoptim.noise.key import NoiseKey
from dpoptim.noise.normals import normals
from dpoptim.noise.parallel import in_chunks

_CHUNK = 2**16  # elements summed at a time by a core: the running sum stays in its cache
_DEVICE_CHUNK = 2**22  # the same on an accelerator, and where the dtype is torch's alone


class NoiseStream(Protocol):
    """What every mechanism gives for one tensor: `row(t)` is row t of C⁻¹z, for z iid standard normal."""

    @property
    def memory_bytes(self) -> int:
        """Bytes kept between steps."""
        ...

    def row(self, step: int) -> torch.Tensor:
        """Row `step` (from 0) of C⁻¹z, flat; a pure function of the key and the step."""
        ...


@dataclass(frozen=True, kw_only=True)
class NormalSource:
    """Which normals a stream is made of: elements [start, start + numel) of tensor `name` in noise `stream`.

    `dtype` and `device` are those of the rows. A shard of a tensor is the same source with its own `start`.
    """

    key: NoiseKey
    stream: str
    name: str
    numel: int
    start: int = 0
    dtype: torch.dtype = torch.float32
    device: str | torch.device = "cpu"

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise ValueError(f"numel={self.numel} is negative; give the number of elements of the tensor")
        if self.start < 0:
            raise ValueError(f"start={self.start} is negative; give the shard's first element")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype={self.dtype} is not a floating dtype; use torch.float32")

    def normals(self, step: int, *, dtype: torch.dtype, start: int = 0, count: int | None = None) -> torch.Tensor:
        """Row `step` of z, or the part [start, start + count) of it."""
        return normals(
            self.key,
            stream=self.stream,
            name=self.name,
            step=step,
            start=self.start + start,
            count=self.numel - start if count is None else count,
            dtype=dtype,
            device=self.device,
        )


class ConvolvedStream:
    """Rows of C⁻¹z from the coefficients of C⁻¹, with the old normals made again: no memory at all.

        row(t) = Σ_{i ≤ t} noising_coefs[i]·z_{t-i}

    Independent noise is the case of one coefficient. Sums are float64 and rounded once to the source's dtype.
    A row costs min(t + 1, len(noising_coefs)) rows of normals.

    Guarantee: rows may be asked in any order; products and sums are separate, correctly rounded operations on
    each element, so shards and devices agree bit for bit.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> source = NormalSource(key=key, stream="gradient", name="weight", numel=3, dtype=torch.float64)
    >>> stream = ConvolvedStream(source, noising_coefs=[1.0, -0.5], steps=10)
    >>> z = [source.normals(step, dtype=torch.float64) for step in range(2)]
    >>> torch.equal(stream.row(1), z[1] + -0.5 * z[0]), stream.memory_bytes
    (True, 0)
    """

    def __init__(self, source: NormalSource, *, noising_coefs: Sequence[float], steps: int) -> None:
        self.source = source
        self.steps = steps
        self._coefs = [float(coef) for coef in noising_coefs]

    @property
    def memory_bytes(self) -> int:
        return 0

    def row(self, step: int) -> torch.Tensor:
        _check_step(step, self.steps)
        source = self.source
        if self._coefs == [1.0]:
            return source.normals(step, dtype=source.dtype)
        out = torch.empty(source.numel, dtype=source.dtype, device=source.device)
        for at in range(0, source.numel, _DEVICE_CHUNK):
            count = min(_DEVICE_CHUNK, source.numel - at)
            total = torch.zeros(count, dtype=torch.float64, device=source.device)
            for lag, coef in enumerate(self._coefs[: step + 1]):
                total += source.normals(step - lag, dtype=torch.float64, start=at, count=count).mul_(coef)
            out[at : at + count] = total
        return out


class RecurrentStream:
    """Rows y = C⁻¹z for a banded C, by forward substitution on a ring of the last bands-1 rows.

        y_t = (z_t - Σ_{i=1}^{bands-1} strategy_coefs[i]·y_{t-i}) / strategy_coefs[0]

    The ring has the source's dtype; sums are float32, or float64 where the dtype is. Rounding a row to
    the dtype feeds back into later rows as a change of z by as much; with float32 that is 1e-7 of the
    noise.

    Guarantee: row(t) has the same bits in every run: products and sums are separate, correctly rounded
    operations on each element, in one order, whatever the device or the shard. Asked for a step that is
    not the next one (after a restart, or going back), the stream replays the steps before it from the
    key, which costs one row of normals and one substitution for each.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> source = NormalSource(key=key, stream="gradient", name="weight", numel=3)
    >>> a = RecurrentStream(source, strategy_coefs=[1.0, 0.5], steps=10)
    >>> b = RecurrentStream(source, strategy_coefs=[1.0, 0.5], steps=10)
    >>> rows = [a.row(step) for step in range(4)]
    >>> torch.equal(b.row(3), rows[3]), b.memory_bytes
    (True, 12)
    """

    def __init__(self, source: NormalSource, *, strategy_coefs: Sequence[float], steps: int) -> None:
        self.source = source
        self.steps = steps
        self._inverse_diagonal = 1.0 / float(strategy_coefs[0])
        self._feedback = [-float(coef) / float(strategy_coefs[0]) for coef in strategy_coefs[1:]]
        self._sum_dtype = torch.float64 if source.dtype == torch.float64 else torch.float32
        # Row t is kept at index t % (bands-1), over row t-(bands-1), which no later row needs.
        self._ring = torch.empty(len(self._feedback), source.numel, dtype=source.dtype, device=source.device)
        self._next = 0

    @property
    def memory_bytes(self) -> int:
        return self._ring.numel() * self._ring.element_size()

    def row(self, step: int) -> torch.Tensor:
        _check_step(step, self.steps)
        if not self._feedback:
            return self._advanced(step)
        if step == self._next - 1:
            return self._ring[step % len(self._ring)].clone()
        if step < self._next:
            self._next = 0
        while self._next < step:
            self._advanced(self._next)
        return self._advanced(step)

    def _advanced(self, step: int) -> torch.Tensor:
        """Row `step`, put into the ring; the ring must hold the rows before it."""
        row = self.source.normals(step, dtype=self._sum_dtype)
        if self._inverse_diagonal != 1.0:
            row *= self._inverse_diagonal
        coefs = self._feedback[:step]
        past = [(step - lag) % len(self._ring) for lag in range(1, len(coefs) + 1)]
        if row.device.type == "cpu" and row.dtype == self._ring.dtype:
            totals, ring = row.numpy(), self._ring.numpy()

            def add(begin: int, end: int) -> None:
                _add_products(np, totals[begin:end], [ring[at, begin:end] for at in past], coefs)

            in_chunks(add, len(row), chunk=_CHUNK)
        else:
            for part, rows in zip(row.split(_DEVICE_CHUNK), self._ring.split(_DEVICE_CHUNK, dim=1), strict=True):
                _add_products(torch, part, [rows[at] for at in past], coefs)
        row = row.to(self.source.dtype)
        if self._feedback:
            self._ring[step % len(self._ring)] = row
            self._next = step + 1
        return row


def _add_products(xp: Any, total: Any, rows: Sequence[Any], coefs: Sequence[float]) -> None:
    """total += Σ coefs[i]·rows[i] in that order, for arrays of `xp` (numpy or torch).

    Product and sum are two operations: one fused multiply-add would round otherwise, where there is one.
    """
    product = xp.empty_like(total)
    for row, coef in zip(rows, coefs, strict=True):
        xp.multiply(row if row.dtype == total.dtype else row.to(total.dtype), coef, out=product)
        total += product


def _check_step(step: int, steps: int) -> None:
    if not 0 <= step < steps:
        raise ValueError(f"step={step} is not in [0, steps={steps}); optimize the strategy for more steps")
