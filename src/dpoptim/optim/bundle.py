"""What the slots of the optimizer are given: parameters as one vector, its state, its group's settings and the step.
Released values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpoptim.gradients import end_to_end

SCALARS = {"noise_moment"}
"""State that is one number for all parameters of a bundle."""


@dataclass(frozen=True)
class Bundle:
    """The parameters of one group, precision and device end to end: one operation serves them all.

    `state` is kept between steps and saved, through views into it that the optimizer holds for each parameter;
    `passing` is made again when a run is resumed. `step` counts completed steps: 0 before the first release, t after
    the t-th.
    """

    names: list[str]
    parameters: list[Tensor]
    state: dict[str, Tensor]
    passing: dict[str, Tensor]
    group: dict[str, Any]
    step: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the state: fp32 (float64 for float64 parameters), whatever the parameters are stored in."""
        return torch.float64 if self.parameters[0].dtype == torch.float64 else torch.float32

    def get(self, key: str) -> Tensor:
        """The state vector `key`, zeros at first."""
        if key not in self.state:
            numel = sum(parameter.numel() for parameter in self.parameters)
            self.state[key] = torch.zeros(numel, dtype=self.dtype, device=self.parameters[0].device)
        return self.state[key]

    def flat(self, by_name: Mapping[str, Tensor]) -> Tensor:
        """Tensors of the parameters' shapes as one vector, to be read."""
        return end_to_end([by_name[name] for name in self.names], self.dtype)

    def flat_parameters(self) -> Tensor:
        return self.flat(dict(zip(self.names, self.parameters, strict=True)))

    def split(self, vector: Tensor) -> list[Tensor]:
        """Views into a vector, of the parameters' shapes."""
        parts = vector.split([parameter.numel() for parameter in self.parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]
