"""Arithmetic on vectors as long as the model as loops in C, on a CPU: one pass over memory instead of several.

These return None or False, and do nothing, unless the vectors are contiguous float32 on a CPU with a compiler, and
long enough. The choice depends on the arguments alone. `inverse_root` and `noise.streams` have the plain versions.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dpoptim.kernels.c_compiler import library
from dpoptim.kernels.threads import in_chunks

WORTH_COMPILING = 1 << 20  # from this many elements on, a second of compiling pays off
_TOGETHER = 1 << 18  # elements per job

_SOURCE = """
#include <math.h>
#include <stdint.h>

void inverse_root(const float *restrict moment, float *restrict out, int64_t count, float factor, float floor) {
    for (int64_t i = 0; i < count; i++) out[i] = 1 / (factor * sqrtf(moment[i] < 0 ? 0 : moment[i]) + floor);
}

void add_noise(float *restrict sums, const float *restrict row, const float *restrict scale, int64_t count,
               float stddev, float divisor) {
    if (scale)
        for (int64_t i = 0; i < count; i++) sums[i] = (sums[i] + stddev * (row[i] / scale[i])) / divisor;
    else
        for (int64_t i = 0; i < count; i++) sums[i] = (sums[i] + stddev * row[i]) / divisor;
}
"""


@functools.cache
def _loops() -> ctypes.CDLL | None:
    loops = library(_SOURCE, contract=True)
    if loops is not None:
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        loops.inverse_root.argtypes = (pointer, pointer, number, real, real)
        loops.add_noise.argtypes = (pointer, pointer, pointer, number, real, real)
        loops.inverse_root.restype = loops.add_noise.restype = None
    return loops if loops is not None and _right(loops) else None


def _right(loops: ctypes.CDLL) -> bool:
    """Return whether the loops agree with torch; a compiler may be configured for unsafe optimizations."""
    row = torch.tensor([1.0, -2.5, 0.0, -0.1, 1e-30, torch.nan, torch.inf], dtype=torch.float32).repeat(9)
    scale, sums = torch.empty_like(row), row.flip(0)
    loops.inverse_root(row.data_ptr(), scale.data_ptr(), len(row), 2.0, 0.5)
    plain, scaled = sums.clone(), sums.clone()
    loops.add_noise(plain.data_ptr(), row.data_ptr(), None, len(row), 3.0, 7.0)
    loops.add_noise(scaled.data_ptr(), row.data_ptr(), scale.data_ptr(), len(row), 3.0, 7.0)
    return all(
        torch.allclose(found, expected, rtol=1e-6, atol=0, equal_nan=True)
        for found, expected in (
            (scale, 1 / (2 * row.clamp(min=0).sqrt() + 0.5)),
            (plain, (sums + 3 * row) / 7),
            (scaled, (sums + 3 * (row / scale)) / 7),
        )
    )


def _loops_for(*vectors: Tensor | None) -> ctypes.CDLL | None:
    given = [vector for vector in vectors if vector is not None]
    fits = all(v.device.type == "cpu" and v.dtype == torch.float32 and v.is_contiguous() for v in given)
    alike = all(v.numel() == given[0].numel() >= WORTH_COMPILING for v in given)
    return _loops() if fits and alike else None


def inverse_root(moment: Tensor, *, factor: float, floor: float) -> Tensor | None:
    """1 / (factor·√max(moment, 0) + floor)."""
    loops = _loops_for(moment)
    if loops is None:
        return None
    out = torch.empty_like(moment)

    def fill(begin: int, end: int) -> None:
        places = (vector.data_ptr() + 4 * begin for vector in (moment, out))
        loops.inverse_root(*places, end - begin, factor, floor)

    in_chunks(fill, moment.numel(), chunk=_TOGETHER)
    return out


def add_noise(sums: Tensor, row: Tensor, scale: Tensor | None, *, stddev: float, divisor: float) -> bool:
    """Sums ← (sums + stddev·row / scale) / divisor in place."""
    loops = _loops_for(sums, row, scale)
    if loops is None:
        return False

    def add(begin: int, end: int) -> None:
        places = (None if vector is None else vector.data_ptr() + 4 * begin for vector in (sums, row, scale))
        loops.add_noise(*places, end - begin, stddev, divisor)

    in_chunks(add, sums.numel(), chunk=_TOGETHER)
    return True
