"""Which variant and which noise to train with, why, and which constants to try.

Nothing here looks at data: gradients are described by a `GradientSignal`, which is assumed or measured on public
examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpoptim.arguments import check_number, check_whole
from dpoptim.noise import NoiseMemory
from dpoptim.noise.series import Series
from dpoptim.optim.variants import noise_level
from dpoptim.privacy import Gradient, IndependentMoments, PrivacyPlan
from dpoptim.theory.noise_choice import Alternative, Choice, Progress, alternatives, choose_noise
from dpoptim.theory.second_moments import check, moment_laws, momentum_weight, negative_fractions, squared_weight
from dpoptim.theory.stability_window import ScaleWindow, rounded, scale_window

ASSUMED_NORMS = (0.03, 0.1, 0.3)
"""‖g_t‖/ζ if nothing is measured. Fine-tuning BERT-Tiny, our runs have means of .03 to .05, and the paper's has .27."""
MANY_NEGATIVE = 0.25  # of the coordinates; there g² is .67 standard deviations of ν̂
_NEGLIGIBLE_NOISE = 0.1  # of g²; ν̂ is 10 % too large and a step 5 % too short
_LITTLE_GAIN = 0.02  # in the mean share of signal in an update
_FEWEST_SEEN = 0.5  # of ‖g‖², in coordinates where ν̂ can distinguish it from noise
_LEAST_PART = 0.001  # of the coordinates hold half of ‖g‖²; in our BERT-Tiny runs .07 to .14 % do
_MOST_FORECASTS = 10
_NOTHING = (
    "there is nothing to adapt to. Fewer trained parameters, larger batches or more examples would help more than any "
    "variant"
)
EVIDENCE = (
    "Evidence: in the paper's one experiment (BERT-Tiny, masked tokens, three noise levels) scale_then_privatize had "
    "the lowest loss of the private variants at every level: 3.097, 3.423 and 3.659, compared with 3.251, 3.493 and "
    "3.697 for post_processing and 3.223, 3.492 and 3.727 for bias_correction. Our reproduction has the same winner at "
    "gradients of only 0.03 to 0.05 clip norms: 3.397, 3.646 and 4.236, compared with 3.699, 3.735 and 4.287, and with "
    "3.659, 3.728 and 4.293. To learn which wins on your task, run a trial on public data or within the budget."
)


@dataclass(frozen=True, kw_only=True)
class GradientSignal:
    """E g_i²/ζ² of the averaged clipped gradient at the training batch size, as groups of coordinates.

    Attributes:
        parameters: The number of coordinates.
        squares: The square of each group, in units of the squared clip norm ζ².
        weights: The share of the coordinates in each group; they add up to 1.
        measured: Whether the numbers come from (public) gradients or are assumed.
        examples: How many examples were measured.
        agreement: ‖g‖ over the mean norm of the examples' clipped gradients; 1 if they all point the same way.
        example_norms: The 10, 50 and 90 % quantiles of the examples' gradient norms before clipping.

    >>> signal = GradientSignal(parameters=100, squares=(0.0, 2e-4), weights=(0.5, 0.5))
    >>> round(signal.norm, 6), signal.median, round(signal.share_above(1e-4), 6)
    (0.1, 0.0001, 1.0)
    """

    parameters: int
    squares: tuple[float, ...]
    weights: tuple[float, ...]
    measured: bool = False
    examples: int = 0
    agreement: float = ASSUMED_NORMS[1]
    example_norms: tuple[float, float, float] | None = None

    def __post_init__(self) -> None:
        check_whole("parameters", self.parameters)
        if not self.squares or len(self.squares) != len(self.weights):
            raise ValueError(f"squares has {len(self.squares)} groups and weights {len(self.weights)}; use one each")
        for value in (*self.squares, *self.weights):
            check_number("squares and weights", value, low=0)
        if abs(sum(self.weights) - 1) > 1e-6:
            raise ValueError(f"weights must be shares of the coordinates that add up to 1, not {sum(self.weights)}")
        check_number("agreement", self.agreement, low=0, high=1)

    @classmethod
    def evenly(cls, *, parameters: int, norm: float = ASSUMED_NORMS[1]) -> GradientSignal:
        """Assume ‖g‖ = norm·ζ, 0 < norm ≤ 1, spread evenly: g_i² = (norm·ζ)²/m in each of the m coordinates.

        This is the most favourable spread for bias correction: the probability of a negative ν̂ is convex in g², so any
        other spread of the same norm has more negative coordinates.

        >>> GradientSignal.evenly(parameters=100, norm=1.0).squares
        (0.01,)
        """
        check_number("norm", norm, above=0, high=1, hint="An average of clipped gradients is no longer than ζ.")
        return cls(parameters=parameters, squares=(norm**2 / parameters,), weights=(1.0,), agreement=norm)

    @property
    def mean(self) -> float:
        """The mean of g_i²/ζ² over the coordinates."""
        return float(np.dot(self.weights, self.squares))

    @property
    def norm(self) -> float:
        """√E‖g‖²/ζ."""
        return math.sqrt(self.parameters * self.mean)

    @property
    def median(self) -> float:
        """The median of g_i²/ζ² over the coordinates; between two groups, their mean."""
        order = np.argsort(self.squares)
        squares, upto = np.asarray(self.squares)[order], np.cumsum(np.asarray(self.weights)[order])
        below = squares[int(np.searchsorted(upto, 0.5 - 1e-12))]
        above = squares[min(int(np.searchsorted(upto, 0.5 + 1e-12)), len(squares) - 1)]
        return float(below + above) / 2

    def average(self, values: Series) -> float:
        """Average a quantity over the coordinates, given its value for each group."""
        return float(np.dot(self.weights, values))

    def share_above(self, level: float) -> float:
        """Compute the part of ‖g‖² in coordinates with g_i²/ζ² ≥ level; 0 if all gradients are 0."""
        squares, weights = np.asarray(self.squares), np.asarray(self.weights)
        return float(np.dot(weights, squares * (squares >= level)) / self.mean) if self.mean else 0.0


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The noise and the share of negative second moments at one step, counted from 1.

    `noise_variance` is φ_t on a coordinate of the averaged gradient. `bias_correction` and `independent_moments` are
    shares of negative ν̂; the latter is None if squares cannot be released under the plan's sampling.
    """

    step: int
    noise_variance: float
    bias_correction: float
    independent_moments: float | None


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """What the advice would be for an even gradient of this norm, in clip norms; `snr` and the rest as in `Advice`."""

    norm: float
    variant: str
    snr: float
    negative_fraction: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to train with, why, and the numbers behind it. Variances and eps are in gradient units.

    Attributes:
        epsilon: The target ε.
        delta: The target δ.
        choice: The chosen noise.
        signal: What gradients are assumed or measured to look like.
        variant: The recommended variant.
        reason: Why, in one sentence.
        forecasts: Negative second moments at some steps.
        snr: The mean of g² over φ at the last step. Below 1, noise exceeds the gradient on average.
        assumptions: The advice at each of `ASSUMED_NORMS`; empty if a signal was given. The other numbers are for .1.
        signal_share: The mean over coordinates of x/(1+x), where x is the signal-to-noise ratio of the momentum.
        scaled_share: The same if scaling made x equal in all coordinates, which is the most it can do.
        window: The window of eps_scale.
        eps_to_try: Values of eps for bias correction and IME.
        clip_norms_to_try: Quantiles of measured norms, or the given clip norm, a third and a tenth of it.
        alternatives: The other mechanisms at the same (ε, δ).
        notes: What the numbers are based on, and their limits.
    """

    epsilon: float
    delta: float
    choice: Choice
    signal: GradientSignal
    variant: str
    reason: str
    forecasts: tuple[Forecast, ...]
    snr: float
    assumptions: tuple[Assumption, ...]
    signal_share: float
    scaled_share: float
    window: ScaleWindow
    eps_to_try: tuple[float, ...]
    clip_norms_to_try: tuple[float, ...]
    alternatives: tuple[Alternative, ...] = field(repr=False)
    notes: tuple[str, ...] = field(repr=False)

    @property
    def plan(self) -> PrivacyPlan:
        """The calibrated plan to train with."""
        return self.choice.plan

    @property
    def noise_variance(self) -> float:
        """φ at the last step: (ζσ·column norm/B)²·‖last row of C⁻¹‖²."""
        return self.forecasts[-1].noise_variance

    @property
    def negative_fraction(self) -> float:
        """The share of negative coordinates after bias correction at the last step, where it is smallest."""
        return self.forecasts[-1].bias_correction

    @property
    def many_negative(self) -> bool:
        """Whether more than a quarter of the coordinates would be negative throughout."""
        return self.negative_fraction > MANY_NEGATIVE


def advise(
    plan: PrivacyPlan,
    *,
    epsilon: float,
    delta: float,
    parameters: int,
    signal: GradientSignal | None = None,
    beta1: float = 0.9,
    beta2: float = 0.999,
    memory_budget: int | None = None,
    memory: NoiseMemory = NoiseMemory(),  # noqa: B008
    progress: Progress | None = None,
) -> Advice:
    """Recommend noise, variant and constants for a plan at (ε, δ). A pure function of numbers.

    Args:
        plan: A plan that is not calibrated yet, with release=Gradient().
        epsilon: The target ε. Without noise (ε = ∞) nothing is negative.
        delta: The target δ.
        parameters: The number of trained parameters.
        signal: What gradients look like. None assumes norms of .03 to .3 clip norms, spread evenly; `measure_signal`
            measures it on PUBLIC examples.
        beta1: Adam's momentum.
        beta2: Adam's second-moment decay.
        memory_budget: Bytes for past noise, as for `choose_noise`.
        memory: How past noise is stored.
        progress: Called with the name of each mechanism before it is calibrated.

    Guarantee:
        Probabilities of a negative ν̂ are within .01 of the exact ones for constant gradients (.003 at β₂ = .999).

    >>> plan = PrivacyPlan(num_examples=10_000, batch_size=100, steps=300)
    >>> advice = advise(plan, epsilon=5.0, delta=1e-6, parameters=10_000)
    >>> advice.variant, advice.many_negative, advice.window.regime(advice.window.low / 2).value
    ('scale_then_privatize', True, 'diverges')
    """
    if not isinstance(plan.release, Gradient):
        raise ValueError(f"plan releases {plan.release!r}. Use release=Gradient(); variants set their own release.")
    check(beta1=beta1, beta2=beta2)
    assumed = signal is None
    signal = GradientSignal.evenly(parameters=parameters) if signal is None else signal
    if signal.parameters != parameters:
        raise ValueError(f"signal has {signal.parameters} parameters, not {parameters}. Use the same model for both.")
    target: dict[str, Any] = dict(epsilon=epsilon, delta=delta, memory_budget=memory_budget, progress=progress)
    choice = choose_noise(plan, parameters=parameters, memory=memory, **target)
    rows, missing = alternatives(choice, **target)
    forecasts = _forecasts(choice.plan, signal, beta2)
    shares = _shares(choice.plan, signal, beta1)
    phi, negative = forecasts[-1].noise_variance / plan.clip_norm**2, forecasts[-1].bias_correction
    assumptions = _assumptions(choice.plan, parameters, phi=phi, shares=shares, beta2=beta2) if assumed else ()
    if assumed:
        variant, reason = choose_over_range(assumptions, parameters=parameters, phi=phi, beta2=beta2)
    else:
        variant, reason = choose_variant(signal, phi=phi, negative=negative, shares=shares, beta2=beta2)
    level = noise_level(choice.plan, Gradient())
    norms = signal.example_norms or (plan.clip_norm / 10, plan.clip_norm / 3, plan.clip_norm)
    occupied = sum(weight for weight, square in zip(signal.weights, signal.squares, strict=True) if square > 0)
    window = scale_window(
        clip_norm=plan.clip_norm,
        dimension=max(1, round(occupied * parameters)),
        noise_multiplier=level * plan.batch_size / plan.clip_norm,
        batch_size=plan.batch_size,
        agreement=signal.agreement,
        default=max(2 * level, 1e-8),
    )
    return Advice(
        epsilon=epsilon,
        delta=delta,
        choice=choice,
        signal=signal,
        variant=variant,
        reason=reason,
        forecasts=forecasts,
        snr=signal.mean / phi if phi else math.inf,
        assumptions=assumptions,
        signal_share=shares[0],
        scaled_share=shares[1],
        window=window,
        eps_to_try=tuple(rounded(level * factor) for factor in (0.3, 1.0, 3.0)),
        clip_norms_to_try=tuple(sorted({rounded(norm) for norm in norms if norm > 0} or {plan.clip_norm})),
        alternatives=rows,
        notes=_notes(choice.plan, signal, missing),
    )


def choose_variant(
    signal: GradientSignal, *, phi: float, negative: float, shares: tuple[float, float], beta2: float
) -> tuple[str, str]:
    """Choose the variant and give the reason.

    1. φ ≤ .1·g² in half of the coordinates: post-processing is enough, because ν̂ is off by 10 % and steps by 5 %.
    2. Measured, at most 25 % negative, and scaling would raise the share of signal by less than .02: bias correction.
    3. Measured, and less than half of ‖g‖² lies where g² exceeds the fluctuation of ν̂, √(2κ)·φ: post-processing.
    4. Assumed, and φ so large that this holds even with half of ‖g‖² in .1 % of the coordinates: likewise.
    5. Otherwise scale-then-privatize. An assumed even spread cannot show what scaling gains, so the evidence decides.
    """
    if phi <= _NEGLIGIBLE_NOISE * signal.median:
        share = phi / signal.median if phi else 0.0
        return "post_processing", (
            f"noise adds {share:.1%} to the second moment of the median coordinate, so a step is "
            f"{1 - 1 / math.sqrt(1 + share):.1%} short: there is little to correct"
        )
    excess = f"noise adds {phi / signal.mean:.3g} times" if signal.mean else "noise adds infinitely many times"
    bias = f"{excess} the mean squared gradient to the second moment"
    fluctuation = _fluctuation(beta2)
    if signal.measured:
        gain = shares[1] - shares[0]
        if negative <= MANY_NEGATIVE and gain < _LITTLE_GAIN:
            return "bias_correction", (
                f"{bias}, which can be removed: {negative:.1%} of the coordinates would be negative (at most "
                f"{MANY_NEGATIVE:.0%}), and with this spread of gradients scaling would raise the share of signal in "
                f"an update by only {gain:.3f}"
            )
        seen = signal.share_above(fluctuation * phi)
        if seen < _FEWEST_SEEN:
            return "post_processing", (
                f"{bias}, and {seen:.0%} of the squared gradient lies in coordinates where the second moment could "
                f"distinguish it from noise (g² above {fluctuation:.3g} times the noise): {_NOTHING}"
            )
        return "scale_then_privatize", (
            f"{bias}; bias correction would leave {negative:.1%} of the coordinates negative; scaling before clipping "
            f"could raise the share of signal in an update from {shares[0]:.3f} to at most {shares[1]:.3f}"
        )
    if signal.mean < _LEAST_PART / _FEWEST_SEEN * fluctuation * phi:
        return "post_processing", (
            f"{bias}; even with half of the squared gradient in {_LEAST_PART:.1%} of the coordinates, the second "
            f"moment could not distinguish it from noise (g² above {fluctuation:.3g} times the noise): {_NOTHING}"
        )
    kind = "more" if negative > MANY_NEGATIVE else "no more"
    return "scale_then_privatize", (
        f"{bias}; bias correction would leave {negative:.1%} of the coordinates negative, {kind} than "
        f"{MANY_NEGATIVE:.0%}, if gradients are as assumed (less even gradients have more). How much scaling gains "
        "depends on the spread, which only a probe can measure; without one, the paper's results decide"
    )


def _fluctuation(beta2: float) -> float:
    """The standard deviation of ν̂ over φ, in pure noise after many steps."""
    return math.sqrt(2 * squared_weight(beta=beta2))


def choose_over_range(
    assumptions: Sequence[Assumption], *, parameters: int, phi: float, beta2: float
) -> tuple[str, str]:
    """Choose the variant for a gradient norm known only to lie between two ends, and say if the choice depends on it.

    Scale-then-privatize, unless it is advised nowhere in the range. Where the gradient is too short for it, its scale
    is nearly constant, so it nearly equals post-processing; where noise is negligible, so is what the two do about it.

    Args:
        assumptions: By norm.
        parameters: m.
        phi: φ in units of the squared clip norm, at the last step.
        beta2: Adam's second-moment decay.
    """
    low, high = assumptions[0], assumptions[-1]
    ends = f"for averaged gradients of {low.norm:g} to {high.norm:g} clip norms"
    if not phi:
        return "post_processing", f"there is no noise, so there is nothing to correct {ends}"
    added = _between(*(_short(1 / end.snr) for end in (high, low)))
    bias = f"noise adds {added} times the mean squared gradient to the second moment"
    too_short = math.sqrt(parameters * _LEAST_PART / _FEWEST_SEEN * _fluctuation(beta2) * phi)
    long_enough = math.sqrt(parameters * phi / _NEGLIGIBLE_NOISE)
    if high.norm < too_short:
        return "post_processing", (
            f"{bias} {ends}, and over that whole range the second moment could not distinguish even a concentrated "
            f"gradient from noise (it could from {too_short:.2g} clip norms on): {_NOTHING}"
        )
    if low.norm >= long_enough:
        return "post_processing", f"{bias} {ends}, so over that whole range there is little to correct"
    negative = _between(*(f"{end.negative_fraction:.0%}" for end in (high, low)))
    depends = "; the choice is the same over that range"
    if low.norm < too_short:
        depends = f"; below {too_short:.2g} there is nothing to adapt to, and post_processing is as good"
    elif high.norm >= long_enough:
        depends = f"; from {long_enough:.2g} on there is little to correct, and post_processing is as good"
    return "scale_then_privatize", (
        f"{ends}, {bias}, and bias correction would leave {negative} of the coordinates negative{depends}. Gradients "
        "less even than assumed have more negative ones. How much scaling gains depends on the spread, which only a "
        "probe can measure; without one, measured results decide"
    )


def _between(first: str, last: str) -> str:
    """Two numbers as a range, or one if they look alike."""
    return first if first == last else f"{first} to {last}"


def _short(value: float) -> str:
    """Three digits, without powers of ten.

    >>> _short(0.0123), _short(5030.0)
    ('0.0123', '5,030')
    """
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _assumptions(
    plan: PrivacyPlan, parameters: int, *, phi: float, shares: tuple[float, float], beta2: float
) -> tuple[Assumption, ...]:
    """The variant, the signal-to-noise ratio and the share of negative ν̂ at the last step, at each assumed norm."""
    signals = [GradientSignal.evenly(parameters=parameters, norm=norm) for norm in ASSUMED_NORMS]
    negatives = [0.0] * len(signals)
    if phi:
        (law,) = moment_laws(plan.strategy, [plan.steps], beta2=beta2)
        ratios = [signal.mean / unit_variance(plan) for signal in signals]
        negatives = negative_fractions(plan.strategy, ratios, law=law, beta2=beta2).tolist()
    return tuple(
        Assumption(
            norm=norm,
            variant=choose_variant(signal, phi=phi, negative=negative, shares=shares, beta2=beta2)[0],
            snr=signal.mean / phi if phi else math.inf,
            negative_fraction=negative,
        )
        for norm, signal, negative in zip(ASSUMED_NORMS, signals, negatives, strict=True)
    )


def unit_variance(plan: PrivacyPlan) -> float:
    """(σ·column norm/B)²: φ for a row of C⁻¹ of norm 1, in units of the squared clip norm."""
    stddev = plan.noise_stddevs().gradient_sum / plan.clip_norm
    return (stddev * plan.strategy.column_norm / plan.batch_size) ** 2


def _forecasts(plan: PrivacyPlan, signal: GradientSignal, beta2: float) -> tuple[Forecast, ...]:
    """At the first step, the last, a quarter of the way, and some in between, evenly spaced in logarithm."""
    from scipy.special import ndtr

    last = plan.steps
    steps = {1, max(1, last // 4), last, *np.geomspace(1, last, _MOST_FORECASTS).round().astype(int).tolist()}
    unit, norms, squares = unit_variance(plan), plan.strategy.row_norms(), np.asarray(signal.squares)
    square_stddev = _square_stddev(plan)
    found = []
    for law in moment_laws(plan.strategy, sorted(steps), beta2=beta2):
        negative, ime = 0.0, None if square_stddev is None else 0.0
        if unit:
            negative = signal.average(negative_fractions(plan.strategy, squares / unit, law=law, beta2=beta2))
            if square_stddev:
                ime = signal.average(ndtr(-squares / (square_stddev * math.sqrt(law.once))))
        phi = plan.clip_norm**2 * unit * float(norms[law.step - 1]) ** 2
        found.append(Forecast(step=law.step, noise_variance=phi, bias_correction=negative, independent_moments=ime))
    return tuple(found)


def _square_stddev(plan: PrivacyPlan) -> float | None:
    """IME's noise on the averaged square, in units of the squared clip norm; None where IME has no proof."""
    try:
        square = plan.with_release(IndependentMoments()).noise_stddevs().square
    except ValueError:
        return None
    return None if square is None else square * plan.strategy.column_norm / plan.clip_norm**2


def _shares(plan: PrivacyPlan, signal: GradientSignal, beta1: float) -> tuple[float, float]:
    """The mean of x/(1+x) over coordinates: without scaling, and with x the same in all, which scaling can reach."""
    noise = unit_variance(plan) * momentum_weight(plan.strategy, step=plan.steps, beta1=beta1)
    if not noise:
        return 1.0, 1.0
    ratios, even = np.asarray(signal.squares) / noise, signal.mean / noise
    return signal.average(ratios / (1 + ratios)), even / (1 + even)


def _notes(plan: PrivacyPlan, signal: GradientSignal, missing: str | None) -> tuple[str, ...]:
    """What the numbers are based on, and where to doubt them."""
    if signal.measured:
        source = (
            f"MEASURED on {signal.examples} public examples at the model's current weights: the averaged clipped "
            f"gradient at batch size {plan.batch_size} is {signal.norm:.3g} clip norms long; it changes in training"
        )
    else:
        source = (
            f"ASSUMED: the averaged clipped gradient is {signal.norm:.3g} clip norms long (means are 0.27 in the "
            "paper's experiment, 0.03 to 0.05 in our reproduction) and, unless a spread was given, spread evenly over "
            "the coordinates, the best case for bias correction; --probe or measure_signal measures it"
        )
    notes = [source, EVIDENCE]
    if signal.example_norms and signal.example_norms[1] < plan.clip_norm:
        notes.append(
            f"Half of the public examples have gradients below {signal.example_norms[1]:.3g} and are not clipped at "
            f"{plan.clip_norm:g}: a lower clip norm means less noise, and the window's upper end holds only where "
            "gradients are clipped"
        )
    if missing is not None:
        notes.append(f"The other sampling is not compared: {missing}")
    return tuple(notes)
