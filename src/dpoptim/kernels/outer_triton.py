"""Triton kernels for sums of outer products; `norms` has the plain functions.

A tile of Σ_t left[j, t] ⊗ right[j, t] is made in registers for one example after another: loads of the next example
run while the last one is reduced. Loads go through tensor descriptors, which fill with zeros beyond the last position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dpoptim.kernels.choose import has_wide_products
from dpoptim.kernels.norms import with_padding
from dpoptim.kernels.tables_triton import cdiv, next_power_of_2, processors

COLUMNS_TOGETHER = 1 << 12


@triton.jit
def _product(left, right, example, blocks, row, col, BR: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """Σ_t left[example, t, row:] ⊗ right[example, t, col:]."""
    total = tl.zeros([BR, BC], tl.float32)
    for block in range(blocks):
        a = left.load([example, block * BT, row]).reshape(BT, BR)
        b = right.load([example, block * BT, col]).reshape(BT, BC)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
    return total


@triton.jit
def _rounded_up(scale):
    """The smallest bfloat16 values that are not below the scale, so that no norm is too small."""
    nearest = scale.to(tl.bfloat16)
    is_below = nearest.to(tl.float32) < scale
    return (nearest.to(tl.int16, bitcast=True) + is_below.to(tl.int16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def _times(total, scale):
    """total · scale; without assembly, the compiler keeps float32 copies of the scale, and registers overflow."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 low, high; .reg .f32 a, b;
        shl.b32 low, $4, 16; and.b32 high, $4, 0xffff0000; mov.b32 a, low; mov.b32 b, high;
        mul.f32 $0, $2, a; mul.f32 $1, $3, b; }""",
        "=f,=f,f,f,r", [total, scale], dtype=tl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["examples", "group"])
def _outer_squares(left, right, scale, out, examples, group, blocks, rows, cols, tiles_across, SCALED: tl.constexpr,
                   IS_ROUNDED: tl.constexpr, PARTS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
                   BT: tl.constexpr):  # fmt: skip
    tile, tiles = tl.program_id(0), tl.num_programs(0).to(tl.int64)
    row, col = (tile // tiles_across) * BR, (tile % tiles_across) * BC
    down, across = row + tl.arange(0, BR), col + tl.arange(0, BC)
    if SCALED:
        inside = (down[:, None] < rows) & (across[None, :] < cols)
        factor = tl.load(scale + down[:, None].to(tl.int64) * cols + across[None, :], mask=inside, other=0.0)
        if IS_ROUNDED:
            factor = _rounded_up(factor)
    first = tl.program_id(1) * group
    for example in tl.range(first, tl.minimum(first + group, examples), flatten=True):
        total = _product(left, right, example, blocks, row, col, BR, BC, BT)
        if SCALED:
            total = _times(total, factor) if IS_ROUNDED else total * factor
        # One number for the rows of each warp: summing further here would make the warps wait for each other.
        of_rows = tl.sum(total * total, 1).reshape([BR // (16 * PARTS), PARTS, 16])
        tl.store(out + (example * tiles + tile) * PARTS + tl.arange(0, PARTS), tl.sum(tl.sum(of_rows, 2), 0))


@triton.jit(do_not_specialize=["examples", "share"])
def _outer_weighted_sum(left, right, weights, out, largest, examples, share, blocks, rows, cols, tiles_across,
                        IS_SECOND: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    if IS_SECOND:  # noqa: SIM102
        if tl.load(largest) < float("inf"):  # the sum is there already
            return
    tile = tl.program_id(0)
    row, col = (tile // tiles_across) * BR, (tile % tiles_across) * BC
    down, across = row + tl.arange(0, BR), col + tl.arange(0, BC)
    sums = tl.zeros([BR, BC], tl.float32)
    first = tl.program_id(1) * share
    for example in tl.range(first, tl.minimum(first + share, examples), flatten=True):
        total = _product(left, right, example, blocks, row, col, BR, BC, BT)
        weight = tl.load(weights + example)
        sums = tl.where(weight != 0, sums + total * weight, sums)  # one instruction for each element
    place = (tl.program_id(1).to(tl.int64) * rows + down[:, None]) * cols + across[None, :]
    tl.store(out + place, sums, mask=(down[:, None] < rows) & (across[None, :] < cols))


@triton.jit
def _weight_and_split(values, weights, high, low, positions, width, of_example, of_position, BW: tl.constexpr):
    """weight·value as the exact sum of two bfloat16 numbers; the weights have 8 significant bits."""
    example, position = (tl.program_id(0) // positions).to(tl.int64), tl.program_id(0) % positions
    col = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = col < width
    weight = tl.load(weights + example)
    value = tl.load(values + example * of_example + position * of_position + col, mask=inside, other=0.0)
    product = tl.where(weight != 0, value.to(tl.float32) * weight, 0.0)
    first = product.to(tl.bfloat16)
    place = tl.program_id(0).to(tl.int64) * width + col
    tl.store(high + place, first, mask=inside)
    tl.store(low + place, (product - first.to(tl.float32)).to(tl.bfloat16), mask=inside)


@triton.jit
def _with_lookups(total, ids, values, example, lookups, cols, down, across, BT: tl.constexpr):
    """Add values[example, u] to the tile's rows ids[example, u], by a product with a matrix of 0 and 1."""
    for start in range(0, lookups, BT):
        u = start + tl.arange(0, BT).to(tl.int64)  # so that places in `values` are counted in 64 bits
        here = tl.load(ids + example * lookups + u, mask=u < lookups, other=-1)
        picked = down[:, None] == here[None, :]
        if tl.sum(tl.sum(picked.to(tl.int32), 1), 0) > 0:
            value = tl.load(
                values + (example * lookups + u[:, None]) * cols + across[None, :],
                mask=(u[:, None] < lookups) & (across[None, :] < cols), other=0.0,
            )  # fmt: skip
            total = tl.dot(picked.to(value.dtype), value, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["examples", "share", "lookups"])
def _outer_square_sum(left, right, ids, values, weights, out, examples, share, blocks, rows, cols, tiles_across,
                      lookups, BR: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    row, col = (tile // tiles_across) * BR, (tile % tiles_across) * BC
    down, across = row + tl.arange(0, BR), col + tl.arange(0, BC)
    sums = tl.zeros([BR, BC], tl.float32)
    first = tl.program_id(1) * share
    for example in range(first, tl.minimum(first + share, examples)):
        weight = tl.load(weights + example)
        if weight != 0:
            total = _product(left, right, example, blocks, row, col, BR, BC, BT)
            total = _with_lookups(total, ids, values, example, lookups, cols, down, across, 32)
            total = total * weight
            sums += total * total
    place = (tl.program_id(1).to(tl.int64) * rows + down[:, None]) * cols + across[None, :]
    tl.store(out + place, sums, mask=(down[:, None] < rows) & (across[None, :] < cols))


@triton.jit
def _outer_row_products(left, right, ids, values, scale, out, positions, tokens, cols, left_example, left_position,
                        SCALED: tl.constexpr, BI: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    example = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    col = tl.program_id(2) * BC + tl.arange(0, BC)
    ids_here = tl.load(ids + example * tokens + i, mask=i < tokens, other=0)
    there = tl.zeros([BI, BC], tl.float32)
    for start in range(0, positions, BT):
        t = start + tl.arange(0, BT)
        a = tl.load(
            left + example * left_example + t[None, :].to(tl.int64) * left_position + ids_here[:, None],
            mask=(t[None, :] < positions) & (i[:, None] < tokens), other=0.0,
        )  # fmt: skip
        b = tl.load(
            right + (example * positions + t[:, None]) * cols + col[None, :],
            mask=(t[:, None] < positions) & (col[None, :] < cols), other=0.0,
        )  # fmt: skip
        there = tl.dot(a, b, there, input_precision="ieee")
    inside = (i[:, None] < tokens) & (col[None, :] < cols)
    if SCALED:
        factor = tl.load(scale + ids_here[:, None] * cols + col[None, :], mask=inside, other=0.0)
        there = there * factor * factor
    value = tl.load(values + (example * tokens + i[:, None]) * cols + col[None, :], mask=inside, other=0.0)
    place = (example * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(out + place, tl.sum(tl.sum(there * value.to(tl.float32), 1), 0))


@triton.jit(do_not_specialize=["examples"])
def _gram_squares(left, right, out, examples, positions, ROWS: tl.constexpr, BT: tl.constexpr):
    """For some rows t of two tables of products: Σ_u left[t, u]·right[t, u], and Σ_t √(left[t, t]·right[t, t])."""
    example, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = block * ROWS + tl.arange(0, ROWS)
    base = example * positions * positions
    total = tl.zeros([ROWS, BT], tl.float32)
    for start in range(0, positions, BT):
        u = start + tl.arange(0, BT)
        inside = (t[:, None] < positions) & (u[None, :] < positions)
        place = base + t[:, None] * positions + u[None, :]
        a, b = tl.load(left + place, mask=inside, other=0.0), tl.load(right + place, mask=inside, other=0.0)
        total += a * b
    diagonal = base + t * (positions + 1)
    a = tl.load(left + diagonal, mask=t < positions, other=0.0)
    b = tl.load(right + diagonal, mask=t < positions, other=0.0)
    parts = tl.sqrt(a) * tl.sqrt(b)
    # A square below 1e-30 may have vanished in part. That matters only beside a very long vector.
    parts = tl.where((tl.minimum(a, b) < 1e-30) & (tl.maximum(a, b) > 1e16), float("nan"), parts)
    place = out + example * tl.num_programs(1) + block
    tl.store(place, tl.sum(tl.sum(total, 1), 0))
    tl.store(place + examples.to(tl.int64) * tl.num_programs(1), tl.sum(parts, 0))


class _Tiles:
    """Two factors as descriptors, and the tiles of their product; the sizes are the fastest on an H200."""

    def __init__(self, left: Tensor, right: Tensor, sizes: Callable[..., tuple[int, ...]]) -> None:
        self.dtype = dtype = left.dtype if left.dtype == right.dtype else torch.float32
        left, right = _loadable(left.to(dtype)), _loadable(right.to(dtype))
        (self.examples, positions, self.rows), self.cols = left.shape, right.shape[2]
        given = (64, 64, 32, 4, 3, 3) if dtype == torch.float32 else sizes(positions, self.rows, self.cols)
        high, wide, self.block, warps, stages, at_once = given
        self.high = max(16, min(high, next_power_of_2(self.rows)))
        self.wide = max(16, min(wide, next_power_of_2(self.cols)))
        self.blocks = cdiv(positions, self.block)
        self.across = cdiv(self.cols, self.wide)
        self.count = cdiv(self.rows, self.high) * self.across
        self.left = TensorDescriptor(left, list(left.shape), list(left.stride()), [1, self.block, self.high])
        self.right = TensorDescriptor(right, list(right.shape), list(right.stride()), [1, self.block, self.wide])
        self.slots = at_once * processors(left.device)
        self.options = {"num_warps": warps, "num_stages": stages}
        self.constants = {"BR": self.high, "BC": self.wide, "BT": self.block}


# (rows and columns of a tile, positions per load, warps, stages, programs per processor). No size changes the order in
# which a product's positions are added, so norms and sums see the same product.


def _sizes_for_squares(positions: int, rows: int, cols: int) -> tuple[int, ...]:
    if positions <= 16:
        return 64, 256, 16, 4, 6, 2
    is_even = cdiv(positions, 32) % 2 == 0
    return (128, 256, 64, 8, 4, 1) if is_even and min(rows, cols) >= 1024 else (128, 128, 32, 4, 4, 3)


def _sizes_for_scaled_squares(positions: int, rows: int, cols: int) -> tuple[int, ...]:
    if positions <= 16:
        return 64, 128, 16, 4, 6, 3
    if positions <= 32:
        return 64, 128, 32, 4, 4, 3
    return (128, 128, 64, 4, 3, 2) if cdiv(positions, 32) % 2 == 0 else (128, 128, 32, 4, 4, 2)


def _sizes_for_sums(positions: int, rows: int, cols: int) -> tuple[int, ...]:
    if positions <= 16:
        return 64, 128, 16, 4, 5, 3
    halves = cdiv(positions, 32)
    if halves % 2 == 0 and 128 < positions <= 256 and min(rows, cols) >= 512:
        return 128, 256, 64, 8, 4, 1
    if halves % 2 == 0:
        return (64, 128, 64, 4, 3, 3) if positions <= 256 else (128, 128, 64, 8, 5, 1)
    if halves > 6 and min(rows, cols) >= 256:
        return 128, 256, 32, 8, 5, 1
    return 64, 128, 32, 4, 5, 3


@functools.lru_cache(maxsize=512)
def _examples_together(tiles: int, examples: int, slots: int, *, most: int, overhead: float) -> int:
    """Return the examples per program that let all programs end together; `overhead` is the fixed cost in examples."""

    def cost(group: int) -> float:
        rounds = cdiv(tiles * cdiv(examples, group), slots)
        return rounds * (group + overhead)

    return min(range(1, min(most, examples) + 1), key=cost)


def _loadable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy, with strides and start at multiples of 16 bytes, which descriptors need."""
    step = 16 // tensor.element_size()
    even = tensor.stride(2) == 1 and tensor.stride(0) % step == tensor.stride(1) % step == 0
    if even and tensor.data_ptr() % 16 == 0 and min(tensor.stride()) > 0:
        return tensor
    width = tensor.shape[2]
    padded = tensor.new_empty(*tensor.shape[:2], cdiv(width, step) * step)
    padded[..., :width] = tensor
    return padded[..., :width]


def outer_squares(left: Tensor, right: Tensor, scale: Tensor | None) -> Tensor:
    examples = len(left)
    if not left.numel() or not right.numel():
        return torch.zeros(examples, dtype=torch.float64, device=left.device)
    tiles = _Tiles(left, right, _sizes_for_squares if scale is None else _sizes_for_scaled_squares)
    parts = min(4, tiles.high // 16)
    out = torch.empty(examples, tiles.count, parts, dtype=torch.float32, device=left.device)
    most = 256 if left.shape[1] <= 16 else 32
    group = _examples_together(tiles.count, examples, tiles.slots, most=most, overhead=0.5)
    given = out if scale is None else scale.float().contiguous()
    _outer_squares[(tiles.count, cdiv(examples, group))](
        tiles.left, tiles.right, given, out, examples, group, tiles.blocks, tiles.rows, tiles.cols, tiles.across,
        SCALED=scale is not None, IS_ROUNDED=tiles.dtype != torch.float32, PARTS=parts,
        **tiles.constants, **tiles.options,
    )  # fmt: skip
    return out.sum(2).sum(1, dtype=torch.float64)


def gram_squares(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    examples, positions, _ = left.shape
    tables = (_products_of_positions(left), _products_of_positions(right))
    out = torch.empty(2, examples, cdiv(positions, 16), dtype=torch.float32, device=left.device)
    _gram_squares[out.shape[1:]](*tables, out, examples, positions, ROWS=16, BT=64)
    squares, parts = out.sum(2, dtype=torch.float64)
    return squares, parts


def _products_of_positions(factors: Tensor) -> Tensor:
    """⟨factors[j, t], factors[j, u]⟩, float32. Tensor cores round each step of a sum down, so sums are kept short."""
    total: Tensor | None = None
    for block in factors.split(COLUMNS_TOGETHER, 2):
        if total is None:
            total = torch.bmm(block, block.mT, out_dtype=torch.float32)
        else:
            total = torch.baddbmm(total, block, block.mT, out_dtype=torch.float32)
    assert total is not None
    return total


def outer_weighted_sum(left: Tensor, right: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    examples, rows, cols = len(left), left.shape[2], right.shape[2]
    if out is None:
        out = torch.empty(rows, cols, dtype=weights.dtype, device=left.device)
    if not left.numel() or not right.numel():
        return out.zero_()
    tiles = _Tiles(left, right, _sizes_for_sums)
    share = _examples_together(tiles.count, examples, tiles.slots, most=examples, overhead=2.0)
    shares = cdiv(examples, share)
    is_direct = shares == 1 and out.dtype == torch.float32 and out.is_contiguous()
    sums = out if is_direct else torch.empty(shares, rows, cols, dtype=torch.float32, device=left.device)
    _outer_weighted_sum[(tiles.count, shares)](
        tiles.left, tiles.right, weights.float().contiguous(), sums, sums, examples, share, tiles.blocks, rows, cols,
        tiles.across, IS_SECOND=False, **tiles.constants, **tiles.options,
    )  # fmt: skip
    if is_direct:
        return out
    return torch.sum(sums, 0, out=out) if out.dtype == torch.float32 else out.copy_(sums.sum(0))


def split_is_faster(left: Tensor, right: Tensor, weights: Tensor) -> bool:
    """Return whether `split_weighted_sum` works for these factors and is faster than `outer_weighted_sum`.

    Tiles load 32 positions of an example at a time, and waste those that it does not have.
    """
    positions, rows, cols = left.shape[1], left.shape[2], right.shape[2]
    if not 0 < 8 * positions < 7 * 32 * min(4, cdiv(positions, 32)) or rows * cols < 1 << 22:
        return False
    is_supported = left.dtype == right.dtype == torch.bfloat16 and weights.dtype == torch.float32
    broad = right if left.shape[2] < right.shape[2] else left
    return is_supported and with_padding(broad).is_contiguous() and has_wide_products()


def split_weighted_sum(left: Tensor, right: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """`outer_weighted_sum` by two ordinary matrix products, for weights with 8 significant bits.

    For them, weight·factor is the exact sum of two bfloat16 numbers. Products round the sum over all examples, not each
    example's: nothing bounds that error where an example's positions cancel.
    """
    narrow, broad = (left, right) if left.shape[2] < right.shape[2] else (right, left)
    examples, positions, width = narrow.shape
    narrow = narrow if narrow.stride(2) == 1 else narrow.contiguous()
    high, low = torch.empty(2, examples * positions, width, dtype=torch.bfloat16, device=narrow.device)
    block = min(1024, next_power_of_2(width))
    weights = weights.contiguous()
    _weight_and_split[(examples * positions, cdiv(width, block))](
        narrow, weights, high, low, positions, width, narrow.stride(0), narrow.stride(1), BW=block
    )
    flat = with_padding(broad).flatten(0, 1)  # aligned rows, which products of matrices need to be fast
    first, second = ((part.T, flat) if narrow is left else (flat.T, part) for part in (high, low))
    shape = first[0].shape[0], first[1].shape[1]
    total = out if out.shape == shape else out.new_empty(shape)
    torch.mm(*first, out_dtype=torch.float32, out=total)
    torch.addmm(total, *second, out_dtype=torch.float32, out=total)
    if total is not out:
        out.copy_(total[: left.shape[2], : right.shape[2]])
    # A weight of 0 does not remove what is not finite. Then the sum is made again from tiles.
    tiles = _Tiles(left, right, _sizes_for_sums)
    largest = torch.linalg.vector_norm(out, ord=torch.inf)
    _outer_weighted_sum[(tiles.count, 1)](
        tiles.left, tiles.right, weights, out, largest, examples, examples, tiles.blocks, tiles.rows, tiles.cols,
        tiles.across, IS_SECOND=True, **tiles.constants, **tiles.options,
    )  # fmt: skip
    return out


def outer_square_sum(left: Tensor, right: Tensor, weights: Tensor, ids: Tensor | None, values: Tensor | None) -> Tensor:
    examples, rows, cols = len(left), left.shape[2], right.shape[2]
    if ids is None or values is None:
        ids, values = torch.zeros(examples, 0, device=left.device), right.new_empty(examples, 0, cols)
    if not examples or not rows or not cols:
        return torch.zeros(rows, cols, dtype=weights.dtype, device=left.device)
    if not left.shape[1]:
        left, right = left.new_zeros(examples, 1, rows), right.new_zeros(examples, 1, cols)
    if not left.dtype == right.dtype == values.dtype:  # sums need the precision that the norms had
        left, right, values = left.float(), right.float(), values.float()
    tiles = _Tiles(left, right, _sizes_for_sums)
    share = _examples_together(tiles.count, examples, tiles.slots, most=examples, overhead=2.0)
    shares = cdiv(examples, share)
    out = torch.empty(shares, rows, cols, dtype=torch.float32, device=left.device)
    _outer_square_sum[(tiles.count, shares)](
        tiles.left, tiles.right, ids.int().contiguous(), values.contiguous(), weights.float().contiguous(), out,
        examples, share, tiles.blocks, rows, cols, tiles.across, ids.shape[1], **tiles.constants, **tiles.options,
    )  # fmt: skip
    return out.sum(0).to(weights.dtype)


def outer_row_products(left: Tensor, right: Tensor, ids: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
    dtype = left.dtype if left.dtype == right.dtype else torch.float32
    left, right = left.to(dtype), right.to(dtype).contiguous()
    left = left if left.stride(2) == 1 else left.contiguous()
    ids, values = ids.long().contiguous(), values.contiguous()
    (examples, tokens, cols), positions = values.shape, left.shape[1]
    if not values.numel() or not positions:
        return torch.zeros(examples, dtype=torch.float64, device=left.device)
    is_full = dtype == torch.float32
    high, wide = (32, 64) if is_full else (128, 128)
    wide = max(16, min(wide, next_power_of_2(cols)))
    grid = (examples, cdiv(tokens, high), cdiv(cols, wide))
    out = torch.empty(grid, dtype=torch.float32, device=left.device)
    given = values if scale is None else scale.float().contiguous()
    _outer_row_products[grid](
        left, right, ids, values, given, out, positions, tokens, cols, left.stride(0), left.stride(1),
        SCALED=scale is not None, BI=high, BC=wide, BT=32, num_warps=4 if is_full else 8,
    )  # fmt: skip
    return out.sum((1, 2), dtype=torch.float64)
