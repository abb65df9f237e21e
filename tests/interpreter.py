"""Run Triton kernels on a CUDA device, or on a CPU with Triton's interpreter (TRITON_INTERPRET=1).

The interpreter runs a kernel's code on ordinary tensors. It tests what a kernel computes, but not its speed, whether it
compiles, or how a GPU rounds.
"""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
HAS_TRITON = importlib.util.find_spec("triton") is not None

needs_triton = pytest.mark.skipif(
    not HAS_TRITON or not (IS_INTERPRETED or torch.cuda.is_available()),
    reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1",
)


if IS_INTERPRETED:
    import triton
    import triton.language as tl

    @triton.jit
    def times(total, scale):  # the interpreter cannot run assembly
        return total * scale.to(tl.float32)


def _accept_cpu_tensors() -> None:
    """Patch the kernels so that they accept CPU tensors."""
    from triton.runtime import interpreter

    from dpoptim.kernels import (
        adam_triton,
        choose,
        normals_triton,
        outer_triton,
        tables_triton,
    )

    aligned = outer_triton._loadable

    def loadable(tensor: Tensor) -> Tensor:
        """The interpreter treats bfloat16 as integers in products."""
        return aligned(tensor.float() if tensor.dtype == torch.bfloat16 else tensor)

    def table_of(numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.tensor(numbers, dtype=dtype)

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:  # the interpreter's own conversion rounds down
        if target != tl.bfloat16:
            return own_convert(data, source, target, mode)
        return torch.from_numpy(data.astype(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    own_convert = interpreter._convert_float
    # numpy rounds these correctly, as CUDA's library does.
    rounded = SimpleNamespace(div_rn=lambda a, b: a / b, sqrt_rn=lambda x: tl.sqrt(x))
    replacements = {
        (choose, "on_current_device"): lambda *tensors: True,
        (choose, "_has_tensor_descriptors"): lambda: True,
        (outer_triton, "processors"): lambda device: 2,
        (outer_triton, "_loadable"): loadable,
        (outer_triton, "_times"): times,
        (tables_triton, "table_of"): table_of,
        (normals_triton, "table_of"): table_of,
        (adam_triton, "table_of"): table_of,
        (interpreter, "_convert_float"): convert,
        (normals_triton, "libdevice"): rounded,
    }
    for (module, name), other in replacements.items():
        setattr(module, name, other)
    for name, value in vars(normals_triton).copy().items():
        if isinstance(value, tl.constexpr):
            setattr(normals_triton, name, value.value)


if IS_INTERPRETED:
    _accept_cpu_tensors()
