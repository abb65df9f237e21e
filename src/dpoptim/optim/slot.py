"""What the slots of the optimizer are given: one parameter, its state, its group's settings and the step. Released
values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """One parameter at one step. `step` counts completed steps: 0 before the first release, t after the t-th."""

    name: str
    parameter: nn.Parameter
    state: dict[str, Any]
    group: dict[str, Any]
    step: int

    def zeros(self) -> Tensor:
        """State beside the parameter: fp32 (float64 for float64 parameters), whatever the parameter is stored in."""
        dtype = torch.float64 if self.parameter.dtype == torch.float64 else torch.float32
        return torch.zeros_like(self.parameter, dtype=dtype, memory_format=torch.preserve_format)

    def get(self, key: str) -> Tensor:
        """The state tensor `key`, zeros at first."""
        if key not in self.state:
            self.state[key] = self.zeros()
        return self.state[key]
