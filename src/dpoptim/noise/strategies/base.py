"""The interface of every strategy, the pattern of participations, and strategies as checkpoint values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
import torch

from dpoptim.arguments import check_whole
from dpoptim.noise.exact import ExactStream
from dpoptim.noise.key import NoiseKey
from dpoptim.noise.normals import NormalSource, TensorPart
from dpoptim.noise.search.workloads import Matrix, PrefixSums, Workload
from dpoptim.noise.series import Series
from dpoptim.noise.streams import HostStream, NoiseMemory, NoiseStream


class Strategy(ABC):
    """A strategy matrix C for `steps` steps: the mechanism adds row t of C⁻¹z to the sum of step t.

    With workload A, the noise on the optimizer's result is AC⁻¹z times sensitivity and noise multiplier.

    Guarantee: a strategy validates its own coefficients and computes its own sensitivity, so ε does not depend on
    how the coefficients were found.
    """

    steps: int

    @property
    @abstractmethod
    def bands(self) -> int:
        """The number of diagonals of C up to the last non-zero one."""

    @property
    @abstractmethod
    def sensitivity_is_exact(self) -> bool:
        """Whether `sensitivity` is exact, not only an upper bound, for every participation pattern."""

    @property
    @abstractmethod
    def column_norm(self) -> float:
        """The largest ‖column of C‖: the sensitivity to one participation."""

    @abstractmethod
    def sensitivity(self, *, max_participations: int, min_separation: int) -> float:
        """Return how far Cx moves when the unit-norm contributions of one example are removed.

        Args:
            max_participations: The most steps in which the example takes part. Larger values count as the number that
                fits into the steps.
            min_separation: The least number of steps between two participations (1: consecutive steps).
        """

    def is_exact_for(self, *, max_participations: int, min_separation: int) -> bool:
        """Return whether `sensitivity` is exact for this participation pattern."""
        return self.sensitivity_is_exact

    @abstractmethod
    def squared_errors(self, workload: Workload = PrefixSums()) -> Series:  # noqa: B008
        """Return ‖row t of AC⁻¹‖² for each step, before multiplying by the sensitivity."""

    def mean_error(self, workload: Workload = PrefixSums()) -> float:  # noqa: B008
        """Return ‖AC⁻¹‖_F/√steps: the root mean square error of the workload, before sensitivity."""
        return float(np.sqrt(self.squared_errors(workload).mean()))

    def max_error(self, workload: Workload = PrefixSums()) -> float:  # noqa: B008
        """Return max_t ‖row t of AC⁻¹‖: the largest root mean square error of a step, before sensitivity."""
        return float(np.sqrt(self.squared_errors(workload).max()))

    @abstractmethod
    def strategy_matrix(self) -> Matrix:
        """Return C as float64 [steps, steps]."""

    @abstractmethod
    def noising_matrix(self) -> Matrix:
        """Return C⁻¹ as float64 [steps, steps]."""

    @abstractmethod
    def noising_row(self, step: int) -> list[float]:
        """Return C⁻¹[t, t], C⁻¹[t, t-1], ... of row t up to the last non-zero entry."""

    @abstractmethod
    def row_norms(self) -> Series:
        """Return ‖row t of C⁻¹‖ for each step, float64 [steps]."""

    @property
    def kept_rows(self) -> int:
        """How many rows a stream stores between steps: bands - 1, or none if C is full."""
        return 0 if self.bands == self.steps else self.bands - 1

    @property
    def normal_rows(self) -> float:
        """How many rows of normals a streamed row needs, averaged over the steps."""
        return (self.steps + 1) / 2 if self.bands == self.steps else 1.0

    def memory_bytes(self, parameters: int, *, memory: NoiseMemory = NoiseMemory()) -> int:  # noqa: B008
        """Return how many bytes the streams of `parameters` float32 parameters store between steps."""
        parameters = check_whole("parameters", parameters, low=0)
        return self.kept_rows * parameters * memory.bytes_per_number

    def stream(
        self,
        key: NoiseKey,
        parts: Sequence[TensorPart],
        *,
        stream: str,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        memory: NoiseMemory = NoiseMemory(),  # noqa: B008
        exact: bool = False,
    ) -> NoiseStream:
        """Return the rows of C⁻¹z for several tensors, concatenated. Each tensor gets the same noise as alone.

        Args:
            key: The secret of the run.
            parts: The tensors or shards, in the order of the row.
            stream: The noise stream, such as "gradient" or "square".
            dtype: float32 or float64.
            device: Where the rows are returned.
            memory: In how many bits, and where, past rows are stored.
            exact: Whether `add_to` rounds a real-valued sum, as in `noise.exact`. No past rows are stored.
        """
        where = "cpu" if memory.on_host else device
        source = NormalSource(key=key, stream=stream, parts=tuple(parts), dtype=dtype, device=where)
        if exact:
            return ExactStream(source, noising_row=self.noising_row, steps=self.steps)
        made = self._stream_from(source, memory)
        return HostStream(made, device) if memory.on_host and torch.device(device).type != "cpu" else made

    @abstractmethod
    def _stream_from(self, source: NormalSource, memory: NoiseMemory) -> NoiseStream: ...


class StrategySpec(Protocol):
    """A kind of noise, before the number of steps and the participation pattern are known."""

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> Strategy:
        """Return the strategy for this many steps and this participation pattern."""
        ...


def fitting_participations(steps: int, max_participations: int, min_separation: int) -> int:
    """Return max_participations, or the number that fits into the steps at that separation if it is smaller.

    >>> [fitting_participations(16, count, 8) for count in (1, 2, 3, 100)]
    [1, 2, 2, 2]
    """
    steps = check_whole("steps", steps)
    max_participations = check_whole("max_participations", max_participations)
    min_separation = check_whole("min_separation", min_separation)
    return min(max_participations, (steps - 1) // min_separation + 1)


def check_participation(steps: int, max_participations: int, min_separation: int) -> None:
    """Check that a pattern to optimize for fits into the steps."""
    most = fitting_participations(steps, max_participations, min_separation)
    if max_participations > most:
        raise ValueError(
            f"{max_participations} participations at min_separation={min_separation} do not fit into {steps} steps. "
            f"Use max_participations={most} or fewer."
        )


def strategy_state(strategy: Strategy) -> dict[str, Any]:
    """Return the strategy as numbers and float64 tensors, for a checkpoint.

    A resumed run needs exactly the same C, and a search may end in different last bits on a different machine.

    >>> from dpoptim.noise import ToeplitzStrategy
    >>> strategy_state(ToeplitzStrategy(steps=3, strategy_coefs=(1.0, 0.5)))
    {'kind': 'ToeplitzStrategy', 'steps': 3, 'strategy_coefs': tensor([1.0000, 0.5000], dtype=torch.float64)}
    """
    state: dict[str, Any] = {"kind": type(strategy).__name__}
    for part in fields(strategy):  # type: ignore[arg-type]
        if part.init:
            value = getattr(strategy, part.name)
            state[part.name] = (
                value if isinstance(value, int) else torch.tensor(value, dtype=torch.float64, device="cpu")
            )
    return state


def saved_strategy(state: Mapping[str, Any], *, like: Strategy) -> Strategy:
    """Return the strategy of a checkpoint.

    Args:
        state: What `strategy_state` returned.
        like: The plan's strategy.

    Raises:
        ValueError: If the two differ by more than rounding.

    >>> from dpoptim.noise import ToeplitzStrategy
    >>> strategy = ToeplitzStrategy(steps=3, strategy_coefs=(1.0, 0.5))
    >>> saved_strategy(strategy_state(strategy), like=strategy) == strategy
    True
    """
    expected = strategy_state(like)
    if state.keys() != expected.keys() or not all(_is_close(state[name], value) for name, value in expected.items()):
        raise ValueError(
            f"The checkpoint's strategy ({state.get('kind')}) differs from the plan's ({type(like).__name__}). "
            "Resume the run with the version of dpoptim that started it."
        )
    values = {name: value for name, value in state.items() if name != "kind"}
    return type(like)(**{name: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for name, v in values.items()})


def _is_close(saved: Any, now: Any) -> bool:
    if not isinstance(now, torch.Tensor):
        return bool(saved == now)
    return saved.shape == now.shape and bool(torch.allclose(saved.cpu(), now, rtol=1e-3, atol=1e-5))
