"""Confidence intervals: Student's over seeds, of values and of paired differences, and Wilson's of a share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import ndtri, stdtrit

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    """mean ± half_width; half_width is None for a single value."""

    mean: float
    half_width: float | None

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside; never for a single value."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def mean_interval(values: Sequence[float]) -> Interval:
    """Compute mean ± t_{(1 + CONFIDENCE)/2, n−1}·s/√n; the mean is infinite if a value is not finite (it diverged)."""
    count = len(values)
    if not all(math.isfinite(value) for value in values):
        return Interval(mean=math.inf, half_width=None)
    mean = statistics.fmean(values)
    if count == 1:
        return Interval(mean=mean, half_width=None)
    quantile = float(stdtrit(count - 1, (1.0 + CONFIDENCE) / 2))
    return Interval(mean=mean, half_width=quantile * statistics.stdev(values) / math.sqrt(count))


def paired_difference(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Compute the mean of valueᵢ − otherᵢ, paired by seed, with its interval; it is infinite if either diverged."""
    return mean_interval([one - other for one, other in zip(values, others, strict=True)])


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's interval of a share that was measured on `count` independent cases, such as an accuracy.

    >>> low, high = share_interval(1.0, 100)
    >>> f"{low:.3f} {high:.3f}"
    '0.963 1.000'
    """
    z = float(ndtri((1.0 + CONFIDENCE) / 2))
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return middle - half, middle + half
