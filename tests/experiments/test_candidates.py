"""Candidates for a better optimizer: second moments of rows, without the noise."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpoptim.data import private_loader
from dpoptim.noise import BandedToeplitz, Independent, NoiseKey
from dpoptim.optim.variants import noise_level
from dpoptim.privacy import Gradient, PrivacyPlan
from experiments.tinybert.candidates import rows_scaled


@pytest.mark.parametrize("spec", [Independent(), BandedToeplitz(bands=16)])
@pytest.mark.parametrize("filtered", [False, True])
def test_row_means_contain_no_noise(spec, filtered):
    """Where the gradient is 0, they are 0 on average, whatever the noise; the scale stays near 1."""
    plan = PrivacyPlan(num_examples=256, batch_size=64, steps=100, noise_multiplier=1.0, clip_norm=1.0, noise=spec)
    model, key = nn.Linear(200, 50, bias=False), NoiseKey.from_bytes(bytes(32))
    level = noise_level(plan, Gradient())
    optimizer = rows_scaled(model, plan, 1e-3, eps_scale=level / 2, filtered=filtered, key=key, run_id="x")
    for (inputs,) in private_loader(TensorDataset(torch.zeros(256, 200)), plan, key=key, run_id="x"):
        model(inputs).sum(1).sum().backward()
        optimizer.step()
    means = optimizer.state[model.weight]["row_means"] / (1 - 0.999**100)
    assert torch.equal(means, means[:, :1].expand_as(means))
    assert abs(float(means.mean())) < 0.02 * level**2
    assert float(means.std()) < 0.05 * level**2
