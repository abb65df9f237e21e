"""What is released at each step: how far one example can move it, and the noise that covers it.

Units: ζ is the clip norm, B the expected batch size, σ the noise multiplier. Gradient noise is in units of the SUM of
clipped gradients. Noise on squares is in units of the AVERAGE (1/B)Σ or of the squared average. Both are per unit row:
the mechanism multiplies them by column_norm(Cᵢ)·(Cᵢ⁻¹z)_t, with C₁ for the gradient and C₂ for the square. Both are the
same strategy unless `IndependentMoments.square_noise` is set.

f is the adjacency's factor (2 under `REPLACE`, else 1). The accountant allows one participation a change of norm f, in
units in which the noise has standard deviation σ. So every pair of standard deviations below satisfies

    (Δ₁/std₁)² + (Δ₂/std₂)² ≤ f²/σ²      Δ₁ = f·ζ/B and Δ₂ the largest changes of the two averages.

With one strategy, an example contributes one vector to a step, and the sensitivity of C covers the run. For two
strategies see `joint_ratio`.

With random sampling (`Poisson`, `CyclicPoisson`) under `REPLACE`, the accountant also uses that each neighbour lies
within 1/σ of the batch without the example. So Δ₂ is twice the zero-out value there, even where two replaced examples
are closer to each other. These bounds hold for any other examples in the batch. So they hold for each participation,
and under `CyclicPoisson` for each block of rows: Δᵢ·‖column of Cᵢ‖/(stdᵢ·column_norm(Cᵢ)) ≤ Δᵢ/stdᵢ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dpoptim.arguments import check_choice, check_number
from dpoptim.noise import StrategySpec
from dpoptim.privacy.adjacency import Adjacency
from dpoptim.privacy.sampling import Poisson, Sampling

Squares = Literal["of_average", "average_of"]


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Release only the clipped sum."""

    def describe(self) -> str:
        return "the sum of clipped per-example gradients"


@dataclass(frozen=True, kw_only=True)
class IndependentMoments:
    """Release the clipped sum and, with separate noise, a square: independent moment estimation (IME).

    Args:
        balance: How to split the budget. "equal" is √2·σ·Δᵢ for both (the paper's algorithm). "mse" is
            σᵢ² = σ²Δᵢ(Δ₁ + Δ₂), which minimises the sum of the two variances. A number c puts noise
            √(Δ₁² + c²Δ₂²)·σ on (g, c·g²).
        squares: "of_average" for the square of the averaged gradient, "average_of" for the average of the
            per-example squares.
        square_noise: The kind of noise on the square; None for the plan's. ε depends on it, so set it before
            calibrating the plan.
    """

    balance: float | Literal["equal", "mse"] = "equal"
    squares: Squares = "of_average"
    square_noise: StrategySpec | None = None

    def __post_init__(self) -> None:
        if isinstance(self.balance, str):
            check_choice("balance", self.balance, ("equal", "mse"))
        else:
            check_number("balance", self.balance, above=0.0)
        check_choice("squares", self.squares, ("of_average", "average_of"))
        if self.square_noise is not None:
            check_noise("square_noise", self.square_noise)

    def describe(self) -> str:
        square = (
            "the square of the averaged clipped gradient"
            if self.squares == "of_average"
            else "the average of the squared clipped gradients"
        )
        return f"the sum of clipped per-example gradients and, with separate noise, {square}"


@dataclass(frozen=True, kw_only=True)
class JointMoments:
    """Release the sum over examples of the vector (g, √λ·g²): joint moment estimation (JME).

    It gives the average of the squares; for the square of an average the bound does not hold.

    Args:
        square_weight: λ, by default 1/(2ζ²). Under `REPLACE` and without sampling the squares then cost nothing.
    """

    square_weight: float | None = None

    def __post_init__(self) -> None:
        if self.square_weight is not None:
            check_number("square_weight", self.square_weight, above=0.0)

    def describe(self) -> str:
        return "the sum over examples of the clipped gradient joined with its weighted square, under one noise"


@dataclass(frozen=True, kw_only=True)
class NoiselessSquare:
    """Release the noised clipped sum, and the square of the average WITHOUT noise: a baseline that is not private."""

    def describe(self) -> str:
        return "the sum of clipped gradients, and the square of their average WITHOUT NOISE"


Release = Gradient | IndependentMoments | JointMoments | NoiselessSquare
"""What a step releases."""


class NoiseStddevs(NamedTuple):
    """Standard deviations per unit row: of the clipped sum, and of the released square if there is one."""

    gradient_sum: float
    square: float | None


def check_noise(name: str, noise: object) -> None:
    """Check that `noise` is a specification such as Independent(), not its class."""
    if isinstance(noise, type) or not hasattr(noise, "optimize"):
        raise ValueError(f"Expected {name} such as Independent() or BandedToeplitz(bands=8), got {noise!r}.")


def check_supported(release: Release, sampling: Sampling) -> None:
    """Refuse releases without a proved sensitivity: squares under truncated Poisson sampling."""
    truncated = isinstance(sampling, Poisson) and sampling.max_batch_size is not None
    if truncated and isinstance(release, (IndependentMoments, JointMoments)):
        raise ValueError(
            f"release={release!r} with truncated Poisson samples has no proof: an example may push another one out of "
            "the batch. Use Poisson() without max_batch_size, or release=Gradient()."
        )


def square_sensitivity(
    *, squares: Squares, sampling: Sampling, adjacency: Adjacency, clip_norm: float, batch_size: int
) -> float:
    """Return Δ₂, the largest ℓ₂ change of the released square, in units of the averaged square.

    - "of_average", exactly B examples: the change is (u)⊙(2s + u)/B² with ‖s‖ ≤ (B−1)ζ, ‖u‖ ≤ ζ, so (2B−1)ζ²/B².
      Equal gradients along one coordinate attain it. `REPLACE`: twice that, through the batch with the example zeroed
      (attained up to a factor (2B−2)/(2B−1)).
    - "of_average", random sampling, averages a, b projected onto norm ζ: ‖a² − b²‖ ≤ ‖a − b‖·‖a + b‖_∞ ≤ (ζ/B)·2ζ.
      `REPLACE`: twice that.
    - "average_of": ζ²/B, attained by one coordinate. `REPLACE` with exactly B examples: ‖u² − v²‖² ≤ ‖u²‖² + ‖v²‖²,
      because squares have no negative products, so √2·ζ²/B, attained by two coordinates. With random sampling 2ζ²/B.

    Guarantee: an upper bound for every dimension. With random sampling it holds only if the averaged gradient is
    projected onto norm ζ before it is squared, because a batch may hold more than B examples.

    >>> from dpoptim.privacy.sampling import Shuffled
    >>> kinds = dict(squares="of_average", sampling=Shuffled(), adjacency=Adjacency.ZERO_OUT, clip_norm=1.0)
    >>> square_sensitivity(**kinds, batch_size=1), square_sensitivity(**kinds, batch_size=8)
    (1.0, 0.234375)
    """
    poisson = sampling.is_random
    replace = adjacency is Adjacency.REPLACE
    squared_norm = clip_norm * clip_norm
    if squares == "average_of":
        return (1.0 if not replace else 2.0 if poisson else math.sqrt(2.0)) * squared_norm / batch_size
    one_side = 2.0 / batch_size if poisson else (2 * batch_size - 1) / batch_size**2
    return adjacency.sensitivity_factor * one_side * squared_norm


def joint_sensitivity(*, square_weight: float, sampling: Sampling, adjacency: Adjacency, clip_norm: float) -> float:
    """Return the largest change of Σ(g, √λ·g²), in units of the sum.

    Zero-out and add/remove: ‖g‖² + λ‖g²‖² ≤ ζ² + λζ⁴, attained by one coordinate. `REPLACE` with exactly B examples
    and dimension ≥ 2: 2ζ for λ ≤ 1/(2ζ²), else ζ(1 + 2λζ²)/√(2λζ²). `REPLACE` with random sampling: twice the zero-out
    value.
    """
    weight = square_weight * clip_norm * clip_norm
    if adjacency is not Adjacency.REPLACE or sampling.is_random:
        return adjacency.sensitivity_factor * clip_norm * math.sqrt(1.0 + weight)
    if weight <= 0.5:
        return 2.0 * clip_norm
    return clip_norm * (1.0 + 2.0 * weight) / math.sqrt(2.0 * weight)


def noise_stddevs(
    release: Release,
    *,
    sampling: Sampling,
    adjacency: Adjacency,
    clip_norm: float,
    batch_size: int,
    noise_multiplier: float,
) -> NoiseStddevs:
    """Return the standard deviations per unit row of the noise on the clipped sum and on the averaged square.

    `Gradient`: ζσ. `IndependentMoments`: as its `balance` says. `JointMoments`: sensitivity·σ/f on (g, √λ·g²), and that
    over √λ·B on the averaged square. `NoiselessSquare`: 0 for the square.

    >>> from dpoptim.privacy.sampling import Shuffled
    >>> common = dict(sampling=Shuffled(), adjacency=Adjacency.ZERO_OUT, clip_norm=1.0, batch_size=8)
    >>> noise_stddevs(Gradient(), **common, noise_multiplier=2.0)
    NoiseStddevs(gradient_sum=2.0, square=None)
    >>> [round(std, 6) for std in noise_stddevs(IndependentMoments(), **common, noise_multiplier=1.0)]
    [1.414214, 0.331456]
    """
    check_supported(release, sampling)
    if isinstance(release, Gradient):
        return NoiseStddevs(clip_norm * noise_multiplier if noise_multiplier else 0.0, None)
    if noise_multiplier == 0.0:
        return NoiseStddevs(0.0, 0.0)
    if isinstance(release, NoiselessSquare):
        return NoiseStddevs(clip_norm * noise_multiplier, 0.0)
    unit = noise_multiplier / adjacency.sensitivity_factor
    if isinstance(release, JointMoments):
        weight = default_square_weight(release, clip_norm)
        std = unit * joint_sensitivity(
            square_weight=weight, sampling=sampling, adjacency=adjacency, clip_norm=clip_norm
        )
        return NoiseStddevs(std, std / (math.sqrt(weight) * batch_size))
    first = adjacency.sensitivity_factor * clip_norm / batch_size
    second = square_sensitivity(
        squares=release.squares, sampling=sampling, adjacency=adjacency, clip_norm=clip_norm, batch_size=batch_size
    )
    share = gradient_share(release, second / first)
    return NoiseStddevs(batch_size * unit * first / math.sqrt(share), unit * second / math.sqrt(1.0 - share))


def gradient_share(release: IndependentMoments, ratio: float) -> float:
    """Return the gradient's share of the budget, for ratio = Δ₂/Δ₁. Both the noise and ε follow from it.

    (Δ₁/std₁)² = share·(f/σ)² and (Δ₂/std₂)² = (1 - share)·(f/σ)²: ½ for "equal", Δ₁ : Δ₂ for "mse", Δ₁² : c²Δ₂² for c.
    """
    if release.balance == "equal":
        return 0.5
    odds = ratio if release.balance == "mse" else (release.balance * ratio) ** 2
    return 1.0 / (1.0 + odds)


def default_square_weight(release: JointMoments, clip_norm: float) -> float:
    """Return λ of a joint release, by default 1/(2ζ²)."""
    return release.square_weight if release.square_weight is not None else 0.5 / (clip_norm * clip_norm)


def joint_ratio(
    release: IndependentMoments,
    *,
    ratios: tuple[float, float],
    sampling: Sampling,
    adjacency: Adjacency,
    clip_norm: float,
    batch_size: int,
) -> float:
    """Return √(a₁r₁² + a₂r₂²): how far one example moves both streams, relative to one participation.

        rᵢ = sensitivity(Cᵢ)/column_norm(Cᵢ)      aᵢ = (Δᵢ/stdᵢ)²·σ²/f²,   a₁ + a₂ = 1

    Multiplied by Cᵢ, stream i is Cᵢxᵢ plus independent noise of standard deviation stdᵢ·column_norm(Cᵢ). At the steps
    where it takes part, one example changes xᵢ by at most Δᵢ, so Cᵢxᵢ changes by at most Δᵢ·sensitivity(Cᵢ). The
    squares of both changes over their noise sum to at most Σᵢ (Δᵢ·rᵢ/stdᵢ)² = (f/σ)²·(a₁r₁² + a₂r₂²). The shares aᵢ are
    those of `gradient_share`.

    Guarantee: holds along every history of releases, so also for contributions that depend on it. It is attained if
    one participation pattern is the worst for both strategies, as for two Toeplitz strategies.

    >>> from dpoptim.privacy.sampling import Shuffled
    >>> common = dict(sampling=Shuffled(), adjacency=Adjacency.ZERO_OUT, clip_norm=1.0, batch_size=8)
    >>> round(joint_ratio(IndependentMoments(), ratios=(1.0, 7.0), **common), 12)
    5.0
    """
    if ratios[0] == ratios[1]:
        return ratios[0]
    # Δ₂/Δ₁ is proportional to the clip norm, so clip_norm = ∞ is a limit of this.
    unit = square_sensitivity(
        squares=release.squares, sampling=sampling, adjacency=adjacency, clip_norm=1.0, batch_size=batch_size
    )
    share = gradient_share(release, unit * batch_size / adjacency.sensitivity_factor * clip_norm)
    return math.sqrt(share * ratios[0] ** 2 + (1.0 - share) * ratios[1] ** 2)
