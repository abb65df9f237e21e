"""Where Triton's kernels are tested: on a CUDA device, or on a CPU by Triton's interpreter (TRITON_INTERPRET=1).

The interpreter runs a kernel's own code, program by program, on ordinary tensors: what a kernel computes is tested
without a GPU, and how fast it is, whether it compiles and what a GPU rounds otherwise is not.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
HAS_TRITON = importlib.util.find_spec("triton") is not None

needs_triton = pytest.mark.skipif(
    not HAS_TRITON or not (IS_INTERPRETED or torch.cuda.is_available()),
    reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1",
)


def _take_cpu_tensors() -> None:
    """From now on kernels take tensors of the CPU, where they are interpreted."""
    from dpoptim.gradients import kernels, triton_kernels, triton_outer
    from dpoptim.noise import triton_tables

    in_place_of = {
        (kernels, "_run_on_gpu"): lambda tensors: all(t is None or t.dtype != torch.float64 for t in tensors),
        (kernels, "_kernels"): lambda: triton_kernels,
        (kernels, "_outer_kernels"): lambda: triton_outer,
        (triton_outer, "_processors"): lambda device: 2,
        (triton_tables, "table_of"): lambda numbers, dtype, device: torch.tensor(numbers, dtype=dtype),
    }
    for (module, name), function in in_place_of.items():
        setattr(module, name, function)


if IS_INTERPRETED:
    _take_cpu_tensors()
