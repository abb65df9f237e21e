"""What the averaged clipped gradient looks like: how long it is, and how its squares lie over the coordinates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpoptim.noise.series import Series

PAPER_NORM = 0.27
"""‖g_t‖/ζ, the mean over the steps of fine-tuning BERT-Tiny in the paper: what is assumed where nothing is measured."""


@dataclass(frozen=True, kw_only=True)
class GradientSignal:
    """E g_i²/ζ² of the averaged clipped gradient at the training's batch size, as groups of coordinates.

    `weights[k]` of the `parameters` coordinates have the square `squares[k]`, in units of the squared clip norm ζ².
    `measured` says whether the numbers come from (public) gradients or are assumed; `agreement` is ‖g‖ over the mean
    norm of the clipped gradients of the examples (1 where they all point the same way), and `example_norms` are the
    10, 50 and 90 % points of the norms of their gradients before clipping, in gradient units.

    >>> signal = GradientSignal(parameters=100, squares=(0.0, 2e-4), weights=(0.5, 0.5))
    >>> round(signal.norm, 6), signal.median, round(signal.share_above(1e-4), 6)
    (0.1, 0.0001, 1.0)
    """

    parameters: int
    squares: tuple[float, ...]
    weights: tuple[float, ...]
    measured: bool = False
    examples: int = 0
    agreement: float = PAPER_NORM
    example_norms: tuple[float, float, float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.parameters, bool) or not isinstance(self.parameters, int) or self.parameters < 1:
            raise ValueError(f"parameters={self.parameters!r} must be the number of trained parameters, at least 1")
        if not self.squares or len(self.squares) != len(self.weights):
            raise ValueError(f"squares has {len(self.squares)} groups and weights {len(self.weights)}; give as many")
        if not all(0 <= square < math.inf for square in self.squares):
            raise ValueError("squares must be finite numbers of at least 0, in units of the squared clip norm")
        if not all(weight >= 0 for weight in self.weights) or abs(sum(self.weights) - 1) > 1e-6:
            raise ValueError(f"weights must be shares of the coordinates that add up to 1, not {sum(self.weights)}")
        if not 0 <= self.agreement <= 1:
            raise ValueError(f"agreement={self.agreement} must lie in [0, 1]")

    @classmethod
    def evenly(cls, *, parameters: int, norm: float = PAPER_NORM) -> GradientSignal:
        """ASSUMED: ‖g‖ = norm·ζ, spread evenly, g_i² = (norm·ζ)²/m in each of the m coordinates.

        The kindest spread: the chance of a negative ν̂ falls with g² and is convex in it (under correlated noise all
        but straight where g² is small), so another spread of the same norm has more negative coordinates (Jensen).

        >>> GradientSignal.evenly(parameters=100, norm=1.0).squares
        (0.01,)
        """
        if not 0 < norm <= 1:
            raise ValueError(f"norm={norm} must lie in (0, 1]: an average of clipped gradients is no longer than ζ")
        return cls(parameters=parameters, squares=(norm**2 / parameters,), weights=(1.0,), agreement=norm)

    @property
    def mean(self) -> float:
        """The mean of g_i²/ζ² over the coordinates."""
        return float(np.dot(self.weights, self.squares))

    @property
    def norm(self) -> float:
        """√E‖g‖²/ζ."""
        return math.sqrt(self.parameters * self.mean)

    @property
    def median(self) -> float:
        """Half of the coordinates lie at or below; between two groups, their mean."""
        order = np.argsort(self.squares)
        squares, upto = np.asarray(self.squares)[order], np.cumsum(np.asarray(self.weights)[order])
        below = squares[int(np.searchsorted(upto, 0.5 - 1e-12))]
        above = squares[min(int(np.searchsorted(upto, 0.5 + 1e-12)), len(squares) - 1)]
        return float(below + above) / 2

    def average(self, values: Series) -> float:
        """The mean over the coordinates of a quantity given for each group."""
        return float(np.dot(self.weights, values))

    def share_above(self, level: float) -> float:
        """The part of ‖g‖² that lies in coordinates with g_i²/ζ² ≥ level; 0 where there is no gradient."""
        squares, weights = np.asarray(self.squares), np.asarray(self.weights)
        return float(np.dot(weights, squares * (squares >= level)) / self.mean) if self.mean else 0.0
