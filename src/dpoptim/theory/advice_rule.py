"""Which variant to use, by a rule with stated thresholds, and what stands behind it.

Post-processing is Adam on the noisy gradient. Bias correction takes the noise's share out of ν̂ and changes nothing
else. Scale-then-privatize also changes how clipping and noise are spread over the coordinates, which gains where
gradients are uneven and nothing where they are even (a constant scale is only another clip norm).
"""

from __future__ import annotations

import math

from dpoptim.theory.advice_signal import GradientSignal
from dpoptim.theory.second_moments import squared_weight

NEGLIGIBLE_NOISE = 0.1  # of g²: ν̂ is a tenth too large, a step 5 % too short
MANY_NEGATIVE = 0.25  # of the coordinates: there g² is .67 standard deviations of ν̂
LITTLE_GAIN = 0.02  # in the mean share of signal in an update
_FEWEST_SEEN = 0.5  # of ‖g‖², in coordinates where ν̂ can tell it from noise
_LEAST_PART = 0.01  # of the coordinates, into which an uneven gradient may crowd
_NOTHING = (
    "there is nothing to adapt to. Fewer trained parameters, larger batches or more examples would help more than any "
    "variant"
)

EVIDENCE = (
    "Evidence: in the paper's one experiment (BERT-Tiny, masked tokens, three noise levels) scale_then_privatize had "
    "the lowest loss of the private variants at every level: 3.097, 3.423 and 3.659 against 3.251, 3.493 and 3.697 of "
    "post_processing and 3.223, 3.492 and 3.727 of bias_correction. Which wins on your task is for a trial to say, on "
    "public data or within the budget."
)


def choose_variant(
    signal: GradientSignal, *, phi: float, negative: float, shares: tuple[float, float], beta2: float
) -> tuple[str, str]:
    """The rule, and its reason.

    1. φ ≤ .1·g² in half of the coordinates: ν̂ is off by a tenth, steps by 5 %. Post-processing is enough.
    2. Measured, at most 25 % negative, and scaling would gain less than .02 in the share of signal: bias correction,
       which then sees g² and changes nothing else.
    3. Measured, and less than half of ‖g‖² lies where g² exceeds the fluctuation of ν̂, √(2κ)·φ, κ = (1−β₂)/(1+β₂):
       there is nothing to adapt to; post-processing. (With g² even, the likely window of eps_scale is then narrower
       than the fluctuation of √ν̂.)
    4. Assumed, and φ so large that this holds even with all of the gradient in 1 % of the coordinates: likewise.
    5. Otherwise scale-then-privatize. An assumed, even spread cannot tell what scaling gains, and evidence decides; it
       reaches down to a mean g² of about φ/80.
    """
    if phi <= NEGLIGIBLE_NOISE * signal.median:
        share = phi / signal.median if phi else 0.0
        return "post_processing", (
            f"noise adds {share:.1%} to the second moment of the median coordinate, so a step is "
            f"{1 - 1 / math.sqrt(1 + share):.1%} short: there is little to correct"
        )
    excess = f"noise adds {phi / signal.mean:.3g} times" if signal.mean else "noise adds infinitely many times"
    bias = f"{excess} the mean squared gradient to the second moment"
    fluctuation = math.sqrt(2 * squared_weight(beta=beta2))
    if signal.measured:
        gain = shares[1] - shares[0]
        if negative <= MANY_NEGATIVE and gain < LITTLE_GAIN:
            return "bias_correction", (
                f"{bias}, which can be taken out: {negative:.1%} of the coordinates would be negative (at most "
                f"{MANY_NEGATIVE:.0%}), and as gradients are spread, scaling would raise the share of signal in an "
                f"update by {gain:.3f} only"
            )
        seen = signal.share_above(fluctuation * phi)
        if seen < _FEWEST_SEEN:
            return "post_processing", (
                f"{bias}, and {seen:.0%} of the squared gradient lies in coordinates where the second moment could "
                f"tell it from noise (g² above {fluctuation:.3g} times the noise): {_NOTHING}"
            )
        return "scale_then_privatize", (
            f"{bias}; bias correction would leave {negative:.1%} of the coordinates negative; scaling before clipping "
            f"could raise the share of signal in an update from {shares[0]:.3f} to at most {shares[1]:.3f}"
        )
    if signal.mean < _LEAST_PART * fluctuation * phi:
        return "post_processing", (
            f"{bias}; even with all of the gradient in {_LEAST_PART:.0%} of the coordinates, the second moment could "
            f"not tell it from noise (g² above {fluctuation:.3g} times the noise): {_NOTHING}"
        )
    kind = "more" if negative > MANY_NEGATIVE else "no more"
    return "scale_then_privatize", (
        f"{bias}; bias correction would leave {negative:.1%} of the coordinates negative, {kind} than "
        f"{MANY_NEGATIVE:.0%}, if gradients are as assumed, and more the less even they are. How much scaling gains "
        "depends on the spread, which only a probe can measure; without one, the paper's results decide"
    )
