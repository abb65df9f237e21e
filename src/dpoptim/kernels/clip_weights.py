"""From norms to clip weights: one number per example, without waiting for the device, as CUDA graphs need."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class ClipResult(NamedTuple):
    """The clip weight of each example of a physical batch."""

    norms: Tensor  # ‖scale ⊙ g_j‖·factor, [examples]
    weights: Tensor  # c_j·factor; 0 for examples that add nothing or need recomputing
    needs_recompute: Tensor  # bool: the norm cannot be trusted, so the example is clipped by itself
    counts: Tensor  # int64 [3]: how many exceed the clip norm, add nothing, need recomputing


def clip_weights(
    squared: Tensor,
    min_trusted_norm: Tensor | None,
    *,
    clip_norm: float | Tensor,
    factor: float | Tensor,
    dtype: torch.dtype,
    stability: float | None = None,
) -> ClipResult:
    """Turn squared norms, float64 [examples], into clip weights c_j = min(1, clip_norm / norm); c_j = 1 for norm 0.

    With a `stability`, c_j = clip_norm / (norm + stability) instead. `factor`, a number or one per example, undoes a
    loss that was divided by it. An example gets weight 0 if its norm is not finite, or so large that float32 has no
    such weight at full precision (rounding could double it). Weights fall to 0 between norms of 1e17 and 1e18, whose
    squares soon overflow float32: neither the method nor rounding may decide whether an example counts. The norm of an
    example cannot be trusted if it is below `min_trusted_norm`·factor, or if that bound is NaN.
    """
    norms, limit = squared.sqrt(), clip_norm / factor  # both of the divided loss
    weights = (limit / norms).clamp_(max=1.0) if stability is None else clip_norm / (norms * factor + stability)
    weights = weights.clamp_(max=1e30) * ((1e18 - norms) / 9e17).clamp_(0.0, 1.0)
    is_kept = is_summed = weights >= torch.finfo(torch.float32).tiny  # false for NaN
    if min_trusted_norm is None:
        needs_recompute = torch.zeros_like(is_kept)
    else:
        is_summed = is_kept & (min_trusted_norm <= norms)
        needs_recompute = is_kept ^ is_summed
    weights = torch.where(is_summed, weights, 0.0)
    counts = torch.stack([norms > limit, ~is_kept, needs_recompute]).sum(1)
    if isinstance(factor, Tensor) or factor != 1:
        norms, weights = norms * factor, weights * factor
    return ClipResult(norms.to(dtype), weights.to(dtype), needs_recompute, counts)


def clipped_part(ratios: Tensor) -> Tensor:
    """Count, from 0 to 1, how far norms over their clip norm are clipped, float64; 0 for NaN.

    It rises from 0 at 0.95 to 1 at 1.05, so that rounding cannot change the count of many equal examples.

    >>> clipped_part(torch.tensor([0.0, 0.95, 1.0, 1.2, math.inf, math.nan])).round(decimals=6).tolist()
    [0.0, 0.0, 0.5, 1.0, 1.0, 0.0]
    """
    return ((ratios.double() - 1.0) * 10.0 + 0.5).clamp_(0.0, 1.0).nan_to_num_(0.0)


def sum_of_parts(
    d_squared: Tensor, e_squared: Tensor, cross: Tensor, d_parts: Tensor, e_parts: Tensor, *, trust: float,
    is_gram: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ‖D + E‖² and the smallest norm that can be trusted, float64 [examples].

    Args:
        d_squared: ‖D‖².
        e_squared: ‖E‖².
        cross: ⟨D, E⟩.
        d_parts: A bound on ‖D‖ that holds even if nothing in D cancels.
        e_parts: The same for E.
        trust: How many times larger than the whole its parts may be before their rounding shows.
        is_gram: Whether ‖D‖² is a sum of squares; otherwise its rounding error is linear in its parts.

    Where D and E cancel, rounding shows in full. Where parts of D cancel, its rounding shows beside E; a fifth of
    their bound is enough there.
    """
    # In few operations, because each takes the host time at every step:
    #   trusted = (d + e_parts + d_parts/5)/trust + √((d² + e² + parts·(parts/10 or (d + e)/50))/trust)
    d, squares = d_squared.sqrt(), d_squared + e_squared
    parts = d_parts + e_parts
    other, share = (parts, 1 / 10) if is_gram else (d + e_squared.sqrt(), 1 / 50)
    summands = torch.addcmul(squares, parts, other, value=share)
    uncancelled = (d + e_parts).add_(d_parts, alpha=1 / 5)
    min_trusted_norm = summands.div_(trust).sqrt_().add_(uncancelled, alpha=1 / trust)
    squares = squares.add_(cross, alpha=2).clamp_(min=0)
    # Where `cross` is -inf, clamping would hide that the sum is not a number; 0·inf is NaN.
    return squares.add_(cross, alpha=0), min_trusted_norm


def length_products(
    left: Tensor, right: Tensor, *, left_lengths: Tensor | None = None, factor: Tensor | None = None
) -> Tensor:
    """Σ_t ‖left[j, t]‖·‖right[j, t]‖·factor for each j, float64; `left_lengths` are the first norms, if known."""
    total = ((row_lengths(left) if left_lengths is None else left_lengths) * row_lengths(right)).sum(1)
    return total if factor is None else total * factor


def row_lengths(vectors: Tensor) -> Tensor:
    """Norms along the last axis, float64; positive for every nonzero vector, even if its squares underflow."""
    lengths = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)
    if vectors.dtype != torch.float64:
        return lengths  # squares of narrower numbers do not underflow in float64
    return torch.maximum(lengths, torch.linalg.vector_norm(vectors, ord=math.inf, dim=-1))
