"""The plan: everything that ε depends on, in one frozen object."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import dpoptim.noise
from dpoptim.noise import Banded, BandedToeplitz, Independent, Strategy, StrategySpec
from dpoptim.privacy import accounting, calibration, sampling
from dpoptim.privacy import release_types as releases
from dpoptim.privacy.accounting import GaussianRun, PoissonRun, Run, TruncatedPoissonRun
from dpoptim.privacy.adjacency import Adjacency
from dpoptim.privacy.plain_values import from_plain, to_plain
from dpoptim.privacy.release_types import Gradient, IndependentMoments, NoiselessSquare, NoiseStddevs, Release
from dpoptim.privacy.sampling import CyclicPoisson, Poisson, Sampling, Shuffled
from dpoptim.privacy.statement import privacy_statement


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Sampling, clipping, what is released and its noise: all that the guarantee rests on, and nothing else.

    The noise on the SUM of clipped gradients at step t is clip_norm·σ·column_norm(C)·(C⁻¹z)_t with σ the
    `noise_multiplier`, which is relative to one participation; how often an example participates is the
    accountant's business. So with `Independent()` noise the standard deviation is clip_norm·σ for every
    sampling and adjacency.

    `sampling` is `Shuffled()` by default: nothing about the batches need be secret, and nothing is amplified.
    `Poisson()` needs much less noise for the same ε, while batches and key stay secret; `CyclicPoisson(bands=...)`
    does so for correlated noise with as many bands.

    Guarantee: the same object tells the loader how to sample, the optimizer how much noise to add and the
    accountant what to prove, and combinations without a proof are refused when the plan is made.
    Edge cases: noise_multiplier=0 is for debugging, has ε = ∞, and alone allows clip_norm=∞. `batch_size` is
    the expected one and `num_examples` a public number: neither is ever read off the data.

    >>> plan = PrivacyPlan(num_examples=1000, batch_size=100, steps=30, noise_multiplier=1.0)
    >>> plan.max_participations, plan.min_separation, round(plan.epsilon(delta=1e-7), 4)
    (3, 10, 10.0453)
    >>> calibrated = plan.calibrate(epsilon=8.0, delta=1e-7)
    >>> round(calibrated.noise_multiplier, 4), round(calibrated.epsilon(), 3)
    (1.2161, 8.0)
    """

    num_examples: int
    batch_size: int
    steps: int
    clip_norm: float = 1.0
    sampling: Sampling = field(default_factory=Shuffled)
    noise: StrategySpec = field(default_factory=Independent)
    release: Release = field(default_factory=Gradient)
    adjacency: Adjacency = Adjacency.ZERO_OUT
    noise_multiplier: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_examples", "batch_size", "steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number ≥ 1, got {value!r}")
        if self.batch_size > self.num_examples:
            raise ValueError(
                f"batch_size={self.batch_size} exceeds num_examples={self.num_examples}; a batch holds no example twice"
            )
        _check_number("clip_norm", self.clip_norm, low=0.0, low_allowed=False, infinity_allowed=True)
        if self.noise_multiplier is not None:
            _check_number("noise_multiplier", self.noise_multiplier, low=0.0, low_allowed=True)
        if math.isinf(self.clip_norm) and self.noise_multiplier != 0:
            raise ValueError("clip_norm=inf is unbounded sensitivity; use a finite one, or noise_multiplier=0 to debug")
        if self.delta is not None:
            _check_delta(self.delta)
        if not isinstance(self.adjacency, Adjacency):
            raise ValueError(f"adjacency must be Adjacency.ZERO_OUT, .ADD_REMOVE or .REPLACE, got {self.adjacency!r}")
        if not isinstance(self.sampling, (Shuffled, Poisson, CyclicPoisson)):
            raise ValueError(
                f"sampling must be Shuffled(), Poisson() or CyclicPoisson(bands=...), got {self.sampling!r}"
            )
        if not isinstance(self.release, Release):
            raise ValueError(f"release must be one of dpoptim's releases, such as Gradient(), got {self.release!r}")
        if isinstance(self.noise, type) or not hasattr(self.noise, "optimize"):
            raise ValueError(
                f"noise must be made by a call such as Independent() or BandedToeplitz(bands=8), got {self.noise!r}"
            )
        self._refuse_unproved()

    def _refuse_unproved(self) -> None:
        releases.check_supported(self.release, self.sampling)
        without = self.adjacency is Adjacency.ADD_REMOVE
        match self.sampling:
            case Shuffled() if without:
                raise ValueError(
                    "Shuffled() under Adjacency.ADD_REMOVE has no proof: removing a record shifts every later batch; "
                    "use Adjacency.ZERO_OUT, or Poisson()"
                )
            case CyclicPoisson() if without:
                raise ValueError(
                    f"{self.sampling!r} under Adjacency.ADD_REMOVE has no proof: removing a record shifts the groups "
                    "of others; use Adjacency.ZERO_OUT, or Poisson()"
                )
            case Poisson(max_batch_size=int()) if without:
                raise ValueError(
                    "a truncated Poisson sample under Adjacency.ADD_REMOVE has no proof: how often it is cut depends "
                    "on the number of examples, which is private there; use Adjacency.ZERO_OUT, or no max_batch_size"
                )
            case CyclicPoisson(bands=bands):
                if bands > self.steps:
                    raise ValueError(
                        f"bands={bands} of {self.sampling!r} exceeds steps={self.steps}, so that some groups would "
                        f"never take part; use at most {self.steps} bands"
                    )
                self.sampling.sampling_prob(num_examples=self.num_examples, batch_size=self.batch_size)
        if self.sampling.is_random:
            _refuse_unamplified("noise", self.noise, self.sampling)
            _refuse_unamplified("release.square_noise", self._square_noise, self.sampling)

    @property
    def _square_noise(self) -> StrategySpec:
        """The kind of noise on the square, if there is one."""
        own = self.release.square_noise if isinstance(self.release, IndependentMoments) else None
        return self.noise if own is None else own

    @property
    def sampling_prob(self) -> float:
        """The chance of an example to be in a batch: batch_size/num_examples, but under `CyclicPoisson` bands times
        that, at its group's steps alone.
        """
        return self.sampling.sampling_prob(num_examples=self.num_examples, batch_size=self.batch_size)

    @property
    def max_participations(self) -> int:
        """In how many steps one example may take part at most."""
        return self.sampling.max_participations(
            num_examples=self.num_examples, batch_size=self.batch_size, steps=self.steps
        )

    @property
    def min_separation(self) -> int:
        """How many steps lie at least between two participations of one example."""
        return self.sampling.min_separation(
            num_examples=self.num_examples, batch_size=self.batch_size, steps=self.steps
        )

    @functools.cached_property
    def strategy(self) -> Strategy:
        """The strategy matrix C, optimized for the plan's steps and pattern of participations."""
        return self._optimized(self.noise)

    @functools.cached_property
    def square_strategy(self) -> Strategy:
        """The strategy of the noise on the square: `strategy`, unless the release names a noise of its own."""
        return self.strategy if self._square_noise == self.noise else self._optimized(self._square_noise)

    def _optimized(self, noise: StrategySpec) -> Strategy:
        strategy = noise.optimize(
            steps=self.steps, max_participations=self.max_participations, min_separation=self.min_separation
        )
        groups = self.sampling.bands if isinstance(self.sampling, CyclicPoisson) else 1
        if self.sampling.is_random and strategy.bands > groups:
            raise ValueError(
                f"{noise!r} gave a strategy of {strategy.bands} bands, which {self.sampling!r} does not amplify; if "
                "the cache of strategies was tampered with, remove it"
            )
        return strategy

    @functools.cached_property
    def run(self) -> Run:
        """What the accountant is asked about."""
        strategy, square_strategy = self.strategy, self.square_strategy  # which refuse what has no proof
        limit = self.sampling.max_batch_size if isinstance(self.sampling, Poisson) else None
        if limit is not None and limit < self.num_examples:
            return TruncatedPoissonRun(
                sampling_prob=self.sampling_prob,
                steps=self.steps,
                adjacency=self.adjacency,
                num_examples=self.num_examples,
                max_batch_size=limit,
            )
        if self.sampling.is_random and self.sampling_prob < 1.0:
            return PoissonRun(sampling_prob=self.sampling_prob, steps=self.max_participations, adjacency=self.adjacency)
        ratio = self.sensitivity_ratio(strategy)
        if isinstance(self.release, IndependentMoments) and self._square_noise != self.noise:
            ratio = releases.joint_ratio(
                self.release,
                ratios=(ratio, self.sensitivity_ratio(square_strategy)),
                sampling=self.sampling,
                adjacency=self.adjacency,
                clip_norm=self.clip_norm,
                batch_size=self.batch_size,
            )
        return GaussianRun(sensitivity=self.adjacency.sensitivity_factor * ratio)

    def sensitivity_ratio(self, strategy: Strategy) -> float:
        """How far one example moves the whole run, in units of what one participation may."""
        sensitivity = strategy.sensitivity(
            max_participations=self.max_participations, min_separation=self.min_separation
        )
        return sensitivity / strategy.column_norm

    @property
    def is_private(self) -> bool:
        """Whether there is any guarantee at all, whatever δ."""
        return bool(self.noise_multiplier) and not isinstance(self.release, NoiselessSquare)

    def epsilon(self, *, delta: float | None = None) -> float:
        """ε at `delta` (by default the δ that the plan was calibrated for), never understated.

        Edge cases: ∞ where there is no noise, or where a square is released without noise.
        """
        multiplier = self._known_multiplier()
        delta = self._known_delta(delta)
        if isinstance(self.release, NoiselessSquare):
            return math.inf
        return accounting.epsilon(self.run, noise_multiplier=multiplier, delta=delta)

    def rdp_epsilon(self, *, delta: float | None = None) -> float | None:
        """A looser upper bound on ε, by Rényi divergences; None where none is implemented."""
        if not accounting.has_second_opinion(self.run):
            return None
        multiplier, delta = self._known_multiplier(), self._known_delta(delta)
        if isinstance(self.release, NoiselessSquare):
            return math.inf
        return accounting.rdp_epsilon(self.run, noise_multiplier=multiplier, delta=delta)

    def calibrate(self, *, epsilon: float, delta: float) -> PrivacyPlan:
        """A new plan with the least noise that keeps to (ε, δ): ε is met within 1e-4, never passed."""
        _check_number("epsilon", epsilon, low=0.0, low_allowed=False, infinity_allowed=True)
        _check_delta(delta)
        if isinstance(self.release, NoiselessSquare):
            raise ValueError(
                "release=NoiselessSquare() is not private at any noise multiplier; for a baseline, calibrate with "
                "release=Gradient() and then call .with_release(NoiselessSquare())"
            )
        multiplier = calibration.calibrate(self.run, epsilon=float(epsilon), delta=float(delta))
        return self.replace(noise_multiplier=multiplier, delta=float(delta))

    def replace(self, **changes: Any) -> PrivacyPlan:
        """A new plan with these fields changed; the noise multiplier stays unless it is among them."""
        return dataclasses.replace(self, **changes)

    def with_release(self, release: Release) -> PrivacyPlan:
        """A new plan that releases something else, with the same noise multiplier, and no larger an ε.

        Edge cases: refused where a `square_noise` of its own, or another balance beside one, would make ε larger.
        """
        changed = self.replace(release=release)
        if not self.noise_multiplier or self._square_noise == changed._square_noise == self.noise:
            return changed
        before, after = self.run, changed.run
        same = before == after
        if isinstance(before, GaussianRun) and isinstance(after, GaussianRun):
            same = after.sensitivity <= before.sensitivity * (1.0 + 1e-12)
        if not same:
            raise ValueError(
                f"release={release!r} makes epsilon larger than that of the plan, which releases {self.release!r}; "
                "calibrate for it: plan.replace(release=..., noise_multiplier=None).calibrate(epsilon=..., delta=...)"
            )
        return changed

    def noise_stddevs(self) -> NoiseStddevs:
        """Noise per unit row: on the clipped sum, and on the averaged square where one is released."""
        return releases.noise_stddevs(
            self.release,
            sampling=self.sampling,
            adjacency=self.adjacency,
            clip_norm=self.clip_norm,
            batch_size=self.batch_size,
            noise_multiplier=self._known_multiplier(),
        )

    def statement(self, delta: float | None = None) -> str:
        """What is guaranteed, to whom, by which proof and under which assumptions; for an auditor to read."""
        return privacy_statement(self, delta=delta)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values; `from_dict` gives it back."""
        fields = {part.name: to_plain(getattr(self, part.name)) for part in dataclasses.fields(self)}
        return {**fields, "adjacency": self.adjacency.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyPlan:
        """The plan that `to_dict` described; refuses unknown fields and kinds.

        >>> plan = PrivacyPlan(num_examples=10, batch_size=2, steps=5, sampling=Poisson())
        >>> PrivacyPlan.from_dict(plan.to_dict()) == plan
        True
        """
        known = {part.name for part in dataclasses.fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"values has unknown fields {sorted(unknown)}; a plan has {sorted(known)}")
        fields = dict(values)
        for name, module in (("sampling", sampling), ("noise", dpoptim.noise), ("release", releases)):
            if name in fields:
                fields[name] = from_plain(name, fields[name], module)
        if "adjacency" in fields:
            fields["adjacency"] = Adjacency(fields["adjacency"])
        return cls(**fields)

    def _known_multiplier(self) -> float:
        if self.noise_multiplier is None:
            raise ValueError(
                "noise_multiplier is not set; call plan.calibrate(epsilon=..., delta=...) or pass noise_multiplier"
            )
        return float(self.noise_multiplier)

    def _known_delta(self, delta: float | None) -> float:
        delta = self.delta if delta is None else delta
        if delta is None:
            raise ValueError("delta is not known; pass delta=..., or calibrate the plan, which remembers it")
        _check_delta(delta)
        return float(delta)


def _refuse_unamplified(name: str, noise: StrategySpec, sampling: Sampling) -> None:
    """Refuse noise for which secret draws are not proved to amplify."""
    if isinstance(sampling, CyclicPoisson):
        bands = _strategy_bands(noise)
        if bands is None or bands > sampling.bands:
            more = "Shuffled() for this noise" if bands is None else f"CyclicPoisson(bands={bands})"
            raise ValueError(
                f"{name}={noise!r} with {sampling!r} has no proof: amplification needs a strategy of at most "
                f"{sampling.bands} diagonals; use Independent(), or BandedToeplitz or Banded with bands ≤ "
                f"{sampling.bands}, or {more}"
            )
    elif not isinstance(noise, Independent):
        raise ValueError(
            f"{name}={noise!r} is correlated, and with {sampling!r} has no proof: amplification of correlated noise is "
            "proved for cyclic Poisson sampling with a banded strategy only; use sampling=CyclicPoisson(bands=...), "
            "Independent(), or Shuffled()"
        )


def _strategy_bands(noise: StrategySpec) -> int | None:
    """How many diagonals C has at most; None where the specification does not bound them, as in `BandedInverse`."""
    if isinstance(noise, (Banded, BandedToeplitz)):
        return noise.bands
    return 1 if isinstance(noise, Independent) else None


def _check_number(name: str, value: object, *, low: float, low_allowed: bool, infinity_allowed: bool = False) -> None:
    fits = (
        isinstance(value, numbers.Real)
        and not isinstance(value, bool)
        and (float(value) > low or (low_allowed and float(value) == low))
        and (infinity_allowed or math.isfinite(float(value)))
    )
    if not fits:
        least = f"{low:g} or more" if low_allowed else f"above {low:g}"
        raise ValueError(f"{name}={value!r} must be a finite number {least}{', or inf' if infinity_allowed else ''}")


def _check_delta(delta: object) -> None:
    if isinstance(delta, bool) or not isinstance(delta, numbers.Real) or not 0.0 < float(delta) < 1.0:
        raise ValueError(f"delta must be a number strictly between 0 and 1, got {delta!r}; try 1/num_examples or less")
