"""Limits in which a variant must equal something simpler."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpoptim
from dpoptim.optim import InverseRoot, NoiseCorrected, OfNoisyGradient, PrivateOptimizer, rules
from dpoptim.optim.variants import noise_level
from tests.optim.table import EPS_SCALE, LR, RULES, VARIANTS, task

KEY = dpoptim.NoiseKey.from_bytes(bytes(32))
RUN: Any = {"key": KEY, "run_id": "the run", "external_batches": True}
STEPS = 60


def plan(**changes) -> dpoptim.PrivacyPlan:
    settings = dict(num_examples=40, batch_size=4, steps=STEPS, clip_norm=0.9, noise_multiplier=0.7)
    return dpoptim.PrivacyPlan(**{**settings, **changes})


def train(make, plan: dpoptim.PrivacyPlan, dtype: torch.dtype = torch.float64) -> Tensor:
    made = task(plan, dtype)
    optimizer = make(made)
    path = []
    for batch in made.batches:
        made.losses(made.model, batch).sum().backward()
        optimizer.step()
        path.append(made.theta())
    return torch.stack(path)


TORCH = {
    "adam": lambda p: torch.optim.Adam(p, LR, eps=0.1),
    "adam with decay": lambda p: torch.optim.Adam(p, LR, eps=0.1, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, LR, eps=0.1, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, LR, eps=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, LR, eps=0.1),
    "rmsprop with momentum": lambda p: torch.optim.RMSprop(p, LR, eps=0.1, momentum=0.8),
}


def train_with_torch(make, plan: dpoptim.PrivacyPlan) -> Tensor:
    made = task(plan, torch.float64)
    optimizer = make(made.model.parameters())
    path = []
    for batch in made.batches:
        optimizer.zero_grad()
        (made.losses(made.model, batch).sum() / plan.batch_size).backward()
        optimizer.step()
        path.append(made.theta())
    return torch.stack(path)


@pytest.mark.parametrize(
    ("variant", "rule"),
    [
        *(("post_processing", rule) for rule in TORCH),
        ("independent_moments", "adamw"),
        ("independent_moments", "rmsprop"),
        ("scale_then_privatize", "adam with decay"),
        ("scale_then_privatize", "adagrad"),
        ("scale_then_privatize, exponent 1/4", "rmsprop with momentum"),
        ("scale_then_privatize, as printed", "adam"),
        ("noiseless_preconditioner", "adam"),
        ("noiseless_preconditioner, scaled", "adamw"),
    ],
)
def test_without_noise_and_clipping_equals_torch_optim(variant, rule):
    quiet = plan(noise_multiplier=0.0, clip_norm=math.inf)
    ours = train(lambda t: VARIANTS[variant].make(t.model, quiet, RULES[rule][0], t, **RUN), quiet)
    torch.testing.assert_close(ours, train_with_torch(TORCH[rule], quiet), rtol=1e-11, atol=1e-12)


def test_sgd_equals_torch_sgd():
    quiet = plan(noise_multiplier=0.0, clip_norm=math.inf)
    ours = train(lambda t: dpoptim.dp_sgd(t.model, quiet, LR, momentum=0.9, weight_decay=0.1), quiet)
    theirs = train_with_torch(lambda p: torch.optim.SGD(p, LR, momentum=0.9, weight_decay=0.1), quiet)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rule", ["adam with decay", "adagrad"])
def test_exponent_zero_equals_post_processing(rule):
    """s = ε/(1 + ε) is constant: post-processing with clip norm ζ/s, step for step."""
    constant = EPS_SCALE / (1 + EPS_SCALE)
    scaled, flat = plan(), plan(clip_norm=0.9 / constant)
    ours = train(
        lambda t: dpoptim.scale_then_privatize(
            t.model, scaled, LR, rule=RULES[rule][0], exponent=0.0, eps_scale=EPS_SCALE, **RUN
        ),
        scaled,
    )
    theirs = train(lambda t: dpoptim.post_processing(t.model, flat, LR, rule=RULES[rule][0], **RUN), flat)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rule", ["adam with decay", "adagrad"])
@pytest.mark.parametrize("options", [{"exponent": 0.0}, {"eps_scale": math.inf}], ids=["exponent 0", "eps_scale inf"])
def test_exponent_zero_defaults_to_post_processing(rule, options):
    """Bit for bit, at the same clip norm: the scale is 1."""
    same = plan()
    ours = train(lambda t: dpoptim.scale_then_privatize(t.model, same, LR, rule=RULES[rule][0], **options, **RUN), same)
    theirs = train(lambda t: dpoptim.post_processing(t.model, same, LR, rule=RULES[rule][0], **RUN), same)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rule", ["adam with decay", "adagrad"])
def test_a_large_eps_scale_approaches_post_processing(rule):
    """Where ε_s1 dwarfs √ν̂, the normalised scale is 1 and the clip norm is the raw gradient norm."""
    scaled = plan()
    ours = train(
        lambda t: dpoptim.scale_then_privatize(t.model, scaled, LR, rule=RULES[rule][0], eps_scale=1e9, **RUN),
        scaled,
    )
    theirs = train(lambda t: dpoptim.post_processing(t.model, scaled, LR, rule=RULES[rule][0], **RUN), scaled)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", ["adam with decay", "adagrad"])
def test_normalised_scale_equals_the_printed_algorithm(rule):
    """s and ζ scaled together change nothing: clip norm ζ·ε_s1 against ζ."""
    printed = plan(clip_norm=3.0)
    normal = plan(clip_norm=3.0 * EPS_SCALE)
    ours = train(lambda t: VARIANTS["scale_then_privatize"].make(t.model, normal, RULES[rule][0], t, **RUN), normal)
    theirs = train(
        lambda t: VARIANTS["scale_then_privatize, as printed"].make(t.model, printed, RULES[rule][0], t, **RUN),
        printed,
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_band_equals_independent_noise(variant):
    banded = plan(noise=dpoptim.BandedToeplitz(bands=1), steps=15)
    independent = plan(steps=15)
    paths = [
        train(lambda t, p=p: VARIANTS[variant].make(t.model, p, RULES["adam"][0], t, **RUN), p)
        for p in (banded, independent)
    ]
    assert torch.equal(*paths)


def test_a_released_square_does_not_include_decay():
    """L2 decay is added to the noisy gradient after the release."""
    quiet = plan(noise_multiplier=0.0, clip_norm=math.inf)
    rule = RULES["adam with decay"][0]
    ours = train(lambda t: dpoptim.independent_moments(t.model, quiet, LR, rule=rule), quiet)
    theirs = train_with_torch(TORCH["adam with decay"], quiet)
    assert float((ours - theirs).abs().max()) > 1e-4


def test_mean_loss_equals_sum_loss():
    settings = plan()
    by_sum = train(lambda t: dpoptim.scale_then_privatize(t.model, settings, LR, **RUN), settings)
    made = task(settings, torch.float64)
    optimizer = dpoptim.scale_then_privatize(made.model, settings, LR, **RUN, loss_reduction="mean")
    for batch in made.batches:
        made.losses(made.model, batch).mean().backward()
        optimizer.step()
    torch.testing.assert_close(made.theta(), by_sum[-1], rtol=1e-11, atol=1e-12)


class OneNumber(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, 1, dtype=torch.float64))


def on_pure_noise(second_moment, release, steps: int, rule, count: int = 4000, lr: float = 0.0) -> PrivateOptimizer:
    pure = dpoptim.PrivacyPlan(num_examples=10, batch_size=5, steps=steps, clip_norm=1.0, noise_multiplier=1.0)
    return PrivateOptimizer(
        OneNumber(count), pure, release=release, lr=lr, rule=rule, geometry=dpoptim.optim.Flat(),
        second_moment=second_moment, **RUN,
    )  # fmt: skip


def test_first_bias_correction_is_negative_for_two_thirds_of_pure_noise():
    """P(z² < 1) = .68269 at t = 1, near one half at last."""
    optimizer = on_pure_noise(NoiseCorrected(), dpoptim.Gradient(), 400, rules.Adam(eps=1e-12))
    fractions = []
    for _ in range(400):
        optimizer.step()
        (state,) = optimizer.state.values()
        t = optimizer.mechanism.step
        nu_hat = state["second_moment"] / (1 - 0.999**t)
        bias = float(state["noise_moment"]) / (1 - 0.999**t)
        fractions.append(float((nu_hat < bias).double().mean()))
    assert abs(fractions[0] - 0.68269) < 4 * math.sqrt(0.68269 * 0.31731 / 4000)
    assert abs(fractions[-1] - 0.51) < 0.04


def test_post_processing_moves_by_the_averaged_noise_where_gradients_are_zero():
    """steady update RMS ≈ √((1−β₁)/(1+β₁)) = .22942, in units of lr."""
    optimizer = on_pure_noise(OfNoisyGradient(), dpoptim.Gradient(), 300, rules.Adam(eps=1e-12), lr=1.0)
    (weight,) = optimizer.param_groups[0]["params"]
    squares = []
    for t in range(300):
        before = weight.detach().clone()
        optimizer.step()
        if t >= 200:
            squares.append(float((weight.detach() - before).square().mean()))
    assert math.sqrt(sum(squares) / len(squares)) == pytest.approx(0.22942, rel=0.03)


@pytest.mark.parametrize("rule", [dpoptim.Adam(betas=(0.9, 0.9)), dpoptim.AdaGrad()], ids=["adam", "adagrad"])
def test_noise_diverges_below_the_stable_window_but_not_at_the_default(rule):
    """In pure noise the second moment explodes at half the smallest stable constant, with a warning."""
    noisy = plan(steps=200)
    largest = {}
    for eps_scale in (None, 0.5):
        least = 0.9 * 0.7 / 4 * (math.sqrt(200) if isinstance(rule, dpoptim.AdaGrad) else 1.0)
        model = OneNumber(50)
        if eps_scale is None:
            optimizer = dpoptim.scale_then_privatize(model, noisy, LR, rule=rule, **RUN)
        else:
            with pytest.warns(UserWarning, match="outside the stable window"):
                optimizer = dpoptim.scale_then_privatize(
                    model, noisy, LR, rule=rule, **RUN, eps_scale=eps_scale * least
                )
        for _ in range(200):
            optimizer.step()
        (state,) = optimizer.state.values()
        largest[eps_scale] = float(state["second_moment"].mean())
    total = 200 if isinstance(rule, dpoptim.AdaGrad) else 1
    variance = (0.9 * 0.7 / 4) ** 2 * total
    assert largest[None] < 5 * variance
    assert largest[0.5] > 20 * variance


AMPLIFICATION = {0.0: 1.0, 0.25: 2.0, 1 / 3: 2.0, 0.5: 2.0, 0.6: 1.3698, 0.75: 1.1728, 1.0: 1.0718}
"""The factor by which scale-then-privatize amplifies pure noise at the default constant: the roots y below."""


@pytest.mark.parametrize(
    ("exponent", "batch_size"), list(zip(AMPLIFICATION, itertools.cycle([64, 2048]), strict=False))
)
def test_the_default_eps_scale_bounds_pure_noise(exponent, batch_size):
    """y = 1 + y^(2p)·φᵖ/ε: the released noise over ζσ/B, for any unit of the noise."""
    noisy = plan(num_examples=10 * batch_size, batch_size=batch_size, steps=150)
    level = 0.9 * 0.7 / batch_size
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = dpoptim.scale_then_privatize(
            OneNumber(4000), noisy, 0.0, rule=dpoptim.Adam(betas=(0.9, 0.98)), exponent=exponent, **RUN
        )
    seen: list[float] = []
    optimizer.observers.append(lambda r: seen.append(float(r.gradient["weight"].square().mean())))
    for _ in range(150):
        optimizer.step()
    assert math.sqrt(seen[0]) / level == pytest.approx(1.0, rel=0.05)
    assert math.sqrt(sum(seen[100:]) / 50) / level == pytest.approx(AMPLIFICATION[exponent], rel=0.1)


@pytest.mark.parametrize(("exponent", "factor"), [(0.5, 1.0), (0.75, 2.598076), (1.0, 4.0)])
@pytest.mark.parametrize("normalise", [True, False])
def test_the_warning_starts_where_pure_noise_has_no_fixed_point(exponent, factor, normalise):
    """y = 1 + y^(2p)·φᵖ/ε has a root from ε = factor·φᵖ on; not normalised, φ is ε² times as large."""
    level, eps_scale = 0.9 * 0.7 / 4, 0.02
    root = factor * level ** (2 * exponent)
    clip_norm = 0.9 / level * (eps_scale ** (1 - 2 * exponent) / factor) ** (0.5 / exponent)

    def make(above: float):
        given = (plan(), root * above) if normalise else (plan(clip_norm=clip_norm / above), eps_scale)
        return dpoptim.scale_then_privatize(
            OneNumber(3), given[0], LR, eps_scale=given[1], exponent=exponent, normalise=normalise, **RUN
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(1.01)
    with pytest.warns(UserWarning, match="outside the stable window"):
        make(0.99)


def test_the_default_eps_scale_is_twice_the_noise():
    for changes in ({}, {"clip_norm": 3.7, "noise_multiplier": 1.3}, {"noise_multiplier": 1e-12}):
        noisy = plan(**changes)
        geometry = dpoptim.scale_then_privatize(OneNumber(3), noisy, LR, **RUN).geometry
        assert isinstance(geometry, InverseRoot)
        assert geometry.eps_scale == max(2 * noise_level(noisy, dpoptim.Gradient()), 1e-8)
    with pytest.raises(ValueError, match="eps_scale=inf with normalise=False"):
        dpoptim.scale_then_privatize(OneNumber(3), plan(), LR, eps_scale=math.inf, normalise=False, **RUN)


def test_adagrad_without_gradients_does_not_move():
    quiet = plan(noise_multiplier=0.0, steps=3)
    model = nn.Linear(3, 2).double()
    optimizer = dpoptim.post_processing(model, quiet, LR, rule=dpoptim.AdaGrad(eps=0.0))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)


def test_noise_level_of_independent_noise():
    """The noise on the sum, clip_norm·noise_multiplier, over the expected batch."""
    plan = dpoptim.PrivacyPlan(num_examples=1000, batch_size=100, steps=30, clip_norm=2.0, noise_multiplier=0.5)
    assert noise_level(plan, dpoptim.Gradient()) == 0.01
