"""The conditions on dimension and batch size: golden values, inverses, and simulation at the limit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import dpoptim
from dpoptim.theory import regimes
from dpoptim.theory.regimes import Signal
from dpoptim.theory.second_moments import second_moment_variance

PAIRS: dict[str, Any] = {
    "post-processing": (regimes.largest_dimension_post_processing, regimes.smallest_batch_post_processing, {}),
    "bias correction": (
        regimes.largest_dimension_bias_correction,
        regimes.smallest_batch_bias_correction,
        {"beta2": 0.99},
    ),
    "ime": (regimes.largest_dimension_ime, regimes.smallest_batch_ime, {"beta2": 0.99}),
}


def test_golden():
    """The limits at B = 2048, σ = 1, β₂ = .999; the printed 10⁶ and 2·10⁴ are outside."""
    optimistic = regimes.largest_dimension_bias_correction(batch_size=2048, noise_multiplier=1.0)
    pessimistic = regimes.largest_dimension_bias_correction(
        batch_size=2048, noise_multiplier=1.0, signal=Signal.PESSIMISTIC
    )
    assert optimistic == pytest.approx(1.88e8, rel=5e-3)
    assert pessimistic == pytest.approx(9.2e4, rel=6e-3)
    assert optimistic != pytest.approx(1e6, rel=0.5)
    assert pessimistic != pytest.approx(2e4, rel=0.5)
    assert regimes.smallest_batch_ime(dimension=1.0, noise_multiplier=1.0) == pytest.approx(0.0633, rel=1e-3)


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("name", PAIRS)
def test_smallest_batch_inverts_largest_dimension(name, signal):
    dimension_of, batch_of, options = PAIRS[name]
    for batch_size, noise_multiplier in ((10.0, 0.3), (2048.0, 1.7), (1e5, 8.0)):
        given: dict[str, Any] = dict(noise_multiplier=noise_multiplier, signal=signal, **options)
        dimension = dimension_of(batch_size=batch_size, **given)
        if name == "ime" and signal is Signal.PESSIMISTIC:
            assert dimension == pytest.approx(dimension_of(batch_size=1.0, **given))
            assert batch_of(dimension=0.99 * dimension, **given) == 1.0
            assert batch_of(dimension=1.01 * dimension, **given) == math.inf
        else:
            assert batch_of(dimension=dimension, **given) == pytest.approx(batch_size)


@pytest.mark.parametrize("signal", Signal)
def test_bias_correction_at_its_limit(signal):
    """There the simulated noise of ν̂ is √(2 + 4√κ) signals, s.e. .6 % of it; with √m for m it is not."""
    batch_size, noise_multiplier, clip_norm, beta2 = 50.0, 2.0, 3.0, 0.95
    given: dict[str, Any] = dict(noise_multiplier=noise_multiplier, beta2=beta2, signal=signal)
    dimension = regimes.largest_dimension_bias_correction(batch_size=batch_size, **given)
    norm = clip_norm / (1 if signal is Signal.OPTIMISTIC else math.sqrt(batch_size))
    phi, rng = (clip_norm * noise_multiplier / batch_size) ** 2, np.random.default_rng(0)
    kappa = (1 - beta2) / (1 + beta2)

    def noise_in_signals(m: float) -> float:
        g, nu = norm / math.sqrt(m), np.zeros(20_000)
        for _ in range(200):
            nu = beta2 * nu + (1 - beta2) * (g + math.sqrt(phi) * rng.standard_normal(20_000)) ** 2
        return float(nu.std()) / g**2

    expected = math.sqrt(2 + 4 * math.sqrt(kappa))
    assert noise_in_signals(dimension) == pytest.approx(expected, rel=0.05)
    assert noise_in_signals(math.sqrt(dimension)) != pytest.approx(expected, rel=0.5)
    post = regimes.largest_dimension_post_processing(
        batch_size=batch_size, noise_multiplier=noise_multiplier, signal=signal
    )
    assert post == pytest.approx(norm**2 / phi)  # where bias and signal are equal
    assert dimension / post == pytest.approx(1 / math.sqrt(kappa))


def test_ime_at_its_limit():
    """There the simulated noise of the averaged square is one signal, s.e. .5 %; bias correction's limit is not."""
    batch_size, noise_multiplier, clip_norm, beta2 = 50.0, 2.0, 3.0, 0.95
    given: dict[str, Any] = dict(batch_size=batch_size, noise_multiplier=noise_multiplier, beta2=beta2)
    square_stddev = math.sqrt(2) * noise_multiplier * 2 * clip_norm**2 / batch_size
    nu, rng = np.zeros(20_000), np.random.default_rng(1)
    for _ in range(200):
        nu = beta2 * nu + (1 - beta2) * square_stddev * rng.standard_normal(20_000)
    assert float(nu.std()) == pytest.approx(clip_norm**2 / regimes.largest_dimension_ime(**given), rel=0.025)
    other = regimes.largest_dimension_bias_correction(**given)
    assert float(nu.std()) != pytest.approx(clip_norm**2 / other, rel=0.5)


def test_multiplying_sigma_by_a_row_norm_is_optimistic_for_correlated_noise():
    """The exact variance of ν̂ in pure noise is at least that of independent noise with the same row norm."""
    strategy = dpoptim.BandedToeplitz(bands=8).optimize(steps=64)
    norm = float(strategy.row_norms().min())
    exact = second_moment_variance(noise_variance=1.0, step=64, beta2=0.9, strategy=strategy)
    assert float(exact) >= float(second_moment_variance(noise_variance=norm**2, step=64, beta2=0.9))


def test_edge_cases():
    assert regimes.largest_dimension_bias_correction(batch_size=1, noise_multiplier=0.0) == math.inf
    assert regimes.largest_dimension_ime(batch_size=1, noise_multiplier=0.0) == math.inf
    assert regimes.smallest_batch_ime(dimension=5, noise_multiplier=0.0) == 0.0
    with pytest.raises(ValueError, match="Expected batch_size > 0"):
        regimes.largest_dimension_post_processing(batch_size=0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="Expected dimension > 0"):
        regimes.smallest_batch_bias_correction(dimension=-1, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="Expected noise_multiplier >= 0"):
        regimes.largest_dimension_ime(batch_size=1, noise_multiplier=-1)
    with pytest.raises(ValueError, match="Expected beta2 >= 0 and < 1"):
        regimes.largest_dimension_ime(batch_size=1, noise_multiplier=1, beta2=1.0)
