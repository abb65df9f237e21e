"""Triton kernels of `linear_cross_entropy`; `norms` has the plain functions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpoptim.kernels.tables_triton import cdiv


@triton.jit(do_not_specialize=["positions"])
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
        _position_sums[(examples, cdiv(width, 1024))](
            values, weights.contiguous(), out, positions, width, values.stride(1), BLOCK=1024
        )
    return out


@triton.jit
def _more(x, largest, total):
    """Largest value and Σ exp(x − largest) of each lane, updated with more values of x."""
    larger = tl.maximum(largest, tl.max(x, 1))
    return larger, total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger[:, None]), 1)


@triton.jit
def _softmax_gradient(logits, labels, losses, lengths, classes, stride, LANES: tl.constexpr, SIDE: tl.constexpr):
    """Read one row twice. Every lane takes SIDE columns at a time and has its own maximum and sum until the end.

    Only the last columns need a mask.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, LANES)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    base = logits + row * stride
    label = tl.load(labels + row)
    whole = classes // (LANES * SIDE) * (LANES * SIDE)
    last, nothing = whole + place, tl.zeros([LANES, SIDE], logits.dtype.element_ty)
    if label < 0:
        for start in range(0, stride, LANES * SIDE):
            tl.store(base + start + place, nothing, mask=start + place < stride)
        tl.store(losses + row, 0.0)
        tl.store(lengths + row, 0.0)
        return
    largest, total = tl.full([LANES], -1e30, tl.float32), tl.zeros([LANES], tl.float32)
    for start in range(0, whole, LANES * SIDE):
        x = tl.load(base + start + place, eviction_policy="evict_last").to(tl.float32)
        largest, total = _more(x, largest, total)
    # Loads are as wide as `stride` allows, which is aligned where `classes` is not.
    x = tl.load(base + last, mask=last < stride, other=0.0).to(tl.float32)
    largest, total = _more(tl.where(last < classes, x, -float("inf")), largest, total)
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    log_sum = tl.where(label < classes, log_sum, float("nan"))  # no such class: the example is left out
    picked = tl.load(base + label, mask=label < classes, other=0.0).to(tl.float32)
    tl.store(losses + row, log_sum - picked)
    at_label = tl.exp(picked - log_sum) - 1.0
    tl.debug_barrier()
    squares = tl.zeros([LANES, SIDE], tl.float32)
    for start in range(0, whole, LANES * SIDE):
        y = tl.load(base + start + place, eviction_policy="evict_first").to(tl.float32)
        gradient = tl.where(place == label - start, at_label, tl.exp(y - log_sum))
        squares += gradient * gradient
        tl.store(base + start + place, gradient.to(logits.dtype.element_ty))
    y = tl.load(base + last, mask=last < stride, other=0.0).to(tl.float32)
    gradient = tl.where(last == label, at_label, tl.exp(y - log_sum))
    gradient = tl.where(last < classes, gradient, 0.0)
    squares += gradient * gradient
    tl.store(base + last, gradient.to(logits.dtype.element_ty), mask=last < stride)
    for start in range(whole + LANES * SIDE, stride, LANES * SIDE):
        tl.store(base + start + place, nothing, mask=start + place < stride)
    tl.store(lengths + row, tl.sqrt(tl.sum(tl.sum(squares, 1), 0)))


def softmax_gradient_(logits: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    lengths = torch.empty_like(losses)  # separate, so that it is aligned; otherwise kernels are compiled twice
    if len(logits):
        _softmax_gradient[(len(logits),)](
            logits, labels.contiguous(), losses, lengths, classes, logits.stride(0), LANES=256, SIDE=8, num_warps=8
        )
    return losses, lengths
