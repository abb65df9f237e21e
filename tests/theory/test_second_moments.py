"""The distribution of ν̂_t against closed forms and simulation, within five standard errors; wrong formulas fail."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import ncx2

import dpoptim
from dpoptim.noise import Independent, Strategy, TensorPart, ToeplitzStrategy
from dpoptim.optim import reference
from dpoptim.theory import second_moments
from dpoptim.theory.second_moments import (
    moment_laws,
    momentum_weight,
    negative_fractions,
    negative_probability,
    second_moment_bias,
    squared_weight,
)

G, PHI, BETA2 = 0.7, 0.3, 0.9
RUNS = 100_000
STRATEGIES = {
    "independent": dpoptim.Independent().optimize(steps=40),
    "square root": dpoptim.SquareRoot().optimize(steps=40),
    "banded": ToeplitzStrategy(steps=40, strategy_coefs=(1.0, 0.5, 0.3)),
}


def simulate(strategy: Strategy, step: int, *, gradient: float = G, seed: int = 0) -> np.ndarray:
    """ν̂_t of RUNS runs, by Adam's recursion and not by weights."""
    noise = np.random.default_rng(seed).standard_normal((step, RUNS))
    noise = strategy.noising_matrix()[:step, :step] @ noise
    nu = np.zeros(RUNS)
    for row in noise:
        nu = BETA2 * nu + (1 - BETA2) * (gradient + math.sqrt(PHI) * row) ** 2
    return nu / (1 - BETA2**step)


def near(sample: np.ndarray, expected: float) -> bool:
    """Whether the sample's mean is within five standard errors of what is expected."""
    return bool(abs(sample.mean() - expected) < 5 * sample.std() / math.sqrt(len(sample)))


@pytest.mark.parametrize("step", [1, 4, 40])
@pytest.mark.parametrize("name", STRATEGIES)
def test_mean_and_variance(name, step):
    strategy = STRATEGIES[name]
    nu = simulate(strategy, step)
    given: dict[str, Any] = dict(noise_variance=PHI, step=step, beta2=BETA2, strategy=strategy)
    mean = float(second_moments.second_moment_mean(G, **given))
    variance = float(second_moments.second_moment_variance(G, **given))
    deviations = (nu - mean) ** 2
    assert near(nu, mean)
    assert near(deviations, variance)
    pure = float(second_moments.second_moment_variance(0.0, **given))
    assert not near(deviations, pure + (variance - pure) / 4)  # gz for 2gz
    assert not near(nu, mean - PHI)  # no bias
    if step > 1:
        extra = 0.0  # the bias's recursion with one β₂ more
        for t, norm in enumerate(strategy.row_norms()[:step], start=1):
            extra = (BETA2 * (BETA2 - BETA2**t) * extra + (1 - BETA2) * norm**2) / (1 - BETA2**t)
        assert not near(nu, G**2 + PHI * extra)
    if name != "independent" and step > 1:  # the covariances, and not the variances alone
        rows = strategy.row_norms()[:step] ** 2
        weights = second_moments.moment_weights(beta=BETA2, step=step)
        assert not near(deviations, float(weights**2 @ (2 * PHI**2 * rows**2 + 4 * G**2 * PHI * rows)))


def test_independent_forms_agree_with_the_matrix():
    gradients = np.array([[0.0, 0.2], [1.0, -3.0]])
    for step in (1, 2, 7, 40):
        given: dict[str, Any] = dict(noise_variance=PHI, step=step, beta2=BETA2)
        for function in (
            second_moments.second_moment_mean,
            second_moments.second_moment_variance,
            second_moments.negative_probability,
        ):
            plain, matrix = (
                function(gradients, **given),
                function(gradients, **given, strategy=STRATEGIES["independent"]),
            )
            assert plain.shape == gradients.shape
            np.testing.assert_allclose(plain, matrix, rtol=1e-9, atol=1e-12)


def test_noise_inflates_a_small_gradient():
    """Noise of variance 1 multiplies the second moment α² by 1 + 1/α², and not by 1 + α²."""
    alpha = 0.5
    sample = (alpha + np.random.default_rng(5).standard_normal(RUNS)) ** 2
    mean = float(second_moments.second_moment_mean(alpha, noise_variance=1.0, step=1))
    assert mean == pytest.approx(alpha**2 * (1 + 1 / alpha**2))
    assert near(sample, mean)
    assert not near(sample, alpha**2 * (1 + alpha**2))


def test_limit_equals_a_long_run():
    for function in (second_moments.second_moment_variance, second_moments.negative_probability):
        limit = float(function(G, noise_variance=PHI, beta2=BETA2))
        assert float(function(G, noise_variance=PHI, beta2=BETA2, step=400)) == pytest.approx(limit, abs=1e-12)
        assert float(function(G, noise_variance=PHI, beta2=BETA2, step=10)) != pytest.approx(limit, rel=0.01)
    right = (4 * G**2 * PHI + 2 * PHI**2) * (1 - BETA2) / (1 + BETA2)
    assert float(second_moments.second_moment_variance(G, noise_variance=PHI, beta2=BETA2)) == pytest.approx(right)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 300])
@pytest.mark.parametrize("shift", [0.0, 0.1, 1.0])
def test_contour_integral_for_equal_weights_is_noncentral_chi_square(count, shift):
    found = second_moments._below(1.0, np.full(count, 1 / count), np.full(count, shift / count))
    assert found == pytest.approx(float(ncx2.cdf(count, count, shift * count + 1e-300)), rel=1e-9)


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_contour_integral_equals_imhofs(shift):
    """Imhof's own real integral, by quadrature, at 25 unequal weights."""
    weights = second_moments.moment_weights(beta=0.8, step=25)

    def integrand(u: float) -> float:
        angle = 0.5 * np.sum(np.arctan(weights * u) + shift * weights * u / (1 + (weights * u) ** 2)) - 0.5 * u
        damping = np.prod((1 + (weights * u) ** 2) ** 0.25)
        damping *= np.exp(0.5 * np.sum(shift * (weights * u) ** 2 / (1 + (weights * u) ** 2)))
        return math.sin(angle) / (u * damping)

    imhof = 0.5 - quad(integrand, 0.0, 400.0, limit=2000, epsabs=1e-11)[0] / math.pi
    assert second_moments._below(1.0, weights, shift * weights) == pytest.approx(imhof, abs=1e-7)


@pytest.mark.parametrize("gradient", [0.0, 0.3])
@pytest.mark.parametrize("step", [1, 5, 40])
@pytest.mark.parametrize("name", STRATEGIES)
def test_negative_probability(name, step, gradient):
    strategy = STRATEGIES[name]
    given: dict[str, Any] = dict(noise_variance=PHI, step=step, beta2=BETA2, strategy=strategy)
    bias = PHI * second_moment_bias(strategy, beta2=BETA2)[step - 1]
    negative = (simulate(strategy, step, gradient=gradient, seed=1) < bias).astype(float)
    assert near(negative, float(second_moments.negative_probability(gradient, **given)))
    variance = float(second_moments.second_moment_variance(gradient, **given))
    normal = 0.5 * math.erfc(gradient**2 / math.sqrt(2 * variance))
    assert not near(negative, normal)  # ν̂ is skewed, so a normal with the right mean and variance is not enough


def test_negative_probability_in_pure_noise():
    """.68269 = P(|z| < 1) at t = 1, .5056 for t → ∞ at β₂ = .999; an equal average of 1,999 squares has .5042."""
    assert float(second_moments.negative_probability(noise_variance=7.0, step=1)) == pytest.approx(0.68269, abs=5e-6)
    limit = float(second_moments.negative_probability(noise_variance=7.0))
    assert limit == pytest.approx(0.5056, abs=5e-5)
    # Edgeworth: ½ + skewness/(6√(2π)) to first order, with skewness √8·Σw³/(Σw²)^1.5
    beta = 0.999
    skewness = math.sqrt(8) * ((1 - beta) ** 3 / (1 - beta**3)) / ((1 - beta) / (1 + beta)) ** 1.5
    assert limit == pytest.approx(0.5 + skewness / (6 * math.sqrt(2 * math.pi)), abs=2e-5)
    equal = float(ncx2.cdf(1999, 1999, 1e-300))
    assert equal == pytest.approx(0.5042, abs=5e-5)
    by_step = [float(second_moments.negative_probability(noise_variance=1.0, step=t)) for t in (1, 2, 10, 100)]
    assert by_step == sorted(by_step, reverse=True)


@pytest.mark.parametrize("name", STRATEGIES)
def test_ime_negative_probability(name):
    strategy, step, gradient, stddev = STRATEGIES[name], 20, 0.4, 0.5
    noise = np.random.default_rng(2).standard_normal((step, RUNS))
    nu = np.zeros(RUNS)
    for row in strategy.noising_matrix()[:step, :step] @ noise:
        nu = BETA2 * nu + (1 - BETA2) * (gradient**2 + stddev * row)
    given: dict[str, Any] = dict(square_stddev=stddev, step=step, beta2=BETA2, strategy=strategy)
    found = float(second_moments.ime_negative_probability(gradient, **given))
    negative = (nu < 0).astype(float)
    assert near(negative, found)
    assert not near(negative, float(second_moments.ime_negative_probability(gradient, **(given | {"step": 1}))))
    assert float(second_moments.ime_negative_probability(0.0, **given)) == 0.5


def test_edge_cases():
    assert float(second_moments.negative_probability(noise_variance=0.0)) == 0.0
    assert float(second_moments.ime_negative_probability(square_stddev=0.0)) == 0.0
    assert float(second_moments.negative_probability(noise_variance=1.0, beta2=0.0)) == pytest.approx(0.6826894921)
    assert float(second_moments.negative_probability(1e3, noise_variance=1.0, step=50)) == 0.0
    with pytest.raises(ValueError, match="Expected beta2 >= 0 and < 1"):
        second_moments.second_moment_mean(noise_variance=1.0, beta2=1.0)
    with pytest.raises(ValueError, match=r"Expected step .* got 0"):
        second_moments.second_moment_variance(noise_variance=1.0, step=0)
    with pytest.raises(ValueError, match="got 41 > 40"):
        second_moments.negative_probability(noise_variance=1.0, step=41, strategy=STRATEGIES["banded"])
    with pytest.raises(ValueError, match="step=None"):
        second_moments.second_moment_variance(noise_variance=1.0, strategy=STRATEGIES["banded"])
    with pytest.raises(ValueError, match="Expected noise_variance >= 0"):
        second_moments.second_moment_variance(noise_variance=-1.0)
    with pytest.raises(ValueError, match="Expected square_stddev >= 0"):
        second_moments.ime_negative_probability(square_stddev=-1.0)


@pytest.mark.parametrize(
    "compute",
    [
        lambda **step: second_moments.moment_weights(beta=0.9, **step),
        lambda **step: second_moments.squared_weight(beta=0.9, **step),
        lambda **step: second_moments.second_moment_mean(noise_variance=1.0, **step),
        lambda **step: second_moments.second_moment_variance(noise_variance=1.0, **step),
        lambda **step: second_moments.negative_probability(noise_variance=1.0, **step),
        lambda **step: second_moments.ime_negative_probability(square_stddev=1.0, **step),
    ],
)
def test_steps_must_be_whole(compute):
    for step in (1.5, 2.0, True, "2"):
        with pytest.raises(ValueError, match="Expected step to be a whole number"):
            compute(step=step)
    assert np.all(compute(step=np.int64(2)) == compute(step=2))


def test_a_noise_specification_must_be_optimized_first():
    with pytest.raises(ValueError, match=r"Call \.optimize\(steps=\.\.\.\) first"):
        second_moment_bias(dpoptim.BufferedToeplitz(buffers=2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Call \.optimize\(steps=\.\.\.\) first"):
        second_moments.negative_probability(noise_variance=1.0, step=2, strategy=dpoptim.BufferedToeplitz(buffers=2))  # type: ignore[arg-type]


# The bias.

SPECS = [
    dpoptim.Independent(),
    dpoptim.SquareRoot(),
    dpoptim.Dense(),
    dpoptim.Banded(bands=3),
    dpoptim.BandedToeplitz(bands=4),
    dpoptim.BandedToeplitz(bands=4, workload=dpoptim.DecayedSums(beta=0.9)),
    dpoptim.BufferedToeplitz(buffers=2),
    dpoptim.BandedInverse(bands=4),
]


@pytest.mark.parametrize(
    ("spec", "beta2"), list(zip(SPECS, itertools.cycle([0.0, 0.9, 0.999]), strict=False)), ids=repr
)
def test_bias_is_the_weighted_trace(spec, beta2):
    """Σ_i w_i (C⁻¹C⁻ᵀ)_ii with the weights of Adam's debiased average."""
    strategy = spec.optimize(steps=12)
    inverse = strategy.noising_matrix()
    variances = np.diag(inverse @ inverse.T)
    for t in range(1, 13):
        weights = (1 - beta2) * beta2 ** np.arange(t - 1, -1, -1) / (1 - beta2**t)
        assert second_moment_bias(strategy, beta2=beta2)[t - 1] == pytest.approx(weights @ variances[:t], rel=1e-12)


def test_bias_equals_what_the_reference_subtracts():
    strategy = dpoptim.BandedToeplitz(bands=4).optimize(steps=12)
    norms = torch.as_tensor(strategy.row_norms()) ** 2
    expected = reference.noise_bias(reference.Adam(lr=0.1, beta2=0.9), norms, 1.0)
    np.testing.assert_allclose(second_moment_bias(strategy, beta2=0.9), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("spec", "memory"),
    [
        (dpoptim.SquareRoot(), dpoptim.NoiseMemory()),
        (dpoptim.BandedToeplitz(bands=4), dpoptim.NoiseMemory(bits=16)),
        (dpoptim.BufferedToeplitz(buffers=2), dpoptim.NoiseMemory(bits=16)),
        (dpoptim.BandedInverse(bands=4), dpoptim.NoiseMemory()),
    ],
    ids=repr,
)
def test_bias_of_streamed_noise(spec, memory):
    """The mean over 200,000 coordinates is within .6 %; the paper's recursion with one β₂ too many is not."""
    strategy = spec.optimize(steps=10)
    key = dpoptim.NoiseKey.from_bytes(bytes(32))
    stream = strategy.stream(key, [TensorPart(name="weight", numel=200_000)], stream="gradient", memory=memory)
    noise = torch.stack([stream.row(step) for step in range(10)]).double().numpy()
    weights = 0.1 * 0.9 ** np.arange(9, -1, -1) / (1 - 0.9**10)
    simulated = float((weights @ noise**2).mean())
    found = float(second_moment_bias(strategy, beta2=0.9)[-1])
    assert simulated == pytest.approx(found, rel=0.006)
    assert simulated != pytest.approx(0.9 * found, rel=0.006)


# The approximation by three cumulants.


@pytest.mark.parametrize(
    ("noise", "beta2"),
    [
        (Independent(), 0.9),
        (dpoptim.BufferedToeplitz(buffers=2), 0.999),
        (dpoptim.BandedToeplitz(bands=8), 0.9),
        (dpoptim.Dense(), 0.999),
    ],
    ids=repr,
)
def test_three_cumulants_are_close_to_the_exact_distribution(noise, beta2):
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
    strategy = dpoptim.BufferedToeplitz(buffers=2).optimize(steps=600)
    (whole,) = moment_laws(strategy, [600], beta2=0.99)
    monkeypatch.setattr("dpoptim.theory.second_moments._LONGEST_BLOCK", 200)
    (scaled,) = moment_laws(strategy, [600], beta2=0.99)
    for name in ("bias", "once", "twice", "cube", "shifted_cube"):
        assert getattr(scaled, name) == pytest.approx(getattr(whole, name), rel=0.05)


@pytest.mark.parametrize("step", [0, 5, 1.5, True])
def test_moment_laws_refuse_bad_steps(step):
    strategy = Independent().optimize(steps=4)
    with pytest.raises(ValueError, match=rf"Expected step .*got {step}"):
        moment_laws(strategy, [step])
    with pytest.raises(ValueError, match=rf"Expected step .*got {step}"):
        momentum_weight(strategy, step=step)
