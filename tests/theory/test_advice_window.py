"""The window of eps_scale: where its upper end lies, and which values are offered from it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpoptim.theory import ScaleWindow, scale_window
from dpoptim.theory.advice_window import rounded


def test_examples_that_disagree_bring_the_upper_end_down():
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


@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0, 2.0, 30.0])
@pytest.mark.parametrize("agreement", [0.0, 0.27, 1.0])
def test_what_to_try_is_a_few_stable_values_apart(ratio, agreement):
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
