"""The plan: everything that ε depends on, in one frozen object."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import dpoptim.noise
from dpoptim.arguments import (
    check_at_most,
    check_choice,
    check_clip_norm,
    check_delta,
    check_number,
    check_whole,
    set_whole,
)
from dpoptim.noise import Banded, BandedToeplitz, Independent, PrefixSums, Strategy, StrategySpec
from dpoptim.outlook import Outlook
from dpoptim.privacy import accounting, calibration, clipping_rules, column_counts, release_types, sampling
from dpoptim.privacy.accounting import GaussianRun, PoissonRun, Run, TruncatedPoissonRun
from dpoptim.privacy.adjacency import Adjacency
from dpoptim.privacy.clipping_rules import AdaptiveClipNorm, FixedClipNorm
from dpoptim.privacy.column_counts import ColumnCounts
from dpoptim.privacy.composition import epsilon_of_runs
from dpoptim.privacy.release_types import Gradient, IndependentMoments, NoiselessSquare, NoiseStddevs, Release
from dpoptim.privacy.sampling import CyclicPoisson, Poisson, Sampling, Shuffled
from dpoptim.privacy.statement import privacy_statement

_IF_OMITTED: dict[str, Any] = {
    "counts": None,
    "allow_mixing": None,
    "unit": "example",
    "records_per_user": None,
    "clipping": {"kind": "FixedClipNorm"},
    "exact_noise": False,
}
"""Fields that the plans of most runs do not mention when they are saved."""


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Everything that the guarantee depends on: sampling, clipping, what is released, and its noise.

    The noise on the SUM of clipped gradients at step t is clip_norm·σ·column_norm(C)·(C⁻¹z)_t, where σ is the
    `noise_multiplier`. σ is relative to one participation; the accountant handles repeated participation. So with
    `Independent()` noise the standard deviation is clip_norm·σ for every sampling and adjacency.

    Args:
        num_examples: The number of examples, or of users, a public number.
        batch_size: The expected batch size, in examples or users.
        steps: The number of steps.
        clip_norm: The bound on the norm of one example's gradient. inf is for debugging with noise_multiplier=0.
        clipping: How gradients are bounded by `clip_norm`: `FixedClipNorm()`, `AdaptiveClipNorm()`,
            `NormalizedGradients()` or `GroupClipNorms(...)`.
        sampling: How batches are drawn. `Shuffled()` needs no secrecy and does not amplify. `Poisson()` needs much
            less noise for the same ε, while batches and key are secret. `CyclicPoisson(bands=...)` does the same for
            correlated noise with at most that many bands.
        noise: The kind of noise, such as `Independent()` or `BandedToeplitz(bands=8)`.
        release: What is released at each step.
        adjacency: Which datasets are neighbours.
        noise_multiplier: σ; `calibrate` sets it. 0 is for debugging and gives ε = ∞.
        delta: The δ that the plan was calibrated for; the default of `epsilon` and `statement`.
        counts: Noisy counts of the values of a table that are released before training; ε includes them.
        unit: Who is protected: an "example", or a "user" with all of their records. What these docs say about
            examples then holds for users, whose gradient is the mean over their records in the step.
        records_per_user: The most records that one user adds to a step, drawn at random. ε does not depend on it.
        exact_noise: Whether noise is added without floating-point errors (`dpoptim.noise.exact`), which is slower.

    Guarantee: one object determines how the loader samples, how much noise is added, and what the accountant
    proves. Combinations without a proof are refused when the plan is created.

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
    counts: ColumnCounts | None = None
    allow_mixing: str | None = None  # the reason for letting examples mix, which the guarantee does not cover
    unit: str = "example"
    records_per_user: int | None = None
    clipping: FixedClipNorm = field(default_factory=FixedClipNorm)
    exact_noise: bool = False

    def __post_init__(self) -> None:
        for name in ("num_examples", "batch_size", "steps"):
            set_whole(self, name)
        check_at_most(
            "batch_size", self.batch_size, "num_examples", self.num_examples, hint="Use a smaller batch_size."
        )
        check_clip_norm(self.clip_norm)
        if self.noise_multiplier is not None:
            check_number("noise_multiplier", self.noise_multiplier, low=0.0)
        if math.isinf(self.clip_norm) and (self.noise_multiplier != 0 or self.clipping != FixedClipNorm()):
            raise ValueError("clip_norm=inf bounds nothing. Use a finite clip_norm, or noise_multiplier=0 to debug.")
        check_delta(self.delta, None if self.noise_multiplier == 0 else self.num_examples, optional=True)
        if self.allow_mixing is not None and not (isinstance(self.allow_mixing, str) and self.allow_mixing.strip()):
            raise ValueError(f"allow_mixing must be a reason in words, or None, got {self.allow_mixing!r}")
        if self.unit != ("example" if self.records_per_user is None else "user"):
            raise ValueError(
                f"unit={self.unit!r} does not go with records_per_user={self.records_per_user!r}. For users, set "
                "unit='user' and how many records of a user are used in a step."
            )
        if self.records_per_user is not None:
            set_whole(self, "records_per_user")
            if self.counts is not None:
                raise ValueError("counts with unit='user' have no proof: a user adds to many. Declare the columns.")
        check_choice("exact_noise", self.exact_noise, (True, False))
        if self.exact_noise and self.counts is not None:
            raise ValueError("exact_noise with counts has no proof: theirs is in floating point. Declare the columns.")
        if not isinstance(self.adjacency, Adjacency):
            raise ValueError(f"Expected an Adjacency such as Adjacency.ZERO_OUT, got adjacency={self.adjacency!r}.")
        if not isinstance(self.sampling, (Shuffled, Poisson, CyclicPoisson)):
            raise ValueError(f"Expected sampling Shuffled(), Poisson() or CyclicPoisson(), got {self.sampling!r}.")
        if not isinstance(self.release, Release):
            raise ValueError(f"Expected a release such as Gradient(), got release={self.release!r}.")
        if type(self.clipping) not in clipping_rules.RULES:
            raise ValueError(f"Expected clipping such as AdaptiveClipNorm(), got clipping={self.clipping!r}.")
        release_types.check_noise("noise", self.noise)
        self._refuse_unproved()

    def _refuse_unproved(self) -> None:
        release_types.check_supported(self.release, self.sampling)
        if isinstance(self.clipping, AdaptiveClipNorm) and not isinstance(self.release, Gradient):
            raise ValueError(f"clipping={self.clipping!r} with {self.release!r} has no proof. Use release=Gradient().")
        if self.adjacency is Adjacency.ADD_REMOVE:
            if isinstance(self.sampling, (Shuffled, CyclicPoisson)):
                raise ValueError(
                    f"{self.sampling!r} under Adjacency.ADD_REMOVE has no proof: removing an example moves others to "
                    "different steps. Use Adjacency.ZERO_OUT, or Poisson()."
                )
            if isinstance(self.sampling, Poisson) and self.sampling.max_batch_size is not None:
                raise ValueError(
                    "Truncated Poisson samples under Adjacency.ADD_REMOVE have no proof: truncation depends on the "
                    "private number of examples. Use Adjacency.ZERO_OUT, or no max_batch_size."
                )
        if isinstance(self.sampling, CyclicPoisson):
            hint = "Otherwise some groups never take part."
            check_at_most(f"the bands of {self.sampling!r}", self.sampling.bands, "steps", self.steps, hint=hint)
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
        """The probability that an example is in a batch, under `CyclicPoisson` at its group's steps."""
        return self.sampling.sampling_prob(num_examples=self.num_examples, batch_size=self.batch_size)

    @property
    def max_participations(self) -> int:
        """The largest number of steps in which one example may take part."""
        return self.sampling.max_participations(
            num_examples=self.num_examples, batch_size=self.batch_size, steps=self.steps
        )

    @property
    def min_separation(self) -> int:
        """The least number of steps between two participations of one example."""
        return self.sampling.min_separation(
            num_examples=self.num_examples, batch_size=self.batch_size, steps=self.steps
        )

    @functools.cached_property
    def strategy(self) -> Strategy:
        """The strategy matrix C, optimized for the plan's steps and participation pattern."""
        return self._optimized(self.noise)

    @functools.cached_property
    def square_strategy(self) -> Strategy:
        """The strategy of the noise on the square: `strategy`, unless the release sets `square_noise`."""
        return self.strategy if self._square_noise == self.noise else self._optimized(self._square_noise)

    def _optimized(self, noise: StrategySpec) -> Strategy:
        strategy = noise.optimize(
            steps=self.steps, max_participations=self.max_participations, min_separation=self.min_separation
        )
        groups = self.sampling.bands if isinstance(self.sampling, CyclicPoisson) else 1
        if self.sampling.is_random and strategy.bands > groups:
            raise ValueError(
                f"{noise!r} gave a strategy of {strategy.bands} bands, which {self.sampling!r} does not amplify. "
                "Clear the strategy cache."
            )
        return strategy

    @functools.cached_property
    def run(self) -> Run:
        """The run as the accountant sees it."""
        # Reading the strategies refuses those that have no proof.
        strategy, square_strategy = self.strategy, self.square_strategy
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
            ratios = (ratio, self.sensitivity_ratio(square_strategy))
            ratio = release_types.joint_ratio(self.release, ratios=ratios, **self._release_setting)
        return GaussianRun(sensitivity=self.adjacency.sensitivity_factor * ratio)

    def sensitivity_ratio(self, strategy: Strategy) -> float:
        """Return how far one example moves the whole run, relative to one participation."""
        sensitivity = strategy.sensitivity(
            max_participations=self.max_participations, min_separation=self.min_separation
        )
        return sensitivity / strategy.column_norm

    @property
    def _release_setting(self) -> dict[str, Any]:
        """What the functions of `release_types` need to know besides the release."""
        names = ("sampling", "adjacency", "clip_norm", "batch_size")
        return {name: getattr(self, name) for name in names}

    @property
    def is_private(self) -> bool:
        """Whether the plan gives any guarantee."""
        return bool(self.noise_multiplier) and not isinstance(self.release, NoiselessSquare)

    def epsilon(self, *, delta: float | None = None) -> float:
        """Return ε at `delta`, by default the plan's own.

        Guarantee: never understated. ∞ without noise, or if a square is released without noise.
        """
        multiplier = self._known_multiplier()
        delta = self._known_delta(delta)
        if isinstance(self.release, NoiselessSquare):
            return math.inf
        if self.counts is not None and multiplier:
            return epsilon_of_runs([self], delta=delta)
        return accounting.epsilon(self.run, noise_multiplier=multiplier, delta=delta)

    def rdp_epsilon(self, *, delta: float | None = None) -> float | None:
        """Return a looser upper bound on ε, by Rényi divergences; None where none is implemented."""
        if self.counts is not None or not accounting.has_rdp_bound(self.run):
            return None
        multiplier, delta = self._known_multiplier(), self._known_delta(delta)
        if isinstance(self.release, NoiselessSquare):
            return math.inf
        return accounting.rdp_epsilon(self.run, noise_multiplier=multiplier, delta=delta)

    def calibrate(self, *, epsilon: float, delta: float) -> PrivacyPlan:
        """Return a new plan with the least noise that keeps to (ε, δ); ε = inf gives no noise.

        Guarantee: the new plan's ε is within 1e-4 of `epsilon` and never above it.
        """
        check_number("epsilon", epsilon, above=0.0, infinity=True)
        check_delta(delta, self.num_examples)
        if isinstance(self.release, NoiselessSquare):
            raise ValueError(
                "release=NoiselessSquare() is not private at any noise multiplier. For a baseline, calibrate with "
                "release=Gradient() and then call .with_release(NoiselessSquare())."
            )
        multiplier = calibration.calibrate(self.run, epsilon=float(epsilon), delta=float(delta))
        found = self.replace(noise_multiplier=multiplier, delta=float(delta))
        if self.counts is None or not multiplier:
            return found
        if (alone := self.counts.epsilon(self.adjacency, delta=float(delta))) >= epsilon:
            raise ValueError(f"The counts alone have epsilon={alone:.4g} >= {epsilon:g}. Give them a smaller part.")
        multiplier = calibration.refine(lambda m: found.replace(noise_multiplier=m).epsilon(), multiplier, epsilon)
        return found.replace(noise_multiplier=multiplier)

    def replace(self, **changes: Any) -> PrivacyPlan:
        """Return a new plan with these fields changed. The noise multiplier is kept unless it is among them."""
        return dataclasses.replace(self, **changes)

    def with_release(self, release: Release) -> PrivacyPlan:
        """Return a new plan with a different release and the same noise multiplier.

        Guarantee: ε does not grow. A release whose `square_noise` or balance would raise it is refused.
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
                f"release={release!r} has a larger epsilon than release={self.release!r}. Calibrate for it: "
                "plan.replace(release=..., noise_multiplier=None).calibrate(epsilon=..., delta=...)."
            )
        return changed

    def noise_stddevs(self) -> NoiseStddevs:
        """Return the noise, per unit row, on the clipped sum and, if one is released, on the averaged square."""
        multiplier = self._known_multiplier()
        stddevs = release_types.noise_stddevs(self.release, noise_multiplier=multiplier, **self._release_setting)
        return stddevs._replace(gradient_sum=stddevs.gradient_sum * self.clipping.noise_factor)

    def outlook(self, *, parameters: int) -> Outlook:
        """Return whether this noise leaves a signal to train `parameters` parameters; uses no data.

        >>> plan = PrivacyPlan(num_examples=10_000, batch_size=32, steps=1000, noise_multiplier=1.0)
        >>> plan.outlook(parameters=124_000_000).verdict
        'hopeless'
        """
        parameters = check_whole("parameters", parameters, low=1)
        stddev = self.noise_stddevs().gradient_sum / self.clip_norm / self.batch_size * self.strategy.column_norm
        total = stddev * math.sqrt(self.strategy.squared_errors(PrefixSums())[-1] * parameters)
        return Outlook(parameters=parameters, noise_to_signal=total / self.steps)

    def statement(self, delta: float | None = None) -> str:
        """Return the privacy statement for an auditor: the guarantee, its proof and its assumptions."""
        return privacy_statement(self, delta=delta)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, which `from_dict` reads."""
        fields = {part.name: _to_plain(getattr(self, part.name)) for part in dataclasses.fields(self)}
        fields = {name: value for name, value in fields.items() if value != _IF_OMITTED.get(name, ...)}
        return {**fields, "adjacency": self.adjacency.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyPlan:
        """Return the plan that `to_dict` described.

        >>> plan = PrivacyPlan(num_examples=10, batch_size=2, steps=5, sampling=Poisson())
        >>> PrivacyPlan.from_dict(plan.to_dict()) == plan
        True
        """
        known = {part.name for part in dataclasses.fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"Unknown fields {sorted(unknown)}. A plan has {sorted(known)}.")
        fields = dict(values)
        modules = {
            "sampling": sampling,
            "noise": dpoptim.noise,
            "release": release_types,
            "counts": column_counts,
            "clipping": clipping_rules,
        }
        for name in modules.keys() & fields:
            fields[name] = _from_plain(name, fields[name], modules[name])
        if "adjacency" in fields:
            fields["adjacency"] = Adjacency(fields["adjacency"])
        return cls(**fields)

    def _known_multiplier(self) -> float:
        if self.noise_multiplier is None:
            raise ValueError("noise_multiplier is not set. Call plan.calibrate(epsilon=..., delta=...), or pass it.")
        return float(self.noise_multiplier)

    def _known_delta(self, delta: float | None) -> float:
        delta = self.delta if delta is None else delta
        if delta is None:
            raise ValueError("delta is not set. Pass delta=..., or calibrate the plan.")
        check_delta(delta)
        return float(delta)


def _refuse_unamplified(name: str, noise: StrategySpec, sampling: Sampling) -> None:
    """Refuse noise that secret sampling is not proved to amplify."""
    if isinstance(sampling, CyclicPoisson):
        bands = _max_bands(noise)
        if bands is None or bands > sampling.bands:
            more = "Shuffled()" if bands is None else f"CyclicPoisson(bands={bands})"
            raise ValueError(
                f"{name}={noise!r} with {sampling!r} has no proof: amplification needs a strategy of at most "
                f"{sampling.bands} diagonals. Use Banded or BandedToeplitz with bands <= {sampling.bands}, or {more}."
            )
    elif not isinstance(noise, Independent):
        raise ValueError(
            f"{name}={noise!r} with {sampling!r} has no proof: amplification of correlated noise needs cyclic sampling "
            "and a banded strategy. Use sampling=CyclicPoisson(bands=...), Independent() or Shuffled()."
        )


def _max_bands(noise: StrategySpec) -> int | None:
    """Return the largest possible number of diagonals of C; None if the specification does not bound it."""
    if isinstance(noise, (Banded, BandedToeplitz)):
        return noise.bands
    return 1 if isinstance(noise, Independent) else None


def _to_plain(value: Any) -> Any:
    """Turn a dataclass into a dict of its fields with its class name as "kind", and a tuple into a list."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {part.name: _to_plain(getattr(value, part.name)) for part in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    return [_to_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _from_plain(name: str, value: Any, module: ModuleType) -> Any:
    """Undo `_to_plain`. The outer kind is a dataclass of `module`, inner kinds are dataclasses of `dpoptim.noise`."""
    if isinstance(value, (tuple, list)):
        return tuple(_from_plain(name, item, module) for item in value)
    if not (isinstance(value, Mapping) and "kind" in value):
        return value
    kind = getattr(module, str(value["kind"]), None)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"{name} has the unknown kind {value['kind']!r}. Was it saved by a newer version?")
    fields = {key: _from_plain(f"{name}.{key}", part, dpoptim.noise) for key, part in value.items() if key != "kind"}
    if unknown := set(fields) - {part.name for part in dataclasses.fields(kind)}:
        raise ValueError(f"{name} has the unknown fields {sorted(unknown)}. Was it saved by a newer version?")
    return kind(**fields)
