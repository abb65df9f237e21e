"""The reference implementations against single steps by hand, and in pure noise against closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpoptim.optim import reference
from dpoptim.optim.reference import SGD, AdaGrad, Adam, RMSProp, Rule, Run

INF = float("inf")
SIZES = torch.tensor([1.0, 0.3, 2.0, 0.05, 4.0], dtype=torch.float64)


def normals(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("exponent", [0.0, 0.25, 1 / 3, 0.5])
def test_scale_by_hand(exponent: float) -> None:
    nu_hat = torch.tensor([0.0, 1.0, 16.0], dtype=torch.float64)
    s = reference.scale_of(nu_hat, exponent=exponent, eps_scale=0.5, normalised=False)
    zero = 1.0 if exponent == 0 else 0.0
    assert s.tolist() == pytest.approx([1 / (zero + 0.5), 1 / 1.5, 1 / (16**exponent + 0.5)])


def test_scale_then_privatize_two_steps_by_hand() -> None:
    """g = 3 in one coordinate, B = 2 expected and one example, ε_s1 = 1: every number below is by hand."""
    run = Run(
        torch.zeros(1, dtype=torch.float64),
        lambda theta, t: torch.full((1, 1), 3.0, dtype=torch.float64),
        torch.tensor([[0.5], [-1.0]], dtype=torch.float64),
        clip_norm=1.0,
        noise_stddev=2.0,
        batch_size=2,
    )
    path = reference.scale_then_privatize(run, rule=AdaGrad(lr=1.0, eps=0.5), eps_scale=1.0, start=4.0)
    first = (1.0 + 2.0 * 0.5) / 2 / (1 / 3)  # s₁ = 1/(√4 + 1); s₁·3 = 1, not clipped
    theta_1 = -first / (first + 0.5)
    s_2 = 1 / (first + 1.0)
    second = (min(3 * s_2, 1.0) - 2.0) / 2 / s_2
    theta_2 = theta_1 - second / ((first**2 + second**2) ** 0.5 + 0.5)
    assert path.flatten().tolist() == pytest.approx([theta_1, theta_2], rel=1e-12)


def test_debiased_and_raw_geometry_differ_by_the_debiasing_factor() -> None:
    """With g̃ known, s_2 is read off the second step's noise: √(β₂-debiased ν) against √(raw ν)."""
    beta2, noise = 0.96, torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    second: dict[bool, float] = {}
    for debias in (True, False):
        run = Run(
            torch.zeros(1, dtype=torch.float64),
            lambda theta, t: torch.zeros(0, 1, dtype=torch.float64),
            noise,
            clip_norm=1.0,
            noise_stddev=1.0,
            batch_size=1,
        )
        path = reference.scale_then_privatize(
            run, rule=Adam(lr=1.0, beta1=0.0, beta2=beta2), eps_scale=1e-9, start=1.0, debias=debias
        )
        step = float(path[0] - path[1])
        weight = 1 - beta2**2
        # step = g̃₂/√ν̂₂ with ν̂₂ = (β₂(1−β₂)g̃₁² + (1−β₂)g̃₂²)/weight and g̃₁ = 1
        square = step**2 * beta2 * (1 - beta2) / weight / (1 - step**2 * (1 - beta2) / weight)
        second[debias] = square**0.5
    assert second[True] == pytest.approx(1.0, rel=1e-6)
    assert second[False] == pytest.approx((1 - beta2) ** 0.5, rel=1e-6)


def test_projection_bounds_the_square_of_a_batch_larger_than_expected() -> None:
    """12 equal examples of norm 1 at B = 4: the average has norm 3, the projected one 1; AdaGrad shows √ν."""
    for project, root in ((True, 1.0), (False, 3.0)):
        run = Run(
            torch.zeros(1),
            lambda theta, t: torch.ones(12, 1),
            torch.zeros(1, 1),
            clip_norm=1.0,
            noise_stddev=0.0,
            batch_size=4,
        )
        path = reference.independent_moments(
            run, torch.zeros(1, 1), rule=AdaGrad(lr=1.0, eps=0.0), square_noise_stddev=0.0, project=project
        )
        assert float(path) == pytest.approx(-3.0 / root)


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
def test_bias_correction_subtracts_the_weighted_noise_variances(rule: Rule, bias_weights: list[float]) -> None:
    """Third step by hand: the same weights on the squares and on ‖row‖²·φ, under the floor ε²."""
    rows = torch.tensor([1.0, 1.5, 1.2], dtype=torch.float64)
    noise = normals(3, 2000, seed=7)
    run = Run(
        torch.zeros(2000, dtype=torch.float64),
        lambda theta, t: torch.zeros(0, 2000, dtype=torch.float64),
        noise,
        clip_norm=1.0,
        noise_stddev=3.0,
        batch_size=6,
    )
    path = reference.bias_correction(run, rule=rule, row_norms_squared=rows)
    weights = torch.tensor(bias_weights, dtype=torch.float64)[:, None]
    noisy_grad = 0.5 * noise
    corrected = (weights * noisy_grad**2).sum(0) - (weights[:, 0] * rows * 0.25).sum()
    step = 0.1 * noisy_grad[2] / corrected.clamp(min=1e-6).sqrt()
    assert 0.2 < float((corrected < 1e-6).double().mean()) < 0.8
    torch.testing.assert_close(path[1] - path[2], step, rtol=1e-9, atol=1e-9)


def fraction_at_the_floor(steps: int, beta2: float, coordinates: int, floor: float = 1e-3) -> Tensor:
    """Per step, the share of coordinates of pure noise whose corrected second moment is not positive."""
    noise = torch.randn(steps, coordinates, generator=torch.Generator().manual_seed(11))
    run = Run(
        torch.zeros(coordinates),
        lambda theta, t: torch.zeros(0, coordinates),
        noise,
        clip_norm=1.0,
        noise_stddev=1.0,
        batch_size=1,
    )
    path = reference.bias_correction(
        run, rule=Adam(lr=floor, beta1=0.0, beta2=beta2, eps=floor), row_norms_squared=torch.ones(steps)
    )
    first = path[:1]  # θ_0 = 0; the difference of one step at a time keeps float32 exact enough
    moves = torch.cat([first, path[1:] - path[:-1]])
    return ((moves + noise).abs() < 1e-2 * noise.abs().clamp(min=1e-3)).double().mean(1)


@pytest.mark.parametrize(
    ("beta2", "steps", "coordinates", "share"),
    [pytest.param(0.999, 4000, 4000, 0.505, marks=pytest.mark.slow), (0.9, 60, 40_000, 0.5560)],
)
def test_bias_correction_in_pure_noise_is_often_negative(
    beta2: float, steps: int, coordinates: int, share: float
) -> None:
    """P(z² < 1) = .68269 at t = 1; `share` in the end is P(Σwz² < 1) by Imhof's integral."""
    four_standard_errors = 2 / coordinates**0.5
    fractions = fraction_at_the_floor(steps, beta2, coordinates)
    assert abs(float(fractions[0]) - 0.68269) < four_standard_errors
    assert abs(float(fractions[-1]) - share) < four_standard_errors


def test_post_processing_adam_in_pure_noise_moves_by_the_momentum_stddev() -> None:
    """Steady update RMS √((1−β₁)/(1+β₁)) = .22942, within 2 %: a level 1.1 times off fails."""
    steps, coordinates = 1500, 1000
    noise = torch.randn(steps, coordinates, generator=torch.Generator().manual_seed(12))
    run = Run(
        torch.zeros(coordinates),
        lambda theta, t: torch.zeros(0, coordinates),
        noise,
        clip_norm=1.0,
        noise_stddev=0.7,
        batch_size=50,
    )
    path = reference.post_processing(run, rule=Adam(lr=1.0))
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
def test_delayed_preconditioner_by_hand(decay: float | None, scaled: list[float]) -> None:
    run = Run(
        torch.zeros(1, dtype=torch.float64),
        constant_two,
        torch.tensor([[0.0], [0.0], [0.0], [1.0], [0.0], [0.0], [0.0], [0.0]], dtype=torch.float64),
        clip_norm=5.0,
        noise_stddev=100.0,
        batch_size=1,
    )
    path = reference.delayed_preconditioner(
        run, lr=1.0, scaled_clip_norm=0.9, scaled_noise_stddev=0.25, plain_steps=2, scaled_steps=2, eps=1.0, decay=decay
    )
    moves = [2.0, 2.0, scaled[0], scaled[1] + 0.25, 2.0, 2.0, scaled[2], scaled[3]]
    expected = torch.tensor(moves, dtype=torch.float64).cumsum(0)
    torch.testing.assert_close(-path[:, 0], expected, rtol=1e-12, atol=0)


def test_delayed_preconditioner_starts_as_dp_sgd_and_averages_noisy_gradients() -> None:
    theta, noise, data = normals(5, seed=2), normals(10, 5, seed=0), normals(10, 6, 5, seed=1)

    def gradients(theta: Tensor, t: int) -> Tensor:
        return SIZES * (theta - data[t])

    run = Run(theta, gradients, noise, clip_norm=1.0, noise_stddev=0.8, batch_size=6)
    path = reference.delayed_preconditioner(
        run, lr=0.1, scaled_clip_norm=1.0, scaled_noise_stddev=0.8, plain_steps=4, scaled_steps=1, eps=0.2, decay=0.0
    )
    plain = reference.dp_sgd(run, rule=SGD(lr=0.1))
    assert torch.equal(path[:4], plain[:4])
    gathered = (theta - path[3]) / 0.1 / 4
    scaled = reference.clip(gradients(path[3], 4) / (gathered.abs() + 0.2), 1.0)
    expected = path[3] - 0.1 * (scaled.sum(0) + 0.8 * noise[4]) / 6
    torch.testing.assert_close(path[4], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("decay", "moments"),
    [(0.0, [0.0, 0.0, 4.0, 4.0, 16.0]), (0.5, [0.0, 0.0, 2.0, 2.0, 9.0])],
)
def test_adadps_by_hand(decay: float, moments: list[float]) -> None:
    """g_pub = t, renewed every 2 steps, ε = 1: s = 1/√(A+1), clipped at 1 and not divided out."""
    run = Run(
        torch.zeros(1, dtype=torch.float64),
        constant_two,
        torch.tensor([[0.0], [1.0], [0.0], [0.0], [0.0]], dtype=torch.float64),
        clip_norm=1.0,
        noise_stddev=0.5,
        batch_size=1,
    )
    path = reference.adadps(
        run,
        lambda theta, t: torch.full((1,), float(t), dtype=torch.float64),
        lr=1.0,
        renew_every=2,
        eps=1.0,
        decay=decay,
    )
    moves = [min(2 / (a + 1) ** 0.5, 1.0) for a in moments]
    moves[1] += 0.5
    expected = torch.tensor(moves, dtype=torch.float64).cumsum(0)
    torch.testing.assert_close(-path[:, 0], expected, rtol=1e-12, atol=0)


def test_noiseless_moment_has_no_noise_and_public_moment_sees_no_private_gradient() -> None:
    """A constant gradient: ν̂ = g² exactly, so AdaGrad-like steps are linear in the noise."""
    noise = normals(25, 5, seed=3)
    rule, zero = Adam(lr=1.0, beta1=0.0, eps=0.0), torch.zeros(5, dtype=torch.float64)
    run = Run(zero, lambda theta, t: SIZES[None], noise, clip_norm=INF, noise_stddev=0.3, batch_size=1)
    for path in (
        reference.post_processing(run, rule=rule, noiseless=True),
        reference.side_information(run, lambda theta, t: SIZES, rule=rule),
    ):
        expected = -(1 + 0.3 * noise / SIZES).cumsum(0)
        torch.testing.assert_close(path, expected, rtol=1e-10, atol=1e-10)
    path = reference.scale_then_privatize(run, rule=rule, eps_scale=0.5, noiseless=True)
    s = torch.cat([torch.full((1, 5), 2.0), (1 / (SIZES + 0.5)).expand(24, -1)])
    torch.testing.assert_close(path, -(1 + 0.3 * noise / s / SIZES).cumsum(0), rtol=1e-10, atol=1e-10)
