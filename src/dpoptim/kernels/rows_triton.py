"""Triton kernels for look-up tables; `norms` has the plain functions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpoptim.kernels.tables_triton import cdiv, next_power_of_2

_CHUNK = 64  # sorted look-ups that a program sums in turn
_TOGETHER = 64  # chunks' sums that a program adds at once


@triton.jit(do_not_specialize=["positions"])
def _row_squares(ids, order, values, scale, squares, bound, positions, width, SCALED: tl.constexpr, BW: tl.constexpr):
    """Sum, scale and square each run of equal ids; positions are sorted by id."""
    example = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BW)
    inside = col < width
    total = tl.zeros([BW], tl.float32)
    run = tl.zeros([BW], tl.float64)  # float64, because long sums in float32 drift
    alone = tl.zeros([BW], tl.float32)
    for at in range(positions):
        here = tl.load(ids + example * positions + at)
        place = tl.load(order + example * positions + at)
        value = tl.load(values + (example * positions + place) * width + col, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            value = value * tl.load(scale + here * width + col, mask=inside, other=0.0)
        alone += value * value
        run += value.to(tl.float64)
        after = tl.load(ids + example * positions + min(at + 1, positions - 1))
        if (at == positions - 1) | (after != here):
            whole = run.to(tl.float32)
            total += whole * whole
            run = tl.zeros([BW], tl.float64)
    tl.store(squares + example, tl.sum(total.to(tl.float64), 0))
    tl.store(bound + example, tl.sqrt(tl.sum(alone.to(tl.float64), 0) * positions))


def row_squares(ids: Tensor, values: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    values = values.contiguous()
    examples, positions, width = values.shape
    squares = torch.empty(examples, dtype=torch.float64, device=values.device)
    bound = torch.empty_like(squares)
    if examples:
        sorted_ids, order = torch.sort(ids.long().contiguous(), dim=1, stable=True)  # sort keeps strides
        given = values if scale is None else scale.float().contiguous()
        block = next_power_of_2(width)
        _row_squares[(examples,)](
            sorted_ids, order, values, given, squares, bound, positions, width, SCALED=scale is not None,
            BW=block, num_warps=max(1, min(32, block // 128)),
        )  # fmt: skip
    return squares, bound


@triton.jit(do_not_specialize=["lookups", "positions"])
def _sum_chunks(ids, order, values, weights, total, partial, lookups, positions, width, CHUNK: tl.constexpr,
                BW: tl.constexpr):  # fmt: skip
    """Sum runs of equal ids; look-ups are sorted by id. A run within one chunk is added to its row.

    A longer run is stored in parts: partial[chunk, 0] if it began in an earlier chunk, partial[chunk, 1] if it begins
    in this one.
    """
    chunk, col = tl.program_id(0), tl.program_id(1) * BW + tl.arange(0, BW)
    inside = col < width
    first = chunk * CHUNK
    last = min(first + CHUNK, lookups) - 1
    began_before = (first > 0) & (tl.load(ids + tl.maximum(first - 1, 0)) == tl.load(ids + first))
    run = tl.zeros([BW], tl.float64)
    for at in range(first, last + 1):
        here, lookup = tl.load(ids + at), tl.load(order + at)
        weight = tl.load(weights + lookup // positions)
        value = tl.load(values + lookup * width + col, mask=inside, other=0.0).to(tl.float32)
        run += tl.where(weight != 0, weight * value, 0.0).to(tl.float64)  # even if the value is NaN
        ends = (at == lookups - 1) | (tl.load(ids + tl.minimum(at + 1, lookups - 1)) != here)
        if ends | (at == last):
            found = run.to(tl.float32)
            if began_before:
                tl.store(partial + (2 * chunk.to(tl.int64)) * width + col, found, mask=inside)
            elif ends:
                row = total + here.to(tl.int64) * width + col
                tl.store(row, tl.load(row, mask=inside, other=0.0) + found, mask=inside)
            else:
                tl.store(partial + (2 * chunk.to(tl.int64) + 1) * width + col, found, mask=inside)
            run = tl.zeros([BW], tl.float64)
            began_before = first < 0  # never


@triton.jit(do_not_specialize=["lookups"])
def _sum_long_runs(ids, total, partial, lookups, width, CHUNK: tl.constexpr, TOGETHER: tl.constexpr, BW: tl.constexpr):
    """Sum the partial sums of a run that begins in this chunk and continues in later ones, and add it to its row."""
    chunk, col = tl.program_id(0), tl.program_id(1) * BW + tl.arange(0, BW)
    inside = col < width
    first, after = chunk * CHUNK, (chunk + 1) * CHUNK
    if after < lookups:
        own = tl.load(ids + after - 1)
        began_before = (first > 0) & (tl.load(ids + tl.maximum(first - 1, 0)) == own)
        if (tl.load(ids + after) == own) & (began_before == 0):
            run = tl.load(partial + (2 * chunk.to(tl.int64) + 1) * width + col, mask=inside, other=0.0)
            start, goes_on = chunk + 1, own == own
            while goes_on:
                later = start + tl.arange(0, TOGETHER)
                same = later * CHUNK < lookups
                same = same & (tl.load(ids + later * CHUNK, mask=same, other=0) == own)
                shares = tl.load(
                    partial + (2 * later.to(tl.int64))[:, None] * width + col[None, :],
                    mask=same[:, None] & inside[None, :], other=0.0,
                )  # fmt: skip
                run += tl.sum(shares, 0)
                start += TOGETHER
                goes_on = tl.sum(same.to(tl.int32), 0) == TOGETHER
            row = total + own.to(tl.int64) * width + col
            tl.store(row, tl.load(row, mask=inside, other=0.0) + run, mask=inside)


def row_weighted_sum(ids: Tensor, values: Tensor, weights: Tensor, total: Tensor) -> None:
    values, lookups, width = values.contiguous(), ids.numel(), values.shape[2]
    if not lookups:
        return
    sorted_ids, order = torch.sort(ids.reshape(-1).int(), stable=True)
    block = min(128, next_power_of_2(width))
    grid = cdiv(lookups, _CHUNK), cdiv(width, block)
    partial = torch.empty(grid[0], 2, width, dtype=torch.float32, device=values.device)
    _sum_chunks[grid](
        sorted_ids, order, values, weights.float().contiguous(), total, partial, lookups, ids.shape[1], width,
        CHUNK=_CHUNK, BW=block, num_warps=1,
    )  # fmt: skip
    _sum_long_runs[grid](
        sorted_ids, total, partial, lookups, width, CHUNK=_CHUNK, TOGETHER=_TOGETHER, BW=block, num_warps=4
    )
