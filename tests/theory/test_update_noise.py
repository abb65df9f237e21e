"""The noise of the update, against simulation (five standard errors) and search."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import dpoptim
from dpoptim.noise import ToeplitzStrategy
from dpoptim.theory import update_noise
from dpoptim.theory.second_moments import moment_weights

RUNS = 100_000
STRATEGIES = {
    "independent": dpoptim.Independent().optimize(steps=40),
    "square root": dpoptim.SquareRoot().optimize(steps=40),
    "banded": ToeplitzStrategy(steps=40, strategy_coefs=(1.0, 0.5, 0.3)),
}


def moments(noise: np.ndarray, beta1: float, beta2: float) -> tuple[np.ndarray, np.ndarray]:
    """μ̂ and ν̂ after the last row, by Adam's recursion."""
    mu, nu = np.zeros(noise.shape[1]), np.zeros(noise.shape[1])
    for row in noise:
        mu = beta1 * mu + (1 - beta1) * row
        nu = beta2 * nu + (1 - beta2) * row**2
    return mu / (1 - beta1 ** len(noise)), nu / (1 - beta2 ** len(noise))


def noise_of(name: str, step: int, seed: int = 0) -> np.ndarray:
    normals = np.random.default_rng(seed).standard_normal((step, RUNS))
    return STRATEGIES[name].noising_matrix()[:step, :step] @ normals


def near(sample: np.ndarray, expected: float) -> bool:
    return bool(abs(sample.mean() - expected) < 5 * sample.std() / math.sqrt(len(sample)) + 1e-12)


@pytest.mark.parametrize("step", [1, 3, 40])
@pytest.mark.parametrize("name", STRATEGIES)
def test_momentum_noise_variance(name, step):
    strategy, phi, beta1 = STRATEGIES[name], 0.3, 0.8
    mu, _ = moments(math.sqrt(phi) * noise_of(name, step), beta1, 0.9)
    found = update_noise.momentum_noise_variance(noise_variance=phi, step=step, beta1=beta1, strategy=strategy)
    assert near(mu**2, found)
    for factor in (0.9, 1.1):
        assert not near(mu**2, factor * found)
    if name == "independent":
        assert update_noise.momentum_noise_variance(noise_variance=phi, step=step, beta1=beta1) == pytest.approx(found)
    elif step > 1:  # rows alone, as if steps were independent
        rows = strategy.row_norms()[:step] ** 2
        assert not near(mu**2, phi * float(moment_weights(beta=beta1, step=step) ** 2 @ rows))


def test_momentum_limit():
    limit = update_noise.momentum_noise_variance(noise_variance=2.0, beta1=0.8)
    assert limit == pytest.approx(2.0 * 0.2 / 1.8)
    assert update_noise.momentum_noise_variance(noise_variance=2.0, beta1=0.8, step=200) == pytest.approx(limit)


@pytest.mark.parametrize("step", [1, 3, 40])
@pytest.mark.parametrize("name", STRATEGIES)
def test_post_processing_update_rms(name, step):
    """Exact at every step; the ratio of the means, aᵀKa/b_t, is not."""
    strategy, beta1, beta2 = STRATEGIES[name], 0.8, 0.9
    mu, nu = moments(noise_of(name, step, seed=1), beta1, beta2)
    found = update_noise.post_processing_update_rms(step=step, beta1=beta1, beta2=beta2, strategy=strategy)
    assert near(mu**2 / nu, found**2)
    assert not near(mu**2 / nu, (1.03 * found) ** 2)
    if step > 1:
        variance = update_noise.momentum_noise_variance(noise_variance=1.0, step=step, beta1=beta1, strategy=strategy)
        weights = moment_weights(beta=beta2, step=step)
        ratio = variance / float(weights @ strategy.row_norms()[:step] ** 2)
        assert found**2 != pytest.approx(ratio, rel=5e-3)
        if step == 40:
            assert not near(mu**2 / nu, ratio)
    if name == "independent":
        plain = update_noise.post_processing_update_rms(step=step, beta1=beta1, beta2=beta2)
        assert plain == pytest.approx(found, rel=1e-8)


def test_post_processing_update_rms_golden():
    """√((1−β₁)/(1+β₁)) = .22942 as β₂ → 1, with an error of first order in 1−β₂."""
    golden = math.sqrt(0.1 / 1.9)
    assert golden == pytest.approx(0.22942, abs=5e-6)
    errors = [golden - update_noise.post_processing_update_rms(beta2=beta2) for beta2 in (0.99, 0.999, 0.9999)]
    assert errors[1] == pytest.approx(0.000113, abs=1e-6)
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.1)
    assert update_noise.post_processing_update_rms(beta2=0.9, step=400) == pytest.approx(
        update_noise.post_processing_update_rms(beta2=0.9), rel=1e-8
    )


def test_scaled_noise():
    """Simulated noise of (clip(s⊙g) + noise)/s is ζσ/(Bs), and in the update, s = 1/√ν̂, the same everywhere."""
    scale = np.array([0.01, 1.0, 50.0])
    given: dict[str, Any] = dict(clip_norm=3.0, noise_multiplier=2.0, batch_size=10)
    normals = np.random.default_rng(3).standard_normal((40, RUNS // 4, 3))
    released = 0.6 * normals / scale
    found = update_noise.scaled_noise_stddev(scale, **given)
    for k in range(3):
        assert near(released[0, :, k] ** 2, found[k] ** 2)
        assert not near(released[0, :, k] ** 2, (0.9 * found[k]) ** 2)
    assert not near(released[0, :, 0] ** 2, (0.6 * scale[0]) ** 2)  # multiplied by s instead
    weights = moment_weights(beta=0.8, step=40)
    update = np.tensordot(weights, released, 1) * scale
    shrunk = update_noise.momentum_noise_variance(noise_variance=0.6**2, step=40, beta1=0.8)
    for k in range(3):
        assert near(update[:, k] ** 2, shrunk)


def test_edge_cases():
    with pytest.raises(ValueError, match="beta2=0"):
        update_noise.post_processing_update_rms(beta2=0.0)
    with pytest.raises(ValueError, match="scale"):
        update_noise.scaled_noise_stddev([1.0, 0.0], clip_norm=1.0, noise_multiplier=1.0, batch_size=1)
    with pytest.raises(ValueError, match="step=None"):
        update_noise.post_processing_update_rms(strategy=STRATEGIES["banded"])
    with pytest.raises(ValueError, match="beta1=1"):
        update_noise.momentum_noise_variance(noise_variance=1.0, beta1=1.0)


@pytest.mark.parametrize(
    "compute",
    [
        lambda step: update_noise.momentum_noise_variance(noise_variance=1.0, step=step),
        lambda step: update_noise.post_processing_update_rms(step=step),
    ],
)
def test_steps_must_be_whole(compute):
    for step in (1.5, 2.0, True):
        with pytest.raises(ValueError, match="must be a whole number"):
            compute(step)
