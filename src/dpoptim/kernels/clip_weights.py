"""Small arithmetic of norms and weights.

On a CUDA device with Triton one kernel replaces the many small operations, which take longer to launch than to run.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dpoptim.kernels import norms as kernels
from dpoptim.kernels.norms import wide_dtype


class ClipResult(NamedTuple):
    """What each example of a physical batch counts for."""

    norms: Tensor  # ‖scale ⊙ g_j‖·factor, [examples]
    weights: Tensor  # c_j·factor; 0 for those that add nothing, and for those apart
    apart: Tensor  # bool: norms that cannot be trusted, of examples that must be looked at by themselves
    counts: Tensor  # int64 [3]: how many exceed the clip norm, add nothing, are apart


def weighed(squared: Tensor, least: Tensor | None, *, clip_norm: float, factor: int, dtype: torch.dtype) -> ClipResult:
    """Norms and weights of examples with squared norms `squared`, float64 [examples], where a loss that was divided by
    `factor` is multiplied by it again: c_j = min(1, clip_norm/norm), and 1 where the norm is 0.

    A weight of 0 leaves an example out: where the norm is not finite or so large that float32 has no such weight in
    full precision, as rounded it could be twice as much. Apart are those others whose norm is not at least
    `least`·factor, which may be NaN.
    """
    on_gpu = kernels.wide_on_gpu(squared, least)
    if on_gpu is not None:
        return ClipResult(*on_gpu.weighed(squared, least, clip_norm, factor, dtype))
    norms = squared.sqrt() * factor
    weights = (clip_norm / norms).clamp(max=1.0)
    weights = torch.where(weights >= torch.finfo(torch.float32).tiny, weights, 0.0) * factor
    if least is None:
        apart = torch.zeros_like(weights, dtype=torch.bool)
    else:
        apart = (weights > 0) & ~(least * factor <= norms)
        weights = weights.masked_fill(apart, 0.0)
    counts = torch.stack([norms > clip_norm, (weights == 0) & ~apart, apart]).sum(1)
    return ClipResult(norms.to(dtype), weights.to(dtype), apart, counts)


def sum_of_parts(
    d_squared: Tensor, e_squared: Tensor, cross: Tensor, d_parts: Tensor, e_parts: Tensor, *, trust: float,
    is_gram: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """‖D + E‖² and the least norm that can be trusted, float64 [examples], of ‖D‖², ‖E‖² and `cross` = ⟨D, E⟩.

    `d_parts` and `e_parts` are what ‖D‖ and ‖E‖ could be at the most if nothing in them cancelled, `trust` is how many
    times its parts may exceed a whole before their rounding shows. What the three are off by is linear in their own
    parts, unless ‖D‖² was added up of squares (`is_gram`); but where D and E cancel it shows in full. Where parts of D
    cancel, its rounding shows beside E; a fifth of their bound is bound enough.
    """
    on_gpu = kernels.wide_on_gpu(d_squared, e_squared, cross, d_parts, e_parts)
    if on_gpu is not None:
        found: tuple[Tensor, Tensor] = on_gpu.sum_of_parts(
            d_squared, e_squared, cross, d_parts, e_parts, trust, is_gram
        )
        return found
    d, e, parts = d_squared.sqrt(), e_squared.sqrt(), d_parts + e_parts
    summands = d_squared + e_squared + parts * (parts / 10 if is_gram else (d + e) / 50)
    least = (d + e_parts + d_parts / 5) / trust + (summands / trust).sqrt()
    squares = (d_squared + 2 * cross + e_squared).clamp(min=0)
    return torch.where(cross.isfinite(), squares, torch.nan), least  # cross may be -inf where the others are finite


def length_products(
    left: Tensor, right: Tensor, *, left_lengths: Tensor | None = None, factor: Tensor | None = None
) -> Tensor:
    """Σ_t ‖left[j, t]‖·‖right[j, t]‖·factor for each j, float64; `left_lengths` are the first norms, if known."""
    if left_lengths is not None:
        on_gpu = kernels.on_gpu(left_lengths, right, factor)
        if on_gpu is not None:
            found: Tensor = on_gpu.length_products(left_lengths, right, factor)
            return found
    known = row_lengths(left) if left_lengths is None else left_lengths.double()
    total = (known * row_lengths(right)).sum(1)
    return total if factor is None else total * factor.double()


def row_lengths(vectors: Tensor) -> Tensor:
    """Norms along the last axis, float64; never 0 for a vector that is not, though its squares underflow."""
    dtype = wide_dtype(vectors.dtype)
    largest = torch.linalg.vector_norm(vectors, ord=math.inf, dim=-1, dtype=dtype)
    return torch.maximum(torch.linalg.vector_norm(vectors, dim=-1, dtype=dtype), largest).double()
