"""Which normals a stream is made of: those of one tensor, or of many laid end to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dpoptim.kernels import choose as gpu
from dpoptim.kernels.threads import in_threads
from dpoptim.noise.key import NoiseKey
from dpoptim.noise.normals import filling_jobs, normals, words

_CHUNK = 2**22  # elements of several rows that are summed at a time


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """Elements [start, start + numel) of the tensor `name`: all of it, or a shard."""

    name: str
    numel: int
    start: int = 0

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise ValueError(f"numel={self.numel} is negative; give the number of elements of the tensor")
        if self.start < 0:
            raise ValueError(f"start={self.start} is negative; give the shard's first element")


@dataclass(frozen=True, kw_only=True)
class NormalSource:
    """The normals of `parts` in noise `stream`, end to end; `dtype` and `device` are those of the rows.

    Guarantee: an element's noise depends on its tensor's name and its place there alone, not on its neighbours
    in the row.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> parts = (TensorPart(name="weight", numel=3), TensorPart(name="bias", numel=2))
    >>> both = NormalSource(key=key, stream="gradient", parts=parts).normals(0, dtype=torch.float32)
    >>> torch.equal(both[3:], NormalSource.of_tensor(key, "bias", numel=2).normals(0, dtype=torch.float32))
    True
    """

    key: NoiseKey
    stream: str
    parts: tuple[TensorPart, ...]
    dtype: torch.dtype = torch.float32
    device: str | torch.device = "cpu"

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype={self.dtype}: noise in fewer bits than float32 shows what it hides; use float32")

    @classmethod
    def of_tensor(
        cls, key: NoiseKey, name: str, *, numel: int, start: int = 0, stream: str = "gradient", **rows: Any
    ) -> NormalSource:
        """The source of one tensor."""
        return cls(key=key, stream=stream, parts=(TensorPart(name=name, numel=numel, start=start),), **rows)

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)

    @property
    def _on_gpu(self) -> Any:
        """The kernels' view of this source; None where they do not run now."""
        return self._device_normals if gpu.available(self.device) else None

    @cached_property
    def _device_normals(self) -> Any:
        subkeys = [self.key.subkey(f"normals/{self.stream}", part.name) for part in self.parts]
        return gpu.device_normals(subkeys, [(part.start, part.start + part.numel) for part in self.parts], self.device)

    def normals(self, step: int, *, dtype: torch.dtype, start: int = 0, count: int | None = None) -> torch.Tensor:
        """Row `step` of z, or the part [start, start + count) of it."""
        stop = self.numel if count is None else start + count
        if self._on_gpu is not None and (start, stop) == (0, self.numel):
            return self._on_gpu.combined(step, [1.0], dtype)
        if torch.device(self.device).type == "cpu":
            return self._on_cpu(step, dtype, start, stop)
        pieces = [
            normals(
                self.key,
                stream=self.stream,
                name=part.name,
                step=step,
                start=part.start + begin,
                count=end - begin,
                dtype=dtype,
                device=self.device,
            )
            for part, begin, end in self._overlaps(start, stop)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype, device=self.device)

    def _on_cpu(self, step: int, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """All parts straight into one vector, by one pool of threads."""
        out = torch.empty(stop - start, dtype=dtype)
        jobs, at = [], 0
        for part, begin, end in self._overlaps(start, stop):
            subkey = self.key.subkey(f"normals/{self.stream}", part.name)
            there = out[at : at + end - begin]
            jobs += filling_jobs(there, subkey, step=step, start=part.start + begin)
            at += end - begin
        in_threads(jobs)
        return out

    def combined(self, step: int, coefs: Sequence[float]) -> torch.Tensor:
        """Σ_i coefs[i]·(row step - i of z), summed in float64 and rounded once to the dtype."""
        if list(coefs) == [1.0]:
            return self.normals(step, dtype=self.dtype)
        if self._on_gpu is not None:
            return self._on_gpu.combined(step, coefs, self.dtype)
        out = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        for at in range(0, self.numel, _CHUNK):
            count = min(_CHUNK, self.numel - at)
            total = torch.zeros(count, dtype=torch.float64, device=self.device)
            for lag, coef in enumerate(coefs):
                total += self.normals(step - lag, dtype=torch.float64, start=at, count=count).mul_(coef)
            out[at : at + count] = total
        return out

    def uniform_shorts(self, use: str, step: int, *, start: int, count: int) -> torch.Tensor:
        """Elements [start, start + count) of int16 numbers, uniform and secret, that no normal is made of."""
        pieces = []
        for part, begin, end in self._overlaps(start, start + count):
            subkey = self.key.subkey(f"dither/{self.stream}", f"{part.name}/{use}")
            first, stop = part.start + begin, part.start + end
            made = words(subkey, step=step, start=first // 4, count=-(-stop // 4) - first // 4).view(np.int16)
            pieces.append(made[first % 4 : first % 4 + end - begin])
        whole = pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.empty(0, np.int16)])
        return torch.from_numpy(whole).to(self.device)

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[TensorPart, int, int]]:
        """The parts within [start, stop) of the row, each with the range of its own elements there."""
        at = 0
        for part in self.parts:
            begin, end = max(start - at, 0), min(stop - at, part.numel)
            if begin < end:
                yield part, begin, end
            at += part.numel
