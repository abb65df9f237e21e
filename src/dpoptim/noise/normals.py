"""Standard normals as a pure function of (key, stream, name, step, element)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from dpoptim.arguments import check_whole, set_whole
from dpoptim.kernels import choose
from dpoptim.kernels.normals import SCRATCH_ROWS, box_muller, compiled_box_muller
from dpoptim.kernels.threads import in_threads
from dpoptim.noise.key import NoiseKey

BLOCK_BYTES = 64
WORDS_PER_BLOCK = BLOCK_BYTES // 8
MAX_BLOCKS = 2**32
MAX_STEP = 2**64

_CHUNK = 2**18  # words per job on a CPU core, long enough that threads seldom wait for each other
_DEVICE_CHUNK = 2**22  # elements worked on at a time on an accelerator, and in sums of several rows
_WORTH_COMPILING = 2**20  # from this many normals on, a second of compiling pays off
_ZEROS = memoryview(bytes(2**18))  # plaintext of the cipher, short enough to stay in a core's cache


def keystream(subkey: bytes, *, step: int, first_block: int, blocks: int) -> NDArray[np.uint8]:
    """Return blocks [first_block, first_block + blocks) of a step's keystream, 64 bytes each.

        ChaCha20(subkey, counter = first_block in 4 bytes, nonce = step in 8 bytes, then 4 zero bytes)

    Raises:
        ValueError: If the step or a block lies outside of its range.

    Guarantee: no two (step, block) pairs share their bytes: the counter never wraps around.

    >>> whole = keystream(bytes(32), step=3, first_block=0, blocks=4)
    >>> bool((keystream(bytes(32), step=3, first_block=2, blocks=1) == whole[128:192]).all())
    True
    """
    if not 0 <= step < MAX_STEP:
        raise ValueError(f"Expected step in [0, 2**64), got {step}. Count steps from 0.")
    if first_block < 0 or blocks < 0 or first_block + blocks > MAX_BLOCKS:
        raise ValueError(
            f"Blocks [{first_block}, {first_block + blocks}) are not in [0, 2**32): a (name, step) has 2**35 words. "
            "Split the tensor into parts with different names."
        )
    stream = np.empty(blocks * BLOCK_BYTES, dtype=np.uint8)
    if not blocks:
        return stream
    counter_and_nonce = first_block.to_bytes(4, "little") + step.to_bytes(8, "little") + bytes(4)
    encryptor = Cipher(algorithms.ChaCha20(subkey, counter_and_nonce), mode=None).encryptor()
    view = stream.data
    for at in range(0, len(view), len(_ZEROS)):  # encrypting straight into the result saves two copies
        part = view[at : at + len(_ZEROS)]
        encryptor.update_into(_ZEROS[: len(part)], part)
    return stream


def words(subkey: bytes, *, step: int, start: int = 0, count: int) -> NDArray[np.uint64]:
    """Return words [start, start + count) of a step's keystream as little-endian unsigned 64-bit integers.

    >>> words(bytes(32), step=0, start=1, count=2).tolist() == words(bytes(32), step=0, count=3)[1:].tolist()
    True
    """
    start = check_whole("start", start, low=0)
    count = check_whole("count", count, low=0)
    first = start // WORDS_PER_BLOCK
    blocks = -(-(start + count) // WORDS_PER_BLOCK) - first
    stream = keystream(subkey, step=step, first_block=first, blocks=blocks).view("<u8")
    skip = start - first * WORDS_PER_BLOCK
    return stream[skip : skip + count].astype(np.uint64, copy=False)


def uniform_words(key: NoiseKey, *, domain: str, step: int, count: int) -> NDArray[np.uint64]:
    """Return `count` uniform 64-bit words for a sampler.

    Guarantee: words of different (domain, step) are independent of each other and of all noise. They are as secret
    as the key, which amplification by sampling relies on.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> uniform_words(key, domain="poisson", step=0, count=3).dtype
    dtype('uint64')
    """
    return words(key.subkey("sampling", domain), step=step, count=count)


def _fill_jobs(out: torch.Tensor, subkey: bytes, *, step: int, start: int) -> list[Callable[[], None]]:
    """Return independent jobs that fill a CPU vector with the normals from element `start` on."""
    target = out.numpy()
    ready = compiled_box_muller.cache_info().currsize > 0
    worth = (ready or len(target) >= _WORTH_COMPILING) and target.flags.c_contiguous
    compiled = compiled_box_muller() if worth else None

    def fill(begin: int, end: int) -> None:
        # Box–Muller makes whole pairs; the odd element at either end is dropped.
        first, stop = begin - begin % 2, end + end % 2
        chunk = words(subkey, step=step, start=first, count=stop - first)
        here = target[begin - start : end - start]
        pairs = here if stop - first == len(here) else np.empty(stop - first, here.dtype)
        if compiled is None:
            box_muller(np, chunk.view(np.int64), pairs, np.empty((SCRATCH_ROWS, len(pairs) // 2)))
        else:
            compiled(chunk.view(np.int64), pairs)
        if pairs is not here:
            here[:] = pairs[begin - first : end - first]

    stop = start + len(target)
    edges = [start, *range((start // _CHUNK + 1) * _CHUNK, stop, _CHUNK), stop]
    return [partial(fill, begin, end) for begin, end in pairwise(edges) if begin < end]


def _fill_on_device(out: torch.Tensor, subkey: bytes, *, step: int, start: int) -> None:
    """Fill `out` with the normals from element `start` on; the CPU makes the keystream."""
    for part in out.split(_DEVICE_CHUNK):
        odd = start % 2  # Box–Muller makes whole pairs; the odd element at either end is dropped.
        chunk = words(subkey, step=step, start=start - odd, count=odd + len(part) + (start + len(part)) % 2)
        pairs = torch.empty(len(chunk), dtype=out.dtype, device=out.device)
        scratch = torch.empty(SCRATCH_ROWS, len(chunk) // 2, dtype=torch.float64, device=out.device)
        box_muller(torch, torch.from_numpy(chunk.view(np.int64)).to(out.device), pairs, scratch)
        part.copy_(pairs[odd : odd + len(part)])
        start += len(part)


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """Elements [start, start + numel) of the tensor `name`: the whole tensor or a shard."""

    name: str
    numel: int
    start: int = 0

    def __post_init__(self) -> None:
        set_whole(self, "numel", low=0)
        set_whole(self, "start", low=0)


@dataclass(frozen=True, kw_only=True)
class NormalSource:
    """The standard normals of several tensor parts in one noise stream, concatenated to rows.

        (w_0, w_1, ...) = words of ChaCha20(subkey(stream, name), nonce = step)
        u = (w_2k + ½)·2^-64 in (0, 1],   (n_2k, n_2k+1) = sqrt(-2 ln u)·(cos, sin)(2π·w_2k+1·2^-64)

    Attributes:
        key: The secret of the run.
        stream: The noise stream, such as "gradient" or "square".
        parts: The tensors, in the order of the row.
        dtype: The dtype of the rows, float32 or float64.
        device: Where the rows live.

    Guarantee: an element's noise depends only on its tensor's name and its position there, not on the other parts. It
    has the same bits in any slice, order of calls, machine, device and number of threads. Elements of different
    (stream, name, step) are independent if ChaCha20 is a pseudo-random function.

    Finite precision: the theorems assume real-valued Gaussians. Here each normal uses 64 bits of keystream, and the
    radius takes one of 2^64 values. The tail is cut at 9.493, which costs at most 2^-64 per pair in total variation
    (2^-42 for 4.4 million normals). ε does not cover the gaps between the floating-point values of a released sum.

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
            raise ValueError(f"Noise in {self.dtype} would reveal what it hides. Use torch.float32.")

    @classmethod
    def of_tensor(
        cls, key: NoiseKey, name: str, *, numel: int, start: int = 0, stream: str = "gradient", **rows: Any
    ) -> NormalSource:
        """Return the source of one tensor."""
        return cls(key=key, stream=stream, parts=(TensorPart(name=name, numel=numel, start=start),), **rows)

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)

    @property
    def on_gpu(self) -> Any:
        """The Triton version of this source; None where kernels do not run."""
        return self._device_normals if choose.available(self.device) else None

    @cached_property
    def _device_normals(self) -> Any:
        from dpoptim.kernels.normals_triton import DeviceNormals

        subkeys = [self.key.subkey(f"normals/{self.stream}", part.name) for part in self.parts]
        ranges = [(part.start, part.start + part.numel) for part in self.parts]
        return DeviceNormals(subkeys, ranges, torch.device(self.device))

    def normals(self, step: int, *, dtype: torch.dtype, start: int = 0, count: int | None = None) -> torch.Tensor:
        """Return row `step` of z, or elements [start, start + count) of it."""
        stop = self.numel if count is None else start + count
        if self.on_gpu is not None and (start, stop) == (0, self.numel):
            return self.on_gpu.combined(step, [1.0], dtype)
        return self._plain(step, dtype, start, stop)

    def _plain(self, step: int, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """Fill one vector with all parts; on a CPU, with one pool of threads."""
        out = torch.empty(stop - start, dtype=dtype, device=self.device)
        jobs, at, is_cpu = [], 0, out.device.type == "cpu"
        for part, begin, end in self._overlaps(start, stop):
            subkey = self.key.subkey(f"normals/{self.stream}", part.name)
            here = out[at : at + end - begin]
            if is_cpu:
                jobs += _fill_jobs(here, subkey, step=step, start=part.start + begin)
            else:
                _fill_on_device(here, subkey, step=step, start=part.start + begin)
            at += end - begin
        in_threads(jobs)
        return out

    def combined(self, step: int, coefs: Sequence[float]) -> torch.Tensor:
        """Return Σ_i coefs[i]·(row step - i of z), summed in float64 and rounded once to the dtype."""
        if list(coefs) == [1.0]:
            return self.normals(step, dtype=self.dtype)
        if self.on_gpu is not None:
            return self.on_gpu.combined(step, coefs, self.dtype)
        out = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        for at in range(0, self.numel, _DEVICE_CHUNK):
            count = min(_DEVICE_CHUNK, self.numel - at)
            total = torch.zeros(count, dtype=torch.float64, device=self.device)
            for lag, coef in enumerate(coefs):
                total += self.normals(step - lag, dtype=torch.float64, start=at, count=count).mul_(coef)
            out[at : at + count] = total
        return out

    def uniform_shorts(self, use: str, step: int, *, start: int, count: int) -> torch.Tensor:
        """Return elements [start, start + count) of uniform secret int16 numbers, independent of all normals."""
        pieces = [np.empty(0, np.int16)]
        for part, begin, end in self._overlaps(start, start + count):
            subkey = self.key.subkey(f"dither/{self.stream}", f"{part.name}/{use}")
            first, stop = part.start + begin, part.start + end
            made = words(subkey, step=step, start=first // 4, count=-(-stop // 4) - first // 4).view(np.int16)
            pieces.append(made[first % 4 : first % 4 + end - begin])
        return torch.from_numpy(np.concatenate(pieces)).to(self.device)

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[TensorPart, int, int]]:
        """Yield the parts within [start, stop) of the row, each with the range of its elements there."""
        at = 0
        for part in self.parts:
            begin, end = max(start - at, 0), min(stop - at, part.numel)
            if begin < end:
                yield part, begin, end
            at += part.numel
