"""What the slots of the optimizer are given: parameters as one vector, its state, its group's settings and the step.
Released values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpoptim.kernels.flat import flatten, unflatten

SCALARS = {"noise_moment"}
"""State that is one number for all parameters of a bundle."""


@dataclass(frozen=True)
class ParameterBundle:
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
        return flatten([by_name[name] for name in self.names], self.dtype)

    @property
    def rounds(self) -> bool:
        """Whether a parameter is stored in fewer bits than the state."""
        return any(parameter.dtype != self.dtype for parameter in self.parameters)

    def values(self) -> Tensor:
        """The parameters as one vector, to be read: with what rounding took from them, where it took something.

        An update is often smaller than half of the last bit of a 16-bit parameter, and would be lost in every step.
        So `state["rounding"]` keeps what the stored value lacks, and both together are a value in the state's
        precision. A parameter that is set from outside is taken as it is: a remainder counts where value and remainder
        round to what is stored, as they do where nobody else wrote.
        """
        stored = self._stored()
        if not self.rounds:
            return stored
        whole = stored + self.get("rounding")
        for parameter, own, instead in zip(self.parameters, self.split(whole), self.split(stored), strict=True):
            own.copy_(torch.where(own.to(parameter.dtype) == parameter, own, instead))
        return whole

    def move_(self, direction: Tensor, *, kept: float, lr: float) -> None:
        """parameters ← kept·parameters − lr·direction."""
        if not self.rounds:
            if kept != 1:
                torch._foreach_mul_(self.parameters, kept)
            torch._foreach_add_(self.parameters, self.split(direction), alpha=-lr)
            return
        values = self.values().mul_(kept).add_(direction, alpha=-lr)
        for parameter, value in zip(self.parameters, self.split(values), strict=True):
            parameter.copy_(value)
        torch.sub(values, self._stored(), out=self.get("rounding"))

    def _stored(self) -> Tensor:
        return self.flat(dict(zip(self.names, self.parameters, strict=True)))

    def split(self, vector: Tensor) -> list[Tensor]:
        """Views into a vector, of the parameters' shapes."""
        return unflatten(vector, self.parameters)
