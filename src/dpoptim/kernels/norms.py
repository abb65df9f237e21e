"""The inner loops of clipping as plain functions. On a CUDA device with Triton they call a kernel of the same name.

All take per-example gradients or their factors in any floating dtype and reduce them in at least float32. A product is
formed once, so a norm and a sum see the same numbers, up to the rounding of float32. In weighted sums an example of
weight 0 adds nothing, even if it is not finite. No kernel uses atomics, so results are the same in every run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dpoptim import kernels
from dpoptim.kernels import norms_c, rows_c
from dpoptim.kernels.choose import has_wide_products, on_gpu, outer_on_gpu

BLOCK_ELEMENTS = 1 << 24  # elements of per-example gradients materialised at once (64 MiB in fp32)
FAINT_WEIGHT = 1e-12  # below this, a gradient is so long that its factors may approach the limits of float32
DOT_ELEMENTS = 1 << 16  # products that are summed in float32 before the sum continues in float64
# On a GPU, products of positions with each other are used if they take this many times fewer operations.
GRAM_COST, UNALIGNED_GRAM_COST = 3, 12
NORM_ELEMENTS = 1 << 12  # the same for a norm that is summed in a single register


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of norms, sums and noise: float64 stays, everything else becomes fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.dtype))


@contextlib.contextmanager
def full_precision(device: str) -> Iterator[None]:
    """Turn off autocast and reduced matmul precision, which the loop may have set for its forward."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def squares(grads: Tensor, scale: Tensor | None) -> Tensor:
    """‖scale ⊙ grads[j]‖² for each j, as float64 [examples]; `scale` has the shape of one gradient."""
    return many_squares([grads], None if scale is None else [scale])


def many_squares(grads: Sequence[Tensor], scales: Sequence[Tensor] | None) -> Tensor:
    """Σ_i ‖scales[i] ⊙ grads[i][j]‖² for each j, as float64 [examples]."""
    given: Sequence[Tensor | None] = [None] * len(grads) if scales is None else scales
    if on_gpu(*grads, *given):
        return kernels.many_triton.many_squares(grads, scales)
    found = norms_c.many_squares(grads, scales)
    if found is not None:
        return found
    total = torch.zeros(len(grads[0]), dtype=torch.float64, device=grads[0].device)
    for grad, scale in reversed(list(zip(grads, given, strict=True))):  # the last ones may still be in a cache
        scaled = wide(grad) if scale is None else wide(grad) * scale
        total += self_products(scaled.reshape(len(grad), grad.shape[1:].numel()))
    return total


def self_products(vectors: Tensor) -> Tensor:
    """⟨v, v⟩ for each row v, float64, in one pass over memory."""
    total = torch.zeros(len(vectors), dtype=torch.float64, device=vectors.device)
    if vectors.device.type == "cpu" and torch.backends.mkl.is_available():
        # MKL's products of single rows and columns are many times slower than norms.
        whole = vectors.shape[1] // NORM_ELEMENTS * NORM_ELEMENTS
        for part in (vectors[:, :whole].unflatten(1, (-1, NORM_ELEMENTS)), vectors[:, None, whole:]):
            if part.numel():
                total += torch.linalg.vector_norm(part, dim=2).double().square_().sum(1)
        return total
    for part in vectors.split(DOT_ELEMENTS, 1):
        total += torch.bmm(part[:, None], part[:, :, None]).view(-1)
    return total


def many_weighted_sums(
    grads: Sequence[Tensor], weights: Tensor, into: Sequence[Tensor], *, add: bool, squared: bool = False
) -> None:
    """Write or add Σ_j weights[j]·grads[i][j], if squared Σ_j (weights[j]·grads[i][j])², to the contiguous into[i]."""
    if on_gpu(*grads, weights):
        kernels.many_triton.many_weighted_sums(grads, weights, into, add=add, squared=squared)
        return
    keep = weights != 0
    if not bool(keep.all()):
        grads, weights = [grad[keep] for grad in grads], weights[keep]
    for grad, total in zip(grads, into, strict=True):
        flat = total.view(-1)
        by_example = grad.reshape(len(grad), total.numel())
        if not squared:
            torch.addmv(flat, wide(by_example).to(weights.dtype).T, weights, beta=float(add), out=flat)
            continue
        columns = max(1, BLOCK_ELEMENTS // max(1, len(grad)))
        for part, of_part in zip(by_example.split(columns, 1), flat.split(columns), strict=True):
            # Weighted before they are squared: g² may overflow where (c·g)² does not.
            found = (wide(part).to(weights.dtype) * weights[:, None]).square_().sum(0)
            of_part.copy_(of_part + found if add else found)


def outer_squares(left: Tensor, right: Tensor, scale: Tensor | None) -> Tensor:
    """‖scale ⊙ Σ_t left[j, t] ⊗ right[j, t]‖² for each j, as float64 [examples]; the product is never stored.

    For 16-bit factors on a GPU, the scale is rounded up to bfloat16: norms may be up to 0.8 % too large, not too small.
    """
    if outer_on_gpu(left, right, scale):
        return kernels.outer_triton.outer_squares(left, right, scale)
    return squares(wide(left).mT @ wide(right), scale)


def one_position_squares(left: Tensor, right: Tensor, scale: Tensor | None) -> Tensor:
    """`outer_squares` for one position: Σ scale²·left²·right², of factors of size 1, so that no square underflows."""
    if scale is None:
        (left, left_size), (right, right_size) = (to_size_one(wide(factor)) for factor in (left, right))
        return squares(left, None) * squares(right, None) * (left_size * right_size).square()
    squared_scale, total = scale.double().square(), torch.empty(len(left), dtype=torch.float64, device=left.device)
    # On a CPU, take so few examples at a time that they stay in the cache.
    together = (1 << 18) // max(1, right.shape[2]) + 1 if left.device.type == "cpu" else len(left)
    for own, *factors in zip(*(part.split(together) for part in (total, left, right)), strict=True):
        (one, one_size), (other, other_size) = (to_size_one(wide(factor), always=True) for factor in factors)
        one, other = one[:, 0].double(), other[:, 0].double()  # their squares could vanish in float32
        torch.mul(((one.square() @ squared_scale) * other.square()).sum(1), (one_size * other_size).square(), out=own)
    return total


def to_size_one(factors: Tensor, *, always: bool = False, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Divide each example's factors by their largest entry or length if squares could overflow or vanish, or always."""
    size = factors.abs().amax((1, 2)) if lengths is None else lengths.amax(1)
    size = torch.where(size > 0, size, 1.0)
    if not always and bool(((size > 1e-6) & (size < 1e6)).all()):
        return factors, torch.ones_like(size, dtype=torch.float64)
    return factors / size[:, None, None], size.double()


def gram_on_gpu(positions: int, *factors: Tensor) -> bool:
    """Return whether `gram_squares` is faster than `outer_squares` for these pairs of factors on a GPU."""
    if any(factor.dtype != torch.bfloat16 for factor in factors):
        return False
    rows, cols = factors[0].shape[2], factors[1].shape[2]
    cost = GRAM_COST if positions % 8 == 0 else UNALIGNED_GRAM_COST
    is_faster = 0 < cost * positions * (rows + cols) < rows * cols
    return is_faster and outer_on_gpu(*factors) and has_wide_products()


def gram_squares(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """‖Σ_t left[j, t] ⊗ right[j, t]‖² as Σ_{t,u} (l_t·l_u)(r_t·r_u), and Σ_t ‖l_t‖·‖r_t‖, for each j, float64.

    Where positions cancel, the first has an error of up to 2e-5 times the square of the second on a GPU, and may even
    be negative. The second is NaN if squares of factors may vanish.
    """
    if outer_on_gpu(left, right):
        return kernels.outer_triton.gram_squares(left, right)
    left, right = left.double(), right.double()
    products = (left @ left.mT) * (right @ right.mT)
    return products.sum((1, 2)), products.diagonal(dim1=1, dim2=2).sqrt().sum(1)


@torch.no_grad()
def quadratic_forms(matrices: Tensor, factors: Tensor) -> Tensor:
    """Σ_{t,u} matrices[j, t, u]·⟨factors[j, t], factors[j, u]⟩ for each j, float64."""
    found = norms_c.quadratic_forms(matrices, factors)
    if found is not None:
        return found
    examples, positions, _ = factors.shape
    total = torch.zeros(examples, dtype=torch.float64, device=factors.device)
    # On a CPU, take one example at a time, whose products are still in the cache when they are summed.
    together, columns = (1, DOT_ELEMENTS) if factors.device.type == "cpu" else (max(examples, 1), 1 << 13)
    for part in factors.split(columns, 2):
        products = part.new_empty(together, positions, part.shape[2])
        for j in range(0, examples, together):
            here = part[j : j + together]
            torch.bmm(matrices[j : j + together], here, out=products)
            total[j : j + together] += products.mul_(here).sum((1, 2))
    return total


def split_is_faster(left: Tensor, right: Tensor, weights: Tensor) -> bool:
    """Return whether `outer_weighted_sum` is faster with `split`."""
    return outer_on_gpu(left, right, weights) and kernels.outer_triton.split_is_faster(left, right, weights)


def cut(weights: Tensor) -> Tensor:
    """Weights with 8 significant bits, at most 0.8 % smaller."""
    return (weights.view(torch.int32) & -65536).view(torch.float32)


def outer_weighted_sum(
    left: Tensor, right: Tensor, weights: Tensor, out: Tensor | None = None, *, split: bool = False
) -> Tensor:
    """Σ_j weights[j]·Σ_t left[j, t] ⊗ right[j, t], in the dtype of `weights`, written to `out` if given.

    With `split`, on a GPU, weights must have been cut, and rounding is small only where positions do not cancel.
    """
    if split:
        assert out is not None
        return kernels.outer_triton.split_weighted_sum(left, right, weights, out)
    if outer_on_gpu(left, right, weights):
        return kernels.outer_triton.outer_weighted_sum(left, right, weights, out)
    keep = weights != 0
    if not bool(keep.all()):
        left, right, weights = left[keep], right[keep], weights[keep]
    left, right = wide(left), wide(right)
    if bool((weights.abs() < FAINT_WEIGHT).any()):  # products with small factors would keep only a few bits
        left, right = left.double() * weights.double()[:, None, None], right.double()
        total = (left.flatten(0, 1).T @ right.flatten(0, 1)).to(weights.dtype)
        return total if out is None else out.copy_(total)
    if left.shape[2] < right.shape[2]:  # weight the smaller one
        left = left * weights[:, None, None]
    else:
        right = right * weights[:, None, None]
    return torch.mm(left.flatten(0, 1).T, right.flatten(0, 1), out=out)


def outer_square_sum(
    left: Tensor, right: Tensor, weights: Tensor, ids: Tensor | None = None, values: Tensor | None = None
) -> Tensor:
    """Σ_j (weights[j]·(D_j + E_j))², element by element, in the dtype of `weights`: D_j = Σ_t left[j, t] ⊗ right[j, t],
    and E_j the table that receives values[j, u] at row ids[j, u], if they are given.
    """
    if outer_on_gpu(left, right, weights, values):
        return kernels.outer_triton.outer_square_sum(left, right, weights, ids, values)
    keep = weights != 0
    grads = wide(left[keep]).mT @ wide(right[keep])
    if ids is not None and values is not None:
        rows = torch.arange(len(grads), device=ids.device)[:, None], ids[keep]
        grads.index_put_(rows, wide(values[keep]), accumulate=True)
    return (grads * weights[keep][:, None, None]).square_().sum(0)


def with_padding(values: Tensor) -> Tensor:
    """Return a view [examples, positions, ≥ width] that includes the gap between rows, if that aligns them."""
    stride, rows = values.stride(1), values.shape[0] * values.shape[1]
    if stride == values.shape[2]:
        return values
    held = values.untyped_storage().nbytes() // values.element_size() - values.storage_offset()
    even = values.stride(2) == 1 and values.stride(0) == stride * values.shape[1]
    if even and stride % 8 == 0 and held >= rows * stride:
        return values.as_strided((*values.shape[:2], stride), values.stride())
    return values


def row_squares(ids: Tensor, values: Tensor, scale: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor]:
    """Squared norms of the tables that receive values[j, t] at row ids[j, t], as float64 [examples].

    Values of equal ids of one example are summed before they are squared. The second result is a bound on the norms
    if nothing in those sums cancelled, √(positions·Σ_t ‖scale ⊙ values[j, t]‖²).
    """
    if on_gpu(values, scale):
        return kernels.rows_triton.row_squares(ids, values, scale)
    found = rows_c.row_squares(ids, values, scale, num_rows)
    if found is not None:
        return found
    each = wide(values) if scale is None else wide(values) * scale[ids]
    each_squared = self_products(each.flatten(0, 1)).view(ids.shape)
    bound = (each_squared.sum(1) * ids.shape[1]).sqrt()
    slots = _own_slots(ids, num_rows)
    _, where, counts = torch.unique(slots, return_inverse=True, return_counts=True)
    repeats = counts[where] > 1
    total = torch.where(repeats, 0.0, each_squared).sum(1)
    distinct, where = torch.unique(slots[repeats], return_inverse=True)
    sums = _row_sums(where, values[repeats], len(distinct)).to(wide_dtype(values.dtype))
    if scale is not None:
        sums *= scale[distinct % num_rows]
    with without_atomics():
        return total.index_add_(0, distinct // num_rows, self_products(sums)), bound


def row_weighted_sum(
    ids: Tensor, values: Tensor, weights: Tensor, num_rows: int, *, into: Tensor | None = None
) -> Tensor:
    """Σ_j weights[j]·(the table that receives values[j, t] at row ids[j, t]), added to `into` if given."""
    if on_gpu(values, weights) and ids.stride(0) != 0:
        total = weights.new_zeros(num_rows, values.shape[2]) if into is None else into
        kernels.rows_triton.row_weighted_sum(ids, values, weights, total)
        return total
    if not values.is_cuda:
        into = values.new_zeros(num_rows, values.shape[2], dtype=weights.dtype) if into is None else into
        if into.is_contiguous() and rows_c.row_weighted_sum(ids, values, weights, num_rows, into) is not None:
            return into
    weighted = values * weights[:, None, None]
    weighted = torch.where(weights[:, None, None] != 0, weighted, 0.0).to(weights.dtype)
    if ids.stride(0) == 0:  # all examples look up the same rows, such as positions
        ids, weighted = ids[:1], weighted.sum(0, keepdim=True)
    weighted = weighted.flatten(0, 1)
    if values.is_cuda:
        found = _summed_rows(ids.flatten(), weighted, num_rows)
        return found if into is None else into.add_(found)
    assert into is not None
    distinct, where = torch.unique(ids, return_inverse=True)
    return into.index_add_(0, distinct, _row_sums(where.flatten(), weighted, len(distinct)).to(into.dtype))


def _own_slots(ids: Tensor, num_rows: int) -> Tensor:
    """Return example · num_rows + row for each look-up, so that each example has separate rows."""
    return ids + num_rows * torch.arange(len(ids), device=ids.device)[:, None]


def _row_sums(places: Tensor, values: Tensor, count: int) -> Tensor:
    """Σ of the values at each place, float64 [count, width]; in float32, long sums would depend on their order."""
    sums = torch.zeros(count, values.shape[-1], dtype=torch.float64, device=values.device)
    together = max(1, BLOCK_ELEMENTS // max(1, values.shape[-1]))
    with without_atomics():
        for some, rows in zip(places.split(together), values.split(together), strict=True):
            sums.index_add_(0, some, rows.double())
    return sums


def row_square_sum(ids: Tensor, values: Tensor, weights: Tensor, num_rows: int) -> Tensor:
    """Σ_j (weights[j]·(the table that receives values[j, t] at row ids[j, t]))², element by element."""
    distinct, where = torch.unique(_own_slots(ids, num_rows), return_inverse=True)
    of_examples = row_weighted_sum(where, values, weights, len(distinct))  # each row of each example separately
    return row_weighted_sum((distinct % num_rows)[None], of_examples.square_()[None], weights.new_ones(1), num_rows)


@contextlib.contextmanager
def without_atomics() -> Iterator[None]:
    """Let torch add to rows in a fixed order on a GPU: by default it does not, and the last bits vary."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])


def _summed_rows(ids: Tensor, values: Tensor, num_rows: int) -> Tensor:
    """The table that receives values[i] at row ids[i], on a GPU."""
    with without_atomics():
        return torch.ops.aten.embedding_dense_backward(values, ids, num_rows, -1, False)


def position_sums(values: Tensor, weights: Tensor) -> Tensor:
    """Σ_t weights[j, t]·values[j, t] for each j, in float32 or float64."""
    if on_gpu(values, weights):
        # Padded rows can be loaded 16 bytes at a time.
        return kernels.cross_entropy_triton.position_sums(with_padding(values), weights)[:, : values.shape[2]]
    return (wide(weights)[:, None] @ wide(values))[:, 0]


def outer_row_products(left: Tensor, right: Tensor, ids: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
    """⟨scale ⊙ D_j, scale ⊙ E_j⟩ for each j, float64: D_j = Σ_t left[j, t] ⊗ right[j, t], E_j the table of values."""
    if outer_on_gpu(left, right, values, scale):
        return kernels.outer_triton.outer_row_products(left, right, ids, values, scale)
    found = rows_c.outer_row_products(left, right, ids, values, scale)
    if found is not None:
        return found
    columns = left.gather(2, ids[:, None, :].expand(-1, left.shape[1], -1))
    return _row_dots(wide(columns).mT @ wide(right), ids, values, scale)


def row_products(grads: Tensor, ids: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
    """⟨scale ⊙ grads[j], scale ⊙ E_j⟩ for each j, float64, with E_j the table of values."""
    there = wide(grads[torch.arange(len(ids), device=ids.device)[:, None], ids])
    return _row_dots(there, ids, values, scale)


def _row_dots(there: Tensor, ids: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
    if scale is not None:
        there = there * scale[ids].square()
    return (there * wide(values)).sum((1, 2), dtype=torch.float64)


def softmax_gradient_(logits: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """(-ln softmax of each row at its label, norm of its gradient), float32; `logits` [rows, ≥ classes] become its
    gradient, softmax - one-hot.

    Columns from `classes` on are padding and become 0. A negative label has loss and gradient 0. A label that is not a
    class raises; kernels cannot raise and return NaN.
    """
    if on_gpu(logits):
        return kernels.cross_entropy_triton.softmax_gradient_(logits, labels, classes)
    log_probs = wide(logits[:, :classes]).log_softmax(1)
    valid = labels >= 0
    picked = labels.clamp(min=0)[:, None]
    losses = -log_probs.gather(1, picked)[:, 0]
    gradient = log_probs.exp_()  # in place, since log_softmax returns a new tensor
    gradient.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=gradient.dtype))
    torch.mul(gradient, valid[:, None], out=logits[:, :classes])
    logits[:, classes:] = 0
    return torch.where(valid, losses, 0.0), torch.where(valid, self_products(gradient).sqrt(), 0.0).to(losses.dtype)
