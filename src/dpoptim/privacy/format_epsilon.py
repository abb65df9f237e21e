"""Format ε for people: rounded up, never down."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal


def format_epsilon(epsilon: float) -> str:
    """Return ε with four decimals, or more below 0.01.

    Guarantee: the text never claims a smaller ε than the accountant's.

    >>> [format_epsilon(value) for value in (7.99991, 8.0, 8.00001, 0.000123456, math.inf)]
    ['8.0000', '8.0000', '8.0001', '0.0001235', '∞']
    """
    if not math.isfinite(epsilon):
        return "∞"
    exact = Decimal(epsilon)
    decimals = 4 if exact == 0 or exact >= Decimal("0.01") else 3 - exact.adjusted()
    return format(exact.quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_CEILING), "f")
