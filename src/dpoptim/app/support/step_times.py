"""How long steps take, told so coarsely that it says little of the batches.

A step's time follows the size of its secret batch closely (a correlation of 0.93 was measured). A mean over ten steps
or more, with two digits, is what people need to see; what it still tells is not covered by the guarantee. The means are
of blocks that share no step: the difference of two means over a sliding window would be that of two single steps.
"""

from __future__ import annotations

LEAST_STEPS = 10


class StepTimes:
    """The mean over the last whole block of `over` steps, at least ten of them.

    >>> times = StepTimes(over=10)
    >>> found = [times.add(1.0 if step < 10 else 2.0) for step in range(21)]
    >>> found[8:11], found[18:]
    ([None, 1.0, 1.0], [1.0, 2.0, 2.0])
    """

    def __init__(self, *, over: int) -> None:
        self._over = max(LEAST_STEPS, over)
        self._block: list[float] = []
        self._mean: float | None = None

    def add(self, seconds: float) -> float | None:
        """Take in a step; the mean of the last whole block with two digits, None before there is one."""
        self._block.append(seconds)
        if len(self._block) == self._over:
            self._mean = two_digits(sum(self._block) / self._over)
            self._block = []
        return self._mean


def two_digits(value: float) -> float:
    """Rounded to two significant digits.

    >>> two_digits(0.012345), two_digits(1234.5)
    (0.012, 1200.0)
    """
    return float(f"{value:.2g}")
