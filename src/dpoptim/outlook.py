"""Whether a plan can train at all, from public numbers alone: its noise beside the largest possible signal."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

GOOD, HOPELESS = 0.5, 1.0  # noise-to-signal ratios; benchmarks/outlook.py shows what they cost


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The noise of a plan beside its largest possible signal: all gradients at the clip norm, in one direction.

    Attributes:
        parameters: How many parameters are trained.
        noise_to_signal: The norm of the noise in the sum of all steps, over that of the signal. For independent noise
            this is noise_multiplier·√parameters/(batch_size·√steps).
    """

    parameters: int
    noise_to_signal: float

    @property
    def verdict(self) -> str:
        """good, poor or hopeless."""
        if self.noise_to_signal >= HOPELESS:
            return "hopeless"
        return "good" if self.noise_to_signal <= GOOD else "poor"

    def __str__(self) -> str:
        """One line, and what would help if the outlook is not good.

        >>> print(Outlook(parameters=10**6, noise_to_signal=0.1))
        good: the noise of the whole run is 0.1 times the largest possible signal
        """
        if not self.noise_to_signal:
            return "good: no noise is added"
        ratio = f"{_rounded_up(self.noise_to_signal)} times the largest possible signal"
        found = f"{self.verdict}: the noise of the whole run is {ratio}"
        if self.verdict == "good":
            return found
        less = self.noise_to_signal / GOOD
        fewer = max(1, int(self.parameters / less**2))
        return (
            f"{found} (good is {GOOD:g} or less). A good outlook needs {_rounded_up(less)} times less noise (a larger "
            f"batch, epsilon or dataset), or at most {fewer:,} trained parameters (a smaller model, LoRA, frozen "
            "layers)"
        )


def _rounded_up(value: float) -> str:
    """Two digits without an exponent.

    >>> [_rounded_up(value) for value in (0.1, 1.02, 17649.3)]
    ['0.1', '1.1', '18,000']
    """
    return f"{Context(prec=2, rounding=ROUND_CEILING).create_decimal(repr(float(value))):,f}"
