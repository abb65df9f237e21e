"""How likely something is by chance, for checks that must not cry wolf."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc, betaincinv, chdtr, chdtrc

Floats = NDArray[np.float64]

UNLIKELY = 1e-6
"""A check fails where chance would do it with less than this probability, all that it looks at taken together."""


def correlation_chance(total: float, count: int) -> float:
    """At most this is the probability that `count` products of independent unit normals sum to ±`total` or further.

    Chernoff: a product's moment generating function is (1 − θ²)^−½.

    >>> correlation_chance(0.0, 100), 1e-6 < correlation_chance(50.0, 100) < 1e-4
    (1.0, True)
    """
    mean = abs(total) / count
    if mean == 0.0:
        return 1.0
    slope = (math.sqrt(1.0 + 4.0 * mean**2) - 1.0) / (2.0 * mean)
    return min(1.0, 2.0 * math.exp(-count * (slope * mean + 0.5 * math.log1p(-(slope**2)))))


def squares_chance(total: Floats, count: int) -> Floats:
    """Of sums of `count` squared unit normals: the chance to lie as far out, on either side."""
    return np.minimum(1.0, 2.0 * np.minimum(chdtr(count, total), chdtrc(count, total)))


def count_chance(found: NDArray[np.int64] | int, of: int, rate: float, *, only_more: bool = False) -> Floats:
    """Of binomial counts: the chance to have as many or more, or, unless `only_more`, to lie as far out on either side.

    >>> round(float(count_chance(10, 10, 0.5, only_more=True)) * 1024, 9)
    1.0
    """
    counts = np.asarray(found, dtype=np.float64)
    more = np.where(counts <= 0, 1.0, bdtrc(np.maximum(counts - 1, 0), of, rate))
    if only_more:
        return np.asarray(more)
    return np.minimum(1.0, 2.0 * np.minimum(more, bdtr(counts, of, rate)))


def upper_limit(count: int, of: int, error: float) -> float:
    """Of the rate behind `count` cases (Clopper and Pearson): it lies above with probability at most `error`.

    >>> round(upper_limit(0, 10, 0.05), 4)
    0.2589
    """
    return 1.0 if count == of else float(betaincinv(count + 1, of - count, 1.0 - error))
