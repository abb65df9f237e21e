"""Norms on a CPU as loops in C, which do not store the products that they square and sum.

`norms` has plain functions of the same names. These return None unless the tensors are float32 on a CPU with a
compiler, and large enough. The choice depends on the arguments alone, so a resumed run continues with the same bits.
Results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dpoptim.kernels.c_compiler import agrees, by_rows, library
from dpoptim.kernels.threads import in_chunks, in_threads

WORTH_COMPILING = 1 << 28  # from this many products on, a second of compiling pays off
WORTH_COMPILING_SQUARES = 1 << 22  # the same for squared elements
_ROWS_TOGETHER = 512  # rows of the product per job; fixed, because it decides the order of sums
_ROWS_OF_TILES = 8  # the most rows that a tile has; zeros fill the last tile

_SOURCE = """
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define HIGH 8  /* rows of a tile; there are 32 registers */
#else
#define HIGH 4
#endif
#define ACROSS (2 * WIDTH)
#define STRIP 1024    /* a multiple of ACROSS */
#define STRETCH 4096  /* a multiple of 4 * WIDTH */

typedef float vector __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef float half __attribute__((vector_size(2 * WIDTH), aligned(4), may_alias));
typedef double wide __attribute__((vector_size(4 * WIDTH)));

/* One element of what is summed: (product * factor)^2, or product * factor. */
static inline __attribute__((always_inline)) double term(float product, float factor, int squared) {
    const float x = product * factor;
    return squared ? (double)x * x : (double)x;
}

static double one_row(const float *left, const float *right, const float *factor, int64_t positions, int64_t col,
                      int64_t cols, int64_t left_stride, int64_t right_stride, int squared) {
    double total = 0;
    for (; col < cols; col++) {
        float sum = 0;
        for (int64_t t = 0; t < positions; t++) sum += left[t * left_stride] * right[t * right_stride + col];
        total += term(sum, factor[col], squared);
    }
    return total;
}

/* Add four vectors to float64 sums, each lane to its own. */
static inline void add_lanes(wide *total, const vector *four) {
    for (int k = 0; k < 2; k++) {
        const half *f = (const half *)four + k;
        total[k] += __builtin_convertvector(f[0], wide) + __builtin_convertvector(f[2], wide) +
                    __builtin_convertvector(f[4], wide) + __builtin_convertvector(f[6], wide);
    }
}

static double sum_lanes(const wide *total) {
    double sum = 0;
    for (int k = 0; k < WIDTH; k++) sum += total[k / (WIDTH / 2)][k % (WIDTH / 2)];
    return sum;
}

/* Sum `term` over HIGH rows and all columns: in float32 for each lane of a strip of columns, added to `total`. The
   sum over the remaining columns is returned. Rows of `factor` from `rows` on are not read: their products must be
   0. */
static inline __attribute__((always_inline)) double high_tiles(
    const float *left, const float *right, const float *factor, wide *total, int64_t rows, int64_t positions,
    int64_t cols, int64_t left_stride, int64_t right_stride, int64_t factor_stride, int squared) {
    vector sums[4] = {{0}};
    int64_t col = 0;
    for (; col + ACROSS <= cols; col += ACROSS) {
        if (col && col % STRIP == 0) {
            add_lanes(total, sums);
            memset(sums, 0, sizeof sums);
        }
        vector sum[HIGH][2] = {{{0}}};
        for (int64_t t = 0; t < positions; t++) {
            const float *r = right + t * right_stride + col;
            const vector r0 = *(const vector *)r, r1 = *(const vector *)(r + WIDTH);
            if (!squared) {  /* `right` is a long strip, not a matrix in a cache */
                __builtin_prefetch(r + STRIP, 0, 2);
                __builtin_prefetch(r + STRIP + WIDTH, 0, 2);
            }
            quad l[HIGH / 4];
            for (int i = 0; i < HIGH / 4; i++) {
                l[i] = ((const quad *)(left + t * left_stride))[i];
#if defined(__aarch64__)
                __asm__("" : "+w"(l[i]));  /* keep it in a vector register, to multiply by single lanes */
#endif
            }
#pragma GCC unroll 8
            for (int i = 0; i < HIGH; i++) {
                sum[i][0] += l[i / 4][i % 4] * r0;
                sum[i][1] += l[i / 4][i % 4] * r1;
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < HIGH; i++) {
            const float *f = factor + (i < rows ? i : 0) * factor_stride + col;
            const vector a = sum[i][0] * *(const vector *)f, b = sum[i][1] * *(const vector *)(f + WIDTH);
            if (squared) {
                sums[i % 2] += a * a;
                sums[2 + i % 2] += b * b;
            } else {
                sums[i % 2] += a;
                sums[2 + i % 2] += b;
            }
        }
    }
    add_lanes(total, sums);
    double rest = 0;
    for (int i = 0; i < rows; i++)
        rest += one_row(left + i, right, factor + i * factor_stride, positions, col, cols, left_stride, right_stride,
                        squared);
    return rest;
}

/* out[j] = sum of (scale * grads[j])^2, in float32 for each lane of a stretch of elements. Without a scale it is 1. */
static inline __attribute__((always_inline)) void add_squares(
    const float *grads, const float *scale, double *out, int64_t examples, int64_t numel, int64_t stride) {
    for (int64_t j = 0; j < examples; j++) {
        const float *g = grads + j * stride;
        wide lanes[2] = {{0}};
        int64_t at = 0;
        while (numel - at >= 4 * WIDTH) {
            int64_t stop = numel - at > STRETCH ? at + STRETCH : numel;
            vector sum[4] = {{0}};
            for (; at + 4 * WIDTH <= stop; at += 4 * WIDTH)
#pragma GCC unroll 4
                for (int k = 0; k < 4; k++) {
                    vector x = ((const vector *)(g + at))[k];
                    if (scale) x *= ((const vector *)(scale + at))[k];
                    sum[k] += x * x;
                }
            add_lanes(lanes, sum);
        }
        double total = sum_lanes(lanes);
        for (; at < numel; at++) total += term(g[at], scale ? scale[at] : 1, 1);
        out[j] = total;
    }
}

void squares(const float *grads, const float *scale, double *out, int64_t examples, int64_t numel, int64_t stride) {
    if (scale)
        add_squares(grads, scale, out, examples, numel, stride);
    else
        add_squares(grads, 0, out, examples, numel, stride);
}

/* out[j] = sum over rows [begin, end), whose scale stays in a cache; left [examples, positions, rows] and right have
   unit stride in their last axis. `tile` has room for positions * HIGH numbers. */
void outer_squares(const float *left, const float *right, const float *scale, double *out, int64_t examples,
                   int64_t positions, int64_t cols, int64_t begin, int64_t end, int64_t left_example,
                   int64_t left_stride, int64_t right_example, int64_t right_stride, float *tile) {
    for (int64_t j = 0; j < examples; j++) {
        const float *l = left + j * left_example, *r = right + j * right_example;
        wide lanes[2] = {{0}};
        int64_t row = begin;
        out[j] = 0;
        for (; row + HIGH <= end; row += HIGH) {
            const float *ahead = l + row + 2 * HIGH;  /* the next tile but one, or the next example */
            if (row + 2 * HIGH >= end) ahead = l + (j + 1 < examples) * left_example + begin;
            for (int64_t t = 0; t < positions; t++) {
                memcpy(tile + t * HIGH, l + t * left_stride + row, sizeof(float) * HIGH);
                __builtin_prefetch(ahead + t * left_stride, 0, 2);
            }
            out[j] += high_tiles(tile, r, scale + row * cols, lanes, HIGH, positions, cols, HIGH, right_stride, cols,
                                 1);
        }
        for (; row < end; row++)
            out[j] += one_row(l + row, r, scale + row * cols, positions, 0, cols, left_stride, right_stride, 1);
        out[j] += sum_lanes(lanes);
    }
}

/* out[j] = sum over t <= i of matrices[j][t][i] <factors[j][t], factors[j][i]>; rows of the matrices have `stride`
   numbers, a multiple of HIGH, zero from column `positions` on. A strip of columns stays in a cache. */
void quadratic_forms(const float *matrices, const float *factors, double *out, int64_t examples, int64_t positions,
                     int64_t cols, int64_t stride, int64_t factor_example, int64_t factor_stride) {
    for (int64_t j = 0; j < examples; j++) {
        wide lanes[2] = {{0}};
        out[j] = 0;
        for (int64_t col = 0; col < cols; col += STRIP) {
            const int64_t width = cols - col < STRIP ? cols - col : STRIP;
            const float *f = factors + j * factor_example + col;
            for (int64_t i = 0; i < positions; i += HIGH) {
                const int64_t rows = positions - i < HIGH ? positions - i : HIGH;
                out[j] += high_tiles(matrices + j * positions * stride + i, f, f + i * factor_stride, lanes, rows,
                                     i + rows, width, stride, factor_stride, factor_stride, 0);
            }
        }
        out[j] += sum_lanes(lanes);
    }
}
"""


@functools.cache
def _loops() -> ctypes.CDLL | None:
    loops = library(_SOURCE, contract=True)
    if loops is not None:
        loops.outer_squares.argtypes = (*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 9, ctypes.c_void_p)
        loops.squares.argtypes = (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 3)
        loops.quadratic_forms.argtypes = (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 6)
        loops.outer_squares.restype = loops.squares.restype = loops.quadratic_forms.restype = None
    return loops if loops is not None and _right(loops) else None


def _right(loops: ctypes.CDLL) -> bool:
    """Return whether the loops agree with torch."""
    vectors = torch.arange(1, 1 + 3 * 5 * 37).float().view(3, 5, 37).sin()
    scale = torch.arange(1, 1 + 37 * 37).float().view(37, 37).cos()
    matrices, factors = scale[:15, :5].reshape(3, 5, 5).triu(), scale[:5]
    for value in (1.0, torch.nan, torch.inf):
        vectors[1, 2, 3] = value
        wide = vectors.double()
        for found, expected in (
            (many_squares([vectors], [factors], loops), (wide * factors).square().sum((1, 2))),
            (many_squares([vectors], None, loops), wide.square().sum((1, 2))),
            (outer_squares(vectors, vectors, scale, loops), ((wide.mT @ wide) * scale).square().sum((1, 2))),
            (quadratic_forms(matrices, vectors, loops), (matrices * (wide @ wide.mT)).sum((1, 2))),
        ):
            if not agrees(found, expected):
                return False
    return True


def _loops_for(tensors: Sequence[Tensor], *, worth: bool) -> ctypes.CDLL | None:
    on_cpu = worth and all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)
    return _loops() if on_cpu else None


def outer_squares(left: Tensor, right: Tensor, scale: Tensor, loops: ctypes.CDLL | None = None) -> Tensor | None:
    """‖scale ⊙ Σ_t left[j, t] ⊗ right[j, t]‖² for each j, float64; float32 within a few rows and 1024 columns."""
    (examples, positions, rows), cols = left.shape, right.shape[2]
    if right.shape[:2] != (examples, positions) or scale.shape != (rows, cols):
        raise ValueError(f"shapes {tuple(left.shape)}, {tuple(right.shape)} and {tuple(scale.shape)} do not fit")
    loops = loops or _loops_for([left, right, scale], worth=examples * positions * rows * cols >= WORTH_COMPILING)
    if loops is None:
        return None
    left, right, scale = by_rows(left), by_rows(right), scale.contiguous()
    strides = (left.stride(0), left.stride(1), right.stride(0), right.stride(1))
    parts = torch.empty(-(-rows // _ROWS_TOGETHER), examples, dtype=torch.float64)

    def measure(begin: int, end: int) -> None:
        into, tile = parts[begin // _ROWS_TOGETHER], torch.empty(positions * _ROWS_OF_TILES, dtype=torch.float32)
        pointers = (left.data_ptr(), right.data_ptr(), scale.data_ptr(), into.data_ptr())
        loops.outer_squares(*pointers, examples, positions, cols, begin, end, *strides, tile.data_ptr())

    in_chunks(measure, rows, chunk=_ROWS_TOGETHER)
    return parts.sum(0)


def quadratic_forms(matrices: Tensor, factors: Tensor, loops: ctypes.CDLL | None = None) -> Tensor | None:
    """Σ_{t,u} matrices[j, t, u]·⟨factors[j, t], factors[j, u]⟩ for each j, float64; float32 as in `outer_squares`."""
    examples, positions, cols = factors.shape
    loops = loops or _loops_for([matrices, factors], worth=examples * positions**2 * cols >= WORTH_COMPILING)
    if loops is None:
        return None
    # Each pair of positions is taken once, so half of the products are enough.
    pairs = F.pad(matrices.triu() + matrices.tril(-1).mT, (0, -positions % _ROWS_OF_TILES)).contiguous()
    factors, out = by_rows(factors), torch.empty(examples, dtype=torch.float64)
    sizes = (positions, cols, pairs.shape[2], factors.stride(0), factors.stride(1))

    def measure(begin: int, end: int) -> None:
        pointers = (pairs[begin].data_ptr(), factors[begin].data_ptr(), out[begin].data_ptr())
        loops.quadratic_forms(*pointers, end - begin, *sizes)

    in_chunks(measure, examples, chunk=-(-examples // 8))
    return out


def many_squares(
    grads: Sequence[Tensor], scales: Sequence[Tensor] | None, loops: ctypes.CDLL | None = None
) -> Tensor | None:
    """Σ_i ‖scales[i] ⊙ grads[i][j]‖² for each j, float64; float32 within a stretch of 4096 elements."""
    numel = sum(grad.numel() for grad in grads)
    loops = loops or _loops_for([*grads, *(scales or ())], worth=numel >= WORTH_COMPILING_SQUARES)
    if loops is None:
        return None
    examples = len(grads[0])
    parts = torch.empty(len(grads), examples, dtype=torch.float64)

    def measure(grad: Tensor, scale: Tensor | None, into: Tensor) -> None:
        vectors = by_rows(grad.reshape(examples, -1))
        factors = None if scale is None else scale.reshape(-1).contiguous()
        pointers = (vectors.data_ptr(), None if factors is None else factors.data_ptr(), into.data_ptr())
        loops.squares(*pointers, examples, vectors.shape[1], vectors.stride(0))

    given = zip(grads, [None] * len(grads) if scales is None else scales, parts, strict=True)
    in_threads([partial(measure, *each) for each in given][::-1])  # the last gradients may still be in a cache
    return parts.sum(0)
