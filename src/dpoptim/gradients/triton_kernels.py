"""Triton kernels for the inner loops of clipping; `kernels` says what each computes, and holds the plain functions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpoptim.gradients.triton_many import many_squares, many_weighted_sums
from dpoptim.gradients.triton_norm import WIDEST, layer_norm, layer_norm_gradient

__all__ = [
    "WIDEST",
    "layer_norm",
    "layer_norm_gradient",
    "many_squares",
    "many_weighted_sums",
    "position_sums",
    "row_squares",
    "softmax_gradient_",
]


@triton.jit
def _position_sums(values, weights, out, positions, width, stride, BLOCK: tl.constexpr):
    example = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for t in range(positions):
        weight = tl.load(weights + example * positions + t).to(tl.float32)
        value = tl.load(values + (example * positions + t) * stride + col, mask=col < width, other=0.0)
        total += weight * value.to(tl.float32)
    tl.store(out + example * width + col, total, mask=col < width)


def position_sums(values: Tensor, weights: Tensor) -> Tensor:
    even = values.stride(2) == 1 and values.stride(0) == values.stride(1) * values.shape[1]
    values = values if even else values.contiguous()
    examples, positions, width = values.shape
    out = torch.zeros(examples, width, dtype=torch.float32, device=values.device)
    if examples and positions:
        _position_sums[(examples, triton.cdiv(width, 1024))](
            values, weights.contiguous(), out, positions, width, values.stride(1), BLOCK=1024
        )
    return out


@triton.jit
def _row_squares(ids, order, values, scale, out, apart, positions, width, SCALED: tl.constexpr, BW: tl.constexpr):
    """Positions come sorted by id; a run of equal ids is summed, scaled and squared."""
    example = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = col < width
    total = tl.zeros([BW], tl.float32)
    run = tl.zeros([BW], tl.float32)
    alone = tl.zeros([BW], tl.float32)
    for at in range(positions):
        here = tl.load(ids + example * positions + at)
        place = tl.load(order + example * positions + at)
        value = tl.load(values + (example * positions + place) * width + col, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            value = value * tl.load(scale + here * width + col, mask=inside, other=0.0)
        alone += value * value
        run += value
        after = tl.load(ids + example * positions + min(at + 1, positions - 1))
        if (at == positions - 1) | (after != here):
            total += run * run
            run = tl.zeros([BW], tl.float32)
    tl.store(out + example * tl.num_programs(1) + tl.program_id(1), tl.sum(total, 0))
    tl.store(apart + example * tl.num_programs(1) + tl.program_id(1), tl.sum(alone, 0))


def row_squares(ids: Tensor, values: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    values = values.contiguous()
    examples, positions, width = values.shape
    block = min(128, triton.next_power_of_2(width))
    out, apart = torch.zeros(2, examples, triton.cdiv(width, block), dtype=torch.float32, device=values.device)
    if examples and positions:
        sorted_ids, order = torch.sort(ids.long(), dim=1, stable=True)
        given = values if scale is None else scale.float().contiguous()
        _row_squares[tuple(out.shape)](
            sorted_ids, order, values, given, out, apart, positions, width, SCALED=scale is not None,
            BW=block, num_warps=1,
        )  # fmt: skip
    return out.sum(1, dtype=torch.float64), (apart.sum(1, dtype=torch.float64) * positions).sqrt()


@triton.jit
def _softmax_gradient(logits, labels, losses, lengths, classes, stride, BLOCK: tl.constexpr):
    """One row, which is read twice; every lane has a maximum and a sum of its own until the end."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    base = logits + row * stride
    label = tl.load(labels + row)
    valid = label >= 0
    largest, total = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, tl.where(valid, classes, 0), BLOCK):
        col = start + lane
        x = tl.load(base + col, mask=col < stride, other=0.0).to(tl.float32)  # `stride` is aligned, `classes` is not
        x = tl.where(col < classes, x, -float("inf"))
        larger = tl.maximum(largest, x)
        total = total * tl.exp(largest - larger) + tl.exp(x - larger)
        largest = larger
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    picked = tl.load(base + tl.maximum(label, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(valid, log_sum - picked, 0.0))
    tl.debug_barrier()
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, stride, BLOCK):
        col = start + lane
        x = tl.load(base + col, mask=(col < stride) & valid, other=0.0).to(tl.float32)
        gradient = tl.exp(x - log_sum) - tl.where(col == label, 1.0, 0.0)
        gradient = tl.where(valid & (col < classes), gradient, 0.0)
        squares += gradient * gradient
        tl.store(base + col, gradient.to(logits.dtype.element_ty), mask=col < stride)
    tl.store(lengths + row, tl.sqrt(tl.sum(squares, 0)))


def softmax_gradient_(logits: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    losses, lengths = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _softmax_gradient[(len(logits),)](
            logits, labels.contiguous(), losses, lengths, classes, logits.stride(0), BLOCK=1024, num_warps=4
        )
    return losses, lengths
