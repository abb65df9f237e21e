"""Buffered linear Toeplitz strategies: correlated noise whose memory is a handful of buffers, whatever the steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dpoptim.noise.memory import NoiseMemory
from dpoptim.noise.powers import noising_series, powers
from dpoptim.noise.search.buffered_search import optimized_buffers
from dpoptim.noise.search.objective import Objective, SearchObjective
from dpoptim.noise.series import Series, divide
from dpoptim.noise.source import NormalSource
from dpoptim.noise.strategies.base import check_steps
from dpoptim.noise.strategies.short_repr import ShortRepr
from dpoptim.noise.strategies.toeplitz import ToeplitzStrategy, convolved
from dpoptim.noise.streams import BufferedStream, NoiseStream
from dpoptim.noise.workloads import PrefixSums, Workload, check_workload


@dataclass(frozen=True, kw_only=True, repr=False)
class BufferedToeplitz(ShortRepr):
    """The Toeplitz C of least error whose coefficients are a sum of at most `buffers` decaying exponentials.

        minimise  error·sensitivity  over  c_0 = 1,  c_i = Σ_j weights[j]·decays[j]^(i-1)

    with `error` the mean or the max error of the workload, as `objective` says. Buffered linear Toeplitz
    (BLT) noise: nearly as good as dense C, in the memory of a few rows and the time of as many sums.

    Guarantee: whatever the search finds is non-negative and non-increasing, so that sensitivity is exact.

    Three buffers by default: their error over that of six, which cost twice the memory, is 1.001 in 2000 steps, 1.0002
    with three participations 128 or 830 steps apart, and 1.008 in 20,000 steps; that of two is 1.015, 1.026 and 1.05.

    Edge cases: a buffer that would not lower the error is left out, so the strategy may have fewer; where no
    correlation helps (one step, or an example present in each) it has none and is independent noise.

    >>> strategy = BufferedToeplitz(buffers=2).optimize(steps=100)
    >>> strategy.buffers, strategy.sensitivity_is_exact
    (2, True)
    >>> round(strategy.mean_error() * strategy.column_norm, 3)  # 2.371 for the square root
    2.321
    """

    buffers: int = field(default=3, metadata={"shown": True})
    objective: Objective = "mean"
    workload: Workload = PrefixSums()  # noqa: RUF009

    def __post_init__(self) -> None:
        check_workload(self.workload)
        if isinstance(self.buffers, bool) or not isinstance(self.buffers, int) or self.buffers < 1:
            raise ValueError(
                f"buffers={self.buffers!r} must be a whole number, at least 1; Independent() is noise without memory"
            )
        if self.objective not in ("mean", "max"):
            raise ValueError(f"objective={self.objective!r} must be 'mean' or 'max'")

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> BufferedToeplitzStrategy:
        """The best buffers for this many steps and that participation; a second call is answered from memory."""
        goal = SearchObjective(
            steps=steps,
            max_participations=max_participations,
            min_separation=min_separation,
            workload=self.workload,
            objective=self.objective,
        )
        decays, weights = optimized_buffers(goal, self.buffers)
        return BufferedToeplitzStrategy(steps=steps, decays=tuple(decays.tolist()), weights=tuple(weights.tolist()))


@dataclass(frozen=True, kw_only=True)
class BufferedToeplitzStrategy(ToeplitzStrategy):
    """The Toeplitz strategy of the buffers (decays, weights), which it is equal and hashed by.

        c_0 = 1,   c_i = Σ_j weights[j]·decays[j]^(i-1)

    Guarantee: decays in [0, 1) and positive weights that sum to at most 1 = c_0 are asked for, so the
    coefficients are non-negative and non-increasing, and `sensitivity` is exact.

    >>> strategy = BufferedToeplitzStrategy(steps=4, decays=(0.5,), weights=(0.25,))
    >>> strategy.strategy_coefs, strategy.noising_coefs.round(12).tolist()
    ((1.0, 0.25, 0.125, 0.0625), [1.0, -0.25, -0.0625, -0.015625])
    """

    strategy_coefs: tuple[float, ...] = field(init=False, repr=False, compare=False)
    decays: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        check_steps(self.steps)
        decays, weights = np.asarray(self.decays, dtype=np.float64), np.asarray(self.weights, dtype=np.float64)
        if decays.shape != weights.shape or decays.ndim != 1:
            raise ValueError(f"weights={self.weights} must be as many as decays={self.decays}")
        if not ((decays >= 0) & (decays < 1)).all():
            raise ValueError(f"decays={self.decays} must lie in [0, 1)")
        if not (weights > 0).all() or not weights.sum() <= 1:
            raise ValueError(
                f"weights={self.weights} must be positive and sum to at most 1; coefficients that increase "
                "have no known sensitivity"
            )
        order = np.argsort(-decays, kind="stable")
        object.__setattr__(self, "decays", tuple(decays[order].tolist()))
        object.__setattr__(self, "weights", tuple(weights[order].tolist()))
        tail = weights[order] @ powers(decays[order], self.steps - 1)
        # Decays within rounding of 1 give equal coefficients, which must not seem to increase by an ulp.
        coefs = np.minimum.accumulate(np.concatenate([[1.0], tail]))
        object.__setattr__(self, "strategy_coefs", tuple(coefs.tolist()))
        super().__post_init__()

    @property
    def buffers(self) -> int:
        """The number of rows a stream keeps."""
        return len(self.decays)

    @cached_property
    def noising_coefs(self) -> Series:
        """The first column of C⁻¹, float64 [steps], read-only: the coefficients of the buffers of 1/c."""
        coefs = noising_series(self.decays, self.weights, self.steps)
        coefs.flags.writeable = False
        return coefs

    @property
    def kept_rows(self) -> int:
        return self.buffers

    @property
    def normal_rows(self) -> float:
        return 1.0

    def _rows(self, source: NormalSource, memory: NoiseMemory) -> NoiseStream:
        """
        >>> from dpoptim.noise import NoiseKey
        >>> key = NoiseKey.from_bytes(bytes(32))
        >>> strategy = BufferedToeplitzStrategy(steps=1000, decays=(0.99, 0.5), weights=(0.1, 0.3))
        >>> stream = strategy.stream(key, stream="gradient", name="weight", numel=5)
        >>> stream.row(0).shape, stream.memory_bytes == strategy.memory_bytes(5) == 40
        (torch.Size([5]), True)
        """
        if not self.decays:
            return convolved(source, [1.0], steps=self.steps)
        return BufferedStream(
            source,
            decays=self.decays,
            weights=self.weights,
            buffer_norms=self._buffer_norms,
            steps=self.steps,
            memory=memory,
        )

    @cached_property
    def _buffer_norms(self) -> list[float]:
        """The largest standard deviation of each buffer, Σ_i decay^i·y_{t-i}, over the steps."""
        return [float(np.linalg.norm(divide(self.noising_coefs, [1.0, -decay], self.steps))) for decay in self.decays]
