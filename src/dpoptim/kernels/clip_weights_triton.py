"""Triton kernels for arithmetic of one number an example; `per_example` says what each computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpoptim.kernels import tables_triton as triton_tables
from dpoptim.kernels.tables_triton import cdiv, next_power_of_2

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit(do_not_specialize=["examples", "factor"])
def _weighed(squared, least, clip_norm, norms, weights, apart, counts, examples, factor, HAS_LEAST: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """One program takes all examples, a block after the other, so that it can count them."""
    most, times = tl.load(clip_norm), factor.to(tl.float64)
    clipped, left_out, doubtful = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for start in range(0, examples, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < examples
        norm = tl.sqrt(tl.load(squared + at, mask=inside, other=1.0)) * times
        share = most / norm  # NaN where the norm is: every comparison is then false, and the weight 0
        weight = tl.where(share >= _TINY, tl.where(share > 1.0, 1.0, share), 0.0) * times
        is_apart = weight < 0  # none is
        if HAS_LEAST:
            trusted = tl.load(least + at, mask=inside, other=0.0) * times <= norm
            is_apart = (weight > 0) & (trusted == 0)
        weight = tl.where(is_apart, 0.0, weight)
        tl.store(norms + at, norm.to(norms.dtype.element_ty), mask=inside)
        tl.store(weights + at, weight.to(weights.dtype.element_ty), mask=inside)
        tl.store(apart + at, is_apart, mask=inside)
        clipped += (inside & (norm > most)).to(tl.int64)
        left_out += (inside & (weight == 0) & (is_apart == 0)).to(tl.int64)
        doubtful += (inside & is_apart).to(tl.int64)
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
        squared, given, most, norms, weights, apart, counts, len(squared), factor, HAS_LEAST=least is not None,
        BLOCK=1024,
    )  # fmt: skip
    return norms, weights, apart, counts


@triton.jit(do_not_specialize=["examples"])
def _sum_of_parts(d_squared, e_squared, cross, d_parts, e_parts, squares, least, examples, TRUST: tl.constexpr,
                  IS_GRAM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < examples
    dd, ee = tl.load(d_squared + at, mask=inside, other=0.0), tl.load(e_squared + at, mask=inside, other=0.0)
    de = tl.load(cross + at, mask=inside, other=0.0)
    of_d, of_e = tl.load(d_parts + at, mask=inside, other=0.0), tl.load(e_parts + at, mask=inside, other=0.0)
    d, e, parts = tl.sqrt(dd), tl.sqrt(ee), of_d + of_e
    summands = dd + ee + parts * (parts / 10 if IS_GRAM else (d + e) / 50)
    tl.store(least + at, (d + of_e + of_d / 5) / TRUST + tl.sqrt(summands / TRUST), mask=inside)
    whole = dd + 2 * de + ee
    whole = tl.where(whole < 0, 0.0, whole)
    is_finite = tl.abs(de) < float("inf")
    tl.store(squares + at, tl.where(is_finite, whole, float("nan")), mask=inside)


def sum_of_parts(
    d_squared: Tensor, e_squared: Tensor, cross: Tensor, d_parts: Tensor, e_parts: Tensor, trust: float, is_gram: bool
) -> tuple[Tensor, Tensor]:
    given = [each.contiguous() for each in (d_squared, e_squared, cross, d_parts, e_parts)]
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
