"""Triton kernels of the optimizer: one pass over memory each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpoptim.kernels.tables_triton import DTYPES, cdiv, parts_of, table_of

_BLOCK = 1024


@triton.jit
def _adam(addresses, shifts, parts, gradient, first_moment, second_moment, rounding, one_minus_beta1, one_minus_beta2,
          correction1, correction2, eps, lr, added_decay, kept, DTYPE: tl.constexpr, ROUNDS: tl.constexpr,
          STEP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    tensor, first = tl.load(parts + 4 * program), tl.load(parts + 4 * program + 1)
    numel, offset = tl.load(parts + 4 * program + 2), tl.load(parts + 4 * program + 3)
    parameter = tl.load(addresses + tensor).to(tl.pointer_type(DTYPE))
    shift = tl.load(shifts + tensor)
    if STEP > 1:
        parameter, first = tl.multiple_of(parameter, 16), tl.multiple_of(first, BLOCK)
        numel, offset, shift = tl.multiple_of(numel, STEP), tl.multiple_of(offset, STEP), tl.multiple_of(shift, STEP)
    within = first + tl.arange(0, BLOCK)
    inside = within < numel
    at = offset + within
    value = tl.load(parameter + within, mask=inside, other=0.0).to(tl.float32)
    if ROUNDS:
        remainder = tl.load(rounding + at, mask=inside, other=0)
        if rounding.dtype.element_ty == tl.int16:
            whole = (value.to(tl.int32, bitcast=True) + remainder.to(tl.int32)).to(tl.float32, bitcast=True)
        else:
            whole = value + remainder
        value = tl.where(whole.to(DTYPE).to(tl.float32) == value, whole, value)
    g = tl.load(gradient + shift + within, mask=inside, other=0.0) + added_decay * value
    mu = tl.load(first_moment + at, mask=inside, other=0.0)
    nu = tl.load(second_moment + at, mask=inside, other=0.0)
    mu += one_minus_beta1 * (g - mu)
    nu += one_minus_beta2 * (g * g - nu)
    denominator = tl.sqrt_rn(tl.div_rn(nu, correction2)) + eps
    direction = tl.where(mu == 0, 0.0, tl.div_rn(tl.div_rn(mu, correction1), denominator))
    value = kept * value - lr * direction
    stored = value.to(DTYPE)
    tl.store(parameter + within, stored, mask=inside)
    if ROUNDS:
        if rounding.dtype.element_ty == tl.int16:
            words = value.to(tl.int32, bitcast=True) - stored.to(tl.float32).to(tl.int32, bitcast=True)
            tl.store(rounding + at, tl.minimum(tl.maximum(words, -32768), 32767).to(tl.int16), mask=inside)
        else:
            tl.store(rounding + at, value - stored.to(tl.float32), mask=inside)
    tl.store(first_moment + at, mu, mask=inside)
    tl.store(second_moment + at, nu, mask=inside)


def adam_step_(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], first_moment: Tensor, second_moment: Tensor,
    rounding: Tensor | None, *, betas: tuple[float, float], step: int, eps: float, lr: float, added_decay: float,
    kept: float,
) -> None:  # fmt: skip
    """Take one step; moments and remainders are vectors of all parameters, gradients need not be adjacent."""
    device, base = first_moment.device, next((g for g in gradients if g.numel()), first_moment)
    first = base.data_ptr()
    found: dict[tuple[torch.dtype, int], list[tuple[int, int, int, int]]] = {}
    offset = 0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if numel := parameter.numel():
            address, shift = parameter.data_ptr(), (gradient.data_ptr() - first) // 4
            even = (numel | offset | shift) % 8 == address % 16 == 0
            found.setdefault((parameter.dtype, 8 if even else 1), []).append((numel, offset, address, shift))
        offset += numel
    for (dtype, width), members in found.items():
        rounds = rounding is not None and dtype != torch.float32
        numels, offsets, addresses, shifts = zip(*members, strict=True)
        parts = parts_of(tuple(zip(numels, offsets, strict=True)), _BLOCK, device)
        _adam[(len(parts),)](
            table_of(addresses, torch.int64, device), table_of(shifts, torch.int64, device), parts, base,
            first_moment, second_moment, rounding if rounds else first_moment, 1 - betas[0], 1 - betas[1],
            1 - betas[0] ** step, 1 - betas[1] ** step, eps, lr, added_decay, kept,
            DTYPE=DTYPES[dtype], ROUNDS=rounds, STEP=width, BLOCK=_BLOCK,
        )  # fmt: skip


@triton.jit
def root_of(moment, factor, floor):
    """factor·√max(moment, 0) + floor, with the same bits in every kernel, whether or not it fuses operations."""
    return tl.fma(tl.sqrt_rn(tl.where(moment < 0, 0.0, moment)), factor, floor)


@triton.jit(do_not_specialize=["factor", "floor"])
def _inverse_root(moment, out, numel, factor, floor, READS: tl.constexpr, BLOCK: tl.constexpr):
    if READS:
        factor, floor = tl.load(factor), tl.load(floor)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(moment + at, mask=at < numel, other=0.0)
    tl.store(out + at, tl.div_rn(1.0, root_of(value, factor, floor)), mask=at < numel)


def inverse_root(moment: Tensor, factor: float | Tensor, floor: float | Tensor) -> Tensor:
    moment = moment.contiguous()
    out = torch.empty_like(moment)
    if moment.numel():
        _inverse_root[(cdiv(moment.numel(), _BLOCK),)](
            moment, out, moment.numel(), factor, floor, READS=isinstance(factor, Tensor), BLOCK=_BLOCK
        )
    return out
