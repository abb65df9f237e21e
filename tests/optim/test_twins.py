"""The twins against torch.optim at no noise, against each other, against hand calculation, and on pure noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dpoptim.optim import twins
from dpoptim.optim.twins import SGD, AdaGrad, Adam, AdamW, RMSProp, Rule

INF = float("inf")
STEPS = 25
COORDINATES = 5
QUIET = torch.zeros(STEPS, COORDINATES, dtype=torch.float64)
CURVATURE = torch.tensor([1.0, 0.3, 2.0, 0.05, 4.0], dtype=torch.float64)


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def quadratic_gradients(examples: int) -> Callable[[Tensor, int], Tensor]:
    """Gradients of ½·Σ a(θ − x_j)², with fresh x_j at each step."""
    data = normals(STEPS, examples, COORDINATES, seed=1)
    return lambda theta, t: CURVATURE * (theta - data[t])


def torch_path(make: Callable[[list[Tensor]], torch.optim.Optimizer], examples: int) -> Tensor:
    gradients = quadratic_gradients(examples)
    theta = torch.nn.Parameter(normals(COORDINATES, seed=2))
    optimizer = make([theta])
    path = []
    for t in range(STEPS):
        theta.grad = gradients(theta.detach(), t).mean(0)
        optimizer.step()
        path.append(theta.detach().clone())
    return torch.stack(path)


OPTIM: dict[str, tuple[Rule, Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "adam": (
        Adam(lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-3),
    ),
    "adamw": (
        AdamW(lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3),
    ),
    "adagrad": (AdaGrad(lr=0.1, eps=1e-3), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3)),
    "rmsprop": (
        RMSProp(lr=0.1, beta2=0.9, eps=1e-3),
        lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9, eps=1e-3),
    ),
    "rmsprop momentum": (
        RMSProp(lr=0.1, beta2=0.9, eps=1e-3, momentum=0.6),
        lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9, eps=1e-3, momentum=0.6),
    ),
}
DECAYED: dict[str, tuple[Rule, Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "adam": (
        Adam(lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.3),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3),
    ),
    "adagrad": (
        AdaGrad(lr=0.1, eps=1e-3, weight_decay=0.3),
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3, weight_decay=0.3),
    ),
    "rmsprop": (
        RMSProp(lr=0.1, beta2=0.9, eps=1e-3, momentum=0.6, weight_decay=0.3),
        lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9, eps=1e-3, momentum=0.6, weight_decay=0.3),
    ),
}


def run(variant: str, rule: Rule, examples: int) -> Tensor:
    """The variant without noise and clipping, in a setting where it should be the plain rule."""
    gradients = quadratic_gradients(examples)
    theta = normals(COORDINATES, seed=2)
    plain: dict[str, Any] = dict(rule=rule, clip_norm=INF, noise_stddev=0.0, batch_size=examples)
    if variant == "post_processing":
        return twins.post_processing(theta, gradients, QUIET, **plain)
    if variant == "scale_then_privatize":
        return twins.scale_then_privatize(theta, gradients, QUIET, **plain, eps_scale=1e-2)
    if variant == "scale_then_privatize, options":
        return twins.scale_then_privatize(
            theta,
            gradients,
            QUIET,
            **plain,
            eps_scale=0.1,
            exponent=1 / 3,
            normalised=True,
            debias=False,
            start=2.0,
        )
    if variant == "independent_moments":
        return twins.independent_moments(theta, gradients, QUIET, QUIET, **plain, square_noise_stddev=0.0)
    if variant == "independent_moments, average of squares":
        return twins.independent_moments(
            theta, gradients, QUIET, QUIET, **plain, square_noise_stddev=0.0, average_of_squares=True
        )
    if variant == "joint_moments":
        return twins.joint_moments(theta, gradients, QUIET, QUIET, **plain, square_weight=0.25)
    if variant == "bias_correction":
        return twins.bias_correction(theta, gradients, QUIET, **plain, row_norms_squared=torch.ones(STEPS))
    if variant == "side_information":
        return twins.side_information(
            theta, gradients, QUIET, lambda th, t: gradients(th, t).mean(0), **plain
        )
    if variant == "noiseless_preconditioner":
        return twins.noiseless_preconditioner(theta, gradients, QUIET, **plain)
    assert variant == "noiseless_scale_then_privatize"
    return twins.noiseless_scale_then_privatize(theta, gradients, QUIET, **plain, eps_scale=1e-2)


@pytest.mark.parametrize("name", OPTIM)
@pytest.mark.parametrize(
    ("variant", "examples"),
    [
        ("post_processing", 3),
        ("scale_then_privatize", 3),
        ("scale_then_privatize, options", 3),
        ("independent_moments", 3),
        ("independent_moments, average of squares", 1),
        ("joint_moments", 1),
        ("side_information", 3),
        ("noiseless_preconditioner", 3),
        ("noiseless_scale_then_privatize", 3),
    ],
)
def test_without_noise_and_clipping_a_variant_is_the_optimizer_of_torch(variant, examples, name):
    rule, make = OPTIM[name]
    torch.testing.assert_close(run(variant, rule, examples), torch_path(make, examples), rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", ["post_processing", "scale_then_privatize"])
@pytest.mark.parametrize("name", DECAYED)
def test_l2_decay_is_that_of_torch(variant, name):
    rule, make = DECAYED[name]
    torch.testing.assert_close(run(variant, rule, 3), torch_path(make, 3), rtol=0, atol=1e-12)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(run(variant, OPTIM[name][0], 3), torch_path(make, 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (
            Adam(lr=0.1, beta2=0.95, eps=0.0),
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.95), eps=0.0),
        ),
        (AdaGrad(lr=0.1, eps=0.0), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=0.0)),
        (RMSProp(lr=0.1, eps=0.0), lambda p: torch.optim.RMSprop(p, lr=0.1, eps=0.0)),
    ],
)
def test_bias_correction_without_noise_and_floor_is_the_optimizer_of_torch(rule, make):
    torch.testing.assert_close(run("bias_correction", rule, 3), torch_path(make, 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("examples", [1, 3])
def test_average_of_squares_is_not_the_square_of_the_average_for_more_than_one_example(examples):
    rule = OPTIM["adam"][0]
    of_average = run("independent_moments", rule, examples)
    of_squares = run("independent_moments, average of squares", rule, examples)
    assert torch.allclose(of_average, of_squares, rtol=0, atol=1e-12) == (examples == 1)


def test_dp_sgd_without_noise_and_clipping_is_sgd_with_momentum_of_torch():
    path = twins.dp_sgd(
        normals(COORDINATES, seed=2),
        quadratic_gradients(3),
        QUIET,
        rule=SGD(lr=0.1, momentum=0.7, weight_decay=0.2),
        clip_norm=INF,
        noise_stddev=0.0,
        batch_size=3,
    )
    expected = torch_path(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.7, weight_decay=0.2), 3)
    torch.testing.assert_close(path, expected, rtol=0, atol=1e-12)


def noisy(clip_norm: float = 1.0, noise_stddev: float = 0.8) -> dict[str, Any]:
    return dict(clip_norm=clip_norm, noise_stddev=noise_stddev, batch_size=6)


@pytest.mark.parametrize("name", OPTIM)
def test_constant_scale_is_post_processing_with_clip_norm_over_s(name):
    rule, noise = OPTIM[name][0], normals(STEPS, COORDINATES, seed=3)
    theta, gradients = normals(COORDINATES, seed=2), quadratic_gradients(6)
    scaled = twins.scale_then_privatize(
        theta, gradients, noise, rule=rule, **noisy(), exponent=0.0, eps_scale=0.25
    )  # s = 1/1.25 at every step
    plain = twins.post_processing(theta, gradients, noise, rule=rule, **noisy(1.25, 1.0))
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-12)
    other = twins.post_processing(theta, gradients, noise, rule=rule, **noisy(1.0, 0.8))
    assert not torch.allclose(scaled, other, rtol=0, atol=1e-3)


@pytest.mark.parametrize("twin", [twins.scale_then_privatize, twins.noiseless_scale_then_privatize])
@pytest.mark.parametrize("name", OPTIM)
def test_normalised_scale_with_clip_norm_times_eps_is_the_same_algorithm(name, twin):
    rule, noise = OPTIM[name][0], normals(STEPS, COORDINATES, seed=3)
    theta, gradients = normals(COORDINATES, seed=2), quadratic_gradients(6)
    raw = twin(theta, gradients, noise, rule=rule, **noisy(), eps_scale=0.05)
    normalised = twin(
        theta, gradients, noise, rule=rule, **noisy(0.05, 0.04), eps_scale=0.05, normalised=True
    )
    torch.testing.assert_close(normalised, raw, rtol=0, atol=1e-10)


@pytest.mark.parametrize("exponent", [0.0, 0.25, 1 / 3, 0.5])
def test_scale_by_hand(exponent):
    nu_hat = torch.tensor([0.0, 1.0, 16.0], dtype=torch.float64)
    s = twins.scale_of(nu_hat, exponent=exponent, eps_scale=0.5, normalised=False)
    zero = 1.0 if exponent == 0 else 0.0
    assert s.tolist() == pytest.approx([1 / (zero + 0.5), 1 / 1.5, 1 / (16**exponent + 0.5)])


def test_scale_then_privatize_two_steps_by_hand():
    """g = 3 in one coordinate, B = 2 expected and one example, ε_s1 = 1: every number below is by hand."""
    path = twins.scale_then_privatize(
        torch.zeros(1, dtype=torch.float64),
        lambda theta, t: torch.full((1, 1), 3.0, dtype=torch.float64),
        torch.tensor([[0.5], [-1.0]], dtype=torch.float64),
        rule=AdaGrad(lr=1.0, eps=0.5),
        clip_norm=1.0,
        noise_stddev=2.0,
        batch_size=2,
        eps_scale=1.0,
        start=4.0,
    )
    first = (1.0 + 2.0 * 0.5) / 2 / (1 / 3)  # s₁ = 1/(√4 + 1); s₁·3 = 1, not clipped
    theta_1 = -first / (first + 0.5)
    s_2 = 1 / (first + 1.0)
    second = (min(3 * s_2, 1.0) - 2.0) / 2 / s_2
    theta_2 = theta_1 - second / ((first**2 + second**2) ** 0.5 + 0.5)
    assert path.flatten().tolist() == pytest.approx([theta_1, theta_2], rel=1e-12)


def test_debiased_and_raw_geometry_differ_by_the_debiasing_factor():
    """With g̃ known, s_2 is read off the second step's noise: √(β₂-debiased ν) against √(raw ν)."""
    beta2, noise = 0.96, torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    second: dict[bool, float] = {}
    for debias in (True, False):
        path = twins.scale_then_privatize(
            torch.zeros(1, dtype=torch.float64),
            lambda theta, t: torch.zeros(0, 1, dtype=torch.float64),
            noise,
            rule=RMSProp(lr=1.0, beta2=beta2) if not debias else Adam(lr=1.0, beta1=0.0, beta2=beta2),
            clip_norm=1.0,
            noise_stddev=1.0,
            batch_size=1,
            eps_scale=1e-9,
            start=1.0,
            debias=debias,
        )
        step = float(path[0] - path[1])
        weight = 1 - beta2**2 if debias else 1.0
        # step = g̃₂/√ν̂₂ with ν̂₂ = (β₂(1−β₂)g̃₁² + (1−β₂)g̃₂²)/weight and g̃₁ = 1
        square = step**2 * beta2 * (1 - beta2) / weight / (1 - step**2 * (1 - beta2) / weight)
        second[debias] = square**0.5
    assert second[True] == pytest.approx(1.0, rel=1e-6)
    assert second[False] == pytest.approx((1 - beta2) ** 0.5, rel=1e-6)


EMPTY: dict[str, Callable[[Callable[[Tensor, int], Tensor]], Tensor]] = {
    "dp_sgd": lambda g: twins.dp_sgd(THETA, g, NOISE, rule=SGD(lr=0.1, momentum=0.5), **noisy()),
    "post_processing": lambda g: twins.post_processing(THETA, g, NOISE, rule=ADAM, **noisy()),
    "bias_correction": lambda g: twins.bias_correction(
        THETA, g, NOISE, rule=ADAM, **noisy(), row_norms_squared=torch.ones(STEPS)
    ),
    "independent_moments": lambda g: twins.independent_moments(
        THETA, g, NOISE, NOISE, rule=ADAM, **noisy(), square_noise_stddev=0.1
    ),
    "average_of_squares": lambda g: twins.independent_moments(
        THETA, g, NOISE, NOISE, rule=ADAM, **noisy(), square_noise_stddev=0.1, average_of_squares=True
    ),
    "joint_moments": lambda g: twins.joint_moments(
        THETA, g, NOISE, NOISE, rule=ADAM, **noisy(), square_weight=0.5
    ),
    "scale_then_privatize": lambda g: twins.scale_then_privatize(
        THETA, g, NOISE, rule=ADAM, **noisy(), eps_scale=0.1
    ),
    "side_information": lambda g: twins.side_information(
        THETA, g, NOISE, lambda theta, t: CURVATURE, rule=ADAM, **noisy()
    ),
    "noiseless_preconditioner": lambda g: twins.noiseless_preconditioner(
        THETA, g, NOISE, rule=ADAM, **noisy()
    ),
    "noiseless_scale_then_privatize": lambda g: twins.noiseless_scale_then_privatize(
        THETA, g, NOISE, rule=ADAM, **noisy(), eps_scale=0.1
    ),
    "delayed_preconditioner": lambda g: twins.delayed_preconditioner(
        THETA,
        g,
        NOISE,
        lr=0.1,
        **noisy(),
        scaled_clip_norm=2.0,
        scaled_noise_stddev=1.6,
        plain_steps=3,
        scaled_steps=2,
        eps=0.1,
        decay=0.5,
    ),
    "adadps": lambda g: twins.adadps(
        THETA, g, NOISE, lambda theta, t: CURVATURE, lr=0.1, **noisy(), renew_every=4, eps=0.1
    ),
}
THETA = normals(COORDINATES, seed=2)
NOISE = normals(STEPS, COORDINATES, seed=3)
ADAM = Adam(lr=0.1, beta2=0.95, eps=0.1)


@pytest.mark.parametrize("variant", EMPTY)
def test_an_empty_batch_takes_a_noise_step(variant):
    """No rows, or rows of zeros: the same finite path, moved by noise alone."""
    no_rows = EMPTY[variant](lambda theta, t: torch.zeros(0, COORDINATES, dtype=torch.float64))
    zero_rows = EMPTY[variant](lambda theta, t: torch.zeros(4, COORDINATES, dtype=torch.float64))
    assert torch.isfinite(no_rows).all()
    assert torch.equal(no_rows, zero_rows)
    assert (no_rows[-1] != no_rows[0]).all()


@pytest.mark.parametrize("variant", EMPTY)
def test_division_is_by_the_expected_batch_size_and_examples_are_clipped(variant):
    """Doubling every gradient beyond the clip norm changes nothing; doubling the examples does."""
    large = normals(4, COORDINATES, seed=5) * 1e6
    once = EMPTY[variant](lambda theta, t: large)
    torch.testing.assert_close(EMPTY[variant](lambda theta, t: 2 * large), once, rtol=0, atol=1e-9)
    twice = EMPTY[variant](lambda theta, t: torch.cat([large, large]))
    assert not torch.allclose(twice, once, atol=1e-3)


@pytest.mark.parametrize("rule", [AdaGrad(lr=0.5, eps=0.0), Adam(lr=0.5, eps=0.0), RMSProp(lr=0.5, eps=0.0)])
@pytest.mark.parametrize("project", [True, False])
def test_a_coordinate_without_gradient_stays_even_without_eps(rule, project):
    def gradients(theta: Tensor, t: int) -> Tensor:
        return torch.tensor([[0.0, 1.0]])

    plain: dict[str, Any] = dict(rule=rule, clip_norm=INF, noise_stddev=0.0, batch_size=1)
    quiet = torch.zeros(3, 2)
    for path in (
        twins.post_processing(torch.zeros(2), gradients, quiet, **plain),
        twins.independent_moments(
            torch.zeros(2), gradients, quiet, quiet, **plain, square_noise_stddev=0.0, project=project
        ),
        twins.scale_then_privatize(torch.zeros(2), gradients, quiet, **plain, eps_scale=0.1),
    ):
        assert path[:, 0].tolist() == [0.0, 0.0, 0.0]
        assert (path[:, 1] < 0).all()


def test_projection_bounds_the_square_of_a_batch_larger_than_expected():
    """12 equal examples of norm 1 at B = 4: the average has norm 3, the projected one 1; AdaGrad shows √ν."""
    for project, root in ((True, 1.0), (False, 3.0)):
        path = twins.independent_moments(
            torch.zeros(1),
            lambda theta, t: torch.ones(12, 1),
            torch.zeros(1, 1),
            torch.zeros(1, 1),
            rule=AdaGrad(lr=1.0, eps=0.0),
            clip_norm=1.0,
            noise_stddev=0.0,
            square_noise_stddev=0.0,
            batch_size=4,
            project=project,
        )
        assert float(path) == pytest.approx(-3.0 / root)


@pytest.mark.parametrize("name", OPTIM)
def test_joint_moments_are_independent_moments_of_the_average_of_squares_at_one_noise_level(name):
    rule, noise, square_noise = (
        OPTIM[name][0],
        normals(STEPS, COORDINATES, seed=3),
        normals(STEPS, COORDINATES),
    )
    theta, gradients = normals(COORDINATES, seed=2), quadratic_gradients(6)
    joint = twins.joint_moments(
        theta, gradients, noise, square_noise, rule=rule, **noisy(), square_weight=0.25
    )
    split = twins.independent_moments(
        theta,
        gradients,
        noise,
        square_noise,
        rule=rule,
        **noisy(),
        square_noise_stddev=0.8 / 0.5 / 6,
        average_of_squares=True,
    )
    torch.testing.assert_close(joint, split, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("rule", "bias_weights"),
    [
        (
            Adam(lr=0.1, beta1=0.0, beta2=0.9, eps=1e-3),
            [0.9**2 * 0.1 / 0.271, 0.9 * 0.1 / 0.271, 0.1 / 0.271],
        ),
        (RMSProp(lr=0.1, beta2=0.9, eps=1e-3), [0.9**2 * 0.1, 0.9 * 0.1, 0.1]),
        (AdaGrad(lr=0.1, eps=1e-3), [1.0, 1.0, 1.0]),
    ],
)
def test_bias_correction_subtracts_the_weighted_noise_variances(rule, bias_weights):
    """Third step by hand: the same weights on the squares and on ‖row‖²·φ, under the floor ε²."""
    rows = torch.tensor([1.0, 1.5, 1.2], dtype=torch.float64)
    noise = normals(3, 2000, seed=7)
    path = twins.bias_correction(
        torch.zeros(2000, dtype=torch.float64),
        lambda theta, t: torch.zeros(0, 2000, dtype=torch.float64),
        noise,
        rule=rule,
        clip_norm=1.0,
        noise_stddev=3.0,
        batch_size=6,
        row_norms_squared=rows,
    )
    weights = torch.tensor(bias_weights, dtype=torch.float64)[:, None]
    noisy_grad = 0.5 * noise
    corrected = (weights * noisy_grad**2).sum(0) - (weights[:, 0] * rows * 0.25).sum()
    step = 0.1 * noisy_grad[2] / corrected.clamp(min=1e-6).sqrt()
    assert 0.2 < float((corrected < 1e-6).double().mean()) < 0.8
    torch.testing.assert_close(path[1] - path[2], step, rtol=1e-9, atol=1e-9)


def fraction_at_the_floor(steps: int, beta2: float, coordinates: int, floor: float = 1e-3) -> Tensor:
    """Per step, the share of coordinates of pure noise whose corrected second moment is not positive."""
    noise = torch.randn(steps, coordinates, generator=torch.Generator().manual_seed(11))
    path = twins.bias_correction(
        torch.zeros(coordinates),
        lambda theta, t: torch.zeros(0, coordinates),
        noise,
        rule=Adam(lr=floor, beta1=0.0, beta2=beta2, eps=floor),
        clip_norm=1.0,
        noise_stddev=1.0,
        batch_size=1,
        row_norms_squared=torch.ones(steps),
    )
    first = path[:1]  # θ_0 = 0; the difference of one step at a time keeps float32 exact enough
    moves = torch.cat([first, path[1:] - path[:-1]])
    return ((moves + noise).abs() < 1e-2 * noise.abs().clamp(min=1e-3)).double().mean(1)


def test_bias_correction_on_pure_noise_is_negative_for_two_thirds_at_first_and_half_in_the_end():
    """t = 1: P(z² < 1) = .68269; t → ∞ at β₂ = .999: about .504. 4,000 coordinates: 4 s.e. are .030 and .032."""
    fractions = fraction_at_the_floor(4000, 0.999, 4000)
    assert abs(float(fractions[0]) - 0.68269) < 0.030
    assert abs(float(fractions[-1]) - 0.504) < 0.032


def test_post_processing_adam_on_pure_noise_moves_by_the_root_of_the_momentum_variance():
    """Steady update RMS √((1−β₁)/(1+β₁)) = .22942, within 2 %; without noise in ν (÷1.1) it would be rejected."""
    steps, coordinates = 4000, 1000
    noise = torch.randn(steps, coordinates, generator=torch.Generator().manual_seed(12))
    path = twins.post_processing(
        torch.zeros(coordinates),
        lambda theta, t: torch.zeros(0, coordinates),
        noise,
        rule=Adam(lr=1.0),
        clip_norm=1.0,
        noise_stddev=0.7,
        batch_size=50,
    )
    moves = (path[1:] - path[:-1])[-500:]
    assert float(moves.square().mean().sqrt()) == pytest.approx(0.22942, rel=0.02)


def constant_two(theta: Tensor, t: int) -> Tensor:
    return torch.full((1, 1), 2.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("decay", "scaled"),
    [
        (0.75, [0.9, 0.9, 2 / (1.75**0.5 + 1), 2 / (1.75**0.5 + 1)]),  # A = 1, then 1.75; 2/(1+1) is clipped
        (None, [2 / 3, 2 / 3, 2 / (8**0.5 + 1), 2 / (8**0.5 + 1)]),  # A = 4, then 8
    ],
)
def test_delayed_preconditioner_by_hand(decay, scaled):
    path = twins.delayed_preconditioner(
        torch.zeros(1, dtype=torch.float64),
        constant_two,
        torch.tensor([[0.0], [0.0], [0.0], [1.0], [0.0], [0.0], [0.0], [0.0]], dtype=torch.float64),
        lr=1.0,
        clip_norm=5.0,
        noise_stddev=100.0,
        scaled_clip_norm=0.9,
        scaled_noise_stddev=0.25,
        batch_size=1,
        plain_steps=2,
        scaled_steps=2,
        eps=1.0,
        decay=decay,
    )
    moves = [2.0, 2.0, scaled[0], scaled[1] + 0.25, 2.0, 2.0, scaled[2], scaled[3]]
    expected = torch.tensor(moves, dtype=torch.float64).cumsum(0)
    torch.testing.assert_close(-path[:, 0], expected, rtol=1e-12, atol=0)


def test_delayed_preconditioner_starts_as_dp_sgd_and_averages_noisy_gradients():
    theta, gradients, noise = (
        normals(COORDINATES, seed=2),
        quadratic_gradients(6),
        normals(STEPS, COORDINATES),
    )
    path = twins.delayed_preconditioner(
        theta,
        gradients,
        noise,
        lr=0.1,
        **noisy(),
        scaled_clip_norm=1.0,
        scaled_noise_stddev=0.8,
        plain_steps=4,
        scaled_steps=1,
        eps=0.2,
        decay=0.0,
    )
    plain = twins.dp_sgd(theta, gradients, noise, rule=SGD(lr=0.1), **noisy())
    assert torch.equal(path[:4], plain[:4])
    gathered = (theta - path[3]) / 0.1 / 4
    scaled = twins.clip(gradients(path[3], 4) / (gathered.abs() + 0.2), 1.0)
    expected = path[3] - 0.1 * (scaled.sum(0) + 0.8 * noise[4]) / 6
    torch.testing.assert_close(path[4], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("plain_steps", "scaled_steps"), [(0, 1), (1, 0)])
def test_delayed_preconditioner_names_a_phase_without_steps(plain_steps, scaled_steps):
    with pytest.raises(ValueError, match=f"plain_steps={plain_steps} and scaled_steps={scaled_steps}"):
        twins.delayed_preconditioner(
            torch.zeros(1),
            constant_two,
            torch.zeros(1, 1),
            lr=1.0,
            **noisy(),
            scaled_clip_norm=1.0,
            scaled_noise_stddev=1.0,
            plain_steps=plain_steps,
            scaled_steps=scaled_steps,
            eps=1.0,
            decay=None,
        )


@pytest.mark.parametrize(
    ("decay", "moments"),
    [(0.0, [0.0, 0.0, 4.0, 4.0, 16.0]), (0.5, [0.0, 0.0, 2.0, 2.0, 9.0])],
)
def test_adadps_by_hand(decay, moments):
    """g_pub = t, renewed every 2 steps, ε = 1: s = 1/√(A+1), clipped at 1 and not divided out."""
    path = twins.adadps(
        torch.zeros(1, dtype=torch.float64),
        constant_two,
        torch.tensor([[0.0], [1.0], [0.0], [0.0], [0.0]], dtype=torch.float64),
        lambda theta, t: torch.full((1,), float(t), dtype=torch.float64),
        lr=1.0,
        clip_norm=1.0,
        noise_stddev=0.5,
        batch_size=1,
        renew_every=2,
        eps=1.0,
        decay=decay,
    )
    moves = [min(2 / (a + 1) ** 0.5, 1.0) for a in moments]
    moves[1] += 0.5
    expected = torch.tensor(moves, dtype=torch.float64).cumsum(0)
    torch.testing.assert_close(-path[:, 0], expected, rtol=1e-12, atol=0)


def test_noiseless_second_moment_sees_no_noise_and_public_one_no_private_gradient():
    """A constant gradient: ν̂ = g² exactly, so AdaGrad-like steps are linear in the noise."""
    noise = normals(STEPS, COORDINATES, seed=3)
    base: dict[str, Any] = dict(rule=Adam(lr=1.0, beta1=0.0, eps=0.0), clip_norm=INF, batch_size=1)
    zero = torch.zeros(COORDINATES, dtype=torch.float64)

    def ones(theta: Tensor, t: int) -> Tensor:
        return CURVATURE[None]

    for path in (
        twins.noiseless_preconditioner(zero, ones, noise, noise_stddev=0.3, **base),
        twins.side_information(zero, ones, noise, lambda theta, t: CURVATURE, noise_stddev=0.3, **base),
    ):
        expected = -(1 + 0.3 * noise / CURVATURE).cumsum(0)
        torch.testing.assert_close(path, expected, rtol=1e-10, atol=1e-10)
    path = twins.noiseless_scale_then_privatize(zero, ones, noise, noise_stddev=0.3, eps_scale=0.5, **base)
    s = torch.cat([torch.full((1, COORDINATES), 2.0), (1 / (CURVATURE + 0.5)).expand(STEPS - 1, -1)])
    torch.testing.assert_close(path, -(1 + 0.3 * noise / s / CURVATURE).cumsum(0), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", EMPTY)
def test_paths_are_reproducible_and_have_one_row_a_step(variant):
    first = EMPTY[variant](quadratic_gradients(3))
    assert first.shape == (STEPS, COORDINATES)
    assert first.dtype == torch.float64
    assert torch.equal(first, EMPTY[variant](quadratic_gradients(3)))
    assert torch.equal(normals(COORDINATES, seed=2), THETA)
