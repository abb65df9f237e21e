"""One test for each row of docs/errata.md: the corrected version holds, and the printed one does not.

The tests are exact calculations or seeded simulations. Their tolerance is at least four standard errors, so a correct
formula would fail for one seed in 15,000. It is far smaller than the distance to the printed version.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor

from dpoptim.noise import BandedToeplitz, DecayedSums, PrefixSums, SquareRoot, Workload
from dpoptim.optim import reference
from dpoptim.optim.reference import SGD, AdaGrad, Adam, Run
from dpoptim.theory import negative_probability, second_moment_variance

BATCH, STEPS, BETA2 = 2048, 2000, 0.999  # the paper's setting
UNIT: dict[str, Any] = {"clip_norm": 1.0, "noise_stddev": 1.0, "batch_size": 1}


def normals(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def shrinkage(beta2: float) -> float:
    """The variance of a long EMA of independent terms, over the variance of one: (1−β₂)²/(1−β₂²)."""
    return (1 - beta2) ** 2 / (1 - beta2**2)


def test_square_of_the_noisy_gradient_has_twice_the_cross_term() -> None:
    """Var(ν̂_∞) of 100,000 runs, s.e. 0.5 %: 4g²φ + 2φ², not the g²φ + 2φ² of a single cross term."""
    g, phi, beta2 = 0.7, 0.3, 0.8
    nu = torch.zeros(100_000, dtype=torch.float64)
    for t in range(80):
        nu = beta2 * nu + (1 - beta2) * (g + phi**0.5 * normals(100_000, seed=t)) ** 2
    right = (4 * g**2 * phi + 2 * phi**2) * (1 - beta2) / (1 + beta2)
    printed = (g**2 * phi + 2 * phi**2) * (1 - beta2) / (1 + beta2)
    assert float(nu.mean()) == pytest.approx(g**2 + phi, rel=0.01)
    assert float(nu.var()) == pytest.approx(right, rel=0.025)
    assert float(nu.var()) != pytest.approx(printed, rel=0.25)


def test_dimension_limits_of_bias_correction() -> None:
    """B/σ ≥ κ^¼·√m solved for m, with κ the shrinkage; the printed limits are 188 and 4.6 times too small."""
    root = shrinkage(BETA2) ** 0.5
    optimistic, pessimistic = BATCH**2 / root, BATCH / root
    assert optimistic == pytest.approx(1.88e8, rel=5e-3)
    assert pessimistic == pytest.approx(9.2e4, rel=5e-3)
    assert optimistic / 1e6 > 100
    assert pessimistic / 2e4 > 4


def test_independent_moments_need_a_batch_linear_in_the_dimension() -> None:
    """Noise std of ν̂ after 6,000 steps in 4,000 runs is .0633·ζ²σ/B, s.e. 1.1 %, against a signal of 1/m."""
    nu = torch.zeros(4000)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6000):
        nu = BETA2 * nu + (1 - BETA2) * 2 * math.sqrt(2) * torch.randn(4000, generator=generator)
    assert float(nu.std()) == pytest.approx(0.0633, rel=0.05)
    assert 2 * math.sqrt(2) * shrinkage(BETA2) ** 0.5 == pytest.approx(0.0633, rel=1e-3)
    for power, factor in ((1, 4.0), (2, 2.0)):  # 1/m against (σ/B)^power: 1 is IME, 2 is bias correction
        small, large = ((m * shrinkage(BETA2) ** 0.5) ** (1 / power) for m in (1e6, 4e6))
        assert large / small == pytest.approx(factor)


def square_change(gradients: Tensor, batch_size: int) -> float:
    """‖ḡ² − ḡ'²‖ when the first of the rows is zeroed out, ḡ being the sum over the expected batch size."""
    with_it, without_it = gradients.sum(0) / batch_size, gradients[1:].sum(0) / batch_size
    return float((with_it**2 - without_it**2).norm())


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_independent_moments_square_sensitivity(batch_size: int) -> None:
    """(2B−1)ζ²/B² is attained by equal gradients and exceeded by none; (2B+1)ζ²/B² is not attained."""
    right, printed = (2 * batch_size - 1) / batch_size**2, (2 * batch_size + 1) / batch_size**2
    equal = torch.zeros(batch_size, 3, dtype=torch.float64)
    equal[:, 0] = 1.0
    assert square_change(equal, batch_size) == pytest.approx(right, rel=1e-12)
    assert {1: 1.0, 8: 0.234375}.get(batch_size, right) == pytest.approx(right, rel=1e-12)
    clipped = [reference.clip(3 * normals(batch_size, 3, seed=seed), 1.0) for seed in range(500)]
    # Cauchy–Schwarz: ‖(a−b)(a+b)‖ ≤ ‖a−b‖·‖a+b‖ ≤ (1/B)·((B + B − 1)/B).
    assert max(square_change(rows, batch_size) for rows in clipped) <= right + 1e-12 < printed


def released_square(examples: int, batch_size: int, project: bool) -> float:
    """ν after one step of AdaGrad on equal unit gradients, read off the step g̃/√ν."""
    ones, quiet = torch.ones(examples, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    run = Run(quiet[0], lambda theta, t: ones, quiet, clip_norm=1.0, noise_stddev=0.0, batch_size=batch_size)
    rule = AdaGrad(lr=1.0, eps=0.0)
    path = reference.independent_moments(run, quiet, rule=rule, square_noise_stddev=0.0, project=project)
    return (examples / batch_size / float(path)) ** 2


def test_independent_moments_with_poisson_batches_need_a_projection() -> None:
    """12 examples at B = 4: one changes the square by 1.44 where .44 is allowed; projected, by ≤ 2ζ²/B."""
    change = released_square(12, 4, project=False) - released_square(11, 4, project=False)
    assert change == pytest.approx(1.4375, rel=1e-9)
    assert change > (2 * 4 - 1) / 4**2 == 0.4375
    worst = 0.0
    for seed in range(2000):
        rows = reference.clip(3 * normals(1 + seed % 16, 2, seed=seed) + (seed % 3), 1.0)
        average, without = rows.sum(0) / 4, rows[1:].sum(0) / 4
        squares = reference.clip(torch.stack([average, without]), 1.0) ** 2
        worst = max(worst, float((squares[0] - squares[1]).norm()))
    assert 0.9 * 0.4375 < worst <= 2 / 4


def test_independent_moments_split_of_the_budget() -> None:
    """(g, c·g²): the printed algorithm is c = Δ₁/Δ₂, the least MSE is at c² = Δ₁/Δ₂, and c = 1 is neither."""
    first, second, noise_multiplier = 1 / 2048, 4095 / 2048**2 * 7, 1.3

    def variances(c: float) -> tuple[float, float]:
        total = noise_multiplier**2 * (first**2 + c**2 * second**2)
        return total, total / c**2

    printed = variances(first / second)
    assert printed == pytest.approx((2 * (first * noise_multiplier) ** 2, 2 * (second * noise_multiplier) ** 2))
    assert variances(1.0) != pytest.approx(printed, rel=0.1)
    best = minimize_scalar(
        lambda log_c: sum(variances(math.exp(log_c))) * 1e6, bracket=(-3.0, 3.0), options={"xtol": 1e-10}
    )
    optimal = [noise_multiplier**2 * delta * (first + second) for delta in (first, second)]
    assert variances(math.exp(best.x)) == pytest.approx(optimal, rel=1e-5)
    for c in (1.0, first / second, math.sqrt(first / second)):  # the same budget for every c
        a, b = variances(c)
        assert first**2 / a + second**2 / b == pytest.approx(1 / noise_multiplier**2)
    assert sum(optimal) < min(sum(printed), sum(variances(1.0)))


def joint_sensitivity_squared(square_weight: float, clip_norm: float, dimension: int) -> float:
    """max ‖x−y‖² + λ‖x²−y²‖² over the ball of radius ζ, by ascent from 10 starts and the pair x = −y."""
    rng = np.random.default_rng(0)

    def value(flat: np.ndarray) -> float:
        pair = flat.reshape(2, dimension)
        norms = np.linalg.norm(pair, axis=1, keepdims=True)
        x, y = pair * np.minimum(1.0, clip_norm / np.maximum(norms, 1e-300))
        return -float(((x - y) ** 2).sum() + square_weight * ((x**2 - y**2) ** 2).sum())

    starts = clip_norm * rng.normal(size=(10, 2 * dimension))
    return max(4 * clip_norm**2, *(-minimize(value, start, method="Nelder-Mead").fun for start in starts))


@pytest.mark.parametrize("clip_norm", [0.5, 1.0])
def test_joint_moments_weight_bound(clip_norm: float) -> None:
    """d ≥ 2: 4ζ² up to λ = 1/(2ζ²), ζ²(1+2λζ²)²/(2λζ²) above; d = 1 holds to (11+5√5)/(8ζ²)."""
    for ratio in (0.9, 1.0, 1.5, 4.0):  # of λ to 1/(2ζ²)
        found = joint_sensitivity_squared(ratio / (2 * clip_norm**2), clip_norm, 2)
        above = clip_norm**2 * (1 + ratio) ** 2 / ratio
        assert found == pytest.approx(max(4 * clip_norm**2, above if ratio > 1 else 0.0), rel=1e-4)
    x = torch.linspace(-clip_norm, clip_norm, 801, dtype=torch.float64)
    distance, total = (x[:, None] - x) ** 2, (x[:, None] + x) ** 2
    limit = (11 + 5 * math.sqrt(5)) / 8 / clip_norm**2
    for factor, exceeds in ((1.0, False), (1.01, True)):
        assert (float((distance * (1 + factor * limit * total)).max()) > 4 * clip_norm**2 * (1 + 1e-9)) == exceeds


def test_joint_moments_printed_weight_is_not_safe() -> None:
    """c = 1/(2ζ²) as factor of g² itself is λ = 1/(4ζ⁴): at ζ = ½ the sensitivity² is 1.125, not 4ζ² = 1."""
    assert joint_sensitivity_squared((1 / (2 * 0.5**2)) ** 2, 0.5, 2) == pytest.approx(1.125, rel=1e-4)


def test_joint_moments_fail_for_the_square_of_an_average() -> None:
    """B = 2, λ = ½, ζ = 1: replacing x by −x beside an example r gives 1.5 where (2ζ/B)² = 1 is claimed."""
    r = x = torch.tensor([1.0, 0.0])
    a, b = (r + x) / 2, (r - x) / 2
    assert float(((a - b) ** 2).sum() + 0.5 * ((a**2 - b**2) ** 2).sum()) == pytest.approx(1.5)
    a2, b2 = (r**2 + x**2) / 2, (r**2 + (-x) ** 2) / 2  # square first: the bound holds
    assert float(((a - b) ** 2).sum() + 0.5 * ((a2 - b2) ** 2).sum()) == pytest.approx(1.0)


def test_bias_recursion() -> None:
    """C = (1, .5, .3), β₂ = .9, t = 20 gives 1.2836411·φ, and 200,000 runs agree, s.e. .2 %."""
    steps, beta2 = 20, 0.9
    strategy = sum(
        torch.diag(torch.full((steps - k,), c, dtype=torch.float64), -k) for k, c in enumerate((1, 0.5, 0.3))
    )
    noising = torch.linalg.inv(torch.as_tensor(strategy))
    rows, columns = (noising**2).sum(1), (noising**2).sum(0)
    rule = Adam(lr=1.0, beta2=beta2)
    right = reference.noise_bias(rule, rows, 1.0)
    assert right[-1] == pytest.approx(1.2836411, abs=5e-8)
    weights = (1 - beta2) * beta2 ** torch.arange(steps - 1, -1, -1, dtype=torch.float64) / (1 - beta2**steps)
    assert right[-1] == pytest.approx(float((weights * rows).sum()), rel=1e-12)
    assert reference.noise_bias(rule, torch.ones(steps), 0.25) == pytest.approx([0.25] * steps)
    simulated = float((weights @ (noising @ normals(steps, 200_000, seed=3)) ** 2).mean())
    assert simulated == pytest.approx(right[-1], rel=0.008)

    extra = extra_independent = 0.0  # the recursion with one β₂ more
    for t in range(1, steps + 1):
        keep, add = beta2 * (beta2 - beta2**t) / (1 - beta2**t), (1 - beta2) / (1 - beta2**t)
        extra, extra_independent = keep * extra + add * float(rows[t - 1]), keep * extra_independent + add
    assert simulated != pytest.approx(extra, rel=0.02)
    assert extra_independent < 0.9  # and it is not even φ for independent noise
    assert simulated != pytest.approx(float((weights * columns).sum()), rel=0.02)
    assert simulated != pytest.approx(float((weights.flip(0) * rows).sum()), rel=0.02)


def second_moment_of_scale_then_privatize(clip_norm: float, steps: int, beta2: float = 0.99) -> list[float]:
    """Mean ν̂_t over m = 400 coordinates with constant g = 1, B = 100, σ = 1, from ν̂_0 = g²."""
    gradient, noise = torch.ones(400, dtype=torch.float64), normals(steps, 400, seed=4)
    nu, nu_hat, means = torch.zeros(400, dtype=torch.float64), gradient**2, []
    for t in range(1, steps + 1):
        s = reference.scale_of(nu_hat, exponent=0.5, eps_scale=1e-6, normalised=False)
        clipped = reference.clip((s * gradient)[None], clip_norm)[0]  # the mean of 100 equal examples
        noisy_grad = (clipped + clip_norm / 100 * noise[t - 1]) / s
        nu = beta2 * nu + (1 - beta2) * noisy_grad**2
        nu_hat = nu / (1 - beta2**t)
        means.append(float(nu_hat.mean()))
    return means


def test_steady_state_of_scale_then_privatize() -> None:
    """ν ← β₂ν + (1−β₂)(ν* + φν) settles at ν*/(1−φ), not ν*²/(1−φ), and contracts by β₂ + (1−β₂)φ."""
    star, phi, beta2 = 0.09, 0.16, 0.9
    nu, errors = 5.0, []
    for _ in range(50):
        errors.append(nu - star / (1 - phi))
        nu = beta2 * nu + (1 - beta2) * (star + phi * nu)
    ratios = [b / a for a, b in itertools.pairwise(errors)]
    assert ratios == pytest.approx([beta2 + (1 - beta2) * phi] * len(ratios), rel=1e-6)
    printed = star**2 / (1 - phi)
    assert beta2 * printed + (1 - beta2) * (star + phi * printed) != pytest.approx(printed, rel=0.5)
    simulated = sum(second_moment_of_scale_then_privatize(40.0, 2000)[1000:]) / 1000
    assert simulated == pytest.approx(1 / (1 - phi), rel=0.01)  # at ζ = 40, φ = .16 again


@pytest.mark.parametrize("clip_norm", [19.0, 22.0, 40.0, 70.0, 120.0])
def test_window_of_scale_then_privatize(clip_norm: float) -> None:
    """A steady state exists for (1/m + σ²/B²)^(−½) = 19.6 ≤ ζ < B/σ = 100: collapse below, divergence above."""
    lower_edge = (1 / 400 + 1 / 100**2) ** -0.5
    assert lower_edge == pytest.approx(19.61, abs=0.01)
    means = second_moment_of_scale_then_privatize(clip_norm, 2000)
    if clip_norm < lower_edge:
        assert means[-1] < 0.25
        assert means[-1] < 0.8 * means[-500]
    elif clip_norm < 100:
        assert sum(means[1000:]) / 1000 == pytest.approx(1 / (1 - clip_norm**2 / 100**2), rel=0.01)
    else:
        assert means[-1] > 1e3
        assert means[-1] > 2 * means[-500]


def test_collapsed_scale_then_privatize_is_post_processing_with_clip_norm_times_eps() -> None:
    """Where ε_s1 dominates √ν̂, s = 1/ε_s1: the same path as post-processing with clip norm ζ·ε_s1."""
    rule, eps_scale = Adam(lr=0.1), 1e6

    def gradients(theta: Tensor, t: int) -> Tensor:
        return theta - normals(4, 5, seed=100 + t)

    zero, noise = torch.zeros(5, dtype=torch.float64), normals(40, 5, seed=5)
    run = Run(zero, gradients, noise, clip_norm=1.0, noise_stddev=0.5, batch_size=4)
    tiny = replace(run, clip_norm=1.0 / eps_scale, noise_stddev=0.5 / eps_scale)
    scaled = reference.scale_then_privatize(tiny, rule=rule, eps_scale=eps_scale)
    plain = reference.post_processing(run, rule=rule)
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-4)


def test_quadratic_example_inflation() -> None:
    """A gradient of second moment α² under noise of variance σ² = 1: ν̂/ν* = 1 + 1/α², not 1 + α²."""
    for alpha in (0.5, 3.0):
        inflation = float(((alpha + normals(400_000, seed=6)) ** 2).mean()) / alpha**2
        assert inflation == pytest.approx(1 + 1 / alpha**2, rel=0.01)
        assert inflation != pytest.approx(1 + alpha**2, rel=0.5)


def test_noise_puts_a_ceiling_on_learning_rates() -> None:
    """Post-processing: |step|/|g̃| → 1/√(g² + φ), which is 1/√φ at g = 0 and lower elsewhere; within 2 %."""
    ratios = torch.tensor([0.0, 0.5, 1.0, 4.0, 16.0], dtype=torch.float64).repeat_interleave(100)
    noise, stddev = normals(1500, 500, seed=7), 0.2
    run = Run(
        torch.zeros(500, dtype=torch.float64),
        lambda theta, t: stddev * ratios[None],
        noise,
        clip_norm=math.inf,
        noise_stddev=stddev,
        batch_size=1,
    )
    path = reference.post_processing(run, rule=Adam(lr=1.0, beta1=0.0, beta2=0.99, eps=0.0))
    steps, noisy_grads = path[1:] - path[:-1], stddev * (ratios + noise[1:])
    rates = (-steps / noisy_grads)[-500:].mean(0).reshape(5, 100).mean(1)
    expected = 1 / (stddev * (ratios.reshape(5, 100)[:, 0] ** 2 + 1).sqrt())
    assert rates.tolist() == pytest.approx(expected.tolist(), rel=0.02)
    assert float(rates.max()) < 1.02 / stddev
    assert float(rates.min()) < 0.1 / stddev  # so 1/√φ is not a floor


def test_one_large_noise_hardly_changes_its_own_denominator() -> None:
    """ν̂ after a last noise of 3√φ, over its mean φ: 1 + 8(1−β₂) on average of 20,000 runs, and 5 at step 2."""
    for steps, beta2, expected in ((2000, 0.99, 1.08), (2, 0.999, 5.0)):  # step 2: (1 + 9)/2
        nu = torch.zeros(20_000, dtype=torch.float64)
        for t in range(steps - 1):
            nu = beta2 * nu + (1 - beta2) * normals(20_000, seed=t) ** 2
        nu_hat = (beta2 * nu + (1 - beta2) * 9) / (1 - beta2**steps)
        assert float(nu_hat.mean()) == pytest.approx(expected, rel=0.005)


def test_spread_at_which_half_of_the_estimates_are_negative() -> None:
    """P(ν̂ ≥ b) passes ½ at √Var ν̂ = 71·g², and is .83 at √Var ν̂ = g²; 40,000 runs agree at β₂ = .9."""
    spread = math.sqrt(2 * shrinkage(BETA2))
    for ratio, low, high in ((70, 0.5, 0.501), (80, 0.499, 0.5), (1, 0.83, 0.84)):
        g = math.sqrt(spread / ratio)
        assert math.sqrt(float(second_moment_variance(g, noise_variance=1.0))) / g**2 == pytest.approx(ratio, rel=0.04)
        assert low < 1 - float(negative_probability(g, noise_variance=1.0)) < high
    g = math.sqrt(math.sqrt(2 * shrinkage(0.9)) / 5)  # the spread is five times g², yet more than half are ≥ 0
    weights = 0.9 ** torch.arange(99, -1, -1, dtype=torch.float64)
    nu_hat = (weights / weights.sum()) @ (g + normals(100, 40_000, seed=11)) ** 2
    share = float((nu_hat >= 1).double().mean())
    assert share > 0.5 + 4 * 0.0025
    assert share == pytest.approx(1 - float(negative_probability(g, noise_variance=1.0, beta2=0.9)), abs=0.01)


def test_an_uneven_gradient_leaves_half_of_the_coordinates_negative() -> None:
    """‖g‖ = 1 in one of 2,000 coordinates, B/σ = 10⁶ ≫ .15√m: half of ν̂ − b are negative; none if it is even."""
    phi, count = 1e-12, 2000
    weights = BETA2 ** torch.arange(1999, -1, -1, dtype=torch.float64)
    noise = phi**0.5 * normals(2000, count, seed=12)
    for gradient, low, high in ((torch.eye(count)[0], 0.45, 0.56), (torch.full((count,), count**-0.5), 0.0, 0.0)):
        nu_hat = (weights / weights.sum()) @ (gradient.double() + noise) ** 2
        assert low <= float((nu_hat < phi).double().mean()) <= high


def test_batch_for_half_a_million_parameters() -> None:
    """κ^¼√m = 106 and κ^½m = 1.1e4 at m = 5e5; the printed limit 2e4 at B = 2048 would give 5.1e4."""
    root = shrinkage(BETA2) ** 0.5
    assert math.sqrt(5e5 * root) == pytest.approx(106, rel=5e-3)
    assert 5e5 * root == pytest.approx(1.12e4, rel=5e-3)
    printed = 5e5 / (2e4 / BATCH)
    assert printed == pytest.approx(5.1e4, rel=5e-3)


def test_improvement_by_prefix_sums() -> None:
    """.1495/.0316 = 4.73 with the same ‖g‖; over the pessimistic condition the factor is 4.73·√B, not 5."""
    optimistic, prefix = shrinkage(BETA2) ** 0.25, 1e-6**0.25
    assert (optimistic, prefix) == pytest.approx((0.15, 0.032), rel=0.02)
    assert optimistic / prefix == pytest.approx(4.73, abs=2e-3)
    pessimistic = optimistic * BATCH**0.5  # √B/σ ≥ .15√m, solved for B/σ
    assert pessimistic / prefix > 200


@pytest.mark.parametrize("workload", [PrefixSums(), DecayedSums(beta=0.98, debiased=False)])
def test_correlated_noise_does_not_help_bias_correction(workload: Workload) -> None:
    """Var ν̂ in pure noise is larger than 2φ²Σw² and 20,000 runs agree; that of IME, linear in the noise, is smaller."""
    steps, beta2 = 200, 0.98
    strategy = BandedToeplitz(bands=steps, workload=workload).optimize(steps=steps)
    noising = torch.as_tensor(strategy.noising_matrix()) * strategy.column_norm
    weights = beta2 ** torch.arange(steps - 1, -1, -1, dtype=torch.float64)
    weights /= weights.sum()
    noise, z = noising @ normals(steps, 20_000, seed=13), normals(steps, 20_000, seed=14)
    square_variances = [float((weights @ one**2).var()) for one in (noise, z)]
    right = float(
        second_moment_variance(noise_variance=strategy.column_norm**2, step=steps, beta2=beta2, strategy=strategy)
    )
    assert square_variances[0] == pytest.approx(right, rel=0.06)
    assert square_variances[0] > 1.5 * square_variances[1]
    assert float((weights @ noise).var()) < float((weights @ z).var()) / 4
    assert bool((noising.diagonal() >= 1 - 1e-12).all())  # so that K_ii ≥ 1


def test_error_of_prefix_sums_is_logarithmic() -> None:
    """The square-root strategy: T doubled adds ln(2)/π to the rms error, so its square grows as log², not as log³."""
    errors = [s.max_error() * s.column_norm for n in (512, 1024, 2048) if (s := SquareRoot().optimize(steps=n))]
    growths = [b - a for a, b in itertools.pairwise(errors)]
    assert growths == pytest.approx([math.log(2) / math.pi] * 2, rel=2e-3)
    cubic = [math.log(n) ** 1.5 for n in (512, 1024, 2048)]
    assert (cubic[2] - cubic[1]) / (cubic[1] - cubic[0]) > 1.04  # there, growths would rise


def test_second_moment_below_its_steady_state_rises() -> None:
    """One step of scale-then-privatize from half and from twice the steady state; 400,000 draws, s.e. 2e-4·ν̂."""
    g, phi, beta2 = 0.3, 0.16, 0.9
    rest = g**2 / (1 - phi)
    for start, rises in ((0.5 * rest, True), (2 * rest, False)):
        after = beta2 * start + (1 - beta2) * (g + math.sqrt(phi * start) * normals(400_000, seed=15)) ** 2
        assert (float(after.mean()) > start) == rises
        assert abs(float(after.mean()) / start - 1) > 0.03


def test_noise_in_the_sum_of_adams_updates() -> None:
    """Noise alone through momentum, a changing ν̂ and debiasing: the weights of each noise in the sum of updates."""
    steps, beta1 = 12, 0.7
    nu_hat = torch.linspace(1.0, 9.0, steps, dtype=torch.float64)
    mu, total = torch.zeros(steps, dtype=torch.float64), torch.zeros(steps, dtype=torch.float64)
    for k in range(1, steps + 1):  # noise j is the j-th unit vector, so `total` holds the weights
        mu = beta1 * mu + (1 - beta1) * torch.eye(steps, dtype=torch.float64)[k - 1]
        total += mu / (1 - beta1**k) / nu_hat[k - 1].sqrt()

    def weights(one: Callable[[int, int], float]) -> Tensor:
        sums = [sum(one(j, k) / float(nu_hat[k - 1]) ** 0.5 for k in range(j, steps + 1)) for j in range(1, steps + 1)]
        return torch.tensor(sums, dtype=torch.float64)

    right = weights(lambda j, k: (1 - beta1) * beta1 ** (k - j) / (1 - beta1**k))
    torch.testing.assert_close(total, right, rtol=1e-12, atol=0)
    printed = weights(lambda j, k: beta1 ** (steps - k) / (1 - beta1**steps))
    ratios = printed / total
    assert float(ratios.max() / ratios.min()) > 1.5  # "proportional to" does not help
    nu_hat = torch.ones(steps, dtype=torch.float64)
    constant = weights(lambda j, k: beta1 ** (steps - k)) / weights(lambda j, k: beta1 ** (k - j))
    torch.testing.assert_close(constant, torch.ones(steps, dtype=torch.float64), rtol=1e-12, atol=0)


def test_noise_of_the_recursion_is_divided_by_the_scale() -> None:
    """The reference's second step, from which ν̂₂ = (g̃₂/step)² follows: g̃₂ has noise/s₂, not noise."""
    g, beta2, start, noise = 1.0, 0.5, 9.0, torch.tensor([[0.3], [-0.4]], dtype=torch.float64)
    run = Run(
        torch.zeros(1, dtype=torch.float64), lambda theta, t: torch.full((1, 1), g, dtype=torch.float64), noise,
        clip_norm=100.0, noise_stddev=1.0, batch_size=1,
    )  # fmt: skip
    rule = Adam(lr=1.0, beta1=0.0, beta2=beta2, eps=0.0)
    path = reference.scale_then_privatize(run, rule=rule, eps_scale=1e-12, start=start)
    first = g + 0.3 * start**0.5
    nu_hat = first**2  # debiased, at t = 1
    for divided in (True, False):
        second = g - 0.4 * (nu_hat**0.5 if divided else 1.0)
        t = 2
        keep, add = (beta2 - beta2**t) / (1 - beta2**t), (1 - beta2) / (1 - beta2**t)
        step = second / math.sqrt(keep * nu_hat + add * second**2)
        assert (float(path[0] - path[1]) == pytest.approx(step, rel=1e-9)) == divided


def test_ratio_of_second_moments_is_bounded_below_only() -> None:
    """Squares that change up to 10⁶-fold per step: never below the bound, which zeros attain; a rise goes far above."""
    squares = 10 ** (3 * normals(3000, seed=16).clamp(-1, 1))
    squares[2000:2010], squares[-1] = 0.0, 1e8
    nu = nu_hat = 0.0
    ratios = []
    for t, square in enumerate(squares.tolist(), start=1):
        nu = BETA2 * nu + (1 - BETA2) * square
        before, nu_hat = nu_hat, nu / (1 - BETA2**t)
        bound = (BETA2 - BETA2**t) / (1 - BETA2**t)
        if t > 1:
            ratios.append(nu_hat / before)
            assert ratios[-1] >= bound * (1 - 1e-12)
            assert square > 0 or ratios[-1] == pytest.approx(bound, rel=1e-9)
    assert 0.998 < min(ratios[1000:]) < BETA2
    assert max(ratios[1000:-1]) < 1.1
    assert ratios[-1] > 100


def test_noise_is_small_where_the_scale_is_large() -> None:
    """The noise of g̃ has std ζσ/(B·s): 20,000 draws, s.e. .5 %, at s = 10 and s = .1."""
    scale = torch.tensor([10.0, 0.1], dtype=torch.float64)
    clip_norm, noise_multiplier, batch_size = 1.5, 0.8, 4
    gradient = torch.tensor([0.01, 1.0], dtype=torch.float64)
    released = (batch_size * scale * gradient + clip_norm * noise_multiplier * normals(20_000, 2, seed=8)) / batch_size
    stddev = (released / scale).std(0)
    assert stddev.tolist() == pytest.approx((clip_norm * noise_multiplier / batch_size / scale).tolist(), rel=0.02)
    assert float(stddev[0]) < float(stddev[1]) / 90


def test_momentum_unrolled() -> None:
    """θ_t = θ₀ − ηΣ_{i≤t} ((1−m^{t−i+1})/(1−m))·g̃_i; neither + nor θ_{t+1} on the left fits."""
    noise, momentum, lr = normals(12, 3, seed=9), 0.7, 0.2
    start = torch.ones(3, dtype=torch.float64)
    no_examples = torch.zeros(0, 3, dtype=torch.float64)
    run = Run(start, lambda theta, t: no_examples, noise, **UNIT)
    path = reference.dp_sgd(run, rule=SGD(lr=lr, momentum=momentum))
    for t in range(1, 13):
        weights = (1 - momentum ** torch.arange(t, 0, -1, dtype=torch.float64)) / (1 - momentum)
        total = lr * (weights @ noise[:t])
        torch.testing.assert_close(path[t - 1], start - total, rtol=0, atol=1e-12)
        assert not torch.allclose(path[t - 1], start + total, atol=1e-3)
        if t < 12:
            assert not torch.allclose(path[t], start - total, atol=1e-3)


def test_scale_then_privatize_is_not_dp2_with_one_scaled_step() -> None:
    """From one A = ν̂ and one release r = Σ clip(s⊙g) + z, DP² steps by r, the other by (r/s)/(√ν̂ + ε)."""
    zero, noise = torch.zeros(2, dtype=torch.float64), normals(2, 2, seed=10)
    sizes = torch.tensor([[1.0, 20.0], [3.0, 5.0]], dtype=torch.float64)
    dp2: dict[str, Any] = {
        "lr": 1.0,
        "scaled_clip_norm": 50.0,
        "scaled_noise_stddev": 1.0,
        "eps": 0.5,
        "decay": 0.0,
    }

    def gradients(theta: Tensor, t: int) -> Tensor:
        return sizes[t][None]

    run = Run(zero, gradients, noise, clip_norm=50.0, noise_stddev=1.0, batch_size=1)
    delayed = reference.delayed_preconditioner(run, plain_steps=1, scaled_steps=1, **dp2)
    first = sizes[0] + noise[0]  # A = first² in both
    s = 1 / (first.abs() + 0.5)
    released = s * sizes[1] + noise[1]
    torch.testing.assert_close(delayed[0] - delayed[1], released, rtol=1e-12, atol=1e-12)
    rule = Adam(lr=1.0, beta1=0.0, beta2=0.5, eps=0.5)
    nu = 0.25 * first**2 + 0.5 * (released / s) ** 2
    step = released / s / ((nu / 0.75).sqrt() + 0.5)
    assert not torch.allclose(step, released, rtol=0.1)
    # The reference takes exactly that step if its first one leaves the same ν̂ (s_1 = 1/(start^½ + ε) = 1).
    scaled = reference.scale_then_privatize(run, rule=rule, eps_scale=0.5, start=0.25)
    torch.testing.assert_close(scaled[0] - scaled[1], step, rtol=1e-12, atol=1e-12)


def test_squared_stability_constant_against_the_bias() -> None:
    """ε_s² = 1e-8 exceeds φ = 4.28e-9 at σ = .134, but neither 2.38e-7 at σ = 1 nor the bias of BandMF."""
    small, large = ((noise_multiplier / BATCH) ** 2 for noise_multiplier in (0.134, 1.0))
    assert small == pytest.approx(4.28e-9, rel=1e-3)
    assert large == pytest.approx(2.38e-7, rel=2e-3)
    assert small < 1e-8 < large
    strategy = BandedToeplitz(bands=128).optimize(steps=STEPS)
    rows = torch.as_tensor(np.asarray(strategy.row_norms()), dtype=torch.float64)
    phi = (strategy.column_norm / BATCH) ** 2
    assert min(reference.noise_bias(Adam(lr=1.0), rows**2, phi)) > 20 * 1e-8


def test_rmse_of_prefix_sums() -> None:
    """σ‖AC⁻¹‖_F/(√T·B): 1.544e-2 for independent noise (closed form √((T+1)/2)/B), 2.077e-3 for b = 128."""
    independent = math.sqrt((STEPS + 1) / 2) / BATCH
    strategy = BandedToeplitz(bands=128).optimize(steps=STEPS)
    banded = strategy.mean_error() * strategy.column_norm / BATCH
    assert independent == pytest.approx(1.544e-2, rel=5e-4)
    assert banded == pytest.approx(2.077e-3, rel=5e-4)
    assert banded / independent == pytest.approx(0.1345, rel=1e-3)
    assert independent != pytest.approx(2.22e-2, rel=0.2)
    assert banded != pytest.approx(2.97e-3, rel=0.2)
    printed_ratio = 2.97e-3 / 2.22e-2
    assert banded / independent == pytest.approx(printed_ratio, rel=0.01)  # the ratio is the paper's


def test_the_page_names_every_test() -> None:
    """Every row of docs/errata.md names tests that exist, and every other test of this file is in a row."""
    tests = Path(__file__).parent
    lines = (tests.parent / "docs" / "errata.md").read_text().splitlines()
    rows = [row for row in lines if row.startswith("| ") and not row.startswith(("| printed", "| case"))]
    named = [re.findall(r"`(test_\w+)`", row.split(" | ")[-1]) for row in rows]
    assert len(list(filter(None, named))) == len(rows) >= 23
    files = [Path(__file__), *(tests / "optim").glob("test_*.py")]
    here, *others = (set(re.findall(r"^def (test_\w+)", file.read_text(), re.M)) for file in files)
    assert here - set(itertools.chain(*named)) == {"test_the_page_names_every_test"}
    assert set(itertools.chain(*named)) <= here.union(*others)
