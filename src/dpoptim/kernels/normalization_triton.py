"""Triton kernels of layer norm, RMS norm and group norm; `normalization` has the plain functions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpoptim.kernels.tables_triton import cdiv, next_power_of_2

WIDEST = 4096  # a program holds a whole row of at most this width
_TILE = 2048  # elements that a program holds at once if rows are shorter
_PROGRAMS = 1056  # enough for a large GPU
_GROUP_TILE = 4096  # the same for group norm, which reads a group again while it is still in the cache


@triton.jit(do_not_specialize=["rows"])
def _layer_norm(inputs, weight, bias, output, mean, rstd, rows, width, eps, offset, RMS: tl.constexpr,
                BR: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    row, col = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BW)
    there = (row[:, None] < rows) & (col[None, :] < width)
    at = row[:, None] * width + col[None, :]
    x = tl.load(inputs + at, mask=there, other=0.0).to(tl.float32)
    if not RMS:
        m = tl.sum(x, 1) / width
        tl.store(mean + row, m, mask=row < rows)
        x = tl.where(there, x - m[:, None], 0.0)
    s = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    y = x * s[:, None] * (tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32) + offset)[None, :]
    if not RMS:
        y += tl.load(bias + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    tl.store(output + at, y.to(output.dtype.element_ty), mask=there)
    tl.store(rstd + row, s, mask=row < rows)


@triton.jit(do_not_specialize=["positions", "chunk"])
def _layer_norm_gradient(grad, inputs, weight, mean, rstd, to_inputs, by_weight, by_bias, positions, width, chunk,
                         offset, RMS: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    """A chunk of the positions of one example: gradients of the inputs, and the chunk's share of weight and bias."""
    example, part, col = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BW)
    w = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32) + offset
    weighted, plain = tl.zeros([BT, BW], tl.float32), tl.zeros([BT, BW], tl.float32)
    for start in range(part * chunk, min((part + 1) * chunk, positions), BT):
        t = start + tl.arange(0, BT)
        inside = t < positions
        there = inside[:, None] & (col[None, :] < width)
        at = (example * positions + t[:, None]) * width + col[None, :]
        g = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
        x = tl.load(inputs + at, mask=there, other=0.0).to(tl.float32)
        s = tl.load(rstd + example * positions + t, mask=inside, other=0.0)
        if not RMS:
            x -= tl.load(mean + example * positions + t, mask=inside, other=0.0)[:, None]
            plain += g
        normalised = tl.where(there, x * s[:, None], 0.0)
        weighted += g * normalised
        g *= w[None, :]
        change = g - normalised * (tl.sum(g * normalised, 1) / width)[:, None]
        if not RMS:
            change -= (tl.sum(g, 1) / width)[:, None]
        change *= s[:, None]
        tl.store(to_inputs + at, change.to(to_inputs.dtype.element_ty), mask=there)
    into = (example * tl.num_programs(1) + part) * width + col
    tl.store(by_weight + into, tl.sum(weighted, 0), mask=col < width)
    if not RMS:
        tl.store(by_bias + into, tl.sum(plain, 0), mask=col < width)


def _tile(width: int) -> tuple[int, int, int]:
    """(rows and columns of a tile, warps)."""
    columns = next_power_of_2(width)
    return max(1, _TILE // columns), columns, 4 if columns <= 1024 else 8


def layer_norm(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Layer norm; without a bias RMS norm, which has no mean."""
    inputs = inputs.contiguous()
    output, (rows, width) = torch.empty_like(inputs, dtype=dtype), (inputs.shape[:-1].numel(), inputs.shape[-1])
    rstd = torch.empty(inputs.shape[:-1], dtype=torch.float32, device=inputs.device)
    mean = rstd if bias is None else torch.empty_like(rstd)
    if rows:
        together, columns, warps = _tile(width)
        _layer_norm[(cdiv(rows, together),)](
            inputs, weight.contiguous(), inputs if bias is None else bias.contiguous(), output, mean, rstd, rows, width,
            eps, offset, RMS=bias is None, BR=together, BW=columns, num_warps=warps,
        )  # fmt: skip
    return output, None if bias is None else mean, rstd


def layer_norm_gradient(
    grad: Tensor, inputs: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, *, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients behind `layer_norm`; those of RMS norm (mean=None) have nothing useful for the bias."""
    grad, inputs = grad.contiguous(), inputs.contiguous()
    examples, positions, width = grad.shape
    to_inputs = torch.empty_like(inputs)
    if not positions or not examples:
        nothing = torch.zeros(examples, width, dtype=torch.float32, device=grad.device)
        return to_inputs, nothing, nothing
    together, columns, warps = _tile(width)
    parts = max(1, min(cdiv(_PROGRAMS, examples), cdiv(positions, together)))
    chunk = cdiv(cdiv(positions, parts), together) * together
    parts = cdiv(positions, chunk)
    by_weight = torch.empty(examples, parts, width, dtype=torch.float32, device=grad.device)
    by_bias = by_weight if mean is None else torch.empty_like(by_weight)
    _layer_norm_gradient[(examples, parts)](
        grad, inputs, weight.contiguous(), rstd if mean is None else mean.contiguous(), rstd.contiguous(), to_inputs,
        by_weight, by_bias, positions, width, chunk, offset, RMS=mean is None, BT=together, BW=columns,
        num_warps=warps,
    )  # fmt: skip
    if parts > 1:
        return to_inputs, by_weight.sum(1), by_bias if mean is None else by_bias.sum(1)
    return to_inputs, by_weight.view(examples, width), by_bias.view(examples, width)


@triton.jit
def _places(first, c, s0, per_group, space, BS: tl.constexpr):
    """The offsets of a tile's elements, and a mask of those inside the group."""
    s = s0 + tl.arange(0, BS)
    return first + c[:, None] * space + s[None, :], (c[:, None] < per_group) & (s[None, :] < space)


@triton.jit
def _group_norm(inputs, weight, bias, output, mean, rstd, groups, per_group, space, eps,
                BC: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)  # of all examples
    first, size = group * per_group * space, per_group * space
    total = tl.zeros([BC, BS], tl.float32)
    for c0 in range(0, per_group, BC):
        c = c0 + tl.arange(0, BC)
        for s0 in range(0, space, BS):
            at, there = _places(first, c, s0, per_group, space, BS)
            total += tl.load(inputs + at, mask=there, other=0.0).to(tl.float32)
    m = tl.sum(tl.sum(total, 1), 0) / size
    total = tl.zeros([BC, BS], tl.float32)
    for c0 in range(0, per_group, BC):
        c = c0 + tl.arange(0, BC)
        for s0 in range(0, space, BS):
            at, there = _places(first, c, s0, per_group, space, BS)
            x = tl.load(inputs + at, mask=there, other=0.0).to(tl.float32)
            centred = tl.where(there, x - m, 0.0)
            total += centred * centred
    r = 1.0 / tl.sqrt(tl.sum(tl.sum(total, 1), 0) / size + eps)
    tl.store(mean + group, m)
    tl.store(rstd + group, r)
    channel = (group % groups) * per_group
    for c0 in range(0, per_group, BC):
        c = c0 + tl.arange(0, BC)
        w = tl.load(weight + channel + c, mask=c < per_group, other=0.0).to(tl.float32)
        b = tl.load(bias + channel + c, mask=c < per_group, other=0.0).to(tl.float32)
        for s0 in range(0, space, BS):
            at, there = _places(first, c, s0, per_group, space, BS)
            x = tl.load(inputs + at, mask=there, other=0.0).to(tl.float32)
            y = (x - m) * r * w[:, None] + b[:, None]
            tl.store(output + at, y.to(output.dtype.element_ty), mask=there)


@triton.jit
def _group_norm_gradient(grad, inputs, weight, mean, rstd, to_inputs, by_weight, by_bias, groups, per_group, space,
                         BC: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    first, size = group * per_group * space, per_group * space
    channel, into = (group % groups) * per_group, group * per_group
    m, r = tl.load(mean + group), tl.load(rstd + group)
    total, along = 0.0, 0.0
    for c0 in range(0, per_group, BC):
        c = c0 + tl.arange(0, BC)
        plain, weighted = tl.zeros([BC, BS], tl.float32), tl.zeros([BC, BS], tl.float32)
        for s0 in range(0, space, BS):
            at, there = _places(first, c, s0, per_group, space, BS)
            g = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
            x = tl.load(inputs + at, mask=there, other=0.0).to(tl.float32)
            plain += g
            weighted += g * tl.where(there, (x - m) * r, 0.0)
        of_bias, of_weight = tl.sum(plain, 1), tl.sum(weighted, 1)
        tl.store(by_bias + into + c, of_bias, mask=c < per_group)
        tl.store(by_weight + into + c, of_weight, mask=c < per_group)
        w = tl.load(weight + channel + c, mask=c < per_group, other=0.0).to(tl.float32)
        total += tl.sum(w * of_bias, 0)
        along += tl.sum(w * of_weight, 0)
    total, along = total / size, along / size
    for c0 in range(0, per_group, BC):
        c = c0 + tl.arange(0, BC)
        w = tl.load(weight + channel + c, mask=c < per_group, other=0.0).to(tl.float32)
        for s0 in range(0, space, BS):
            at, there = _places(first, c, s0, per_group, space, BS)
            g = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
            x = tl.load(inputs + at, mask=there, other=0.0).to(tl.float32)
            change = (g * w[:, None] - total - (x - m) * r * along) * r
            tl.store(to_inputs + at, change.to(to_inputs.dtype.element_ty), mask=there)


def _group_tile(per_group: int, space: int) -> tuple[int, int]:
    """(channels, places) that a program holds at once."""
    places = min(next_power_of_2(space), 1024)
    return min(next_power_of_2(per_group), max(1, _GROUP_TILE // places)), places


def group_norm(inputs: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    inputs = inputs.contiguous()
    examples, channels, space = inputs.shape
    output = torch.empty_like(inputs)
    mean, rstd = torch.empty(2, examples, groups, dtype=torch.float32, device=inputs.device)
    together, places = _group_tile(channels // groups, space)
    _group_norm[(examples * groups,)](
        inputs, weight.contiguous(), bias.contiguous(), output, mean, rstd, groups, channels // groups, space, eps,
        BC=together, BS=places, num_warps=8,
    )  # fmt: skip
    return output, mean, rstd


def group_norm_gradient(
    grad: Tensor, inputs: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad, inputs = grad.contiguous(), inputs.contiguous()
    (examples, channels, space), groups = grad.shape, mean.shape[1]
    to_inputs = torch.empty_like(grad)
    by_weight, by_bias = torch.empty(2, examples, channels, dtype=torch.float32, device=grad.device)
    together, places = _group_tile(channels // groups, space)
    _group_norm_gradient[(examples * groups,)](
        grad, inputs, weight.contiguous(), mean.contiguous(), rstd.contiguous(), to_inputs, by_weight, by_bias,
        groups, channels // groups, space, BC=together, BS=places, num_warps=8,
    )  # fmt: skip
    return to_inputs, by_weight, by_bias
