"""ε of the first t steps of a run."""

from __future__ import annotations

import bisect
import functools
import math

from dpoptim.noise import Independent
from dpoptim.privacy import CyclicPoisson, PrivacyPlan

_POINTS = 20
WHOLE_RUN = "the whole run's: correlated noise is accounted for all steps at once"


class EpsilonSpent:
    """An upper bound on ε after each step: the accountant's own value at the next of some 25 steps.

    With independent noise the first t steps are a run of t steps with the same noise multiplier. With correlated noise
    the accountant covers the run as a whole; then its ε is spent from the first step on, and `note` says so.

    >>> plan = PrivacyPlan(num_examples=1000, batch_size=100, steps=30).calibrate(epsilon=8.0, delta=1e-6)
    >>> spent = EpsilonSpent(plan)
    >>> spent.at(0), spent.at(10) < spent.at(30) <= 8.0, spent.note
    (0.0, True, None)
    """

    def __init__(self, plan: PrivacyPlan) -> None:
        self._plan = plan
        partial = isinstance(plan.noise, Independent) and not isinstance(plan.sampling, CyclicPoisson)
        self.note = None if partial else WHOLE_RUN
        by_share = {math.ceil(plan.steps * part / _POINTS) for part in range(1, _POINTS + 1)}
        by_doubling = {2**power for power in range(plan.steps.bit_length()) if 2**power <= plan.steps // _POINTS}
        self._grid = sorted(by_share | by_doubling) if partial else [plan.steps]
        self._value = functools.cache(self._epsilon)

    def at(self, step: int) -> float:
        """After `step` steps."""
        if step <= 0:
            return 0.0
        return self._value(self._grid[bisect.bisect_left(self._grid, step)])

    def _epsilon(self, steps: int) -> float:
        return self._plan.replace(steps=steps).epsilon() if steps < self._plan.steps else self._plan.epsilon()
