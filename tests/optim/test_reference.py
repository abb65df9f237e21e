"""The reference implementations against torch.optim without noise, against each other, and in one table."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpoptim.optim import reference
from dpoptim.optim.reference import SGD, AdaGrad, Adam, AdamW, RMSProp, Rule, Run

Maker = Callable[[list[Tensor]], torch.optim.Optimizer]
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


def torch_path(make: Maker, examples: int) -> Tensor:
    gradients = quadratic_gradients(examples)
    theta = torch.nn.Parameter(normals(COORDINATES, seed=2))
    optimizer = make([theta])
    path = []
    for t in range(STEPS):
        theta.grad = gradients(theta.detach(), t).mean(0)
        optimizer.step()
        path.append(theta.detach().clone())
    return torch.stack(path)


OPTIM: dict[str, tuple[Rule, Maker]] = {
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
DECAYED: dict[str, tuple[Rule, Maker]] = {
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
    plain = Run(theta, gradients, QUIET, clip_norm=INF, noise_stddev=0.0, batch_size=examples)
    if variant == "post_processing":
        return reference.post_processing(plain, rule=rule)
    if variant == "scale_then_privatize":
        return reference.scale_then_privatize(plain, rule=rule, eps_scale=1e-2)
    if variant == "scale_then_privatize, options":
        return reference.scale_then_privatize(
            plain, rule=rule, eps_scale=0.1, exponent=1 / 3, normalised=True, debias=False, start=2.0
        )
    if variant == "independent_moments":
        return reference.independent_moments(plain, QUIET, rule=rule, square_noise_stddev=0.0)
    if variant == "independent_moments, average of squares":
        return reference.independent_moments(plain, QUIET, rule=rule, square_noise_stddev=0.0, average_of_squares=True)
    if variant == "joint_moments":
        return reference.joint_moments(plain, QUIET, rule=rule, square_weight=0.25)
    if variant == "bias_correction":
        return reference.bias_correction(plain, rule=rule, row_norms_squared=torch.ones(STEPS))
    if variant == "side_information":
        return reference.side_information(plain, lambda th, t: gradients(th, t).mean(0), rule=rule)
    if variant == "noiseless_preconditioner":
        return reference.post_processing(plain, rule=rule, noiseless=True)
    assert variant == "noiseless_scale_then_privatize"
    return reference.scale_then_privatize(plain, rule=rule, eps_scale=1e-2, noiseless=True)


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
def test_without_noise_and_clipping_variants_equal_torch_optim(variant: str, examples: int, name: str) -> None:
    rule, make = OPTIM[name]
    torch.testing.assert_close(run(variant, rule, examples), torch_path(make, examples), rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", ["post_processing", "scale_then_privatize"])
@pytest.mark.parametrize("name", DECAYED)
def test_l2_decay_equals_torch(variant: str, name: str) -> None:
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
def test_bias_correction_without_noise_and_floor_equals_torch_optim(rule: Rule, make: Maker) -> None:
    torch.testing.assert_close(run("bias_correction", rule, 3), torch_path(make, 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("examples", [1, 3])
def test_average_of_squares_differs_from_square_of_average(examples: int) -> None:
    rule = OPTIM["adam"][0]
    of_average = run("independent_moments", rule, examples)
    of_squares = run("independent_moments, average of squares", rule, examples)
    assert torch.allclose(of_average, of_squares, rtol=0, atol=1e-12) == (examples == 1)


def test_dp_sgd_without_noise_and_clipping_equals_torch_sgd() -> None:
    run = Run(THETA, quadratic_gradients(3), QUIET, clip_norm=INF, noise_stddev=0.0, batch_size=3)
    path = reference.dp_sgd(run, rule=SGD(lr=0.1, momentum=0.7, weight_decay=0.2))
    expected = torch_path(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.7, weight_decay=0.2), 3)
    torch.testing.assert_close(path, expected, rtol=0, atol=1e-12)


THETA = normals(COORDINATES, seed=2)
NOISE = normals(STEPS, COORDINATES, seed=3)


def noisy(gradients: Callable[[Tensor, int], Tensor], clip_norm: float = 1.0, noise_stddev: float = 0.8) -> Run:
    return Run(THETA, gradients, NOISE, clip_norm=clip_norm, noise_stddev=noise_stddev, batch_size=6)


@pytest.mark.parametrize("name", OPTIM)
def test_constant_scale_equals_post_processing_with_clip_norm_over_s(name: str) -> None:
    rule, gradients = OPTIM[name][0], quadratic_gradients(6)
    # s = 1/1.25 at every step
    scaled = reference.scale_then_privatize(noisy(gradients), rule=rule, exponent=0.0, eps_scale=0.25)
    plain = reference.post_processing(noisy(gradients, 1.25, 1.0), rule=rule)
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-12)
    other = reference.post_processing(noisy(gradients, 1.0, 0.8), rule=rule)
    assert not torch.allclose(scaled, other, rtol=0, atol=1e-3)


@pytest.mark.parametrize("noiseless", [False, True])
@pytest.mark.parametrize("name", OPTIM)
def test_normalised_scale_equals_the_plain_one_with_clip_norm_times_eps(name: str, noiseless: bool) -> None:
    function = functools.partial(reference.scale_then_privatize, noiseless=noiseless)
    rule, gradients = OPTIM[name][0], quadratic_gradients(6)
    raw = function(noisy(gradients), rule=rule, eps_scale=0.05)
    normalised = function(noisy(gradients, 0.05, 0.04), rule=rule, eps_scale=0.05, normalised=True)
    torch.testing.assert_close(normalised, raw, rtol=0, atol=1e-10)


ADAM = Adam(lr=0.1, beta2=0.95, eps=0.1)
VARIANTS: dict[str, Callable[[Callable[[Tensor, int], Tensor]], Tensor]] = {
    "dp_sgd": lambda g: reference.dp_sgd(noisy(g), rule=SGD(lr=0.1, momentum=0.5)),
    "post_processing": lambda g: reference.post_processing(noisy(g), rule=ADAM),
    "bias_correction": lambda g: reference.bias_correction(noisy(g), rule=ADAM, row_norms_squared=torch.ones(STEPS)),
    "independent_moments": lambda g: reference.independent_moments(noisy(g), NOISE, rule=ADAM, square_noise_stddev=0.1),
    "average_of_squares": lambda g: reference.independent_moments(
        noisy(g), NOISE, rule=ADAM, square_noise_stddev=0.1, average_of_squares=True
    ),
    "joint_moments": lambda g: reference.joint_moments(noisy(g), NOISE, rule=ADAM, square_weight=0.5),
    "scale_then_privatize": lambda g: reference.scale_then_privatize(noisy(g), rule=ADAM, eps_scale=0.1),
    "side_information": lambda g: reference.side_information(noisy(g), lambda theta, t: CURVATURE, rule=ADAM),
    "noiseless_preconditioner": lambda g: reference.post_processing(noisy(g), rule=ADAM, noiseless=True),
    "noiseless_scale_then_privatize": lambda g: reference.scale_then_privatize(
        noisy(g), rule=ADAM, eps_scale=0.1, noiseless=True
    ),
    "delayed_preconditioner": lambda g: reference.delayed_preconditioner(
        noisy(g),
        lr=0.1,
        scaled_clip_norm=2.0,
        scaled_noise_stddev=1.6,
        plain_steps=3,
        scaled_steps=2,
        eps=0.1,
        decay=0.5,
    ),
    "adadps": lambda g: reference.adadps(noisy(g), lambda theta, t: CURVATURE, lr=0.1, renew_every=4, eps=0.1),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_empty_batch_takes_a_noise_step(variant: str) -> None:
    """No rows, or rows of zeros: the same finite path, moved by noise alone."""
    no_rows = VARIANTS[variant](lambda theta, t: torch.zeros(0, COORDINATES, dtype=torch.float64))
    zero_rows = VARIANTS[variant](lambda theta, t: torch.zeros(4, COORDINATES, dtype=torch.float64))
    assert torch.isfinite(no_rows).all()
    assert torch.equal(no_rows, zero_rows)
    assert (no_rows[-1] != no_rows[0]).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_examples_are_clipped_and_divided_by_the_expected_batch_size(variant: str) -> None:
    """Doubling every gradient beyond the clip norm changes nothing; doubling the examples does."""
    large = normals(4, COORDINATES, seed=5) * 1e6
    once = VARIANTS[variant](lambda theta, t: large)
    torch.testing.assert_close(VARIANTS[variant](lambda theta, t: 2 * large), once, rtol=0, atol=1e-9)
    twice = VARIANTS[variant](lambda theta, t: torch.cat([large, large]))
    assert not torch.allclose(twice, once, atol=1e-3)


@pytest.mark.parametrize("rule", [AdaGrad(lr=0.5, eps=0.0), Adam(lr=0.5, eps=0.0), RMSProp(lr=0.5, eps=0.0)])
@pytest.mark.parametrize("project", [True, False])
def test_a_coordinate_without_gradient_stays_even_without_eps(rule: Rule, project: bool) -> None:
    def gradients(theta: Tensor, t: int) -> Tensor:
        return torch.tensor([[0.0, 1.0]])

    quiet = torch.zeros(3, 2)
    plain = Run(torch.zeros(2), gradients, quiet, clip_norm=INF, noise_stddev=0.0, batch_size=1)
    for path in (
        reference.post_processing(plain, rule=rule),
        reference.independent_moments(plain, quiet, rule=rule, square_noise_stddev=0.0, project=project),
        reference.scale_then_privatize(plain, rule=rule, eps_scale=0.1),
    ):
        assert path[:, 0].tolist() == [0.0, 0.0, 0.0]
        assert (path[:, 1] < 0).all()


@pytest.mark.parametrize("name", OPTIM)
def test_joint_moments_equal_independent_moments_at_one_noise_level(
    name: str,
) -> None:
    rule, square_noise = OPTIM[name][0], normals(STEPS, COORDINATES)
    run = noisy(quadratic_gradients(6))
    joint = reference.joint_moments(run, square_noise, rule=rule, square_weight=0.25)
    split = reference.independent_moments(
        run, square_noise, rule=rule, square_noise_stddev=0.8 / 0.5 / 6, average_of_squares=True
    )
    torch.testing.assert_close(joint, split, rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_paths_are_reproducible_with_one_row_per_step(variant: str) -> None:
    first = VARIANTS[variant](quadratic_gradients(3))
    assert first.shape == (STEPS, COORDINATES)
    assert first.dtype == torch.float64
    assert torch.equal(first, VARIANTS[variant](quadratic_gradients(3)))
    assert torch.equal(normals(COORDINATES, seed=2), THETA)
