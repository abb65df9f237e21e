"""How well in and out may be told apart at the most: the plan's whole curve, not its one (ε, δ)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpoptim.app.audit.chance import upper_limit
from dpoptim.app.audit.check import Check
from dpoptim.privacy import PrivacyPlan

Floats = NDArray[np.float64]

_LARGE = np.linspace(0.05, 0.9, 25)
_THRESHOLDS = tuple(range(-8, 9))  # of a score, which is a logarithm of likelihoods; chosen before anything is seen


@dataclass(frozen=True, kw_only=True, eq=False)
class TradeOff:
    """Pairs (ε, δ) that all hold for one plan."""

    epsilons: Floats
    deltas: Floats

    def least_missed(self, wrong: Floats | float) -> Floats:
        """The least rate at which those in are taken for out, where those out are taken for in at the rate `wrong`.

        (ε, δ) allows no less than 1 − δ − e^ε·wrong, and no less than e^−ε·(1 − δ − wrong); each pair counts.
        """
        rates = np.asarray(wrong, dtype=np.float64)[..., None]
        steep = 1.0 - self.deltas - np.exp(self.epsilons) * rates
        flat = np.exp(-self.epsilons) * (1.0 - self.deltas - rates)
        return np.asarray(np.maximum(0.0, np.maximum(steep, flat)).max(axis=-1))


def trade_off_of(plan: PrivacyPlan) -> TradeOff:
    """The plan's curve at its own δ and at larger ones."""
    assert plan.delta is not None
    small = np.geomspace(plan.delta, 0.03, 15)
    deltas = np.concatenate([[plan.delta], small[small > plan.delta], _LARGE[plan.delta < _LARGE]])
    epsilons = np.array([plan.epsilon(delta=float(delta)) for delta in deltas])
    return TradeOff(epsilons=epsilons, deltas=deltas)


def errors_check(allowed: TradeOff, scores: Floats, included: NDArray[np.bool_], *, confidence: float) -> Check:
    """Whether the attack errs as often as it must, at thresholds that were fixed before; canaries are own trials."""
    inside, outside = scores[included], scores[~included]
    error = (1.0 - confidence) / (2 * len(_THRESHOLDS))
    closest, contradicted = math.inf, []
    for threshold in _THRESHOLDS:
        missed, wrong = int((inside <= threshold).sum()), int((outside > threshold).sum())
        if upper_limit(missed, len(inside), error) < allowed.least_missed(upper_limit(wrong, len(outside), error)):
            contradicted.append(threshold)
        least = float(allowed.least_missed(wrong / len(outside)))
        if min(missed, wrong) >= 500 and least > 0:  # enough of both to tell a ratio
            closest = min(closest, missed / len(inside) / least)
    found = f"{len(contradicted)} of {len(_THRESHOLDS)} thresholds err less than the plan allows"
    if not contradicted:
        found = "at every threshold as many as the plan must cause"
        if math.isfinite(closest):
            found += f"; at the closest {closest:.3f} times as many, where chance explains 0.9 and more"
    return Check(name="the attack's errors", passed=not contradicted, found=found)
