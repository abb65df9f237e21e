"""Triton kernel for clip weights; launching the operations of the plain function takes 2 % of a small step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpoptim.kernels.tables_triton import table_of

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit(do_not_specialize=["examples", "factor"])
def _clip_weights(squared, min_trusted, limits, norms, weights, needs_recompute, counts, examples, factor,
                  HAS_MIN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program takes all examples, block by block, so that it can count them."""
    limit, times = tl.load(limits), factor.to(tl.float64)
    clipped, left_out, doubtful = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for start in range(0, examples, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < examples
        norm = tl.sqrt(tl.load(squared + at, mask=inside, other=0.0))
        weight = limit / norm  # NaN where the norm is: every comparison is then false
        is_kept = weight >= _TINY
        is_doubtful = inside & (norm < 0)  # none is
        if HAS_MIN:
            is_trusted = tl.load(min_trusted + at, mask=inside, other=0.0) <= norm
            is_doubtful = inside & is_kept & (is_trusted == 0)
        weight = tl.where(is_kept & (is_doubtful == 0), tl.where(weight > 1.0, 1.0, weight), 0.0)
        tl.store(norms + at, (norm * times).to(norms.dtype.element_ty), mask=inside)
        tl.store(weights + at, (weight * times).to(weights.dtype.element_ty), mask=inside)
        tl.store(needs_recompute + at, is_doubtful, mask=inside)
        clipped += (inside & (norm > limit)).to(tl.int64)
        left_out += (inside & (is_kept == 0)).to(tl.int64)
        doubtful += is_doubtful.to(tl.int64)
    tl.store(counts, tl.sum(clipped, 0))
    tl.store(counts + 1, tl.sum(left_out, 0))
    tl.store(counts + 2, tl.sum(doubtful, 0))


def clip_weights(
    squared: Tensor, min_trusted_norm: Tensor | None, limit: float, factor: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    squared = squared.contiguous()
    norms, weights = torch.empty_like(squared, dtype=dtype), torch.empty_like(squared, dtype=dtype)
    needs_recompute = torch.empty_like(squared, dtype=torch.bool)
    counts = torch.empty(3, dtype=torch.int64, device=squared.device)
    limits = table_of((limit,), torch.float64, squared.device)  # as an argument it would become float32
    bound = squared if min_trusted_norm is None else min_trusted_norm.contiguous()
    _clip_weights[(1,)](
        squared, bound, limits, norms, weights, needs_recompute, counts, len(squared), factor,
        HAS_MIN=min_trusted_norm is not None, BLOCK=1024,
    )  # fmt: skip
    return norms, weights, needs_recompute, counts
