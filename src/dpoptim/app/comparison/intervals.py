"""Student's confidence intervals over seeds, of values and of paired differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

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
