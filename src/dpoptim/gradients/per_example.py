"""Arithmetic of one number an example: from squares to norms, from norms to weights.

Each is a plain function; on a CUDA device with Triton one kernel of the same signature takes the place of its many
small operations, whose launches would take longer than they do.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dpoptim.gradients import kernels
from dpoptim.gradients.kernels import wide_dtype


class Weighed(NamedTuple):
    """What each example of a physical batch counts for."""

    norms: Tensor  # ‖scale ⊙ g_j‖, [examples]
    weights: Tensor  # c_j; 0 for those that add nothing, and for those apart
    apart: Tensor  # bool: norms that cannot be trusted, of examples that must be looked at by themselves
    counts: Tensor  # int64 [3]: how many exceed the clip norm, add nothing, are apart


def weighed(squared: Tensor, least: Tensor | None, *, clip_norm: float, factor: int, dtype: torch.dtype) -> Weighed:
    """Weights min(1, clip_norm/norm)·factor of examples with squared norms `squared`/factor², float64 [examples]; a
    norm of 0 gives `factor`.

    0, which leaves an example out, where the norm is not finite or so large that float32 has no such weight in full
    precision: rounded, it could be twice as much. Apart are those whose norm is not at least `least`·factor, which may
    be NaN.
    """
    on_gpu = kernels.wide_on_gpu(squared, least)
    if on_gpu is not None:
        return Weighed(*on_gpu.weighed(squared, least, clip_norm, factor, dtype))
    norms = squared.sqrt() * factor
    weights = (clip_norm / norms).clamp(max=1.0)
    weights = torch.where(weights >= torch.finfo(torch.float32).tiny, weights, 0.0) * factor
    if least is None:
        apart = torch.zeros_like(weights, dtype=torch.bool)
    else:
        apart = (weights > 0) & ~(least * factor <= norms)
        weights = weights.masked_fill(apart, 0.0)
    counts = torch.stack([norms > clip_norm, (weights == 0) & ~apart, apart]).sum(1)
    return Weighed(norms.to(dtype), weights.to(dtype), apart, counts)


def sum_of_parts(
    projected: Tensor, looked_up: Tensor, cross: Tensor, unprojected: Tensor, bound: Tensor, *, trust: float,
    is_gram: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """‖D + E‖² = ‖D‖² + 2⟨D, E⟩ + ‖E‖² and the least norm that can be trusted, float64 [examples].

    Given are these three summands, by how much the parts of D and of E may exceed them (`unprojected`, `bound`), and by
    how much a whole may exceed its rounding. What the three are off by is linear in their own parts, unless D's was
    added up of squares (`is_gram`); but where D and E cancel it shows in full. Where parts of D cancel, its rounding
    shows beside E; a fifth of their bound is bound enough.
    """
    on_gpu = kernels.wide_on_gpu(projected, looked_up, cross, unprojected, bound)
    if on_gpu is not None:
        found: tuple[Tensor, Tensor] = on_gpu.sum_of_parts(
            projected, looked_up, cross, unprojected, bound, trust, is_gram
        )
        return found
    d, e, uncancelled = projected.sqrt(), looked_up.sqrt(), unprojected + bound
    summands = projected + looked_up + uncancelled * (uncancelled / 10 if is_gram else (d + e) / 50)
    least = (d + bound + unprojected / 5) / trust + (summands / trust).sqrt()
    squares = (projected + 2 * cross + looked_up).clamp(min=0)
    return torch.where(cross.isfinite(), squares, torch.nan), least  # cross may be -inf where the others are finite


def length_products(left: Tensor, right: Tensor, *, left_lengths: Tensor | None, factor: Tensor | None) -> Tensor:
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
