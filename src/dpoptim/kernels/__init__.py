"""Inner loops of clipping, noise and updates. Modules of Triton kernels are imported on first use."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if not name.endswith("_triton"):
        raise AttributeError(f"module 'dpoptim.kernels' has no attribute {name!r}")
    return importlib.import_module(f"dpoptim.kernels.{name}")
