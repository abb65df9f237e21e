"""Noisy counts of a table's values, released before training: what they cost and what they may expose."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpoptim.arguments import check_number, set_whole
from dpoptim.privacy.accounting import gaussian_epsilon, gaussian_noise_multiplier
from dpoptim.privacy.adjacency import Adjacency


@dataclass(frozen=True, kw_only=True)
class ColumnCounts:
    """How often values occur in the columns of a table, with Gaussian noise; rare values stay hidden.

    Each of `releases` counts, in each of `columns`, how many examples have each value. A value that nobody declared is
    reported only if its noisy count exceeds `threshold`.

    Args:
        columns: How many columns are counted; an example adds 1 to one count of each.
        releases: How often they are counted. A later release may depend on an earlier one.
        stddev: The standard deviation of the noise on each count.
        threshold: The noisy count that a value must exceed, at least 1.

    Guarantee: in counts of a fixed list of values, an example moves one count per column by 1 (under REPLACE, two
    counts), so all releases are one Gaussian mechanism of sensitivity √(columns·releases) (times √2). The list may hold
    a value that one neighbour lacks: it has a count of at most 1, and then the other neighbour reports the same unless
    1 + noise > threshold. That probability adds to δ, once per column, release and neighbour that has such a value.

    >>> counts = ColumnCounts.calibrate(epsilon=0.5, delta=1e-6, columns=4, releases=2, adjacency=Adjacency.ZERO_OUT)
    >>> round(counts.stddev, 1), round(counts.threshold, 1), round(counts.epsilon(Adjacency.ZERO_OUT, delta=1e-6), 6)
    (23.6, 125.8, 0.5)
    """

    columns: int
    releases: int
    stddev: float
    threshold: float

    def __post_init__(self) -> None:
        set_whole(self, "columns")
        set_whole(self, "releases")
        check_number("stddev", self.stddev, above=0.0)
        check_number("threshold", self.threshold, low=1.0)

    @classmethod
    def calibrate(
        cls, *, epsilon: float, delta: float, columns: int, releases: int, adjacency: Adjacency
    ) -> ColumnCounts:
        """Return counts that alone are (ε, δ)-private; half of δ is for values that only one example has."""
        from scipy.special import ndtri

        unit = cls(columns=columns, releases=releases, stddev=1.0, threshold=1.0)
        stddev = gaussian_noise_multiplier(epsilon, delta / 2) * unit.shift(adjacency) * (1.0 + 1e-9)
        threshold = 1.0 - stddev * float(ndtri(delta / 2 * (1.0 - 1e-9) / unit._exposures(adjacency)))
        return cls(columns=columns, releases=releases, stddev=stddev, threshold=threshold)

    def shift(self, adjacency: Adjacency) -> float:
        """Return how far neighbours lie apart, in standard deviations of the noise."""
        return math.sqrt(self._exposures(adjacency)) / self.stddev

    def exposed_delta(self, adjacency: Adjacency) -> float:
        """Return the δ for values that only one neighbour has."""
        from scipy.special import ndtr

        return self._exposures(adjacency) * float(ndtr((1.0 - self.threshold) / self.stddev))

    def epsilon(self, adjacency: Adjacency, *, delta: float) -> float:
        """Return ε of the counts alone."""
        rest = delta - self.exposed_delta(adjacency)
        return gaussian_epsilon(1.0 / self.shift(adjacency), rest) if rest > 0 else math.inf

    def describe(self, adjacency: Adjacency) -> str:
        return (
            f"noisy counts of the values of {self.columns} column{'s' * (self.columns > 1)}, released {self.releases} "
            f"times; standard deviation {self.stddev:.6g}, L2 sensitivity {self.shift(adjacency) * self.stddev:.6g}; "
            f"undeclared values are reported above {self.threshold:.6g}, which adds {self.exposed_delta(adjacency):.3g}"
            " to delta. The epsilon above includes them. A blank record has no value in any column"
        )

    def _exposures(self, adjacency: Adjacency) -> int:
        return self.columns * self.releases * adjacency.sensitivity_factor
