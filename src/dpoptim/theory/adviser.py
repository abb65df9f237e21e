"""Which variant and which noise to train with, why, and which constants to try: the theory applied to one training.

The choice of noise is that of `choose_noise`, the choice of variant that of `choose_variant`; the constants come from
the window of scale-then-privatize and the level of the noise. Nothing here looks at data: gradients are a
`GradientSignal`, assumed or measured on public examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from scipy.special import ndtr

from dpoptim.noise import NoiseMemory
from dpoptim.noise.series import Series
from dpoptim.optim.variants import noise_level
from dpoptim.privacy import Gradient, IndependentMoments, PrivacyPlan
from dpoptim.theory.advice_alternatives import Alternative, Progress, alternatives
from dpoptim.theory.advice_moments import moment_laws, momentum_weight, negative_fractions
from dpoptim.theory.advice_rule import EVIDENCE, MANY_NEGATIVE, choose_variant
from dpoptim.theory.advice_signal import GradientSignal
from dpoptim.theory.advice_window import ScaleWindow, rounded, scale_window
from dpoptim.theory.noise_choice import Choice, choose_noise
from dpoptim.theory.second_moments import check_beta

_MOST_FORECASTS = 10


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """At one step: the noise's variance φ_t on a coordinate of the averaged gradient, and the parts of ν̂ below 0.

    `independent_moments` is None where squares cannot be released under the plan's sampling.
    """

    step: int
    noise_variance: float
    bias_correction: float
    independent_moments: float | None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to train with, why, and the numbers behind it. Variances and eps are in gradient units.

    snr: mean of g² over φ at the last step; below 1 noise exceeds the gradient in a coordinate, on average.
    signal_share, scaled_share: the mean over coordinates of x/(1+x), x the signal to noise ratio in the update's
        numerator (momentum included), as coordinates are, and if scaling made x equal in all, which is the most it can.
    """

    epsilon: float
    delta: float
    choice: Choice
    signal: GradientSignal
    variant: str
    reason: str
    forecasts: tuple[Forecast, ...]
    snr: float
    signal_share: float
    scaled_share: float
    window: ScaleWindow
    eps_to_try: tuple[float, ...]
    clip_norms_to_try: tuple[float, ...]
    alternatives: tuple[Alternative, ...] = field(repr=False)
    notes: tuple[str, ...] = field(repr=False)

    @property
    def plan(self) -> PrivacyPlan:
        """The plan to train with, calibrated."""
        return self.choice.plan

    @property
    def noise_variance(self) -> float:
        """φ at the last step: (ζσ·column norm/B)²·‖last row of C⁻¹‖²."""
        return self.forecasts[-1].noise_variance

    @property
    def negative_fraction(self) -> float:
        """Of the coordinates, after bias correction at the last step, where it is least."""
        return self.forecasts[-1].bias_correction

    @property
    def many_negative(self) -> bool:
        """Whether more than a quarter of the coordinates would be negative, all along."""
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
    """Noise, variant and constants for a plan that is not calibrated yet, at (ε, δ); a pure function of numbers.

    `signal` is what gradients look like, by default assumed: a norm of .27 clip norms spread evenly. `measure_signal`
    takes it from PUBLIC examples. Betas are those of Adam.

    Guarantee: probabilities of a negative ν̂ are within .01 of the exact law for constant gradients of the given
    sizes (.003 at β₂ = .999).
    Edge cases: without noise (ε = ∞) nothing is negative; plans that release squares are refused, as the variants bring
    their own release.

    >>> plan = PrivacyPlan(num_examples=10_000, batch_size=100, steps=300)
    >>> advice = advise(plan, epsilon=5.0, delta=1e-6, parameters=10_000)
    >>> advice.variant, advice.many_negative, advice.window.fate(advice.window.low / 2).value
    ('scale_then_privatize', True, 'diverges')
    """
    if not isinstance(plan.release, Gradient):
        raise ValueError(f"plan releases {plan.release!r}; give one with release=Gradient(), variants bring their own")
    check_beta("beta1", beta1)
    check_beta("beta2", beta2)
    signal = GradientSignal.evenly(parameters=parameters) if signal is None else signal
    if signal.parameters != parameters:
        raise ValueError(f"signal is of {signal.parameters} parameters, parameters={parameters}; give the same model")
    choice = choose_noise(
        plan,
        epsilon=epsilon,
        delta=delta,
        parameters=parameters,
        memory_budget=memory_budget,
        memory=memory,
        progress=progress,
    )
    rows, missing = alternatives(choice, epsilon=epsilon, delta=delta, memory_budget=memory_budget, progress=progress)
    forecasts, exact = _forecasts(choice.plan, signal, beta2)
    window = _window(choice.plan, signal)
    shares = _shares(choice.plan, signal, beta1)
    phi = forecasts[-1].noise_variance / plan.clip_norm**2
    snr = signal.mean / phi if phi else math.inf
    variant, reason = choose_variant(
        signal, phi=phi, negative=forecasts[-1].bias_correction, shares=shares, beta2=beta2
    )
    level = noise_level(choice.plan, Gradient())
    notes = _notes(choice.plan, signal, exact=exact, missing=missing)
    return Advice(
        epsilon=epsilon,
        delta=delta,
        choice=choice,
        signal=signal,
        variant=variant,
        reason=reason,
        forecasts=forecasts,
        snr=snr,
        signal_share=shares[0],
        scaled_share=shares[1],
        window=window,
        eps_to_try=tuple(rounded(level * factor) for factor in (0.3, 1.0, 3.0)),
        clip_norms_to_try=_clip_norms(plan.clip_norm, signal),
        alternatives=rows,
        notes=notes,
    )


def unit_variance(plan: PrivacyPlan) -> float:
    """(σ·column norm/B)²: φ for a row of C⁻¹ of norm 1, in units of the squared clip norm."""
    stddev = plan.noise_stddevs().gradient_sum / plan.clip_norm
    return (stddev * plan.strategy.column_norm / plan.batch_size) ** 2


def _forecasts(plan: PrivacyPlan, signal: GradientSignal, beta2: float) -> tuple[tuple[Forecast, ...], bool]:
    """At the first step, the last, a quarter and some between, spaced evenly in their logarithm."""
    last = plan.steps
    steps = {1, max(1, last // 4), last, *np.geomspace(1, last, _MOST_FORECASTS).round().astype(int).tolist()}
    unit, norms, squares = unit_variance(plan), plan.strategy.row_norms(), np.asarray(signal.squares)
    square_stddev = _square_stddev(plan)
    found, exact = [], True
    for law in moment_laws(plan.strategy, sorted(steps), beta2=beta2):
        negative, ime = 0.0, None if square_stddev is None else 0.0
        if unit:
            negative = signal.average(negative_fractions(plan.strategy, squares / unit, law=law, beta2=beta2))
            if square_stddev:
                ime = signal.average(ndtr(-squares / (square_stddev * math.sqrt(law.once))))
            exact = exact and law.covariances
        found.append(
            Forecast(
                step=law.step,
                noise_variance=plan.clip_norm**2 * unit * float(norms[law.step - 1]) ** 2,
                bias_correction=negative,
                independent_moments=ime,
            )
        )
    return tuple(found), exact


def _square_stddev(plan: PrivacyPlan) -> float | None:
    """IME's noise on the averaged square, in units of the squared clip norm; None where it has no proof."""
    try:
        square = plan.with_release(IndependentMoments()).noise_stddevs().square
    except ValueError:
        return None
    return None if square is None else square * plan.strategy.column_norm / plan.clip_norm**2


def _window(plan: PrivacyPlan, signal: GradientSignal) -> ScaleWindow:
    level = noise_level(plan, Gradient())
    occupied = sum(weight for weight, square in zip(signal.weights, signal.squares, strict=True) if square > 0)
    return scale_window(
        clip_norm=plan.clip_norm,
        dimension=max(1, round(occupied * signal.parameters)),
        noise_multiplier=level * plan.batch_size / plan.clip_norm,
        batch_size=plan.batch_size,
        agreement=signal.agreement,
        default=max(2 * level, 1e-8),
    )


def _shares(plan: PrivacyPlan, signal: GradientSignal, beta1: float) -> tuple[float, float]:
    """The mean of x/(1+x) over coordinates as they are, and with x the same in all.

    Scaling by 1/√ν̂ spreads noise in proportion to the gradient, so x is then its mean everywhere; x/(1+x) is concave,
    so the second number is never the smaller one (Jensen), and equal only where gradients are even.
    """
    noise = unit_variance(plan) * momentum_weight(plan.strategy, step=plan.steps, beta1=beta1)
    if not noise:
        return 1.0, 1.0
    ratios: Series = np.asarray(signal.squares) / noise
    even = signal.mean / noise
    return signal.average(ratios / (1 + ratios)), even / (1 + even)


def _clip_norms(clip_norm: float, signal: GradientSignal) -> tuple[float, ...]:
    """Measured: the 10, 50 and 90 % points of the norms. Otherwise the given one, and a third and a tenth of it."""
    values = signal.example_norms or (clip_norm / 10, clip_norm / 3, clip_norm)
    return tuple(sorted({rounded(value) for value in values if value > 0} or {clip_norm}))


def _notes(
    plan: PrivacyPlan,
    signal: GradientSignal,
    *,
    exact: bool,
    missing: str | None,
) -> tuple[str, ...]:
    """What the numbers rest on, and where to doubt them."""
    if signal.measured:
        source = (
            f"MEASURED on {signal.examples} public examples at the model's present weights: the averaged clipped "
            f"gradient at batch size {plan.batch_size} is {signal.norm:.3g} clip norms long; it changes in training"
        )
    else:
        source = (
            f"ASSUMED: the averaged clipped gradient is {signal.norm:.3g} clip norms long (0.27 is the mean in the "
            "paper's experiment) and, unless another spread was given, spread evenly over the coordinates, the kindest "
            "case for bias correction; --probe or measure_signal measures it"
        )
    notes = [source, EVIDENCE]
    if signal.example_norms and signal.example_norms[1] < plan.clip_norm:
        notes.append(
            f"Half of the public examples have gradients below {signal.example_norms[1]:.3g} and are not clipped at "
            f"{plan.clip_norm:g}: a lower clip norm means less noise, and the window's upper end holds only where "
            "gradients are clipped"
        )
    if not exact:
        notes.append("Covariances of the noise over steps were left out: its matrix is too large; row norms are exact")
    if missing is not None:
        notes.append(f"The other sampling is not compared: {missing}")
    return tuple(notes)
