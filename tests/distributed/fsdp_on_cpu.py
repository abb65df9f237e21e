"""FSDP of Accelerate on CPUs: python -m tests.distributed.fsdp_on_cpu SCRIPT [ARGUMENTS]

`AcceleratorState` sets `distributed_type` to FSDP only if it was that of several GPUs, and ignores the plugin of
several CPUs. Here it does for CPUs what it does for GPUs.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState


def allow_fsdp_on_cpu() -> None:
    """Let Accelerators on CPUs use their FSDP plugin."""
    stock = AcceleratorState.__init__

    def init(self: Any, *given: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        stock(self, *given, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
