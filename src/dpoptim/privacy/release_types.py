"""What is released at each step: how far one example can move it, and the noise that covers it.

Units. ζ is the clip norm, B the expected batch size, σ the noise multiplier. Gradient noise is in units of
the SUM of clipped gradients, noise on squares in units of the AVERAGE (1/B)Σ or of the squared average. Both
are per unit row: the mechanism multiplies them by column_norm(Cᵢ)·(Cᵢ⁻¹z)_t, with C₁ for the gradient and C₂
for the square. They are the same strategy unless `IndependentMoments.square_noise` says otherwise.

f is the adjacency's factor (2 under `REPLACE`, else 1). The accountant grants one participation a change of
norm f, in units in which the noise has standard deviation σ. Hence every pair of standard deviations below
satisfies

    (Δ₁/std₁)² + (Δ₂/std₂)² ≤ f²/σ²      Δ₁ = f·ζ/B and Δ₂ the largest changes of the two averages.

With one strategy, one example's contribution to a step is one vector, and the sensitivity of C covers the
run; for two strategies see `joint_ratio`.

Where examples are drawn anew at each step (`Poisson`, `CyclicPoisson`), the accountant under `REPLACE` also
uses that each of the two neighbours lies within 1/σ of the batch without the example; so there Δ₂ is twice
the zero-out value, even where two replaced examples can only be closer to each other. What others are drawn
into the batch does not matter for any of the bounds there, so they hold for each participation on its own,
and under `CyclicPoisson` for each block of rows: Δᵢ·‖column of Cᵢ‖/(stdᵢ·column_norm(Cᵢ)) ≤ Δᵢ/stdᵢ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dpoptim.noise import StrategySpec
from dpoptim.privacy.adjacency import Adjacency
from dpoptim.privacy.sampling import Poisson, Sampling

Squares = Literal["of_average", "average_of"]


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The clipped sum alone."""

    def describe(self) -> str:
        return "the sum of clipped per-example gradients"


@dataclass(frozen=True, kw_only=True)
class IndependentMoments:
    """The clipped sum and, with noise of its own, a square: independent moment estimation (IME).

    `squares="of_average"` releases the square of the averaged gradient, `"average_of"` the average of the
    per-example squares. `balance` splits the budget: `"equal"` is √2·σ·Δᵢ for both (the paper's algorithm), a
    number c puts noise √(Δ₁² + c²Δ₂²)·σ on (g, c·g²), and `"mse"` is σᵢ² = σ²Δᵢ(Δ₁ + Δ₂), which minimises the
    sum of the two variances. `square_noise` is the kind of noise on the square; None is the plan's own.

    Edge cases: a square_noise of its own is part of what ε depends on (`joint_ratio`), so it belongs into the
    plan before the plan is calibrated.
    """

    balance: float | Literal["equal", "mse"] = "equal"
    squares: Squares = "of_average"
    square_noise: StrategySpec | None = None

    def __post_init__(self) -> None:
        if isinstance(self.balance, str):
            if self.balance not in ("equal", "mse"):
                raise ValueError(f"balance must be 'equal', 'mse' or a positive number, got {self.balance!r}")
        else:
            _check_positive("balance", self.balance)
        if self.squares not in ("of_average", "average_of"):
            raise ValueError(f"squares must be 'of_average' or 'average_of', got {self.squares!r}")
        noise = self.square_noise
        if noise is not None and (isinstance(noise, type) or not hasattr(noise, "optimize")):
            raise ValueError(
                f"square_noise must be a noise specification such as Independent(), or None for the plan's own; got "
                f"{noise!r}"
            )

    def describe(self) -> str:
        square = (
            "the square of the averaged clipped gradient"
            if self.squares == "of_average"
            else "the average of the squared clipped gradients"
        )
        return f"the sum of clipped per-example gradients and, with separate noise, {square}"


@dataclass(frozen=True, kw_only=True)
class JointMoments:
    """The sum over examples of the one vector (g, √λ·g²): joint moment estimation (JME).

    `square_weight` is λ, by default 1/(2ζ²): under `REPLACE` and without sampling the squares then cost
    nothing. Only the average of the squares can be had; for the square of an average the bound fails.
    """

    square_weight: float | None = None

    def __post_init__(self) -> None:
        if self.square_weight is not None:
            _check_positive("square_weight", self.square_weight)

    def describe(self) -> str:
        return "the sum over examples of the clipped gradient joined with its weighted square, under one noise"


@dataclass(frozen=True, kw_only=True)
class NoiselessSquare:
    """The noised clipped sum and the average's square WITHOUT noise: not private, a baseline only."""

    def describe(self) -> str:
        return "the sum of clipped gradients, and the square of their average WITHOUT NOISE"


Release = Gradient | IndependentMoments | JointMoments | NoiselessSquare


class NoiseStddevs(NamedTuple):
    """Standard deviations per unit row: of the clipped sum, and of the released square if there is one."""

    gradient_sum: float
    square: float | None


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")


def check_supported(release: Release, sampling: Sampling) -> None:
    """Refuse releases for which no sensitivity is proved: squares under truncated Poisson sampling."""
    truncated = isinstance(sampling, Poisson) and sampling.max_batch_size is not None
    if truncated and isinstance(release, (IndependentMoments, JointMoments)):
        raise ValueError(
            f"release={release!r} with a truncated Poisson sample has no proof here: an example that pushes another "
            "out of the batch moves the squares in a way that is not covered; use Poisson() without max_batch_size, or "
            "release=Gradient()"
        )


def square_sensitivity(
    *, squares: Squares, sampling: Sampling, adjacency: Adjacency, clip_norm: float, batch_size: int
) -> float:
    """Δ₂, the largest change of the released square in ℓ₂ norm, in units of the averaged square.

    `of_average`, exactly B examples, zero-out: (u)⊙(2s + u)/B² with ‖s‖ ≤ (B−1)ζ, ‖u‖ ≤ ζ: (2B−1)ζ²/B²,
    attained by equal gradients along one coordinate. `REPLACE`: twice that, through the batch with the
    example zeroed (attained up to a factor (2B−2)/(2B−1): 4(B−1)ζ²/B²). `of_average` under Poisson, averages
    a, b projected onto norm ζ: ‖a² − b²‖ ≤ ‖a − b‖·‖a + b‖_∞ ≤ (ζ/B)·2ζ, and twice that under `REPLACE`.
    `average_of`: ζ²/B, one coordinate; `REPLACE` with every example in its place: ‖u² − v²‖² ≤ ‖u²‖² + ‖v²‖²
    since squares have no negative products, so √2·ζ²/B, attained by two different coordinates; under Poisson
    2ζ²/B. Poisson here is any random sampling, `CyclicPoisson` among them.

    Guarantee: an upper bound for every dimension; for Poisson only with the averaged gradient
    projected onto norm ζ before it is squared: a Poisson batch may hold more than B examples, whose average is longer.

    >>> from dpoptim.privacy.sampling import Shuffled
    >>> kinds = dict(squares="of_average", sampling=Shuffled(), adjacency=Adjacency.ZERO_OUT, clip_norm=1.0)
    >>> square_sensitivity(**kinds, batch_size=1), square_sensitivity(**kinds, batch_size=8)
    (1.0, 0.234375)
    """
    poisson = sampling.is_random
    replace = adjacency is Adjacency.REPLACE
    squared_norm = clip_norm * clip_norm
    if squares == "average_of":
        factor = 1.0 if not replace else (2.0 if poisson else math.sqrt(2.0))
        return factor * squared_norm / batch_size
    one_side = 2.0 / batch_size if poisson else (2 * batch_size - 1) / batch_size**2
    return adjacency.sensitivity_factor * one_side * squared_norm


def joint_sensitivity(*, square_weight: float, sampling: Sampling, adjacency: Adjacency, clip_norm: float) -> float:
    """The largest change of Σ(g, √λ·g²), in units of the sum.

    Zero-out and add/remove: ‖g‖² + λ‖g²‖² ≤ ζ² + λζ⁴, attained by one coordinate. `REPLACE` with every
    example in its place, dimension ≥ 2: 2ζ for λ ≤ 1/(2ζ²), else ζ(1 + 2λζ²)/√(2λζ²). `REPLACE` under
    random sampling: twice the zero-out value.

    >>> from dpoptim.privacy.sampling import Shuffled
    >>> joint_sensitivity(square_weight=0.5, sampling=Shuffled(), adjacency=Adjacency.REPLACE, clip_norm=1.0)
    2.0
    """
    weight = square_weight * clip_norm * clip_norm
    if adjacency is not Adjacency.REPLACE:
        return clip_norm * math.sqrt(1.0 + weight)
    if sampling.is_random:
        return 2.0 * clip_norm * math.sqrt(1.0 + weight)
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
    """Standard deviations per unit row of the noise on the clipped sum and on the averaged square.

    Gradient alone: ζσ. IME: as `IndependentMoments.balance` says. JME: sensitivity·σ/f on (g, √λ·g²), hence
    that over √λ·B on the averaged square.

    Edge cases: σ = 0 gives no noise at all; `NoiselessSquare` gives 0 for the square.

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
        squares=release.squares,
        sampling=sampling,
        adjacency=adjacency,
        clip_norm=clip_norm,
        batch_size=batch_size,
    )
    share = gradient_share(release, second / first)
    return NoiseStddevs(batch_size * unit * first / math.sqrt(share), unit * second / math.sqrt(1.0 - share))


def gradient_share(release: IndependentMoments, ratio: float) -> float:
    """Which part of the budget the gradient takes, for ratio = Δ₂/Δ₁; noise and ε both follow from it.

    (Δ₁/std₁)² = share·(f/σ)² and (Δ₂/std₂)² = (1 - share)·(f/σ)²: ½ for "equal", Δ₁ : Δ₂ for "mse", Δ₁² : c²Δ₂² for c.

    >>> gradient_share(IndependentMoments(), 3.0), gradient_share(IndependentMoments(balance="mse"), 3.0)
    (0.5, 0.25)
    """
    if release.balance == "equal":
        return 0.5
    odds = ratio if release.balance == "mse" else (release.balance * ratio) ** 2
    return 1.0 / (1.0 + odds)


def default_square_weight(release: JointMoments, clip_norm: float) -> float:
    """λ of a joint release: as given, or 1/(2ζ²)."""
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
    """√(a₁r₁² + a₂r₂²): how far one example moves both streams of a run, in units of what one participation may.

        rᵢ = sensitivity(Cᵢ)/column_norm(Cᵢ)      aᵢ = (Δᵢ/stdᵢ)²·σ²/f²,   a₁ + a₂ = 1

    Multiplied by Cᵢ, stream i is Cᵢxᵢ plus independent noise of standard deviation stdᵢ·column_norm(Cᵢ). One
    example changes each step's xᵢ by at most Δᵢ, at the steps at which it takes part, so Cᵢxᵢ by at most
    Δᵢ·sensitivity(Cᵢ), and the two changes over their noise have squares that add up to at most
    Σᵢ (Δᵢ·rᵢ/stdᵢ)² = (f/σ)²·(a₁r₁² + a₂r₂²). The shares are ½ and ½ for the balance "equal"; Δ₁ : Δ₂ for
    "mse"; Δ₁² : c²Δ₂² for a number c.

    Guarantee: holds along every history of releases, hence for contributions that depend on it. Attained where
    one pattern of participations is the worst for both strategies, as with two Toeplitz ones.
    Edge cases: equal ratios come back as they are; clip_norm = ∞ is the limit.

    >>> from dpoptim.privacy.sampling import Shuffled
    >>> common = dict(sampling=Shuffled(), adjacency=Adjacency.ZERO_OUT, clip_norm=1.0, batch_size=8)
    >>> round(joint_ratio(IndependentMoments(), ratios=(1.0, 7.0), **common), 12)
    5.0
    """
    if ratios[0] == ratios[1]:
        return ratios[0]
    # Δ₂/Δ₁, which is proportional to the clip norm.
    unit = square_sensitivity(
        squares=release.squares, sampling=sampling, adjacency=adjacency, clip_norm=1.0, batch_size=batch_size
    )
    share = gradient_share(release, unit * batch_size / adjacency.sensitivity_factor * clip_norm)
    return math.sqrt(share * ratios[0] ** 2 + (1.0 - share) * ratios[1] ** 2)
