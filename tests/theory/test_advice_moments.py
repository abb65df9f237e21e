"""The law of ν̂ by three cumulants, against the exact one."""

from __future__ import annotations

import numpy as np
import pytest

from dpoptim import BandedToeplitz, BufferedToeplitz
from dpoptim.noise import Dense, Independent
from dpoptim.theory import negative_probability, second_moment_bias
from dpoptim.theory.advice_moments import moment_laws, momentum_weight, negative_fractions
from dpoptim.theory.second_moments import squared_weight


@pytest.mark.parametrize("noise", [Independent(), BufferedToeplitz(buffers=2), BandedToeplitz(bands=8), Dense()])
@pytest.mark.parametrize("beta2", [0.9, 0.999])
def test_three_cumulants_are_as_good_as_the_exact_law(noise, beta2):
    strategy = noise.optimize(steps=150)
    ratios = np.array([0.0, 0.02, 0.1, 0.4, 2.0])
    close = 3e-3 if beta2 > 0.99 else 8e-3  # few steps count at .9
    for step in (1, 29, 30, 150):
        exact = negative_probability(np.sqrt(ratios), noise_variance=1.0, step=step, beta2=beta2, strategy=strategy)
        (law,) = moment_laws(strategy, [step], beta2=beta2)
        np.testing.assert_allclose(negative_fractions(strategy, ratios, law=law, beta2=beta2), exact, atol=close)
    assert law.bias == pytest.approx(float(second_moment_bias(strategy, beta2=beta2)[-1]))
    assert law.once == pytest.approx(squared_weight(beta=beta2, step=150, strategy=strategy))
    assert momentum_weight(strategy, step=150) == pytest.approx(squared_weight(beta=0.9, step=150, strategy=strategy))


def test_steps_beyond_the_block_are_scaled(monkeypatch):
    strategy = BufferedToeplitz(buffers=2).optimize(steps=600)
    (whole,) = moment_laws(strategy, [600], beta2=0.99)
    monkeypatch.setattr("dpoptim.theory.advice_moments._LONGEST_BLOCK", 200)
    (scaled,) = moment_laws(strategy, [600], beta2=0.99)
    for name in ("bias", "once", "twice", "cube", "shifted_cube"):
        assert getattr(scaled, name) == pytest.approx(getattr(whole, name), rel=0.05)
    assert scaled.covariances


@pytest.mark.parametrize("step", [0, 5, 1.5, True])
def test_steps_are_whole_and_of_the_strategy(step):
    strategy = Independent().optimize(steps=4)
    with pytest.raises(ValueError, match=rf"step={step}"):
        moment_laws(strategy, [step])
    with pytest.raises(ValueError, match=rf"step={step}"):
        momentum_weight(strategy, step=step)
