"""ε as people read it: rounded up, never down, in every table, page and line."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal


def format_epsilon(epsilon: float) -> str:
    """ε to read, with four decimals (more below 0.01).

    Guarantee: never below the number itself, to the last bit of the float: no smaller claim than the accountant's.

    >>> format_epsilon(7.99991), format_epsilon(8.0), format_epsilon(8.00001), format_epsilon(0.000123456), format_epsilon(math.inf)
    ('8.0000', '8.0000', '8.0001', '0.0001235', '∞')
    """
    if not math.isfinite(epsilon):
        return "∞"
    exact = Decimal(epsilon)
    decimals = 4 if exact == 0 or exact >= Decimal("0.01") else 3 - exact.adjusted()
    return format(exact.quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_CEILING), "f")
