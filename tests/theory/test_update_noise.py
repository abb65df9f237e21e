"""Noise and sensitivity of the update, against simulation (five standard errors) and search."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dpoptim.theory import update_noise
from dpoptim.theory.second_moments import moment_weights, negative_probability
from tests.theory.test_second_moments import RUNS, STRATEGIES


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


@pytest.mark.parametrize("name", STRATEGIES)
def test_bias_correction_update_bound(name):
    """Simulated RMS lies between .4 and 1 of the bound where ε ≪ √φ, and follows 1/ε; post-processing's does not."""
    strategy, step, phi = STRATEGIES[name], 40, 0.25
    mu, nu = moments(math.sqrt(phi) * noise_of(name, step, seed=2), 0.8, 0.9)
    bias = phi * float(moment_weights(beta=0.9, step=step) @ strategy.row_norms() ** 2)
    for eps in (1e-2, 1e-3):
        rms = math.sqrt(float(np.mean(mu**2 / np.maximum(nu - bias, eps**2))))
        bound = update_noise.bias_correction_update_bound(
            noise_variance=phi, eps=eps, step=step, beta1=0.8, strategy=strategy
        )
        assert 0.4 * bound < rms < bound
        assert bound <= math.sqrt(phi) * float(strategy.row_norms().max()) / eps
        # Where ν̂ − b is negative the update is μ̂/ε, and that is most of it.
        negative = nu < bias
        chance = float(negative_probability(noise_variance=phi, step=step, beta2=0.9, strategy=strategy))
        assert near(negative.astype(float), chance)
        assert float(np.sum((mu[negative] / eps) ** 2) / RUNS) > 0.9 * rms**2
        plain = update_noise.post_processing_update_rms(step=step, beta1=0.8, beta2=0.9, strategy=strategy)
        assert rms > 10 * plain


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


def update_of(gradients: np.ndarray, beta1: float, beta2: float, eps: float) -> np.ndarray:
    mu, nu = moments(gradients, beta1, beta2)
    return mu / (np.sqrt(nu) + eps)


CASES = [
    (1, 1, 0.9, 0.999),
    (2, 2, 0.9, 0.999),
    (2, 1, 0.9, 0.999),
    (20, 20, 0.9, 0.999),
    (20, 3, 0.9, 0.999),
    (6, 6, 0.0, 0.9),
    (6, 2, 0.0, 0.9),
    (6, 5, 0.9, 0.5),
]


@pytest.mark.parametrize(("step", "participation", "beta1", "beta2"), CASES)
def test_update_sensitivity_is_attained(step, participation, beta1, beta2):
    """One example whose change is spread over 10⁸ coordinates, beside the worst history, changes u by the bound."""
    clip_norm, batch_size, eps, m = 2.0, 4, 0.3, 10**8
    a, w = moment_weights(beta=beta1, step=step), moment_weights(beta=beta2, step=step)
    b, i = a / np.sqrt(w), participation - 1
    form = np.zeros((step, step))
    form[i] -= b / 2
    form[:, i] -= b / 2
    values, vectors = np.linalg.eigh(form)
    direction, k = vectors[:, -1], math.sqrt(w[i]) * values[-1]
    tau = min(1.0, (a[i] + k) / (2 * k)) if k > 1e-12 else 1.0
    history = eps * (1 / tau - 1) * direction / np.sqrt(w)
    step_size = clip_norm / batch_size / math.sqrt(m)  # the change of each coordinate, all equal
    with_it, without_it = history.copy(), history.copy()
    with_it[i] += step_size / 2
    without_it[i] -= step_size / 2
    change = update_of(with_it[:, None], beta1, beta2, eps) - update_of(without_it[:, None], beta1, beta2, eps)
    found = update_noise.update_sensitivity(
        clip_norm=clip_norm,
        batch_size=batch_size,
        eps=eps,
        step=step,
        participation=participation,
        beta1=beta1,
        beta2=beta2,
    )
    attained = math.sqrt(m) * abs(float(change[0]))
    assert attained == pytest.approx(found, rel=1e-3)
    assert attained <= found * (1 + 1e-9)
    if k > a[i]:  # then the numerator's share a_i alone is not a bound
        assert attained > a[i] * clip_norm / (batch_size * eps) * 1.01


@pytest.mark.parametrize(("step", "participation", "beta1", "beta2"), CASES)
def test_update_sensitivity_is_not_exceeded(step, participation, beta1, beta2):
    """200,000 random histories and changes of all sizes, in one coordinate (a change in many is a sum of squares)."""
    rng = np.random.default_rng(step + participation)
    sizes = 10.0 ** rng.uniform(-3, 2, 200_000)
    gradients = rng.standard_normal((step, 200_000)) * sizes * 10.0 ** rng.uniform(-2, 0, (step, 200_000))
    other = gradients.copy()
    other[participation - 1] += rng.standard_normal(200_000) * 10.0 ** rng.uniform(-3, 2, 200_000)
    eps = 0.3
    changes = np.abs(update_of(gradients, beta1, beta2, eps) - update_of(other, beta1, beta2, eps))
    slopes = changes / np.abs(other - gradients)[participation - 1]
    bound = update_noise.update_sensitivity(
        clip_norm=1.0, batch_size=1, eps=eps, step=step, participation=participation, beta1=beta1, beta2=beta2
    )
    assert 0.5 * bound < slopes.max() <= bound * (1 + 1e-6)


@pytest.mark.parametrize("eps", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("m", [1, 5, 400])
def test_first_update_sensitivity(m, eps):
    """Attained by two examples, one minus half of the other; not exceeded by 2,000 random pairs; below ζ/(Bε)."""
    clip_norm, batch_size = 2.0, 8
    found = update_noise.first_update_sensitivity(clip_norm=clip_norm, batch_size=batch_size, eps=eps, dimension=m)

    def first_update(gradient: np.ndarray) -> np.ndarray:
        return gradient / (np.abs(gradient) + eps)

    example = np.full(m, clip_norm / math.sqrt(m))
    change = first_update((example - example / 2) / batch_size) - first_update(-example / 2 / batch_size)
    assert float(np.linalg.norm(change)) == pytest.approx(found, rel=1e-12)
    rng = np.random.default_rng(m)
    for _ in range(2000):
        one = rng.standard_normal(m) * 10.0 ** rng.uniform(-2, 0, m)
        one *= clip_norm / np.linalg.norm(one)
        rest = rng.standard_normal(m) * 10.0 ** rng.uniform(-3, 1) * clip_norm
        moved = first_update((one + rest) / batch_size) - first_update(rest / batch_size)
        assert float(np.linalg.norm(moved)) <= found * (1 + 1e-9)
    if eps:
        loose = update_noise.update_sensitivity(clip_norm=clip_norm, batch_size=batch_size, eps=eps, step=1)
        assert found < loose == pytest.approx(clip_norm / (batch_size * eps))
        one_sided = (clip_norm / batch_size) / (eps + clip_norm / batch_size / math.sqrt(m))  # from 0, not from −½
        assert one_sided < 0.999 * found


def test_edge_cases():
    given: dict[str, Any] = dict(clip_norm=1.0, batch_size=1, eps=1.0)
    assert update_noise.update_sensitivity(**given, step=5000, beta1=0.9, beta2=0.5) == math.inf  # β₁² > β₂
    assert update_noise.update_sensitivity(**given, step=3, beta1=0.0, beta2=0.0) == 1.0
    assert update_noise.update_sensitivity(**given, step=3, participation=2, beta1=0.0, beta2=0.0) == 0.0
    with pytest.raises(ValueError, match="beta2=0"):
        update_noise.update_sensitivity(**given, step=3, beta2=0.0)
    with pytest.raises(ValueError, match="beta2=0"):
        update_noise.post_processing_update_rms(beta2=0.0)
    with pytest.raises(ValueError, match="Expected participation <= step, got 4 > 3"):
        update_noise.update_sensitivity(**given, step=3, participation=4)
    with pytest.raises(ValueError, match="Expected eps > 0"):
        update_noise.bias_correction_update_bound(noise_variance=1.0, eps=0.0)
    with pytest.raises(ValueError, match="scale"):
        update_noise.scaled_noise_stddev([1.0, 0.0], clip_norm=1.0, noise_multiplier=1.0, batch_size=1)
    with pytest.raises(ValueError, match="step=None"):
        update_noise.post_processing_update_rms(strategy=STRATEGIES["banded"])
    with pytest.raises(ValueError, match="Expected beta1 >= 0 and < 1"):
        update_noise.momentum_noise_variance(noise_variance=1.0, beta1=1.0)


@pytest.mark.parametrize(
    "compute",
    [
        lambda step: update_noise.momentum_noise_variance(noise_variance=1.0, step=step),
        lambda step: update_noise.post_processing_update_rms(step=step),
        lambda step: update_noise.bias_correction_update_bound(noise_variance=1.0, eps=1.0, step=step),
        lambda step: update_noise.update_sensitivity(clip_norm=1.0, batch_size=4, eps=1.0, step=step),
        lambda step: update_noise.update_sensitivity(clip_norm=1.0, batch_size=4, eps=1.0, step=9, participation=step),
    ],
)
def test_steps_must_be_whole(compute):
    for step in (1.5, 2.0, True):
        with pytest.raises(ValueError, match="to be a whole number"):
            compute(step)
