"""Triton kernels for many tensors in one launch; `norms` has the plain functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpoptim.kernels.tables_triton import DTYPES, parts_of, table_of

_SPAN = 1 << 15  # elements of one gradient that a program squares
_BLOCK = 256  # elements that a program sums over examples


def _whole(grads: Tensor) -> Tensor:
    """Return the gradients with each example contiguous; there may be gaps between examples."""
    if grads.is_contiguous() or (len(grads) and grads.stride(0) > 0 and grads[0].is_contiguous()):
        return grads
    return grads.contiguous()


def _as_float32(scale: Tensor) -> Tensor:
    return scale if scale.dtype == torch.float32 and scale.is_contiguous() else scale.float().contiguous()


class _Launch(NamedTuple):
    """The tensors of one launch have one dtype and one alignment, so that `step` elements can be loaded at once."""

    dtype: torch.dtype
    step: int
    parts: Tensor


def _launches(grads: Sequence[Tensor], others: Sequence[Tensor], span: int) -> tuple[Tensor, list[_Launch]]:
    """Group pairs (gradients, scale or sum) by launch: one table of all addresses [2, pairs], and the parts per launch.

    Tensors without elements are left out. Loads take 16 bytes if all tensors of a launch are aligned to that. The host
    does this at every step, so it reads as few attributes of each tensor as possible.
    """
    examples, device = grads[0].shape[0], grads[0].device
    kinds: dict[tuple[torch.dtype, int], list[tuple[int, int, tuple[int, int]]]] = {}
    for grad, other in zip(grads, others, strict=True):
        numel = grad.numel()
        if not numel:
            continue
        per_example, stride, addresses = numel // examples, grad.stride(0), (grad.data_ptr(), other.data_ptr())
        step = 16 // grad.element_size()
        if (per_example | stride) % step or (addresses[0] | addresses[1]) % 16:
            step = 1
        kinds.setdefault((grad.dtype, step), []).append((*addresses, (per_example, stride)))
    launches: list[_Launch] = []
    pairs: list[tuple[int, int, tuple[int, int]]] = []
    for (dtype, step), members in kinds.items():
        sizes = tuple(size for *_, size in members)
        launches.append(_Launch(dtype, step, parts_of(sizes, span, device, first=len(pairs))))
        pairs += members
    if not pairs:
        return torch.empty(2, 0, dtype=torch.int64, device=device), []
    first, second, _ = zip(*pairs, strict=True)
    return table_of((first, second), torch.int64, device), launches


@triton.jit(do_not_specialize=["tensors", "columns", "column"])
def _squares(addresses, parts, out, tensors, columns, column, DTYPE: tl.constexpr, SCALED: tl.constexpr,
             STEP: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    example, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tensor, first = tl.load(parts + 4 * program), tl.load(parts + 4 * program + 1)
    numel, stride = tl.load(parts + 4 * program + 2), tl.load(parts + 4 * program + 3)
    grad = tl.load(addresses + tensor).to(tl.pointer_type(DTYPE))
    scale = tl.load(addresses + tensors + tensor).to(tl.pointer_type(tl.float32))
    if STEP > 1:
        grad, scale = tl.multiple_of(grad, 16), tl.multiple_of(scale, 16)
        first, numel, stride = tl.multiple_of(first, BLOCK), tl.multiple_of(numel, STEP), tl.multiple_of(stride, STEP)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, min(SPAN, numel - first), BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        inside = at < numel
        value = tl.load(grad + example * stride + at, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            value = value * tl.load(scale + at, mask=inside, other=0.0)
        total += value * value
    tl.store(out + example * columns + column + program, tl.sum(total, 0))


@triton.jit(do_not_specialize=["examples", "tensors", "add"])
def _weighted_sums(addresses, parts, weights, examples, tensors, add, DTYPE: tl.constexpr, SQUARED: tl.constexpr,
                   STEP: tl.constexpr, EXAMPLES: tl.constexpr, BLOCK: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    tensor, first = tl.load(parts + 4 * program), tl.load(parts + 4 * program + 1)
    numel, stride = tl.load(parts + 4 * program + 2), tl.load(parts + 4 * program + 3)
    grads = tl.load(addresses + tensor).to(tl.pointer_type(DTYPE))
    into = tl.load(addresses + tensors + tensor).to(tl.pointer_type(tl.float32))
    if STEP > 1:
        grads, into = tl.multiple_of(grads, 16), tl.multiple_of(into, 16)
        first, numel, stride = tl.multiple_of(first, BLOCK), tl.multiple_of(numel, STEP), tl.multiple_of(stride, STEP)
    at = first + tl.arange(0, BLOCK)
    inside = at < numel
    total = tl.zeros([EXAMPLES, BLOCK], tl.float32)
    for start in tl.range(0, examples, EXAMPLES, num_stages=STAGES):  # loads run ahead of the sums
        example = start + tl.arange(0, EXAMPLES)
        there = (example < examples)[:, None] & inside[None, :]
        weight = tl.load(weights + example, mask=example < examples, other=0.0)[:, None]
        value = tl.load(grads + example.to(tl.int64)[:, None] * stride + at[None, :], mask=there, other=0.0)
        share = tl.where(weight != 0, weight * value.to(tl.float32), 0.0)  # even if the value is NaN
        total += share * share if SQUARED else share
    found = tl.sum(total, 0)
    if add:
        found += tl.load(into + at, mask=inside, other=0.0)
    tl.store(into + at, found, mask=inside)


def many_squares(grads: Sequence[Tensor], scales: Sequence[Tensor] | None) -> Tensor:
    grads = [_whole(grad) for grad in grads]
    examples, device = grads[0].shape[0], grads[0].device
    given = grads if scales is None else [_as_float32(scale) for scale in scales]
    addresses, launches = _launches(grads, given, _SPAN)
    columns, column = sum(len(launch.parts) for launch in launches), 0
    out = torch.empty(examples, columns, dtype=torch.float32, device=device)
    for dtype, step, parts in launches:
        _squares[(examples, len(parts))](
            addresses, parts, out, addresses.shape[1], columns, column, DTYPE=DTYPES[dtype], SCALED=scales is not None,
            STEP=step, SPAN=_SPAN, BLOCK=1024,
        )  # fmt: skip
        column += len(parts)
    return out.sum(1, dtype=torch.float64)


def many_weighted_sums(
    grads: Sequence[Tensor], weights: Tensor, into: Sequence[Tensor], *, add: bool, squared: bool
) -> None:
    grads, weights = [_whole(grad) for grad in grads], weights.float().contiguous()
    if not len(weights) and not add:
        torch._foreach_zero_(list(into))
    addresses, launches = _launches(grads, into, _BLOCK)
    for dtype, step, parts in launches:
        _weighted_sums[(len(parts),)](
            addresses, parts, weights, len(weights), addresses.shape[1], int(add), DTYPE=DTYPES[dtype], SQUARED=squared,
            STEP=step, EXAMPLES=32, BLOCK=_BLOCK, STAGES=3,
        )  # fmt: skip
