"""Triton kernels for the inner loops of clipping; `kernels` says what each computes, and holds the plain functions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SPAN = 1 << 15  # elements of one gradient that a program squares


@triton.jit
def _squares(grads, scale, out, numel, spans, SCALED: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    example = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(span * SPAN, min((span + 1) * SPAN, numel), BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < numel
        grad = tl.load(grads + example * numel + at, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            grad = grad * tl.load(scale + at, mask=inside, other=0.0)
        total += grad * grad
    tl.store(out + example * spans + span, tl.sum(total, 0))


def squares(grads: Tensor, scale: Tensor | None) -> Tensor:
    grads = grads.contiguous()
    examples, numel = len(grads), grads[0].numel() if len(grads) else 0
    if not examples or not numel:
        return torch.zeros(examples, dtype=torch.float64, device=grads.device)
    spans = triton.cdiv(numel, _SPAN)
    out = torch.empty(examples, spans, dtype=torch.float32, device=grads.device)
    given = grads if scale is None else scale.float().contiguous()
    _squares[(examples, spans)](grads, given, out, numel, spans, SCALED=scale is not None, SPAN=_SPAN, BLOCK=1024)
    return out.sum(1, dtype=torch.float64)


@triton.jit
def _weighted_sum(grads, weights, out, examples, numel, SHARE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    share = tl.program_id(1)
    inside = at < numel
    total = tl.zeros([BLOCK], tl.float32)
    for example in range(share * SHARE, min((share + 1) * SHARE, examples)):
        weight = tl.load(weights + example)
        total += weight * tl.load(grads + example.to(tl.int64) * numel + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + share.to(tl.int64) * numel + at, total, mask=inside)


def weighted_sum(grads: Tensor, weights: Tensor) -> Tensor:
    grads = grads.contiguous()
    shape = grads.shape[1:]
    examples, numel = len(grads), shape.numel()
    if not examples or not numel:
        return torch.zeros(shape, dtype=weights.dtype, device=weights.device)
    blocks = triton.cdiv(numel, 1024)
    share = max(16, examples // max(1, 512 // blocks))
    shares = triton.cdiv(examples, share)
    out = torch.empty(shares, numel, dtype=torch.float32, device=grads.device)
    _weighted_sum[(blocks, shares)](grads, weights.float(), out, examples, numel, SHARE=share, BLOCK=1024)
    return out.sum(0).view(shape).to(weights.dtype)


@triton.jit
def _add_product(left, right, example, t, positions, rows, cols, row, col, left_stride, total, IEEE: tl.constexpr):
    """total += Σ_t left[example, t, row] ⊗ right[example, t, col]."""
    here = (example * positions + t)[:, None]
    columns = tl.load(
        left + here * left_stride + row[None, :], mask=(t[:, None] < positions) & (row[None, :] < rows), other=0.0
    )
    values = tl.load(
        right + here * cols + col[None, :], mask=(t[:, None] < positions) & (col[None, :] < cols), other=0.0
    )
    if IEEE:
        total = tl.dot(tl.trans(columns), values, total, input_precision="ieee")
    else:
        total = tl.dot(tl.trans(columns), values, total)
    return total


@triton.jit
def _outer_squares(
    left, right, scale, out, examples, positions, rows, cols, left_stride, tiles,
    SCALED: tl.constexpr, IEEE: tl.constexpr, GROUP: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    LONG: tl.constexpr, UNROLLED: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Each program takes one tile of the product for GROUP examples; positions go in blocks of 64, then of 16."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    col = tl.program_id(1) * BC + tl.arange(0, BC)
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if SCALED:
        inside = (row[:, None] < rows) & (col[None, :] < cols)
        weight = tl.load(scale + row[:, None].to(tl.int64) * cols + col[None, :], mask=inside, other=0.0)
    for member in tl.range(GROUP, num_stages=2):
        # Beyond the last example the last one is measured again, and stored where it belongs.
        example = tl.minimum(tl.program_id(2) * GROUP + member, examples - 1).to(tl.int64)
        total = tl.zeros([BR, BC], tl.float32)
        if UNROLLED:
            for block in tl.static_range(LONG):
                t = block * 64 + tl.arange(0, 64)
                total = _add_product(left, right, example, t, positions, rows, cols, row, col, left_stride, total, IEEE)
        else:
            for block in range(LONG):
                t = block * 64 + tl.arange(0, 64)
                total = _add_product(left, right, example, t, positions, rows, cols, row, col, left_stride, total, IEEE)
        for block in tl.static_range(SHORT):
            t = LONG * 64 + block * 16 + tl.arange(0, 16)
            total = _add_product(left, right, example, t, positions, rows, cols, row, col, left_stride, total, IEEE)
        if SCALED:
            total = total * weight
        tl.store(out + example * tiles + tile, tl.sum(tl.sum(total * total, 1), 0))


@triton.jit
def _position_sums(values, weights, out, positions, width, stride, BLOCK: tl.constexpr):
    example = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for t in range(positions):
        weight = tl.load(weights + example * positions + t).to(tl.float32)
        total += weight * tl.load(values + (example * positions + t) * stride + col, mask=col < width, other=0.0).to(
            tl.float32
        )
    tl.store(out + example * width + col, total, mask=col < width)


def position_sums(values: Tensor, weights: Tensor) -> Tensor:
    values = _evenly(values)
    examples, positions, width = values.shape
    out = torch.zeros(examples, width, dtype=torch.float32, device=values.device)
    if examples and positions:
        _position_sums[(examples, triton.cdiv(width, 1024))](
            values, weights.contiguous(), out, positions, width, values.stride(1), BLOCK=1024
        )
    return out


def _evenly(tensor: Tensor) -> Tensor:
    """With all positions of all examples at one stride, as the kernels read them."""
    even = tensor.stride(2) == 1 and tensor.stride(0) == tensor.stride(1) * tensor.shape[1]
    return tensor if even else tensor.contiguous()


def outer_squares(left: Tensor, right: Tensor, scale: Tensor | None) -> Tensor:
    dtype = left.dtype if left.dtype == right.dtype else torch.float32
    left, right = _evenly(left.to(dtype)), right.to(dtype).contiguous()
    (examples, positions, rows), cols = left.shape, right.shape[2]
    most = 64 if dtype == torch.float32 else 128
    high, wide = (max(16, min(most, triton.next_power_of_2(size))) for size in (rows, cols))
    grid = (triton.cdiv(rows, high), triton.cdiv(cols, wide))
    tiles, group = grid[0] * grid[1], 16
    out = torch.zeros(examples, tiles, dtype=torch.float32, device=left.device)
    long, short = divmod(positions, 64)
    if short > 48:
        long, short = long + 1, 0
    if examples and positions:
        given = left if scale is None else scale.float().contiguous()
        _outer_squares[(*grid, triton.cdiv(examples, group))](
            left, right, given, out, examples, positions, rows, cols, left.stride(1), tiles,
            SCALED=scale is not None, IEEE=dtype == torch.float32, GROUP=group, BR=high, BC=wide,
            LONG=long, UNROLLED=long <= 4, SHORT=triton.cdiv(short, 16), num_warps=4,
        )  # fmt: skip
    return out.sum(1, dtype=torch.float64)


@triton.jit
def _normalised_sums(grad, inputs, mean, rstd, weighted, plain, positions, width, BW: tl.constexpr, BT: tl.constexpr):
    example = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BW + tl.arange(0, BW)
    by_weight = tl.zeros([BT, BW], tl.float32)
    by_bias = tl.zeros([BT, BW], tl.float32)
    for start in range(0, positions, BT):
        t = start + tl.arange(0, BT)
        there = (t[:, None] < positions) & (col[None, :] < width)
        at = (example * positions + t[:, None]) * width + col[None, :]
        g = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
        x = tl.load(inputs + at, mask=there, other=0.0).to(tl.float32)
        m = tl.load(mean + example * positions + t, mask=t < positions, other=0.0)
        s = tl.load(rstd + example * positions + t, mask=t < positions, other=0.0)
        by_weight += g * ((x - m[:, None]) * s[:, None])
        by_bias += g
    tl.store(weighted + example * width + col, tl.sum(by_weight, 0), mask=col < width)
    tl.store(plain + example * width + col, tl.sum(by_bias, 0), mask=col < width)


def normalised_sums(grad: Tensor, inputs: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    grad, inputs = grad.contiguous(), inputs.contiguous()
    examples, positions, width = grad.shape
    weighted = torch.empty(examples, width, dtype=torch.float32, device=grad.device)
    plain = torch.empty_like(weighted)
    if examples and width:
        block = min(128, triton.next_power_of_2(width))
        _normalised_sums[(examples, triton.cdiv(width, block))](
            grad, inputs, mean.float().contiguous(), rstd.float().contiguous(), weighted, plain, positions, width,
            BW=block, BT=32,
        )  # fmt: skip
    return weighted, plain


@triton.jit
def _row_squares(ids, order, values, scale, out, apart, positions, width, SCALED: tl.constexpr, BW: tl.constexpr):
    """Positions come sorted by id; a run of equal ids is summed, scaled and squared."""
    example = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BW)
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
    tl.store(out + example, tl.sum(total, 0))
    tl.store(apart + example, tl.sum(alone, 0))


def row_squares(ids: Tensor, values: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    values = values.contiguous()
    examples, positions, width = values.shape
    out, apart = torch.zeros(2, examples, dtype=torch.float32, device=values.device)
    if examples and positions:
        sorted_ids, order = torch.sort(ids, dim=1, stable=True)
        given = values if scale is None else scale.float().contiguous()
        _row_squares[(examples,)](
            sorted_ids, order, values, given, out, apart, positions, width, SCALED=scale is not None,
            BW=triton.next_power_of_2(width), num_warps=1 if width <= 128 else 4,
        )  # fmt: skip
    return out.double(), (apart.double() * positions).sqrt()


@triton.jit
def _softmax_gradient(logits, labels, losses, classes, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    label = tl.load(labels + row)
    largest = -float("inf")
    total = 0.0
    for start in range(0, classes, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(base + col, mask=col < classes, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    log_sum = largest + tl.log(total)
    valid = label >= 0
    picked = tl.load(base + tl.maximum(label, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(valid, log_sum - picked, 0.0))
    tl.debug_barrier()
    for start in range(0, stride, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(base + col, mask=col < classes, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(x - log_sum) - tl.where(col == label, 1.0, 0.0)
        gradient = tl.where(valid & (col < classes), gradient, 0.0)
        tl.store(base + col, gradient.to(logits.dtype.element_ty), mask=col < stride)


def softmax_gradient_(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _softmax_gradient[(len(logits),)](
            logits, labels.contiguous(), losses, classes, logits.stride(0), BLOCK=2048, num_warps=4
        )
    return losses
