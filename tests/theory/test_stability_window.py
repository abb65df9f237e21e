"""Steady state, contraction and window of scale-then-privatize, against simulations of the true recursion."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dpoptim.theory import ScaleWindow, SecondMomentRegime, scale_window
from dpoptim.theory import stability_window as theory
from dpoptim.theory.stability_window import rounded

SETTING: dict[str, Any] = {"noise_multiplier": 1.0, "batch_size": 100}
M = 400


def simulate(
    gradient: np.ndarray,
    clip_norm: float,
    *,
    steps: int,
    runs: int = 1,
    beta2: float = 0.99,
    eps_scale: float = 1e-6,
    start: float = 0.0,
    seed: int = 0,
) -> np.ndarray:
    """ν̂_t, [steps, runs, m], of equal examples, so that the average of clipped gradients is one clipped gradient."""
    rng, path = np.random.default_rng(seed), []
    nu = np.zeros((runs, len(gradient)))
    nu_hat = np.full_like(nu, start)
    for t in range(1, steps + 1):
        s = 1 / (np.sqrt(nu_hat) + eps_scale)
        scaled = s * gradient
        scaled *= np.minimum(1.0, clip_norm / np.linalg.norm(scaled, axis=1, keepdims=True))
        noisy = (scaled + clip_norm * SETTING["noise_multiplier"] / 100 * rng.standard_normal(nu.shape)) / s
        nu = beta2 * nu + (1 - beta2) * noisy**2
        nu_hat = nu / (1 - beta2**t)
        path.append(nu_hat)
    return np.asarray(path)


@pytest.mark.parametrize("clip_norm", [22.0, 40.0, 70.0])
def test_steady_state(clip_norm):
    """2,400 coordinates over 1,000 steps, s.e. below .2 %: ν̂*/(1−φ), and not ν̂*²/(1−φ), ν̂*(1−φ) or ν̂*."""
    gradient = np.full(M, 0.5)
    simulated = float(simulate(gradient, clip_norm, steps=2000, runs=6, start=0.25)[1000:].mean())
    phi = clip_norm**2 / 100**2
    assert float(theory.steady_second_moment(0.25, clip_norm=clip_norm, **SETTING)) == pytest.approx(
        simulated, rel=0.01
    )
    for wrong in (0.25**2 / (1 - phi), 0.25 * (1 - phi), 0.25):
        assert wrong != pytest.approx(simulated, rel=0.03)
    field = theory.mean_field(gradient, clip_norm=clip_norm, steps=2000, beta2=0.99, start=0.25, **SETTING)
    assert float(field[1000:].mean()) == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize(
    ("clip_norm", "regime"),
    [
        (19.0, SecondMomentRegime.COLLAPSES),
        (19.8, SecondMomentRegime.STEADY),  # below √m = 20, the window's edge if noise did not hold ν̂ up
        (22.0, SecondMomentRegime.STEADY),
        (40.0, SecondMomentRegime.STEADY),
        (70.0, SecondMomentRegime.STEADY),
        (120.0, SecondMomentRegime.DIVERGES),
    ],
)
def test_the_predicted_regime_matches_simulations(clip_norm, regime):
    assert theory.predict(clip_norm, dimension=M, **SETTING) is regime
    simulated = simulate(np.ones(M), clip_norm, steps=3000, start=1.0).mean((1, 2))
    growth = simulated[-1] / simulated[-1000]
    if regime is SecondMomentRegime.COLLAPSES:
        assert growth < 0.8
        assert simulated[-1] < 0.25
    elif regime is SecondMomentRegime.DIVERGES:
        assert growth > 10
        assert simulated[-1] > 1e3
    else:
        expected = float(theory.steady_second_moment(1.0, clip_norm=clip_norm, **SETTING))
        assert simulated[2000:].mean() == pytest.approx(expected, rel=0.03)


def test_window():
    low, high = theory.clip_norm_window(dimension=M, **SETTING)
    assert (low, high) == pytest.approx((19.6116, 100.0), abs=1e-4)
    assert low != pytest.approx(100.0, rel=0.5)  # without 1/m the window is empty
    assert low != pytest.approx(math.sqrt(M), rel=0.01)  # without σ²/B²
    assert theory.predict(low, dimension=M, **SETTING) is SecondMomentRegime.STEADY
    assert theory.predict(high, dimension=M, **SETTING) is SecondMomentRegime.DIVERGES
    assert theory.clip_norm_window(dimension=M, noise_multiplier=0.0, batch_size=7) == (pytest.approx(20.0), math.inf)
    # At the edge the steady state is exactly at the clip norm: ‖s⊙g‖² = m(1−φ) = ζ².
    phi = theory.feedback(clip_norm=low, **SETTING)
    assert M * (1 - phi) == pytest.approx(low**2)


@pytest.mark.parametrize("clip_norm", [13.0, 16.0])
def test_only_coordinates_with_a_gradient_count(clip_norm):
    """Half of the 400 are 0 and the others differ a thousandfold: the edge is that of m = 200, 14.0."""
    gradient = np.where(np.arange(M) % 2, 10.0 ** np.linspace(-2, 1, M), 0.0)
    regime = theory.predict(clip_norm, dimension=200, **SETTING)
    assert regime is (SecondMomentRegime.STEADY if clip_norm == 16.0 else SecondMomentRegime.COLLAPSES)
    assert theory.predict(clip_norm, dimension=M, **SETTING) is SecondMomentRegime.COLLAPSES
    field = theory.mean_field(gradient, clip_norm=clip_norm, steps=1500, beta2=0.95, start=gradient**2, **SETTING)
    steady = theory.steady_second_moment(gradient**2, clip_norm=clip_norm, **SETTING)
    if regime is SecondMomentRegime.STEADY:
        np.testing.assert_allclose(field[-1], steady, rtol=1e-6, atol=1e-9)
    else:
        assert field[-1].sum() < 0.01 * steady.sum()


def test_mean_field_is_exact_where_nothing_is_clipped():
    """The mean of 20,000 runs at every tenth step within five standard errors; without noise's feedback it is not."""
    gradient, steps, runs = np.array([1.0, 2.0, 0.5, 1.0]), 60, 20_000
    given: dict[str, Any] = dict(clip_norm=45.0, beta2=0.9, eps_scale=1e-9)
    sample = simulate(gradient, steps=steps, runs=runs, start=3.0, **given)[9::10]
    simulated, error = sample.mean(1), 5 * sample.std(1) / math.sqrt(runs)
    field = theory.mean_field(gradient, steps=steps, start=3.0, **given, **SETTING)[9::10]
    phi = theory.feedback(clip_norm=45.0, **SETTING)
    assert np.all(np.abs(simulated - field) < error)
    assert not np.any(np.abs(simulated - gradient**2)[2:] < error[2:])
    assert not np.any(np.abs(simulated - gradient**2 * (1 + phi))[2:] < error[2:])


@pytest.mark.parametrize(
    ("clip_norm", "start", "tolerance"),
    [(10.0, 0.0, 0.01), (40.0, 0.0, 0.01), (40.0, 1.0, 0.01), (10.0, 1.0, 0.2), (120.0, 0.0, 0.2), (120.0, 1.0, 0.2)],
)
def test_mean_field_follows_clipped_runs(clip_norm, start, tolerance):
    """After 400 steps within 1 % where ν̂ is at rest, within 20 % on its fall by 1/2,000 or its rise by 140."""
    given: dict[str, Any] = dict(clip_norm=clip_norm, steps=400, beta2=0.99, eps_scale=1e-3, start=start)
    simulated = float(simulate(np.ones(M), runs=8, **given)[-1].mean())
    field = float(theory.mean_field(np.ones(M), **given, **SETTING)[-1].mean())
    assert field == pytest.approx(simulated, rel=tolerance)
    assert simulated != pytest.approx(1.0, rel=0.1)  # noise does not come back
    if theory.predict(clip_norm, dimension=M, **SETTING) is SecondMomentRegime.COLLAPSES:  # nothing is clipped
        assert simulated != pytest.approx(
            float(theory.steady_second_moment(1.0, clip_norm=clip_norm, **SETTING)), rel=0.9
        )


def test_contraction():
    given: dict[str, Any] = dict(clip_norm=40.0, **SETTING)
    found = theory.contraction_factor(**given, beta2=0.9)
    path = theory.mean_field(np.ones(4), steps=150, beta2=0.9, eps_scale=1e-12, start=9.0, **given)[:, 0]
    errors = path - float(theory.steady_second_moment(1.0, **given))
    # While β₂ᵗ is not negligible the debiased average moves faster; it is 5e-6 from step 116 on.
    ratios = errors[121:141] / errors[120:140]
    assert ratios == pytest.approx(found, rel=1e-4)
    assert ratios != pytest.approx(0.9, rel=1e-3)
    assert ratios != pytest.approx(0.9 * (1 + 0.16), rel=1e-3)


@pytest.mark.parametrize("clip_norm", [2.0, 10.0, 15.0])
def test_collapsed_state(clip_norm):
    """Where ε_s1 holds it, ν̂ is (ρε/(1−ρ))²; 3,200 coordinates agree within 2 %, and (ρε)² does not."""
    expected = theory.collapsed_state(clip_norm=clip_norm, dimension=M, eps_scale=1e-3, **SETTING)
    given: dict[str, Any] = dict(clip_norm=clip_norm, steps=2500, beta2=0.99, eps_scale=1e-3)
    field = theory.mean_field(np.ones(M), **given, **SETTING)
    assert float(field[-1].mean()) == pytest.approx(expected, rel=2e-3)
    simulated = float(simulate(np.ones(M), runs=4, **given)[-200:].mean())
    assert simulated == pytest.approx(expected, rel=0.02)
    rho = clip_norm / theory.clip_norm_window(dimension=M, **SETTING)[0]
    assert simulated != pytest.approx((rho * 1e-3) ** 2, rel=0.15)


def test_edge_cases():
    given: dict[str, Any] = dict(clip_norm=100.0, **SETTING)
    assert theory.steady_second_moment([0.0, 1.0], **given).tolist() == [0.0, math.inf]
    assert theory.contraction_factor(**given) == pytest.approx(1.0)
    assert theory.mean_field(0.0, steps=2, **(given | {"clip_norm": 1.0})).shape == (2, 1)
    with pytest.raises(ValueError, match="noiseless"):
        theory.steady_second_moment(-1.0, **given)
    with pytest.raises(ValueError, match="Expected clip_norm > 0"):
        theory.predict(0.0, dimension=M, **SETTING)
    with pytest.raises(ValueError, match="Expected dimension > 0"):
        theory.clip_norm_window(dimension=0, **SETTING)
    with pytest.raises(ValueError, match=r"Expected steps .* got 0"):
        theory.mean_field(1.0, steps=0, **given)
    with pytest.raises(ValueError, match="Expected beta2 >= 0 and < 1"):
        theory.contraction_factor(beta2=1.0, **given)


@pytest.mark.parametrize("steps", [0, 1.5])
def test_steps_must_be_whole(steps):
    with pytest.raises(ValueError, match=f"Expected steps .* got {steps}"):
        theory.mean_field([1.0], clip_norm=1.0, noise_multiplier=1.0, batch_size=2, steps=steps)


# The window of eps_scale.


def test_disagreeing_examples_lower_the_upper_end():
    """Between the two upper ends the second moment collapses, below the lower of them it does not."""
    rng = np.random.default_rng(5)
    parameters, batch, clip_norm, beta2 = 200, 60, 1.0, 0.9
    mean = 30 * np.ones(parameters) / math.sqrt(parameters)
    agreement = 0.4
    spread = np.linalg.norm(mean) / math.sqrt(parameters) * math.sqrt(1 / agreement**2 - 1)
    window = scale_window(
        clip_norm=clip_norm, dimension=parameters, noise_multiplier=0.5, batch_size=batch, agreement=agreement
    )
    assert window.high > 2 * window.likely_high

    def run(eps_scale: float) -> float:
        nu = nu_hat = np.zeros(parameters)
        for t in range(1, 301):
            examples = mean + spread * rng.standard_normal((batch, parameters))
            scale = eps_scale / (np.sqrt(nu_hat) + eps_scale)
            weights = np.minimum(1.0, clip_norm / np.linalg.norm(scale * examples, axis=1))
            noise = 0.5 * clip_norm / batch * rng.standard_normal(parameters) / scale
            nu = beta2 * nu + (1 - beta2) * ((weights @ examples) / batch + noise) ** 2
            nu_hat = nu / (1 - beta2**t)
        return float(nu_hat.mean() / (mean**2).mean())

    assert run(0.8 * window.likely_high) > 0.5
    assert run(math.sqrt(window.high * window.likely_high)) < 0.1


def window_of(ratio: float, agreement: float = 1.0) -> ScaleWindow:
    """Of 1,000 coordinates; the noise is `ratio` times as long as a gradient that all examples share."""
    return scale_window(
        clip_norm=0.7, dimension=1000, noise_multiplier=ratio * 1000**-0.5 * 64, batch_size=64, agreement=agreement
    )


@pytest.mark.parametrize(
    ("ratio", "agreement"), [(0.01, 0.27), (0.3, 0.0), (0.3, 1.0), (1.0, 0.27), (2.0, 1.0), (30.0, 0.27)]
)
def test_values_to_try_are_few_stable_and_distinct(ratio, agreement):
    window = window_of(ratio, agreement)
    assert 3 <= len(window.to_try) <= 6
    assert all(value > 1.05 * window.low for value in window.to_try)
    assert all(b > 1.05 * a for a, b in zip(window.to_try, window.to_try[1:], strict=False))
    assert window.describe(window.low).startswith("below")
    assert window.too_narrow == all(window.place(value) == "above" for value in window.to_try)


def test_both_upper_ends_are_offered():
    """A value beside each upper end, on its side however it is rounded."""
    window = window_of(0.3, 0.5)
    assert window.low < window.likely_high < window.high
    for end, place in ((window.likely_high, "in"), (window.high, "in if examples agree")):
        nearest = min(window.to_try, key=lambda value: abs(value - end))
        assert nearest == pytest.approx(end, rel=0.05)
        assert window.place(nearest) == place
    assert [window.place(factor * window.low) for factor in (0.9, 1.01, 100.0)] == ["below", "in", "above"]


@pytest.mark.parametrize("clip_norm", np.linspace(0.1, 1.0, 10))
def test_rounding_does_not_leave_the_window(clip_norm):
    window = scale_window(clip_norm=float(clip_norm), dimension=1000, noise_multiplier=4.0, batch_size=64)
    assert 1.1 < window.width < 1.2
    inside = [value for value in window.to_try if window.low < value <= window.high]
    assert inside
    assert all(len(f"{value:.12g}".replace("0.", "").lstrip("0")) <= 3 for value in inside)


def test_rounded():
    assert rounded(0.0) == 0.0
    assert rounded(123.4, 3) == 123.0
    assert math.isclose(rounded(1.10489), 1.1)
