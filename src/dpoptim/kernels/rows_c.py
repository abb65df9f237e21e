"""Sums over look-ups on a CPU as loops in C, which chain the look-ups of each row instead of sorting them.

`norms` has plain functions of the same names. These return None unless the tensors are float32 on a CPU with a
compiler, and large enough. The choice depends on the arguments alone, so a resumed run continues with the same bits.
Results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dpoptim.kernels.c_compiler import agrees, by_rows, library
from dpoptim.kernels.threads import in_chunks

WORTH_COMPILING = 1 << 18  # from this many looked-up numbers on, a second of compiling pays off
_TOGETHER = 1 << 18  # looked-up numbers per job
_COLUMNS = 64  # columns per job of a sum over examples

_SOURCE = """
#include <stdint.h>

#define BLOCK 64  /* columns summed at a time */

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static double sum_of(const double *lanes) {
    double sum = 0;
    for (int k = 0; k < BLOCK; k++) sum += lanes[k];
    return sum;
}

/* Chain the look-ups of each row in ascending order: first[row], then next[look-up]; -1 ends a chain. `first` holds -1
   before, and again after `unchain`. */
static void chain(const int64_t *ids, int64_t count, int64_t offset, int64_t *first, int64_t *next) {
    for (int64_t t = count - 1; t >= 0; t--) {
        next[offset + t] = first[ids[t]];
        first[ids[t]] = offset + t;
    }
}

static void unchain(const int64_t *ids, int64_t count, int64_t *first) {
    for (int64_t t = 0; t < count; t++) first[ids[t]] = -1;
}

/* squares[j] = sum over rows of (scale * sum of the row's values)^2; parts[j] = sum over look-ups of (scale * value)^2.
   Values are [examples, positions, width], width contiguous. */
void row_squares(const int64_t *ids, const float *values, const float *scale, double *squares, double *parts,
                 int64_t begin, int64_t end, int64_t positions, int64_t width, int64_t id_example,
                 int64_t value_example, int64_t value_position, int64_t *first, int64_t *next) {
    for (int64_t j = begin; j < end; j++) {
        const int64_t *id = ids + j * id_example;
        double whole[BLOCK] = {0}, alone[BLOCK] = {0};
        chain(id, positions, 0, first, next);
        for (int64_t t = 0; t < positions; t++) {
            if (first[id[t]] != t) continue;
            for (int64_t at = 0; at < width; at += BLOCK) {
                const int64_t block = least(BLOCK, width - at);
                const float *s = scale ? scale + id[t] * width + at : 0;
                double sum[BLOCK] = {0};
                for (int64_t i = t; i >= 0; i = next[i]) {
                    const float *v = values + j * value_example + i * value_position + at;
                    for (int64_t k = 0; k < block; k++) {
                        const double x = (double)v[k] * (s ? s[k] : 1);
                        alone[k] += x * x;
                        sum[k] += v[k];
                    }
                }
                for (int64_t k = 0; k < block; k++) {
                    const double x = sum[k] * (s ? s[k] : 1);
                    whole[k] += x * x;
                }
            }
        }
        unchain(id, positions, first);
        squares[j] = sum_of(whole);
        parts[j] = sum_of(alone);
    }
}

/* out[j] = sum over look-ups and columns of value * scale^2 * (sum over u of left[j][u][row] * right[j][u]). */
void outer_row_products(const float *left, const float *right, const int64_t *ids, const float *values,
                        const float *scale, double *out, int64_t begin, int64_t end, int64_t terms, int64_t positions,
                        int64_t width, int64_t left_example, int64_t left_term, int64_t right_example,
                        int64_t right_term, int64_t id_example, int64_t value_example, int64_t value_position) {
    for (int64_t j = begin; j < end; j++) {
        const int64_t *id = ids + j * id_example;
        const float *l = left + j * left_example, *r = right + j * right_example;
        double lanes[BLOCK] = {0};
        for (int64_t t = 0; t < positions; t++) {
            const int64_t ahead = id[least(t + 1, positions - 1)];
            for (int64_t u = 0; u < terms; u++) __builtin_prefetch(l + u * left_term + ahead);
            for (int64_t at = 0; at < width; at += BLOCK) {
                const int64_t block = least(BLOCK, width - at);
                const float *s = scale ? scale + id[t] * width + at : 0;
                const float *v = values + j * value_example + t * value_position + at;
                float sum[BLOCK] = {0};
                for (int64_t u = 0; u < terms; u++) {
                    const float x = l[u * left_term + id[t]];
                    for (int64_t k = 0; k < block; k++) sum[k] += x * r[u * right_term + at + k];
                }
                for (int64_t k = 0; k < block; k++) {
                    const double factor = s ? s[k] : 1;
                    lanes[k] += factor * factor * v[k] * sum[k];
                }
            }
        }
        out[j] = sum_of(lanes);
    }
}

/* total[row] += sum over its look-ups in all examples of weight * value, in columns [begin, end) of `width`. */
void row_weighted_sum(const int64_t *ids, const float *values, const float *weights, float *total, int64_t begin,
                      int64_t end, int64_t examples, int64_t positions, int64_t width, int64_t id_example,
                      int64_t value_example, int64_t value_position, int64_t *first, int64_t *next) {
    for (int64_t j = examples - 1; j >= 0; j--)
        if (weights[j] != 0) chain(ids + j * id_example, positions, j * positions, first, next);
    for (int64_t j = 0; j < examples; j++)
        for (int64_t t = 0; t < positions; t++) {
            const int64_t row = ids[j * id_example + t];
            if (weights[j] == 0 || first[row] != j * positions + t) continue;
            for (int64_t at = begin; at < end; at += BLOCK) {
                const int64_t block = least(BLOCK, end - at);
                double sum[BLOCK] = {0};
                for (int64_t i = first[row]; i >= 0; i = next[i]) {
                    const float *v = values + i / positions * value_example + i % positions * value_position + at;
                    const float weight = weights[i / positions];
                    for (int64_t k = 0; k < block; k++) sum[k] += weight * v[k];
                }
                for (int64_t k = 0; k < block; k++) total[row * width + at + k] += (float)sum[k];
            }
        }
}
"""


@functools.cache
def _loops() -> ctypes.CDLL | None:
    loops = library(_SOURCE)
    if loops is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        loops.row_squares.argtypes = (*[pointer] * 5, *[number] * 7, *[pointer] * 2)
        loops.outer_row_products.argtypes = (*[pointer] * 6, *[number] * 12)
        loops.row_weighted_sum.argtypes = (*[pointer] * 4, *[number] * 8, *[pointer] * 2)
        loops.row_squares.restype = loops.outer_row_products.restype = loops.row_weighted_sum.restype = None
    return loops if loops is not None and _right(loops) else None


def _right(loops: ctypes.CDLL) -> bool:
    """Return whether the loops agree with torch."""
    examples, positions, rows, width = 3, 5, 4, 70
    values = torch.arange(1, 1 + examples * positions * width).float().view(examples, positions, width).sin()
    left, right, scale = values[:, :2, :rows], values[:, 1:3], values.flatten()[: rows * width].view(rows, width).cos()
    ids, weights = torch.tensor([[0, 2, 0, 3, 2], [1, 1, 1, 1, 1], [0, 1, 2, 3, 0]]), scale.new_tensor([0.5, 2, 0])
    for value in (1.0, torch.nan, torch.inf):
        values[2, 4, 3] = value
        wide = values.double() * scale[ids]
        tables = wide.new_zeros(examples, rows, width).index_put((torch.arange(3)[:, None], ids), wide, accumulate=True)
        outers = (left.double().mT @ right.double()) * scale
        squares, bound = row_squares(ids, values, scale, rows, loops) or (wide, wide)
        for found, expected in (
            (squares, tables.square().sum((1, 2))),
            (bound.square(), positions * wide.square().sum((1, 2))),
            (outer_row_products(left, right, ids, values, scale, loops), (outers * tables).sum((1, 2))),
            (
                row_weighted_sum(ids, values, weights, rows, torch.zeros_like(scale), loops),
                ((weights[:2, None, None] * tables[:2]).sum(0) / scale).float(),
            ),
        ):
            if not agrees(found, expected, atol=1e-6):
                return False
    return True


def _loops_for(ids: Tensor, rows: int, values: Tensor, *others: Tensor | None) -> ctypes.CDLL | None:
    tensors = [tensor for tensor in (values, *others) if tensor is not None]
    if values.numel() < WORTH_COMPILING or any(t.device.type != "cpu" or t.dtype != torch.float32 for t in tensors):
        return None
    smallest, largest = ids.aminmax()
    if not 0 <= smallest <= largest < rows:  # the loops do not look
        raise IndexError(f"Expected row ids in [0, {rows}), got {int(smallest)} to {int(largest)}.")
    return _loops()


def row_squares(
    ids: Tensor, values: Tensor, scale: Tensor | None, num_rows: int, loops: ctypes.CDLL | None = None
) -> tuple[Tensor, Tensor] | None:
    """As in `norms`, in float64."""
    loops = loops or _loops_for(ids, num_rows, values, scale)
    if loops is None:
        return None
    ids, values = by_rows(ids.long()), by_rows(values)
    scale = None if scale is None else scale.contiguous()
    examples, positions, width = values.shape
    squares, parts = torch.empty(2, examples, dtype=torch.float64)

    def measure(begin: int, end: int) -> None:
        pointers, chains = (ids, values, scale, squares, parts), _chains(num_rows, positions)
        sizes = (begin, end, positions, width, ids.stride(0), *values.stride()[:2])
        loops.row_squares(*map(_address, pointers), *sizes, *map(_address, chains))

    in_chunks(measure, examples, chunk=max(1, _TOGETHER // (positions * width)))
    return squares, (parts * positions).sqrt()


def outer_row_products(
    left: Tensor, right: Tensor, ids: Tensor, values: Tensor, scale: Tensor | None, loops: ctypes.CDLL | None = None
) -> Tensor | None:
    """As in `norms`: float32 within one look-up, float64 over several."""
    loops = loops or _loops_for(ids, left.shape[2], values, left, right, scale)
    if loops is None:
        return None
    ids, left, right, values = (by_rows(tensor) for tensor in (ids.long(), left, right, values))
    scale = None if scale is None else scale.contiguous()
    examples, positions, width = values.shape
    out = torch.empty(examples, dtype=torch.float64)

    def measure(begin: int, end: int) -> None:
        pointers, sizes = (left, right, ids, values, scale, out), (begin, end, left.shape[1], positions, width)
        strides = (*left.stride()[:2], *right.stride()[:2], ids.stride(0), *values.stride()[:2])
        loops.outer_row_products(*map(_address, pointers), *sizes, *strides)

    in_chunks(measure, examples, chunk=max(1, _TOGETHER // (positions * width)))
    return out


def row_weighted_sum(
    ids: Tensor, values: Tensor, weights: Tensor, num_rows: int, into: Tensor, loops: ctypes.CDLL | None = None
) -> Tensor | None:
    """As in `norms`, added to the contiguous `into`; sums are float64."""
    loops = loops or _loops_for(ids, num_rows, values, weights, into)
    if loops is None:
        return None
    ids, values, weights = by_rows(ids.long()), by_rows(values), weights.contiguous()
    examples, positions, width = values.shape

    def add(begin: int, end: int) -> None:
        pointers, chains = (ids, values, weights, into), _chains(num_rows, examples * positions)
        sizes = (begin, end, examples, positions, width, ids.stride(0), *values.stride()[:2])
        loops.row_weighted_sum(*map(_address, pointers), *sizes, *map(_address, chains))

    in_chunks(add, width, chunk=_COLUMNS)
    return into


def _chains(rows: int, lookups: int) -> tuple[Tensor, Tensor]:
    return torch.full((rows,), -1, dtype=torch.int64), torch.empty(lookups, dtype=torch.int64)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
