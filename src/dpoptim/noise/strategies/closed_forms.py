"""Strategies that need no search: independent noise, and the square root of the prefix sums."""

from __future__ import annotations

from dataclasses import dataclass

from dpoptim.noise.series import sqrt_series
from dpoptim.noise.strategies.base import check_participation
from dpoptim.noise.strategies.toeplitz import ToeplitzStrategy


@dataclass(frozen=True, kw_only=True)
class Independent:
    """Fresh noise at each step, as in DP-SGD: the matrix mechanism with C = I.

    >>> round(Independent().optimize(steps=3).mean_error() ** 2, 12)  # the mean of 1, 2, 3
    2.0
    """

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> ToeplitzStrategy:
        """C = I for this many steps, whatever the participations."""
        check_participation(steps, max_participations, min_separation)
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
        check_participation(steps, max_participations, min_separation)
        return ToeplitzStrategy(steps=steps, strategy_coefs=tuple(sqrt_series(steps).tolist()))
