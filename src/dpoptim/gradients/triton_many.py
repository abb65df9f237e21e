"""Triton kernels that take many tensors in one launch; `kernels` says what each computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpoptim.noise.triton_tables import DTYPES, addresses_of, parts_of

_SPAN = 1 << 15  # elements of one gradient that a program squares
_BLOCK = 1024  # elements that a program sums over examples


def _whole(grads: Tensor) -> Tensor:
    """With each example's elements side by side; the examples may lie further apart."""
    if grads.is_contiguous() or (len(grads) and grads.stride(0) > 0 and grads[0].is_contiguous()):
        return grads
    return grads.contiguous()


def _size(grads: Tensor) -> tuple[int, int]:
    return grads.numel() // len(grads), grads.stride(0)


def _step(*tensors: Tensor) -> int:
    """How many elements may be loaded at once: 16 bytes where everything begins at a multiple of that."""
    step = 16 // tensors[0].element_size()
    numel, stride = _size(tensors[0])
    return 1 if numel % step or stride % step or any(tensor.data_ptr() % 16 for tensor in tensors) else step


@triton.jit
def _squares(addresses, parts, out, tensors, DTYPE: tl.constexpr, SCALED: tl.constexpr, STEP: tl.constexpr,
             SPAN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
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
    tl.store(out + example * tl.num_programs(1) + program, tl.sum(total, 0))


@triton.jit
def _weighted_sums(addresses, parts, weights, examples, tensors, DTYPE: tl.constexpr, ADD: tl.constexpr,
                   STEP: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    program, share = tl.program_id(0), tl.program_id(1)
    tensor, first = tl.load(parts + 4 * program), tl.load(parts + 4 * program + 1)
    numel, stride = tl.load(parts + 4 * program + 2), tl.load(parts + 4 * program + 3)
    grads = tl.load(addresses + tensor).to(tl.pointer_type(DTYPE))
    into = tl.load(addresses + tensors + tensor).to(tl.pointer_type(tl.float32))
    if STEP > 1:
        grads, into = tl.multiple_of(grads, 16), tl.multiple_of(into, 16)
        first, numel, stride = tl.multiple_of(first, BLOCK), tl.multiple_of(numel, STEP), tl.multiple_of(stride, STEP)
    at = first + tl.arange(0, BLOCK)
    inside = at < numel
    total = tl.zeros([BLOCK], tl.float32)
    for example in range(share * SHARE, min((share + 1) * SHARE, examples)):
        weight = tl.load(weights + example)
        value = tl.load(grads + example.to(tl.int64) * stride + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(weight != 0, weight * value, 0.0)
    into += share.to(tl.int64) * numel
    if ADD:
        total += tl.load(into + at, mask=inside, other=0.0)
    tl.store(into + at, total, mask=inside)


def many_squares(grads: Sequence[Tensor], scales: Sequence[Tensor] | None) -> Tensor:
    grads = [_whole(grad) for grad in grads]
    examples, device = len(grads[0]), grads[0].device
    given = grads if scales is None else [scale.float().contiguous() for scale in scales]
    total = torch.zeros(examples, dtype=torch.float64, device=device)
    for pairs, step in _kinds(zip(grads, given, strict=True)):
        parts = parts_of(tuple(_size(grad) for grad, _ in pairs), _SPAN, device)
        out = torch.empty(examples, len(parts), dtype=torch.float32, device=device)
        _squares[(examples, len(parts))](
            addresses_of(*zip(*pairs, strict=True)), parts, out, len(pairs), DTYPE=DTYPES[pairs[0][0].dtype],
            SCALED=scales is not None, STEP=step, SPAN=_SPAN, BLOCK=1024,
        )  # fmt: skip
        total = total + out.sum(1, dtype=torch.float64)
    return total


def many_weighted_sums(grads: Sequence[Tensor], weights: Tensor, into: Sequence[Tensor], *, add: bool) -> None:
    grads, weights = [_whole(grad) for grad in grads], weights.float().contiguous()
    examples, device = len(grads[0]), grads[0].device
    for pairs, step in _kinds(zip(grads, into, strict=True)):
        parts = parts_of(tuple(_size(grad) for grad, _ in pairs), _BLOCK, device)
        shares = min(triton.cdiv(4096, len(parts)), triton.cdiv(examples, 16))
        share = triton.next_power_of_2(triton.cdiv(examples, shares))
        shares = triton.cdiv(examples, share)
        sources, targets = (list(column) for column in zip(*pairs, strict=True))
        partial = targets
        if shares > 1:
            partial = [target.new_empty(shares, target.numel()) for target in targets]
        _weighted_sums[(len(parts), shares)](
            addresses_of(sources, partial), parts, weights, examples, len(pairs), DTYPE=DTYPES[sources[0].dtype],
            ADD=add and shares == 1, STEP=step, SHARE=share, BLOCK=_BLOCK,
        )  # fmt: skip
        if shares > 1:
            many_weighted_sums(partial, torch.ones(shares, device=device), targets, add=add)


def _kinds(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[list[tuple[Tensor, Tensor]], int]]:
    """The pairs that one launch can take: of one dtype and one alignment, with something in them."""
    found: dict[tuple[torch.dtype, int], list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        if pair[0].numel():
            found.setdefault((pair[0].dtype, _step(*pair)), []).append(pair)
    return [(chosen, step) for (_, step), chosen in found.items()]
