"""How the gradient of one example, or of one user, is bounded before it is summed.

ζ is the plan's `clip_norm`, g the gradient after scaling. Every rule multiplies g, or parts of it, by numbers that
depend on g and on earlier releases alone, so that the sum changes by at most ζ per example. So sensitivity, noise and ε
are those of the plan; only `AdaptiveClipNorm` also releases a count, and raises the noise to pay for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dpoptim.arguments import check_number

Groups = list[tuple[list[str], float]]
"""Names of parameters that are clipped together, and their clip norm over ζ."""


@dataclass(frozen=True, kw_only=True)
class FixedClipNorm:
    """Multiply g by min(1, ζ/‖g‖)."""

    @property
    def noise_factor(self) -> float:
        """How many times larger the noise is than that of a fixed clip norm."""
        return 1.0

    def groups_of(self, names: Iterable[str]) -> Groups:
        """Return which of these parameters are clipped together."""
        return [(list(names), 1.0)]

    def describe(self, clip_norm: float) -> str:
        return f"clipped to norm {clip_norm:g}"


@dataclass(frozen=True, kw_only=True)
class NormalizedGradients(FixedClipNorm):
    """Multiply g by ζ/(‖g‖ + γ): every example has nearly the same weight (AUTO-S, Bu et al., 2023).

    Adam cancels ζ, so there is no clip norm to tune.

    Args:
        stability: γ, in units of the gradient. Gradients far below it keep their relative sizes.

    Guarantee: ‖g‖·ζ/(‖g‖ + γ) < ζ.
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        check_number("stability", self.stability, low=1e-12, hint="float32 does not measure smaller norms.")

    def describe(self, clip_norm: float) -> str:
        return f"divided by its norm + {self.stability:g} and multiplied by {clip_norm:g}"


@dataclass(frozen=True, kw_only=True)
class GroupClipNorms(FixedClipNorm):
    """Clip groups of parameters separately, to ζ·√(weight/sum of weights) each.

    Args:
        groups: Pairs of a prefix of parameter names and a weight. A parameter belongs to the longest prefix that its
            name begins with; "" holds all others.

    Guarantee: the squares of the groups' clip norms sum to ζ², so the whole clipped gradient has a norm of at most ζ.
    Rounding errors are bounded relative to the gradient of their group: do not multiply losses by large constants.

    >>> GroupClipNorms(groups=(("", 9.0), ("head.", 16.0))).groups_of(["body.weight", "head.weight"])
    [(['body.weight'], 0.6), (['head.weight'], 0.8)]
    """

    groups: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        pairs = tuple((str(prefix), weight) for prefix, weight in self.groups)
        if not pairs or len(dict(pairs)) < len(pairs):
            raise ValueError(f"groups must be pairs of different prefixes and weights, got {self.groups!r}")
        for prefix, weight in pairs:
            check_number(f"the weight of group {prefix!r}", weight, above=0.0)
        object.__setattr__(self, "groups", pairs)

    @classmethod
    def per_layer(cls, names: Iterable[str]) -> GroupClipNorms:
        """Return one group with equal weight for each module that owns one of these parameters."""
        return cls(groups=tuple((prefix, 1.0) for prefix in dict.fromkeys(_module_of(name) for name in names)))

    def groups_of(self, names: Iterable[str]) -> Groups:
        found: dict[str, list[str]] = {prefix: [] for prefix, _ in self.groups}
        for name in names:
            prefixes = [prefix for prefix in found if name.startswith(prefix)]
            if not prefixes:
                raise ValueError(f"The parameter '{name}' is in no group. Add a group with the prefix ''.")
            found[max(prefixes, key=len)].append(name)
        if empty := [prefix for prefix, own in found.items() if not own]:
            raise ValueError(f"The group {empty[0]!r} has no trained parameter. Leave it out.")
        total = sum(weight for _, weight in self.groups)
        return [(found[prefix], math.sqrt(weight / total)) for prefix, weight in self.groups]

    def describe(self, clip_norm: float) -> str:
        return f"clipped in {len(self.groups)} groups of parameters whose squared clip norms sum to {clip_norm:g}²"


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipNorm(FixedClipNorm):
    """Clip to ζ_t, which follows a quantile of the norms by noisy counts (Andrew et al., 2021).

    ζ_1 = ζ. Step t also releases p̃_t, the noisy number of clipped examples over the expected batch size, and
    ζ_{t+1} = ζ_t·exp(r_t·(p̃_t − (1 − quantile))), within a factor of 10,000 of ζ. An example near ζ_t counts in part.

    Args:
        quantile: The share of gradients that ζ_t should exceed.
        rate: How fast ζ_t follows. r_t is smaller if the noise on p̃_t would move ζ_t by more than a standard deviation
            of 1 % in a step.
        count_weight: a: how far an example may move the count, relative to the gradient. The noise of the gradient
            grows by √(1 + a²), and the noise on p̃ is noise_multiplier·√(1 + a²)/(a·batch_size) if it is independent.

    Guarantee: let κ_t = ζ_t/ζ, a function of earlier releases. At each participation an example adds the vector
    x = (c·g/κ_t, aζ·b), where ‖c·g‖ ≤ ζ_t, and b in [0, 1] is how far it was clipped. So ‖x‖² ≤ ζ² + a²ζ² for any
    history. A missing example, or a gradient of 0, adds 0. Under `REPLACE` two examples differ by at most twice this
    bound. The mechanism adds ζ·√(1 + a²)·σ·(a row of noise, by one strategy) to both parts, so ε is that of a fixed
    clip norm at the same σ. The gradient is released times κ_t.
    """

    quantile: float = 0.9
    rate: float = 0.05
    count_weight: float = 0.1

    def __post_init__(self) -> None:
        check_number("quantile", self.quantile, above=0.0, below=1.0)
        check_number("rate", self.rate, above=0.0)
        check_number("count_weight", self.count_weight, above=0.0, high=100.0)

    @property
    def noise_factor(self) -> float:
        return math.sqrt(1.0 + self.count_weight**2)

    def next_factor(self, factor: float, noisy_share: float, noise: float) -> float:
        """Return κ_{t+1} from κ_t, p̃_t and the standard deviation of the noise on p̃_t, which is public.

        >>> [round(AdaptiveClipNorm().next_factor(1.0, noisy_share=1.0, noise=one), 4) for one in (0.0, 1.0)]
        [1.046, 1.009]
        """
        rate = self.rate / max(1.0, self.rate * noise / _NOISE_PER_STEP)
        exponent = math.log(factor) + rate * (noisy_share - (1.0 - self.quantile))
        return math.exp(min(max(exponent, -math.log(1e4)), math.log(1e4)))

    def describe(self, clip_norm: float) -> str:
        text = f"clipped to a norm that starts at {clip_norm:g} and follows the {self.quantile:g} quantile (bounds and "
        text += "noise are given at its start and follow it), and the "
        return text + f"count of those clipped (budget: noise times {self.noise_factor:.6g})"


_NOISE_PER_STEP = 0.01
"""The standard deviation of what noise may change of the logarithm of an adaptive clip norm in a step."""

RULES = (FixedClipNorm, NormalizedGradients, GroupClipNorms, AdaptiveClipNorm)
"""Those with a proof; a subclass may have none."""


def _module_of(name: str) -> str:
    return name[: name.rfind(".") + 1]
