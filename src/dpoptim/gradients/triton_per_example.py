"""Triton kernels for arithmetic of one number an example; `per_example` says what each computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpoptim.noise import triton_tables
from dpoptim.noise.triton_tables import cdiv, next_power_of_2

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit(do_not_specialize=["examples", "factor"])
def _weighed(squared, least, clip_norm, norms, weights, apart, counts, examples, factor, TRUSTED: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """One program takes all examples, a block after the other, so that it can count them."""
    most, times = tl.load(clip_norm), factor.to(tl.float64)
    clipped, left_out, doubtful = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for start in range(0, examples, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < examples
        norm = tl.sqrt(tl.load(squared + at, mask=inside, other=1.0)) * times
        share = most / norm  # which is NaN where the norm is, and so neither side of any comparison
        weight = tl.where(share >= _TINY, tl.where(share > 1.0, 1.0, share), 0.0) * times
        by_itself = weight < 0
        if not TRUSTED:
            trusted = tl.load(least + at, mask=inside, other=0.0) * times <= norm
            by_itself = (weight > 0) & (trusted == 0)
        weight = tl.where(by_itself, 0.0, weight)
        tl.store(norms + at, norm.to(norms.dtype.element_ty), mask=inside)
        tl.store(weights + at, weight.to(weights.dtype.element_ty), mask=inside)
        tl.store(apart + at, by_itself, mask=inside)
        clipped += (inside & (norm > most)).to(tl.int64)
        left_out += (inside & (weight == 0) & (by_itself == 0)).to(tl.int64)
        doubtful += (inside & by_itself).to(tl.int64)
    tl.store(counts, tl.sum(clipped, 0))
    tl.store(counts + 1, tl.sum(left_out, 0))
    tl.store(counts + 2, tl.sum(doubtful, 0))


def weighed(
    squared: Tensor, least: Tensor | None, clip_norm: float, factor: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    squared = squared.contiguous()
    norms, weights = torch.empty_like(squared, dtype=dtype), torch.empty_like(squared, dtype=dtype)
    apart = torch.empty_like(squared, dtype=torch.bool)
    counts = torch.empty(3, dtype=torch.int64, device=squared.device)
    most = triton_tables.table_of((clip_norm,), torch.float64, squared.device)  # an argument would be rounded to fp32
    given = squared if least is None else least.contiguous()
    _weighed[(1,)](
        squared, given, most, norms, weights, apart, counts, len(squared), factor, TRUSTED=least is None, BLOCK=1024,
    )  # fmt: skip
    return norms, weights, apart, counts


@triton.jit(do_not_specialize=["examples"])
def _sum_of_parts(projected, looked_up, cross, unprojected, bound, squares, least, examples, TRUST: tl.constexpr,
                  IS_GRAM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < examples
    of_d, of_e = tl.load(projected + at, mask=inside, other=0.0), tl.load(looked_up + at, mask=inside, other=0.0)
    of_both = tl.load(cross + at, mask=inside, other=0.0)
    parts_of_d = tl.load(unprojected + at, mask=inside, other=0.0)
    parts_of_e = tl.load(bound + at, mask=inside, other=0.0)
    d, e, uncancelled = tl.sqrt(of_d), tl.sqrt(of_e), parts_of_d + parts_of_e
    summands = of_d + of_e + uncancelled * (uncancelled / 10 if IS_GRAM else (d + e) / 50)
    tl.store(least + at, (d + parts_of_e + parts_of_d / 5) / TRUST + tl.sqrt(summands / TRUST), mask=inside)
    whole = of_d + 2 * of_both + of_e
    whole = tl.where(whole < 0, 0.0, whole)
    is_finite = tl.abs(of_both) < float("inf")
    tl.store(squares + at, tl.where(is_finite, whole, float("nan")), mask=inside)


def sum_of_parts(
    projected: Tensor, looked_up: Tensor, cross: Tensor, unprojected: Tensor, bound: Tensor, trust: float,
    is_gram: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    given = [each.contiguous() for each in (projected, looked_up, cross, unprojected, bound)]
    squares, least = torch.empty_like(given[0]), torch.empty_like(given[0])
    if len(squares):
        _sum_of_parts[(cdiv(len(squares), 256),)](
            *given, squares, least, len(squares), TRUST=trust, IS_GRAM=is_gram, BLOCK=256
        )
    return squares, least


@triton.jit(do_not_specialize=["positions"])
def _length_products(lengths, vectors, factor, out, positions, width, HAS_FACTOR: tl.constexpr, BT: tl.constexpr,
                     BW: tl.constexpr):  # fmt: skip
    example = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BT], tl.float64)
    for start in range(0, positions, BT):
        t = start + tl.arange(0, BT)
        there = t < positions
        squares = tl.zeros([BT], tl.float64)  # in which none vanishes
        for first in range(0, width, BW):
            col = first + tl.arange(0, BW)
            at = (example * positions + t[:, None]) * width + col[None, :]
            value = tl.load(vectors + at, mask=there[:, None] & (col < width)[None, :], other=0.0).to(tl.float64)
            squares += tl.sum(value * value, 1)
        known = tl.load(lengths + example * positions + t, mask=there, other=0.0)
        total += tl.sqrt(squares) * known.to(tl.float64)
    found = tl.sum(total, 0)
    if HAS_FACTOR:
        found = found * tl.load(factor).to(tl.float64)
    tl.store(out + example, found)


def length_products(lengths: Tensor, vectors: Tensor, factor: Tensor | None) -> Tensor:
    vectors = vectors.contiguous()
    examples, positions, width = vectors.shape
    out = torch.empty(examples, dtype=torch.float64, device=vectors.device)
    if examples:
        given = vectors if factor is None else factor
        _length_products[(examples,)](
            lengths.contiguous(), vectors, given, out, positions, width, HAS_FACTOR=factor is not None, BT=16,
            BW=min(256, next_power_of_2(width)),
        )  # fmt: skip
    return out
