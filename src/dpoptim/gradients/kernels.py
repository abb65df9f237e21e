"""The inner loops of clipping, each as a plain function; on a CUDA device with Triton a kernel of the same signature.

All take per-example gradients or their factors in any floating dtype and reduce them in float32 at least: a product
is formed once, and what a norm measures is what a sum adds, to the rounding of float32. No kernel uses atomics, so
results do not change from run to run.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from dpoptim.noise import gpu


@functools.cache
def _kernels() -> ModuleType | None:
    if not gpu.available("cuda"):
        return None
    from dpoptim.gradients import triton_kernels

    return triton_kernels


def on_gpu(*tensors: Tensor | None) -> ModuleType | None:
    """The kernels, where they run for all of these tensors; float64 stays with the plain functions."""
    given = [tensor for tensor in tensors if tensor is not None]
    if any(not tensor.is_cuda or tensor.dtype == torch.float64 for tensor in given):
        return None
    return _kernels()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of norms, sums and noise: float64 stays, everything else becomes fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.dtype))


def squares(grads: Tensor, scale: Tensor | None) -> Tensor:
    """‖scale ⊙ grads[j]‖² for each j, as float64 [examples]; `scale` has the shape of one gradient."""
    kernels = on_gpu(grads, scale)
    if kernels is not None:
        return kernels.squares(grads, scale)
    scaled = wide(grads) if scale is None else wide(grads) * scale
    return scaled.square().reshape(len(grads), -1).sum(1, dtype=torch.float64)


def weighted_sum(grads: Tensor, weights: Tensor) -> Tensor:
    """Σ_j weights[j]·grads[j], in the dtype of `weights`."""
    kernels = on_gpu(grads, weights)
    if kernels is not None:
        return kernels.weighted_sum(grads, weights)
    return torch.tensordot(weights, wide(grads).to(weights.dtype), dims=1)


def outer_squares(left: Tensor, right: Tensor, scale: Tensor | None) -> Tensor:
    """‖scale ⊙ Σ_t left[j, t] ⊗ right[j, t]‖² for each j, as float64 [examples]; the product is never stored."""
    kernels = on_gpu(left, right, scale)
    if kernels is not None:
        return kernels.outer_squares(left, right, scale)
    return squares(wide(left).mT @ wide(right), scale)


def outer_weighted_sum(left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    """Σ_j weights[j]·Σ_t left[j, t] ⊗ right[j, t], in the dtype of `weights`.

    On a GPU bfloat16 factors stay what they are, exactly: weights[j]·right is split into three bfloat16 numbers that
    sum to it, and one product, which reads `left` once, takes all three.
    """
    if left.is_cuda and left.dtype == right.dtype == torch.bfloat16:
        rest = wide(right) * weights.float()[:, None, None]
        parts = []
        for _ in range(3):
            parts.append(rest.to(right.dtype))
            rest = rest - parts[-1]
        columns = torch.cat(parts, 2).flatten(0, 1)
        products = torch.mm(_whole_rows(left).T, columns, out_dtype=torch.float32)[: left.shape[2]]
        first, second, third = products.split(right.shape[2], 1)
        return (first + second + third).to(weights.dtype)
    weighted = wide(left) * weights[:, None, None]
    return weighted.flatten(0, 1).T @ wide(right).flatten(0, 1)


def _whole_rows(values: Tensor) -> Tensor:
    """[examples·positions, ≥ width]: with what lies between the rows, where that makes their width an aligned one."""
    stride, rows = values.stride(1), values.shape[0] * values.shape[1]
    held = values.untyped_storage().nbytes() // values.element_size() - values.storage_offset()
    even = values.stride(2) == 1 and values.stride(0) == stride * values.shape[1]
    if even and stride % 8 == 0 and held >= rows * stride:
        return values.as_strided((rows, stride), (stride, 1))
    return values.flatten(0, 1)


def normalised_sums(grad: Tensor, inputs: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """(Σ_t grad·x̂, Σ_t grad) for each example, float32 [examples, width], with x̂ = (inputs - mean)·rstd.

    `grad` and `inputs` are [examples, positions, width], `mean` and `rstd` [examples, positions].
    """
    kernels = on_gpu(grad, inputs, mean, rstd)
    if kernels is not None:
        return kernels.normalised_sums(grad, inputs, mean, rstd)
    normalised = (wide(inputs) - mean[..., None]) * rstd[..., None]
    return (wide(grad) * normalised).sum(1), wide(grad).sum(1)


def row_squares(ids: Tensor, values: Tensor, scale: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor]:
    """Squared norms of the tables that receive values[j, t] at row ids[j, t], as float64 [examples].

    Values of equal ids of one example are summed before they are squared. The second result is a bound on the norms
    if nothing in those sums cancelled, √(positions·Σ_t ‖scale ⊙ values[j, t]‖²).
    """
    kernels = on_gpu(values, scale)
    if kernels is not None:
        return kernels.row_squares(ids, values, scale)
    examples = len(ids)
    slots = ids + num_rows * torch.arange(examples, device=ids.device)[:, None]
    distinct, where = torch.unique(slots, return_inverse=True)
    sums = wide(values).new_zeros(len(distinct), values.shape[-1])
    sums.index_add_(0, where.flatten(), wide(values).flatten(0, 1))
    if scale is not None:
        sums *= scale[distinct % num_rows]
    total = torch.zeros(examples, dtype=torch.float64, device=ids.device)
    each = wide(values) if scale is None else wide(values) * scale[ids]
    bound = (each.square().sum((1, 2), dtype=torch.float64) * ids.shape[1]).sqrt()
    return total.index_add_(0, distinct // num_rows, squares(sums, None)), bound


def row_weighted_sum(ids: Tensor, values: Tensor, weights: Tensor, num_rows: int) -> Tensor:
    """Σ_j weights[j]·(the table that receives values[j, t] at row ids[j, t]), in the dtype of `weights`."""
    weighted = (values * weights[:, None, None]).to(weights.dtype).flatten(0, 1)
    if values.is_cuda:
        return torch.ops.aten.embedding_dense_backward(weighted, ids.flatten(), num_rows, -1, False)
    return weighted.new_zeros(num_rows, values.shape[-1]).index_add_(0, ids.flatten(), weighted)


def position_sums(values: Tensor, weights: Tensor) -> Tensor:
    """Σ_t weights[j, t]·values[j, t] for each j, in float32 or float64."""
    kernels = on_gpu(values, weights)
    if kernels is not None:
        return kernels.position_sums(values, weights)
    return (wide(weights)[:, None] @ wide(values))[:, 0]


def outer_row_products(left: Tensor, right: Tensor, ids: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
    """⟨scale ⊙ D_j, scale ⊙ E_j⟩ for each j, float64: D_j = Σ_t left[j, t] ⊗ right[j, t] and E_j the table of values.

    D_j is looked at in the rows that `ids` name, and nowhere else.
    """
    columns = left.gather(2, ids[:, None, :].expand(-1, left.shape[1], -1))
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        there = torch.bmm(columns.mT, right, out_dtype=torch.float32)
    else:
        there = wide(columns).mT @ wide(right)
    if scale is not None:
        there = there * scale[ids].square()
    return (there * wide(values)).sum((1, 2), dtype=torch.float64)


def softmax_gradient_(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """-ln softmax of each row at its label, float32; `logits` [rows, ≥ classes] become its gradient, softmax - one-hot.

    Columns from `classes` on are padding and become 0. A negative label has loss and gradient 0.
    """
    kernels = on_gpu(logits)
    if kernels is not None:
        return kernels.softmax_gradient_(logits, labels, classes)
    log_probs = wide(logits[:, :classes]).log_softmax(1)
    valid = labels >= 0
    picked = labels.clamp(min=0)[:, None]
    losses = -log_probs.gather(1, picked)[:, 0]
    gradient = log_probs.exp()
    gradient.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=gradient.dtype))
    logits[:, :classes] = gradient * valid[:, None]
    logits[:, classes:] = 0
    return torch.where(valid, losses, 0.0)
