"""What the slots of the optimizer receive: parameters as one vector, their state, the group's settings and the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpoptim.data.shards import own_part
from dpoptim.kernels.flat import flatten, unflatten

SCALARS = {"noise_moment"}
"""State that is one number for the whole bundle."""


@dataclass(frozen=True)
class ParameterBundle:
    """The parameters of one group that share a `FlatTensors` vector, so that one operation serves them all.

    `state` persists between steps and is saved, through views that the optimizer holds for each parameter. `transient`
    is recomputed when a run is resumed. `step` counts completed steps: 0 before the first release, t after the t-th.
    """

    names: list[str]
    parameters: list[Tensor]
    state: dict[str, Tensor]
    transient: dict[str, Tensor]
    group: dict[str, Any]
    step: int
    clip_factor: float = 1.0  # of an adaptive clip norm: what settings in units of the noise are multiplied by

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the state: float64 for float64 parameters, else float32."""
        return torch.float64 if self.parameters[0].dtype == torch.float64 else torch.float32

    def get(self, key: str) -> Tensor:
        """Return the state vector `key`, which starts as zeros."""
        if key not in self.state:
            numel = sum(parameter.numel() for parameter in self.parameters)
            self.state[key] = torch.zeros(numel, dtype=self.state_dtype(key), device=self.parameters[0].device)
        return self.state[key]

    def state_dtype(self, key: str) -> torch.dtype:
        """Return the dtype of the state vector `key`: integers for remainders of bfloat16; see `values`."""
        is_short = {parameter.dtype for parameter in self.parameters} <= {torch.bfloat16, torch.float32}
        return torch.int16 if key == "rounding" and is_short else self.dtype

    def flat(self, by_name: Mapping[str, Tensor]) -> Tensor:
        """Concatenate tensors of the parameters' shapes into one vector, for reading."""
        return flatten([own_part(by_name[name]) for name in self.names], self.dtype)

    @property
    def rounds(self) -> bool:
        """Whether a parameter is stored in fewer bits than the state."""
        return any(parameter.dtype != self.dtype for parameter in self.parameters)

    def values(self) -> Tensor:
        """Return the parameters, with what rounding removed from them, as one vector for reading.

        An update is often smaller than half of the last bit of a 16-bit parameter and would be lost in every step. So
        `state["rounding"]` keeps the remainder. It is used only where value + remainder rounds to the stored value. So
        a parameter that is set from outside changes by at most half of its last bit. A bfloat16 number is the upper
        half of a float32 word, so its remainder is the difference of two words, which 16 bits hold up to the last bit.
        """
        stored = self._stored()
        if not self.rounds:
            return stored
        rounding = self.get("rounding")
        is_word = rounding.dtype == torch.int16
        whole = (stored.view(torch.int32) + rounding).view(stored.dtype) if is_word else stored + rounding
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
        rounding = self.get("rounding")
        if rounding.dtype == torch.int16:
            words = values.view(torch.int32) - self._stored().view(torch.int32)
            rounding.copy_(words.clamp_(-(2**15), 2**15 - 1))
        else:
            torch.sub(values, self._stored(), out=rounding)

    def average_(self, decay: float) -> None:
        """Include the parameters in state["average"]: their mean, exponential from step 1/(1 - decay) on."""
        self.get("average").lerp_(self.values(), max(1 - decay, 1 / self.step))

    def _stored(self) -> Tensor:
        return self.flat(dict(zip(self.names, self.parameters, strict=True)))

    def split(self, vector: Tensor) -> list[Tensor]:
        """Split a vector into views of the parameters' shapes."""
        return unflatten(vector, self.parameters)
