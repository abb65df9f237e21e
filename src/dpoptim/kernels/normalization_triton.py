"""Triton kernels of layer norm, with one pass over memory each; `normalization` has the plain functions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpoptim.kernels.tables_triton import cdiv, next_power_of_2

WIDEST = 4096  # of what a program holds a whole row
_TILE = 2048  # elements that a program holds at once, where a row is shorter
_PROGRAMS = 1056  # are enough for a large GPU


@triton.jit(do_not_specialize=["rows"])
def _layer_norm(inputs, weight, bias, output, mean, rstd, rows, width, eps, BR: tl.constexpr, BW: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BW)
    there = (row[:, None] < rows) & (col[None, :] < width)
    at = row[:, None] * width + col[None, :]
    x = tl.load(inputs + at, mask=there, other=0.0).to(tl.float32)
    m = tl.sum(x, 1) / width
    centred = tl.where(there, x - m[:, None], 0.0)
    s = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
    w = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)
    b = tl.load(bias + col, mask=col < width, other=0.0).to(tl.float32)
    y = centred * s[:, None] * w[None, :] + b[None, :]
    tl.store(output + at, y.to(output.dtype.element_ty), mask=there)
    tl.store(mean + row, m, mask=row < rows)
    tl.store(rstd + row, s, mask=row < rows)


@triton.jit(do_not_specialize=["positions", "chunk"])
def _layer_norm_gradient(grad, inputs, weight, mean, rstd, to_inputs, by_weight, by_bias, positions, width, chunk,
                         BT: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    """A chunk of the positions of one example: gradients of the inputs, and the chunk's share of weight and bias."""
    example, part, col = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BW)
    w = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)
    weighted, plain = tl.zeros([BT, BW], tl.float32), tl.zeros([BT, BW], tl.float32)
    for start in range(part * chunk, min((part + 1) * chunk, positions), BT):
        t = start + tl.arange(0, BT)
        inside = t < positions
        there = inside[:, None] & (col[None, :] < width)
        at = (example * positions + t[:, None]) * width + col[None, :]
        g = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
        x = tl.load(inputs + at, mask=there, other=0.0).to(tl.float32)
        m = tl.load(mean + example * positions + t, mask=inside, other=0.0)
        s = tl.load(rstd + example * positions + t, mask=inside, other=0.0)
        normalised = tl.where(there, (x - m[:, None]) * s[:, None], 0.0)
        weighted += g * normalised
        plain += g
        g *= w[None, :]
        along = tl.sum(g * normalised, 1) / width
        change = (g - (tl.sum(g, 1) / width)[:, None] - normalised * along[:, None]) * s[:, None]
        tl.store(to_inputs + at, change.to(to_inputs.dtype.element_ty), mask=there)
    into = (example * tl.num_programs(1) + part) * width + col
    tl.store(by_weight + into, tl.sum(weighted, 0), mask=col < width)
    tl.store(by_bias + into, tl.sum(plain, 0), mask=col < width)


def _tile(width: int) -> tuple[int, int, int]:
    """(rows of a tile, columns of it, warps)."""
    columns = next_power_of_2(width)
    return max(1, _TILE // columns), columns, 4 if columns <= 1024 else 8


def layer_norm(inputs: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    inputs = inputs.contiguous()
    output, (rows, width) = torch.empty_like(inputs), (inputs.shape[:-1].numel(), inputs.shape[-1])
    mean = torch.empty(inputs.shape[:-1], dtype=torch.float32, device=inputs.device)
    rstd = torch.empty_like(mean)
    if rows:
        together, columns, warps = _tile(width)
        _layer_norm[(cdiv(rows, together),)](
            inputs, weight.contiguous(), bias.contiguous(), output, mean, rstd, rows, width, eps,
            BR=together, BW=columns, num_warps=warps,
        )  # fmt: skip
    return output, mean, rstd


def layer_norm_gradient(
    grad: Tensor, inputs: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad, inputs = grad.contiguous(), inputs.contiguous()
    examples, positions, width = grad.shape
    to_inputs = torch.empty_like(grad)
    if not positions or not examples:
        nothing = torch.zeros(examples, width, dtype=torch.float32, device=grad.device)
        return to_inputs, nothing, nothing
    together, columns, warps = _tile(width)
    parts = max(1, min(cdiv(_PROGRAMS, examples), cdiv(positions, together)))
    chunk = cdiv(cdiv(positions, parts), together) * together
    parts = cdiv(positions, chunk)
    by_weight = torch.empty(examples, parts, width, dtype=torch.float32, device=grad.device)
    by_bias = torch.empty_like(by_weight)
    _layer_norm_gradient[(examples, parts)](
        grad, inputs, weight.contiguous(), mean.contiguous(), rstd.contiguous(), to_inputs, by_weight, by_bias,
        positions, width, chunk, BT=together, BW=columns, num_warps=warps,
    )  # fmt: skip
    if parts > 1:
        return to_inputs, by_weight.sum(1), by_bias.sum(1)
    return to_inputs, by_weight.view(examples, width), by_bias.view(examples, width)
