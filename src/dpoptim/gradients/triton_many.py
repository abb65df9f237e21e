"""Triton kernels that take many tensors in one launch; `kernels` says what each computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpoptim.noise.triton_tables import DTYPES, addresses_of, parts_of

_SPAN = 1 << 15  # elements of one gradient that a program squares
_BLOCK = 256  # elements that a program sums over examples


def _whole(grads: Tensor) -> Tensor:
    """With each example's elements side by side; the examples may lie further apart."""
    if grads.is_contiguous() or (len(grads) and grads.stride(0) > 0 and grads[0].is_contiguous()):
        return grads
    return grads.contiguous()


class _Launch:
    """Pairs (gradients, scale or sum) that one launch takes: of one dtype and one alignment."""

    def __init__(self, dtype: torch.dtype, step: int) -> None:
        self.dtype, self.step = dtype, step  # `step` elements are loaded at once
        self.grads: list[Tensor] = []
        self.others: list[Tensor] = []
        self.sizes: list[tuple[int, int]] = []  # elements of an example, and the stride of examples

    @property
    def addresses(self) -> Tensor:
        return addresses_of(self.grads, self.others)

    def parts(self, span: int) -> Tensor:
        return parts_of(tuple(self.sizes), span, self.grads[0].device)


def _launches(grads: Sequence[Tensor], others: Sequence[Tensor]) -> Iterable[_Launch]:
    """Tensors without elements are left out; loads are of 16 bytes where all begins at a multiple of that."""
    found: dict[tuple[torch.dtype, int], _Launch] = {}
    for grad, other in zip(grads, others, strict=True):
        if not grad.numel():
            continue
        size = (grad.numel() // grad.shape[0], grad.stride(0))
        step = 16 // grad.element_size()
        if size[0] % step or size[1] % step or grad.data_ptr() % 16 or other.data_ptr() % 16:
            step = 1
        launch = found.get((grad.dtype, step))
        if launch is None:
            launch = found[grad.dtype, step] = _Launch(grad.dtype, step)
        launch.grads.append(grad)
        launch.others.append(other)
        launch.sizes.append(size)
    return found.values()


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
                   SQUARED: tl.constexpr, STEP: tl.constexpr, EXAMPLES: tl.constexpr, BLOCK: tl.constexpr,
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
        share = tl.where(weight != 0, weight * value.to(tl.float32), 0.0)  # whatever it holds
        total += share * share if SQUARED else share
    found = tl.sum(total, 0)
    if ADD:
        found += tl.load(into + at, mask=inside, other=0.0)
    tl.store(into + at, found, mask=inside)


def many_squares(grads: Sequence[Tensor], scales: Sequence[Tensor] | None) -> Tensor:
    grads = [_whole(grad) for grad in grads]
    examples, device = grads[0].shape[0], grads[0].device
    given = grads if scales is None else [scale.float().contiguous() for scale in scales]
    total = torch.zeros(examples, dtype=torch.float64, device=device)
    for launch in _launches(grads, given):
        parts = launch.parts(_SPAN)
        out = torch.empty(examples, parts.shape[0], dtype=torch.float32, device=device)
        _squares[(examples, parts.shape[0])](
            launch.addresses, parts, out, len(launch.grads), DTYPE=DTYPES[launch.dtype],
            SCALED=scales is not None, STEP=launch.step, SPAN=_SPAN, BLOCK=1024,
        )  # fmt: skip
        total = total + out.sum(1, dtype=torch.float64)
    return total


def many_weighted_sums(
    grads: Sequence[Tensor], weights: Tensor, into: Sequence[Tensor], *, add: bool, squared: bool
) -> None:
    grads, weights = [_whole(grad) for grad in grads], weights.float().contiguous()
    if not len(weights) and not add:
        torch._foreach_zero_(list(into))
    for launch in _launches(grads, into):
        parts = launch.parts(_BLOCK)
        _weighted_sums[(parts.shape[0],)](
            launch.addresses, parts, weights, len(weights), len(launch.grads), DTYPE=DTYPES[launch.dtype], ADD=add,
            SQUARED=squared, STEP=launch.step, EXAMPLES=32, BLOCK=_BLOCK, STAGES=3,
        )  # fmt: skip
