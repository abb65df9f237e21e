"""Triton kernels for noise: ChaCha20, Box–Muller and forward substitution, with the bits of the plain functions.

Fused multiply-adds would change the bits, so every launch has enable_fp_fusion=False. Division and square root are
libdevice's correctly rounded ones. The arithmetic is that of `kernels.normals` and `noise.normals`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from dpoptim.kernels.adam_triton import root_of
from dpoptim.kernels.inverse_root import LazyInverseRoot
from dpoptim.kernels.normals import LOG_COEFS, MINUS_2_LN2, ROOT_HALF_BITS, SINE_COEFS
from dpoptim.kernels.tables_triton import cdiv, shift_of, table_of

BLOCKS = 128  # ChaCha20 blocks per program, of 64 bytes or eight normals each
_WARPS = 4  # of 32 threads per program
_STEP = 4  # normals that are loaded and stored at once if all tensors are aligned to that

_LOG = tl.constexpr(LOG_COEFS)
_SINE = tl.constexpr(SINE_COEFS)
_MINUS_2_LN2 = tl.constexpr(MINUS_2_LN2)
_ROOT_HALF_BITS = tl.constexpr(ROOT_HALF_BITS)
_WORD = tl.constexpr(2.0**-64)
_SIGNED_WORD = tl.constexpr(2.0**-63)
_ELEMENTS = 1024  # elements of a row per program of the substitution


@triton.jit
def _rotl(x, n: tl.constexpr):
    return (x << n) | (x >> (32 - n))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _rotl(d ^ a, 16)
    c += d
    b = _rotl(b ^ c, 12)
    a += b
    d = _rotl(d ^ a, 8)
    c += d
    b = _rotl(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _horner(coefs: tl.constexpr, x):
    total = x * coefs[len(coefs) - 1]
    for k in tl.static_range(len(coefs) - 2, 0, -1):
        total = total + coefs[k]
        total = total * x
    return total + coefs[0]


@triton.jit
def _pair(radius_lo, radius_hi, angle_lo, angle_hi):
    word = (radius_hi.to(tl.uint64) << 32) | radius_lo.to(tl.uint64)
    a = word.to(tl.float64)
    a = a + 0.5
    a = a * _WORD
    bits = a.to(tl.int64, bitcast=True)
    e = (bits - _ROOT_HALF_BITS) >> 52
    m = (bits - (e << 52)).to(tl.float64, bitcast=True)
    s = libdevice.div_rn(m - 1.0, m + 1.0)
    poly = _horner(_LOG, s * s)
    c = e.to(tl.float64) * _MINUS_2_LN2
    r = libdevice.sqrt_rn(c + s * poly)
    angle = ((angle_hi.to(tl.uint64) << 32) | angle_lo.to(tl.uint64)).to(tl.int64, bitcast=True)
    x = angle.to(tl.float64) * _SIGNED_WORD
    sine = x * _horner(_SINE, x * x)
    b = (sine * sine) * -1.0 + 1.0
    d = libdevice.sqrt_rn(b)
    b = b * 2.0 - 1.0
    sine = (sine * d) * 2.0
    d = (sine * sine) * -2.0 + 1.0
    return d * r, ((sine * b) * 2.0) * r


@triton.jit
def _normals_of_block(k0, k1, k2, k3, k4, k5, k6, k7, counter, n0, n1):
    """The eight normals of a block of ChaCha20 with this key, counter and nonce."""
    zero = counter * 0
    i0 = zero + 0x61707865
    i1 = zero + 0x3320646E
    i2 = zero + 0x79622D32
    i3 = zero + 0x6B206574
    x0, x1, x2, x3 = i0, i1, i2, i3
    x4, x5, x6, x7 = zero + k0, zero + k1, zero + k2, zero + k3
    x8, x9, x10, x11 = zero + k4, zero + k5, zero + k6, zero + k7
    x12, x13, x14, x15 = counter, zero + n0, zero + n1, zero
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    z0, z1 = _pair(x0 + i0, x1 + i1, x2 + i2, x3 + i3)
    z2, z3 = _pair(x4 + k0, x5 + k1, x6 + k2, x7 + k3)
    z4, z5 = _pair(x8 + k4, x9 + k5, x10 + k6, x11 + k7)
    z6, z7 = _pair(x12 + counter, x13 + n0, x14 + n1, x15)
    return z0, z1, z2, z3, z4, z5, z6, z7


@triton.jit(do_not_specialize=["step", "lags", "stddev", "inverse_divisor"])
def _normals(out, subkeys, coefs, tile_tensor, tile_block, firsts, stops, ats, step, lags, stddev, inverse_divisor,
             scale, shifts, settings, ADDS: tl.constexpr, SCALE: tl.constexpr, STEP: tl.constexpr,
             BLOCKS: tl.constexpr):  # fmt: skip
    """Store a row of noise; if ADDS, replace `out` by (out + stddev·row / scale)·inverse_divisor instead."""
    tile = tl.program_id(0)
    tensor = tl.load(tile_tensor + tile)
    first_block = tl.load(tile_block + tile)
    block = first_block + tl.arange(0, BLOCKS)
    first = tl.load(firsts + tensor)
    stop = tl.load(stops + tensor)
    at = tl.load(ats + tensor)
    key = subkeys + tensor * 8
    k0 = tl.load(key).to(tl.uint32, bitcast=True)
    k1 = tl.load(key + 1).to(tl.uint32, bitcast=True)
    k2 = tl.load(key + 2).to(tl.uint32, bitcast=True)
    k3 = tl.load(key + 3).to(tl.uint32, bitcast=True)
    k4 = tl.load(key + 4).to(tl.uint32, bitcast=True)
    k5 = tl.load(key + 5).to(tl.uint32, bitcast=True)
    k6 = tl.load(key + 6).to(tl.uint32, bitcast=True)
    k7 = tl.load(key + 7).to(tl.uint32, bitcast=True)
    counter = block.to(tl.uint32)
    s0 = tl.zeros([BLOCKS], tl.float64)
    s1 = tl.zeros([BLOCKS], tl.float64)
    s2 = tl.zeros([BLOCKS], tl.float64)
    s3 = tl.zeros([BLOCKS], tl.float64)
    s4 = tl.zeros([BLOCKS], tl.float64)
    s5 = tl.zeros([BLOCKS], tl.float64)
    s6 = tl.zeros([BLOCKS], tl.float64)
    s7 = tl.zeros([BLOCKS], tl.float64)
    for lag in range(lags):
        past = (step - lag).to(tl.int64)
        n0 = (past & 0xFFFFFFFF).to(tl.uint32)
        n1 = (past >> 32).to(tl.uint32)
        z0, z1, z2, z3, z4, z5, z6, z7 = _normals_of_block(k0, k1, k2, k3, k4, k5, k6, k7, counter, n0, n1)
        coef = tl.load(coefs + lag)
        s0 += coef * z0
        s1 += coef * z1
        s2 += coef * z2
        s3 += coef * z3
        s4 += coef * z4
        s5 += coef * z5
        s6 += coef * z6
        s7 += coef * z7
    dtype = out.dtype.element_ty
    even = tl.interleave(tl.interleave(s0.to(dtype), s4.to(dtype)), tl.interleave(s2.to(dtype), s6.to(dtype)))
    odd = tl.interleave(tl.interleave(s1.to(dtype), s5.to(dtype)), tl.interleave(s3.to(dtype), s7.to(dtype)))
    row = tl.interleave(even, odd)  # s0[0], s1[0], ..., s7[0], s0[1], ...
    at = at - first
    shift = at if SCALE is None else tl.load(shifts + tensor) - first
    if STEP > 1:
        first, stop = tl.multiple_of(first, STEP), tl.multiple_of(stop, STEP)
        at, shift = tl.multiple_of(at, STEP), tl.multiple_of(shift, STEP)
    index = first_block.to(tl.int64) * 8 + tl.arange(0, 8 * BLOCKS)
    inside = (index >= first) & (index < stop)
    to = out + at + index
    if ADDS:
        if SCALE is not None:
            own = tl.load(scale + shift + index, mask=inside, other=1.0)
            if SCALE == "root":  # one product instead of two quotients; results differ by 1e-7
                row *= root_of(own, tl.load(settings + 2 * tensor), tl.load(settings + 2 * tensor + 1))
            else:
                row = tl.div_rn(row, own)
        row = tl.fma(row, stddev, tl.load(to, mask=inside, other=0.0)) * inverse_divisor
    tl.store(to, row, mask=inside)


@triton.jit(do_not_specialize=["lags"])
def _substitute(row, ring, coefs, slots, lags, numel, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    total = tl.load(row + at, mask=inside)
    for lag in range(lags):
        coef = tl.load(coefs + lag)
        slot = tl.load(slots + lag).to(tl.int64)
        total += tl.load(ring + slot * stride + at, mask=inside) * coef
    tl.store(row + at, total, mask=inside)


class DeviceNormals:
    """Make the normals of elements [start, stop) of several tensors, each with its subkey, in one launch."""

    def __init__(self, subkeys: Sequence[bytes], ranges: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._numels = [stop - start for start, stop in ranges]
        ends = np.cumsum([0, *self._numels])
        self.numel = int(ends[-1])
        blocks = [np.arange(start // 8, cdiv(stop, 8), BLOCKS) for start, stop in ranges]
        tiles = np.repeat(np.arange(len(ranges)), [len(own) for own in blocks]), np.concatenate([*blocks, []])
        self._device = device
        self._subkeys = torch.from_numpy(np.frombuffer(b"".join(subkeys), "<i4").copy()).to(device)
        self._tiles = torch.from_numpy(np.stack(tiles).astype(np.int64)).to(device)
        firsts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        self._ranges = torch.tensor([firsts, stops, ends[:-1].tolist()], dtype=torch.int64, device=device)
        self._is_even = not any(number % _STEP for number in (*firsts, *stops))  # then all places in a row are aligned

    def combined(self, step: int, coefs: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        """Return Σ_i coefs[i]·(row step - i of z), summed in float64 and rounded once to `dtype`."""
        out = torch.empty(self.numel, dtype=dtype, device=self._device)
        self._launch(out, step, coefs, 0.0, 1.0, None, adds=False)
        return out

    def add_to(
        self, sums: torch.Tensor, step: int, coefs: Sequence[float], *, stddev: float,
        scale: Sequence[torch.Tensor | LazyInverseRoot] | None, divisor: float,
    ) -> bool:  # fmt: skip
        """Compute sums ← (sums + stddev·row / scale) / divisor in place, with `row` as in `combined`.

        `scale` has one entry per tensor. Return False, and do nothing, where only the plain functions apply.
        """
        if sums.dtype != torch.float32 or not sums.is_contiguous() or len(sums) != self.numel:
            return False
        if scale is not None and not self._can_read(scale):
            return False
        self._launch(sums, step, coefs, stddev, 1 / divisor, scale, adds=True)
        return True

    def _can_read(self, scale: Sequence[torch.Tensor | LazyInverseRoot]) -> bool:
        lazy = [own for own in scale if isinstance(own, LazyInverseRoot)]
        if len(lazy) not in (0, len(scale)) or any(own.exponent != 0.5 or own.start for own in lazy):
            return False
        here = self._subkeys.get_device()
        return all(
            own.dtype == torch.float32 and own.is_contiguous() and own.get_device() == here and own.numel() == numel
            for own, numel in zip(_tensors(scale), self._numels, strict=True)
        )

    def _launch(
        self, out: torch.Tensor, step: int, coefs: Sequence[float], stddev: float, inverse_divisor: float,
        scale: Sequence[torch.Tensor | LazyInverseRoot] | None, *, adds: bool,
    ) -> None:  # fmt: skip
        if not self.numel:
            return
        factors = table_of(tuple(coefs), torch.float64, self._device)
        base, shifts, settings, kind, is_even = out, factors, factors, None, self._is_even
        if scale is not None:
            tensors, kind = _tensors(scale), "tensor"
            base = next(own for own in tensors if own.numel())
            places = tuple(shift_of(own, base) if own.numel() else 0 for own in tensors)
            shifts = table_of(places, torch.int64, self._device)
            is_even = is_even and not any(place % _STEP for place in places)
            if isinstance(scale[0], LazyInverseRoot):
                kind = "root"
                numbers = [(own.factor, own.floor) for own in scale if isinstance(own, LazyInverseRoot)]
                settings = table_of(tuple(numbers), torch.float32, self._device)
        _normals[(self._tiles.shape[1],)](
            out, self._subkeys, factors, self._tiles[0], self._tiles[1], *self._ranges, step, len(factors), stddev,
            inverse_divisor, base, shifts, settings, ADDS=adds, SCALE=kind, STEP=_STEP if is_even else 1,
            BLOCKS=BLOCKS, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def _tensors(scale: Sequence[torch.Tensor | LazyInverseRoot]) -> list[torch.Tensor]:
    return [own.moment if isinstance(own, LazyInverseRoot) else own for own in scale]


def add_products(row: torch.Tensor, ring: torch.Tensor, slots: Sequence[int], coefs: Sequence[float]) -> None:
    """Compute row += coefs[i]·ring[slots[i]] for each i in turn, in one pass."""
    if not slots or not row.numel():
        return
    factors = table_of(tuple(coefs), row.dtype, row.device)
    indices = table_of(tuple(slots), torch.int64, row.device)
    _substitute[(cdiv(row.numel(), _ELEMENTS),)](
        row, ring, factors, indices, len(slots), row.numel(), ring.stride(0), BLOCK=_ELEMENTS, enable_fp_fusion=False
    )
