"""The kinds of noise a plan can name, and what each must give once the number of steps is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from dpoptim.noise.key import NoiseKey
from dpoptim.noise.series import Series, sqrt_series
from dpoptim.noise.stream import NoiseStream
from dpoptim.noise.toeplitz import Matrix, ToeplitzStrategy, check_steps, optimized_bands


class Strategy(Protocol):
    """A strategy matrix C for `steps` steps: the mechanism adds row t of C⁻¹z to the sum of step t.

    With A the prefix-sum workload, the noise on the prefix sums is AC⁻¹z times sensitivity and noise
    multiplier.
    """

    @property
    def steps(self) -> int: ...

    @property
    def sensitivity_is_exact(self) -> bool:
        """Whether `sensitivity` is the exact value, and not an upper bound."""
        ...

    @property
    def column_norm(self) -> float:
        """The largest ‖column of C‖: the sensitivity to one participation."""
        ...

    def sensitivity(self, *, max_participations: int, min_separation: int) -> float:
        """How far Cx moves when one example, present in that pattern with unit norm, is taken out."""
        ...

    def mean_error(self) -> float:
        """‖AC⁻¹‖_F/√steps, root mean square error of the prefix sums, before sensitivity."""
        ...

    def max_error(self) -> float:
        """max_t ‖row t of AC⁻¹‖, the largest root mean square error, before sensitivity."""
        ...

    def strategy_matrix(self) -> Matrix:
        """C as float64 [steps, steps]."""
        ...

    def noising_matrix(self) -> Matrix:
        """C⁻¹ as float64 [steps, steps]."""
        ...

    def row_norms(self) -> Series:
        """‖row t of C⁻¹‖ for each step, float64 [steps]."""
        ...

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
    ) -> NoiseStream:
        """Rows of C⁻¹z for elements [start, start + numel) of the tensor `name`."""
        ...


class StrategySpec(Protocol):
    """A kind of noise, before the number of steps and the pattern of participations are known."""

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> Strategy: ...


@dataclass(frozen=True, kw_only=True)
class Independent:
    """Fresh noise at each step, as in DP-SGD: the matrix mechanism with C = I.

    >>> round(Independent().optimize(steps=3).mean_error() ** 2, 12)  # the mean of 1, 2, 3
    2.0
    """

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> ToeplitzStrategy:
        """C = I for this many steps, whatever the participations."""
        return ToeplitzStrategy(steps=steps, strategy_coefs=(1.0,))


@dataclass(frozen=True, kw_only=True)
class SquareRoot:
    """C = A^(1/2), the square root of the prefix sums: a closed form near the optimum for one participation.

        strategy_coefs = 1, 1/2, 3/8, 5/16, ...

    Its rows need no memory, but row t costs t + 1 rows of normals.

    >>> SquareRoot().optimize(steps=4).strategy_coefs
    (1.0, 0.5, 0.375, 0.3125)
    """

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> ToeplitzStrategy:
        """The square root for this many steps, whatever the participations."""
        check_steps(steps)
        return ToeplitzStrategy(steps=steps, strategy_coefs=tuple(sqrt_series(steps).tolist()))


@dataclass(frozen=True, kw_only=True)
class BandedToeplitz:
    """The banded Toeplitz C of least mean error for one participation (and for any at separation ≥ bands).

        minimise  mean_error·column_norm  over  (1, c_1, ..., c_{bands-1})

    With separation ≥ bands the participations do not overlap, which is also what amplification by
    sampling needs.

    Edge cases: bands = 1 is independent noise.

    >>> strategy = BandedToeplitz(bands=16).optimize(steps=256)
    >>> round(strategy.mean_error() * strategy.column_norm, 6)
    3.637574
    """

    bands: int

    def __post_init__(self) -> None:
        if self.bands < 1:
            raise ValueError(f"bands={self.bands} must be at least 1; bands=1 is independent noise")

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> ToeplitzStrategy:
        """The best coefficients for this many steps, by L-BFGS; a second call is answered from memory.

        The participations change nothing: they are taken to lie at least `bands` steps apart.
        """
        check_steps(steps)
        if self.bands > steps:
            raise ValueError(f"bands={self.bands} exceeds steps={steps}; use at most {steps} bands")
        return optimized_bands(steps, self.bands)
