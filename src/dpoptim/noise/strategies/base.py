"""What every strategy gives once the number of steps is known: sensitivity, errors, rows of noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from dpoptim.noise.key import NoiseKey
from dpoptim.noise.memory import NoiseMemory
from dpoptim.noise.series import Series
from dpoptim.noise.source import NormalSource, TensorPart
from dpoptim.noise.streams import HostStream, NoiseStream
from dpoptim.noise.workloads import Matrix, PrefixSums, Workload


class Strategy(ABC):
    """A strategy matrix C for `steps` steps: the mechanism adds row t of C⁻¹z to the sum of step t.

    With A the workload, the noise on what the optimizer makes of the sums is AC⁻¹z times sensitivity and noise
    multiplier.
    """

    steps: int

    @property
    @abstractmethod
    def bands(self) -> int:
        """The number of diagonals of C, up to the last that is not zero."""

    @property
    @abstractmethod
    def sensitivity_is_exact(self) -> bool:
        """Whether `sensitivity` is the exact value, and not an upper bound, whatever the pattern."""

    @property
    @abstractmethod
    def column_norm(self) -> float:
        """The largest ‖column of C‖: the sensitivity to one participation."""

    @abstractmethod
    def sensitivity(self, *, max_participations: int, min_separation: int) -> float:
        """How far Cx moves when one example, present in that pattern with unit norm, is taken out.

        max_participations is "at most": of more than fit into the steps, as many as fit.
        """

    def is_exact_for(self, *, max_participations: int, min_separation: int) -> bool:
        """Whether `sensitivity` of this pattern is the exact value, and not an upper bound."""
        return self.sensitivity_is_exact

    @abstractmethod
    def squared_errors(self, workload: Workload = PrefixSums()) -> Series:  # noqa: B008
        """‖row t of AC⁻¹‖² for each step, float64 [steps]; before sensitivity."""

    def mean_error(self, workload: Workload = PrefixSums()) -> float:  # noqa: B008
        """‖AC⁻¹‖_F/√steps, root mean square error of the workload, by default prefix sums; before sensitivity."""
        return float(np.sqrt(self.squared_errors(workload).mean()))

    def max_error(self, workload: Workload = PrefixSums()) -> float:  # noqa: B008
        """max_t ‖row t of AC⁻¹‖, the largest root mean square error; before sensitivity."""
        return float(np.sqrt(self.squared_errors(workload).max()))

    @abstractmethod
    def strategy_matrix(self) -> Matrix:
        """C as float64 [steps, steps]."""

    @abstractmethod
    def noising_matrix(self) -> Matrix:
        """C⁻¹ as float64 [steps, steps]."""

    @abstractmethod
    def row_norms(self) -> Series:
        """‖row t of C⁻¹‖ for each step, float64 [steps]."""

    @property
    def kept_rows(self) -> int:
        """How many numbers a stream keeps between steps for each element of a tensor.

        The bands - 1 past rows; none where C is full, as its old normals are made again.
        """
        return 0 if self.bands == self.steps else self.bands - 1

    @property
    def normal_rows(self) -> float:
        """How many rows of normals a streamed row is made of, on average over the steps."""
        return (self.steps + 1) / 2 if self.bands == self.steps else 1.0

    def memory_bytes(self, parameters: int, *, memory: NoiseMemory = NoiseMemory()) -> int:  # noqa: B008
        """What the streams of that many float32 parameters keep between steps, in bytes."""
        if parameters < 0:
            raise ValueError(f"parameters={parameters} is negative; give the number of trained parameters")
        return self.kept_rows * parameters * memory.bytes_per_number

    def stream(
        self,
        key: NoiseKey,
        *,
        stream: str,
        name: str,
        numel: int,
        start: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        memory: NoiseMemory = NoiseMemory(),  # noqa: B008
    ) -> NoiseStream:
        """Rows of C⁻¹z for elements [start, start + numel) of the tensor `name`, in noise `stream`.

        `memory` says in how many bits the past is kept and where; the rows come on `device`.
        """
        part = TensorPart(name=name, numel=numel, start=start)
        return self.stream_of(key, [part], stream=stream, dtype=dtype, device=device, memory=memory)

    def stream_of(
        self,
        key: NoiseKey,
        parts: Sequence[TensorPart],
        *,
        stream: str,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        memory: NoiseMemory = NoiseMemory(),  # noqa: B008
    ) -> NoiseStream:
        """The same for many tensors, their rows end to end: what each gets is what it would get alone."""
        where = "cpu" if memory.on_host else device
        source = NormalSource(key=key, stream=stream, parts=tuple(parts), dtype=dtype, device=where)
        made = self._rows(source, memory)
        return HostStream(made, device) if memory.on_host and torch.device(device).type != "cpu" else made

    @abstractmethod
    def _rows(self, source: NormalSource, memory: NoiseMemory) -> NoiseStream: ...


class StrategySpec(Protocol):
    """A kind of noise, before the number of steps and the pattern of participations are known."""

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> Strategy: ...


def check_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")


def check_bands(bands: int, steps: int | None = None) -> None:
    if isinstance(bands, bool) or not isinstance(bands, int) or bands < 1:
        raise ValueError(f"bands={bands!r} must be a whole number, at least 1; bands=1 is independent noise")
    if steps is not None and bands > steps:
        raise ValueError(f"bands={bands} exceeds steps={steps}; use at most {steps} bands")


def fitting_participations(steps: int, max_participations: int, min_separation: int) -> int:
    """max_participations, or as many as fit into the steps at that separation, if those are fewer.

    An example cannot take part more often than that, so "at most max_participations" means no other patterns.

    >>> [fitting_participations(16, count, 8) for count in (1, 2, 3, 100)]
    [1, 2, 2, 2]
    """
    check_steps(steps)
    if max_participations < 1:
        raise ValueError(f"max_participations={max_participations} must be at least 1")
    if min_separation < 1:
        raise ValueError(f"min_separation={min_separation} must be at least 1")
    return min(max_participations, (steps - 1) // min_separation + 1)


def check_participation(steps: int, max_participations: int, min_separation: int) -> None:
    """For those who state a pattern to make a strategy for: one that does not fit is a mistake in it."""
    most = fitting_participations(steps, max_participations, min_separation)
    if max_participations > most:
        raise ValueError(
            f"max_participations={max_participations} at min_separation={min_separation} do not fit into "
            f"steps={steps}; use max_participations={most} or fewer"
        )
