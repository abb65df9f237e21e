"""Triton kernels of `linear_cross_entropy`; `norms` has the plain functions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpoptim.kernels.tables_triton import cdiv, next_power_of_2, processors

_ROW_BYTES = 1 << 16  # of a row that one program holds in registers; the next row waits in shared memory
_LANES = 512  # of such a program


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


@triton.jit(do_not_specialize=["rows", "classes"])
def _softmax_gradient(logits, labels, losses, lengths, rows, classes, stride, CHUNKS: tl.constexpr, LANES: tl.constexpr,
                      SIDE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Read each row once and keep it in registers; a maximum for each lane lets it compute each exponential once."""
    chunk, lane = tl.arange(0, CHUNKS)[:, None, None], tl.arange(0, LANES)[None, :, None]
    col = (chunk * LANES + lane) * SIDE + tl.arange(0, SIDE)[None, None, :]
    for row in tl.range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0), num_stages=STAGES):
        base = logits + row * stride
        label = tl.load(labels + row)
        # Loads are as wide as `stride` allows, which is aligned where `classes` is not.
        x = tl.load(base + col, mask=(col < stride) & (label >= 0), other=0.0).to(tl.float32)
        picked = tl.load(base + label, mask=(label >= 0) & (label < classes), other=0.0).to(tl.float32)
        x = tl.where(col < classes, x, -float("inf"))
        # The label's logit is in every lane's maximum, so that all threads have read it before one overwrites it.
        largest = tl.maximum(tl.max(tl.max(x, 2), 0), tl.maximum(picked, -1e30))
        power = tl.exp(x - largest[None, :, None])
        top = tl.max(largest, 0)
        share = tl.exp(largest - top)
        log_sum = top + tl.log(tl.sum(tl.sum(tl.sum(power, 2), 0) * share, 0))
        log_sum = tl.where(label < classes, log_sum, float("nan"))  # no such class: the example is left out
        factor = tl.where(label < 0, 0.0, share * tl.exp(top - log_sum))
        gradient = tl.where(col == label, tl.exp(picked - log_sum) - 1.0, power * factor[None, :, None])
        gradient = tl.where(col < classes, gradient, 0.0)
        tl.store(base + col, gradient.to(logits.dtype.element_ty), mask=col < stride)
        tl.store(losses + row, tl.where(label < 0, 0.0, log_sum - picked))
        tl.store(lengths + row, tl.sqrt(tl.sum(tl.sum(tl.sum(gradient * gradient, 2), 0), 0)))


@triton.jit
def _more(x, largest, total):
    """Largest value and Σ exp(x − largest) of each lane, updated with more values of x."""
    larger = tl.maximum(largest, tl.max(x, 1))
    return larger, total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger[:, None]), 1)


@triton.jit(do_not_specialize=["classes"])
def _wide_softmax_gradient(logits, labels, losses, lengths, classes, stride, LANES: tl.constexpr, SIDE: tl.constexpr,
                           STAGES: tl.constexpr):  # fmt: skip
    """Read one row twice. Every lane takes SIDE columns at a time and has its own maximum and sum until the end."""
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
    for start in tl.range(0, whole, LANES * SIDE, num_stages=STAGES):
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
    for start in tl.range(0, whole, LANES * SIDE, num_stages=STAGES):
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
    rows, stride, given = len(logits), logits.stride(0), (logits, labels.contiguous(), losses, lengths)
    side = 16 // logits.element_size()  # loads of 16 bytes
    if rows and stride * logits.element_size() <= _ROW_BYTES:
        chunks = next_power_of_2(cdiv(stride, _LANES * side))
        _softmax_gradient[(min(rows, 4 * processors(logits.device)),)](
            *given, rows, classes, stride, CHUNKS=chunks, LANES=_LANES, SIDE=side, STAGES=2, num_warps=_LANES // 32
        )
    elif rows:
        _wide_softmax_gradient[(rows,)](*given, classes, stride, LANES=256, SIDE=8, STAGES=1, num_warps=8)
    return losses, lengths
