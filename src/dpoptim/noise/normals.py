"""Standard normals as a pure function of (key, stream, name, step, element)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from dpoptim.kernels.normals import SCRATCH_ROWS, box_muller
from dpoptim.kernels.normals_c import compiled_box_muller
from dpoptim.kernels.threads import in_threads
from dpoptim.noise.key import NoiseKey

BLOCK_BYTES = 64
WORDS_PER_BLOCK = BLOCK_BYTES // 8
MAX_BLOCKS = 2**32
MAX_STEP = 2**64

_CHUNK = 2**17  # words worked on at a time by a core: calls so long that threads seldom wait for each other
_DEVICE_CHUNK = 2**22  # the same on an accelerator
_WORTH_COMPILING = 2**20  # normals, from which on a second of compiling is soon made up for
_ZEROS = memoryview(bytes(2**16))  # what is enciphered: it stays in a core's cache


def chacha20(subkey: bytes, counter_and_nonce: bytes, length: int) -> bytes:
    """`length` bytes of the ChaCha20 keystream of RFC 8439, from a 4-byte counter and a 12-byte nonce.

    >>> chacha20(bytes(32), bytes(16), 4).hex()
    '76b8e0ad'
    """
    stream = np.empty(length, dtype=np.uint8)
    _chacha20_into(stream, subkey, counter_and_nonce)
    return stream.tobytes()


def keystream(subkey: bytes, *, step: int, first_block: int, blocks: int) -> bytes:
    """Blocks [first_block, first_block + blocks) of a step's keystream, 64 bytes each.

        ChaCha20(subkey, counter = first_block in 4 bytes, nonce = step in 8 bytes, then 4 zero bytes)

    Guarantee: no two (step, block) share their bytes. A counter that would pass 2**32 is refused.

    >>> whole = keystream(bytes(32), step=3, first_block=0, blocks=4)
    >>> keystream(bytes(32), step=3, first_block=2, blocks=1) == whole[128:192]
    True
    """
    return _blocks(subkey, step, first_block, blocks).tobytes()


def words(subkey: bytes, *, step: int, start: int = 0, count: int) -> NDArray[np.uint64]:
    """Words [start, start + count) of a step's keystream, read as little-endian unsigned 64-bit integers.

    >>> words(bytes(32), step=0, start=1, count=2).tolist() == words(bytes(32), step=0, count=3)[1:].tolist()
    True
    """
    _check_slice(start, count)
    first = start // WORDS_PER_BLOCK
    blocks = -(-(start + count) // WORDS_PER_BLOCK) - first
    stream = _blocks(subkey, step, first, blocks).view("<u8")
    skip = start - first * WORDS_PER_BLOCK
    return stream[skip : skip + count].astype(np.uint64, copy=False)


def uniform_words(key: NoiseKey, *, domain: str, step: int, count: int) -> NDArray[np.uint64]:
    """`count` uniform 64-bit words for a sampler, from a keystream that no normal is made of.

    Guarantee: words of distinct (domain, step) are independent of each other and of every noise stream. They
    are as secret as the key, which is what amplification by sampling rests on.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> uniform_words(key, domain="poisson", step=0, count=3).dtype
    dtype('uint64')
    """
    return words(key.subkey("sampling", domain), step=step, count=count)


def normals(
    key: NoiseKey,
    *,
    stream: str,
    name: str,
    step: int,
    start: int = 0,
    count: int,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Elements [start, start + count) of the standard normals of tensor `name` at `step`, in noise `stream`.

        (w_0, w_1, ...) = words of ChaCha20(subkey(stream, name), nonce = step)
        u = (w_2k + ½)·2^-64 in (0, 1],   (n_2k, n_2k+1) = sqrt(-2 ln u)·(cos, sin)(2π·w_2k+1·2^-64)

    Guarantee: element i has the same bits whichever slice it is asked in, in any order of calls, on any
    machine or device, with any number of threads; distinct (stream, name, step, element) are independent
    as far as ChaCha20 is a pseudo-random function. Values are made in float64, then rounded once to
    `dtype`.

    What floating point does: the privacy theorems speak of real-valued Gaussians, and here as everywhere
    in the field the values are finite-precision ones. Each normal spends 64 bits of keystream; the radius
    takes one of 2^64 values, so the tail is cut at 9.493, which costs at most 2^-64 a pair in total
    variation (2^-42 for 4.4 million normals). The gaps between representable values of the released sum
    are not covered by ε.

    Edge cases: `count` may be 0; `start` may be odd.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> whole = normals(key, stream="gradient", name="weight", step=7, count=10)
    >>> torch.equal(normals(key, stream="gradient", name="weight", step=7, start=3, count=4), whole[3:7])
    True
    """
    _check_step(step)
    _check_slice(start, count)
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} is not a floating dtype; use torch.float32 or torch.float64")
    subkey = key.subkey(f"normals/{stream}", name)
    if torch.device(device).type == "cpu":
        # numpy has no bfloat16: torch rounds to the narrow types at the end.
        made = torch.empty(count, dtype=dtype if dtype in (torch.float32, torch.float64) else torch.float64)
        in_threads(filling_jobs(made, subkey, step=step, start=start))
        return made.to(dtype)
    # Whole pairs are made, and the odd element at either end is dropped.
    first, stop = start - start % 2, start + count + (start + count) % 2
    out = torch.empty(stop - first, dtype=dtype, device=device)
    _fill_on_device(out, subkey, step, first)
    return out[start - first : start - first + count]


def filling_jobs(out: torch.Tensor, subkey: bytes, *, step: int, start: int) -> list[Callable[[], None]]:
    """Jobs, in any order and on any threads, that fill a CPU vector with the normals from element `start` on."""
    target = out.numpy()
    ready = compiled_box_muller.cache_info().currsize > 0
    worth = (ready or len(target) >= _WORTH_COMPILING) and target.flags.c_contiguous
    compiled = compiled_box_muller() if worth else None

    def fill(begin: int, end: int) -> None:
        # Whole pairs are made, and the odd element at either end is dropped.
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


def _fill_on_device(out: torch.Tensor, subkey: bytes, step: int, first: int) -> None:
    """Fill `out` with normals from element `first`: keystream on the processor, the rest where `out` is."""
    size = min(len(out), _DEVICE_CHUNK)
    scratch = torch.empty(SCRATCH_ROWS, size // 2, dtype=torch.float64, device=out.device)
    for at in range(0, len(out), _DEVICE_CHUNK):
        part = out[at : at + _DEVICE_CHUNK]
        chunk = words(subkey, step=step, start=first + at, count=len(part))
        box_muller(torch, torch.from_numpy(chunk.view(np.int64)).to(out.device), part, scratch)


def _blocks(subkey: bytes, step: int, first_block: int, blocks: int) -> NDArray[np.uint8]:
    """The bytes of `keystream`, in an array of their own."""
    _check_step(step)
    if first_block < 0 or blocks < 0 or first_block + blocks > MAX_BLOCKS:
        raise ValueError(
            f"first_block={first_block}, blocks={blocks} leaves [0, 2**32): a (name, step) has 2**35 words; "
            "split the tensor into parts with names of their own"
        )
    stream = np.empty(blocks * BLOCK_BYTES, dtype=np.uint8)
    if blocks:
        counter_and_nonce = first_block.to_bytes(4, "little") + step.to_bytes(8, "little") + bytes(4)
        _chacha20_into(stream, subkey, counter_and_nonce)
    return stream


def _chacha20_into(stream: NDArray[np.uint8], subkey: bytes, counter_and_nonce: bytes) -> None:
    """Fill `stream` with keystream: zeros are enciphered straight into it, which spares two copies of it."""
    encryptor = Cipher(algorithms.ChaCha20(subkey, counter_and_nonce), mode=None).encryptor()
    view = stream.data
    for at in range(0, len(view), len(_ZEROS)):
        part = view[at : at + len(_ZEROS)]
        encryptor.update_into(_ZEROS[: len(part)], part)


def _check_step(step: int) -> None:
    if not 0 <= step < MAX_STEP:
        raise ValueError(f"step={step} is not in [0, 2**64); count steps from 0")


def _check_slice(start: int, count: int) -> None:
    if start < 0:
        raise ValueError(f"start={start} is negative; count elements from 0")
    if count < 0:
        raise ValueError(f"count={count} is negative; ask for 0 or more elements")
