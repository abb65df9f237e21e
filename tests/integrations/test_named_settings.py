"""Names of settings, and the objects that they stand for."""

from __future__ import annotations

import pytest
from torch import nn

import dpoptim
from dpoptim.app.recipes import recipe
from dpoptim.integrations import named_settings
from dpoptim.integrations.named_settings import (
    make_optimizer,
    name_of_noise,
    name_of_sampling,
    noise_of,
    noise_words,
    release_of,
    sampling_of,
    steps_of,
)

PLAN = dpoptim.PrivacyPlan(num_examples=20, batch_size=5, steps=4, noise_multiplier=1.0, delta=1e-3)


def test_recipes_accept_every_variant():
    assert set(recipe.VARIANTS) == set(named_settings.VARIANTS)


@pytest.mark.parametrize("variant", named_settings.VARIANTS)
def test_every_variant_makes_an_optimizer(variant):
    optimizer = make_optimizer(
        variant, nn.Linear(2, 2), PLAN, learning_rate=0.5, betas=(0.8, 0.9), eps=None, eps_scale=None,
        weight_decay=0.1, key=None,
    )  # fmt: skip
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert type(optimizer.plan.release) is type(release_of(variant))


def test_names_round_trip():
    for word in noise_words():
        name = word.replace("BANDS", "3").replace("BUFFERS", "3")
        assert name_of_noise(noise_of(name)) == name
    for name in ("poisson", "shuffled", "cyclic:3"):
        assert name_of_sampling(sampling_of(name, dpoptim.Independent())) == name


@pytest.mark.parametrize("name", ["pink", "independent:3", "banded-toeplitz", "banded-toeplitz:0", "banded-toeplitz:x"])
def test_unknown_noise_is_refused(name):
    with pytest.raises(ValueError, match=f"noise='{name}' must be"):
        noise_of(name)


def test_default_steps():
    assert [steps_of(10, 1000, 64), steps_of(0.1, 10, 8), steps_of(3, 40, 8)] == [157, 1, 15]


def test_sampling_follows_the_noise():
    banded = dpoptim.BandedToeplitz(bands=8)
    assert sampling_of("cyclic", banded) == sampling_of("auto", banded) == dpoptim.CyclicPoisson(bands=8)
    assert sampling_of("auto", dpoptim.Independent()) == dpoptim.Poisson()
    assert sampling_of("auto", dpoptim.BufferedToeplitz(buffers=2)) == dpoptim.Shuffled()
